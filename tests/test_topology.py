"""What nvidia-smi and sysfs say of links, and what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_ep.results.topology import rdma
from pytest_ep.results.topology import survey

TWO = (
    "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\t0-31\t0\t\tN/A\n"
    "GPU1\tNV18\t X \t0-31\t0\t\tN/A\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the interconnect\n"
)
WITH_NICS = (
    "\tGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tNV12\tSYS\tPIX\tSYS\t0-47\t0\n"
    "GPU1\tNV12\t X \tNODE\tNODE\tSYS\t0-47\t0\n"
    "GPU2\tSYS\tNODE\t X \tSYS\tPIX\t48-95\t1\n"
    "NIC0\tPIX\tNODE\tSYS\t X \tSYS\t\t\n"
    "NIC1\tSYS\tSYS\tPIX\tSYS\t X \t\t\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
)


def smi(count: int, topology: str | None, asked: list[str] | None = None) -> Any:
    """An nvidia-smi of ``count`` GPUs; ``asked`` gains the first argument of each call."""

    def command(argv: Sequence[str]) -> str | None:
        assert argv[0] == "nvidia-smi"
        if asked is not None:
            asked.append(argv[1])
        if argv[1] == "topo":
            return topology
        lines = (f"{i}, GPU-{i}aaa, 143771, 00000000:{i + 1:02X}:00.0\n" for i in range(count))
        return "".join(lines) or None

    return command


def put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_links_are_a_matrix_by_gpu_pair_without_the_underline_of_the_header(tmp_path: Path) -> None:
    put(tmp_path / "sys/bus/pci/devices/0000:01:00.0/numa_node", "1\n")
    put(tmp_path / "sys/bus/pci/devices/0000:02:00.0/numa_node", "-1\n")
    assert survey({}, tmp_path, smi(2, TWO)) == {
        "memory_mib": 143771,
        "numa_nodes": [1, None],
        "gpu_links": ["X NV18", "NV18 X"],
        "nic_links": {},
        "rdma": {},
    }


def test_nics_have_their_own_names_and_only_visible_gpus_count_in_their_order(tmp_path: Path) -> None:
    found = survey({"CUDA_VISIBLE_DEVICES": "2,0"}, tmp_path, smi(3, WITH_NICS))
    assert found["gpu_links"] == ["X SYS", "SYS X"]
    assert found["nic_links"] == {"mlx5_0": "SYS PIX", "mlx5_1": "PIX SYS"}


def test_an_older_nvidia_smi_that_names_nics_in_the_table_is_read_too(tmp_path: Path) -> None:
    older = "\tGPU0\tmlx5_0\tCPU Affinity\nGPU0\t X \tPHB\t0-9\nmlx5_0\tPHB\t X \t\n"
    found = survey({}, tmp_path, smi(1, older))
    assert (found["gpu_links"], found["nic_links"]) == (["X"], {"mlx5_0": "PHB"})


def test_without_a_gpu_nothing_is_known_and_topology_is_not_asked_for(tmp_path: Path) -> None:
    asked: list[str] = []
    nothing: dict[str, Any] = {
        "memory_mib": None,
        "numa_nodes": [],
        "gpu_links": [],
        "nic_links": {},
        "rdma": {},
    }
    assert survey({}, tmp_path, smi(0, TWO, asked)) == nothing
    assert asked == ["--query-gpu=index,uuid,memory.total,pci.bus_id"]


def test_a_topology_that_does_not_answer_and_memory_that_is_not_told_are_absent(tmp_path: Path) -> None:
    def command(argv: Sequence[str]) -> str | None:
        return None if argv[1] == "topo" else "0, GPU-0, [N/A], 00000000:01:00.0\n"

    found = survey({}, tmp_path, command)
    assert (found["memory_mib"], found["numa_nodes"], found["gpu_links"]) == (None, [None], [])


def test_rdma_devices_say_link_layer_and_rate_of_each_port_in_natural_order(tmp_path: Path) -> None:
    for name, ports in (("mlx5_10", 1), ("mlx5_2", 2)):
        for number in range(1, ports + 1):
            folder = tmp_path / f"sys/class/infiniband/{name}/ports/{number}"
            put(folder / "link_layer", "InfiniBand\n")
            put(folder / "rate", "400 Gb/sec (4X NDR)\n")
    port = "InfiniBand 400 Gb/sec (4X NDR)"
    assert list(rdma(tmp_path).items()) == [("mlx5_2", [port, port]), ("mlx5_10", [port])]
