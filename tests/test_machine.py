"""Finding the machine without torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_ep.matrix import machine
from pytest_ep.matrix.machine import Machine
from pytest_ep.matrix.machine import detect
from pytest_ep.matrix.machine import run_command
from pytest_ep.matrix.machine import sku_name
from pytest_ep.matrix.platforms import load

PLATFORMS = load(None)


def smi(*products: str) -> str:
    return "".join(f"{product}, GPU-{index}aaa-bbb, 580.95.05\n" for index, product in enumerate(products))


def found(root: Path, output: str | None = None, environ: Mapping[str, str] | None = None) -> Machine:
    def command(argv: Sequence[str]) -> str | None:
        assert argv[0] == "nvidia-smi"
        return output

    return detect(PLATFORMS, environ or {}, root, command)


def put(file: Path, text: str = "") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_nvidia_smi_gives_sku_devices_product_and_driver(tmp_path: Path) -> None:
    assert found(tmp_path, smi(*["NVIDIA H200"] * 8)) == Machine("h200", 8, "NVIDIA H200", "580.95.05")


def test_a_machine_without_an_accelerator_is_a_cpu(tmp_path: Path) -> None:
    assert found(tmp_path) == Machine("cpu", 0, "cpu")
    assert found(tmp_path, "") == Machine("cpu", 0, "cpu")
    assert found(tmp_path, "No devices were found\n") == Machine("cpu", 0, "cpu")


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ("0", 1),
        ("0,2", 2),
        (" 1 , 3 ", 2),
        ("0,7,1", 1),
        ("0,-1,1", 1),
        ("GPU-1aaa,GPU-3", 2),
        ("MIG-5f2,MIG-7e1,MIG-9c0", 3),
    ],
)
def test_visible_devices_are_counted_up_to_the_first_bad_entry(
    tmp_path: Path, visible: str, devices: int
) -> None:
    machine = found(tmp_path, smi(*["NVIDIA H200"] * 4), {"CUDA_VISIBLE_DEVICES": visible})
    assert (machine.sku, machine.devices) == ("h200", devices)


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", "9"])
def test_hiding_every_device_makes_a_cpu(tmp_path: Path, visible: str) -> None:
    machine = found(tmp_path, smi("NVIDIA H200"), {"CUDA_VISIBLE_DEVICES": visible})
    assert machine == Machine("cpu", 0, "cpu")


def test_the_first_visible_device_names_a_mixed_machine(tmp_path: Path) -> None:
    machine = found(tmp_path, smi("NVIDIA T400", "NVIDIA H200"), {"CUDA_VISIBLE_DEVICES": "1"})
    assert machine == Machine("h200", 1, "NVIDIA H200", "580.95.05")


def nvidia_proc(root: Path, *products: str) -> None:
    version = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 13\n"
    )
    put(root / "proc/driver/nvidia/version", version)
    for index, product in enumerate(products):
        information = (
            f"Model: \t\t {product}\nIRQ: 1\nGPU UUID: \t GPU-{index}f\nBus Location: 0000:0{index}:00.0\n"
        )
        put(root / f"proc/driver/nvidia/gpus/0000:0{index}:00.0/information", information)


def test_proc_stands_in_for_a_missing_nvidia_smi(tmp_path: Path) -> None:
    nvidia_proc(tmp_path, "NVIDIA B200", "NVIDIA B200")
    put(tmp_path / "dev/nvidiactl")
    assert found(tmp_path) == Machine("b200", 2, "NVIDIA B200", "580.95.05")
    assert found(tmp_path, environ={"CUDA_VISIBLE_DEVICES": "GPU-1f"}).devices == 1


def test_a_container_that_was_granted_no_device_is_a_cpu_although_proc_shows_them(tmp_path: Path) -> None:
    nvidia_proc(tmp_path, "NVIDIA B200")
    assert found(tmp_path).sku == "cpu"


def amd(root: Path, product: str, cards: int, kfd: bool = True) -> None:
    for index in range(cards):
        put(root / f"sys/class/drm/card{index}/device/vendor", "0x1002\n")
        put(root / f"sys/class/drm/card{index}/device/product_name", product)
        nodes = root / "sys/class/kfd/kfd/topology/nodes"
        put(nodes / f"{index + 1}/properties", "cpu_cores_count 0\nsimd_count 1216\n")
    put(root / "sys/class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 96\nsimd_count 0\n")
    put(root / "sys/module/amdgpu/version", "6.12.12\n")
    if kfd:
        put(root / "dev/kfd")


def test_sysfs_gives_amd_devices_and_their_driver(tmp_path: Path) -> None:
    amd(tmp_path, "AMD Instinct MI300X OAM\n", 8)
    assert found(tmp_path) == Machine("mi300x", 8, "AMD Instinct MI300X OAM", "6.12.12")
    assert found(tmp_path, environ={"HIP_VISIBLE_DEVICES": "0,1"}).devices == 2
    assert found(tmp_path, environ={"CUDA_VISIBLE_DEVICES": "3"}).devices == 1


def test_each_partition_of_an_amd_device_counts(tmp_path: Path) -> None:
    amd(tmp_path, "AMD Instinct MI355X", 1)
    for node in range(2, 9):
        put(tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}/properties", "simd_count 128\n")
    assert found(tmp_path).devices == 8


def test_an_integrated_amd_gpu_without_a_product_name_is_no_accelerator(tmp_path: Path) -> None:
    amd(tmp_path, "\n", 1)
    assert found(tmp_path).sku == "cpu"


def test_amd_devices_without_access_to_kfd_are_no_accelerators(tmp_path: Path) -> None:
    amd(tmp_path, "AMD Instinct MI325X", 8, kfd=False)
    assert found(tmp_path).sku == "cpu"


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100_sxm4_80gb"),
        ("NVIDIA H200 NVL", "h200_nvl"),
        ("NVIDIA GH200 480GB", "gh200_480gb"),
        ("NVIDIA GeForce RTX 4090", "geforce_rtx_4090"),
        ("AMD Instinct MI250X / MI250", "mi250x_mi250"),
        ("Tesla V100-SXM2-32GB", "tesla_v100_sxm2_32gb"),
        ("NVIDIA 3D Thing", "gpu_3d_thing"),
        ("NVIDIA", "gpu"),
    ],
)
def test_an_unlisted_device_gets_an_identifier_of_its_own(tmp_path: Path, product: str, name: str) -> None:
    assert sku_name(product) == name
    assert name.isidentifier()
    assert found(tmp_path, f"{product}, GPU-0, 550.1\n").sku == name


def test_a_command_that_is_missing_fails_or_hangs_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "COMMAND_TIMEOUT", 0.2)
    assert run_command(["/nowhere/nvidia-smi"]) is None
    assert run_command([sys.executable, "-c", "print('out'); raise SystemExit(9)"]) is None
    assert run_command(["sleep", "5"]) is None
    assert run_command(["echo", "out"]) == "out\n"


def test_detection_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from pytest_ep.matrix.machine import detect; "
        "from pytest_ep.matrix.platforms import load; import pytest_ep.options; "
        "detect(load(None)); print({'torch', 'numpy'} & set(sys.modules))"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
