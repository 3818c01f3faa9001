"""Which rank a process is: from torchrun's, srun's and mpirun's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_ep.alike import difference
from pytest_ep.ranks.identity import Identity
from pytest_ep.ranks.identity import read_identity
from pytest_ep.ranks.launchers import is_launched
from tests.launching import inherited

SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
    "SLURM_STEP_NODELIST": "gpu-[07-08,11],spare1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-head-12@1",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "PMI_PORT": "node:4711",
}


def test_without_a_launcher_a_process_is_alone() -> None:
    assert read_identity({}) == Identity()


def test_torchruns_variables_come_first() -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    torchrun |= {"MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    one = read_identity({**SRUN, **torchrun})
    assert (one.rank, one.size, one.local_rank, one.local_size) == (1, 2, 0, 1)
    assert (one.store_host, one.store_port, one.hosts_store) == ("a", 1, False)


def test_sruns_tasks_are_ranks_and_the_first_host_holds_the_rendezvous() -> None:
    one = read_identity(SRUN)
    assert (one.rank, one.size, one.local_rank, one.local_size) == (5, 7, 1, 3)
    assert one.store_host == "gpu-07"
    assert one.run == "slurm-77.3-0"
    first = read_identity({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert (first.local_size, first.hosts_store) == (2, True)
    assert first.store_port == one.store_port
    named = read_identity({**SRUN, "MASTER_ADDR": "other", "MASTER_PORT": "5"})
    assert (named.store_host, named.store_port) == ("other", 5)


def test_a_batch_script_and_a_single_task_are_no_ranks() -> None:
    script = {name: value for name, value in SRUN.items() if "_STEP_" not in name}
    assert read_identity(script) == Identity()
    assert read_identity({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) == Identity()


def test_ranks_that_mpirun_starts_through_srun_are_mpiruns() -> None:
    ours = {**OPEN_MPI, "MASTER_ADDR": "head"}
    assert read_identity({**SRUN, **ours}) == read_identity(ours)
    assert read_identity({**SRUN, **MPICH, "PMI_SIZE": "1"}) == Identity()
    srun_with_pmi2 = {**SRUN, "PMI_RANK": "5", "PMI_SIZE": "7", "PMI_FD": "9"}
    assert read_identity(srun_with_pmi2) == read_identity(SRUN)


def test_a_shell_that_srun_started_is_no_rank_but_what_srun_starts_from_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = {**SRUN, "SLURM_PTY_PORT": "4711"}
    monkeypatch.setattr("os.open", lambda path, flags: {"/dev/tty": os.dup(2)}[path])
    assert read_identity(shell) == Identity()
    assert not is_launched(shell)
    assert read_identity(SRUN).rank == 5

    def no_terminal(path: str, flags: int) -> int:
        raise OSError(6, "No such device or address", path)

    monkeypatch.setattr("os.open", no_terminal)
    assert read_identity(shell).rank == 5


def test_mpiruns_ranks_on_one_host_find_each_other_there() -> None:
    for variables in (MPICH, {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}):
        one = read_identity(variables)
        assert one.store_host == "127.0.0.1"
        assert 20_000 <= one.store_port < 30_000
        assert (one.local_rank, one.local_size) == (1, one.size)
    assert read_identity({**MPICH, "PMI_SIZE": "1"}) == Identity()


def test_ranks_of_mpich_below_a_script_each_share_a_port_or_are_told_to_name_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = {name: value for name, value in MPICH.items() if name != "PMI_PORT"}
    with pytest.raises(ValueError, match="set MASTER_PORT to a free port"):
        read_identity(bare)
    assert read_identity({**bare, "MASTER_PORT": "5"}).store_port == 5
    assert read_identity({**bare, "PMI_KVSNAME": "kvs_1"}) != read_identity({**bare, "PMI_KVSNAME": "kvs_2"})
    above = Path("/proc/self/stat").read_text().rpartition("(")[2].rpartition(")")[0]
    monkeypatch.setattr("pytest_ep.ranks.launchers.PROXY", above)
    assert read_identity(bare).run == f"mpi-{os.getpid()}-0"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 in the environment is not below WORLD_SIZE=0"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK=1 in the environment is not below WORLD_SIZE=1"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "0"},
            "LOCAL_WORLD_SIZE=0 in the environment is below 1",
        ),
    ],
)
def test_a_rank_that_cannot_be_is_refused(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match="launch with torchrun") as raised:
        read_identity(variables)
    assert str(raised.value) == f"{said}: launch with torchrun"


def test_a_port_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="MASTER_PORT=70000 in the environment is above 65535"):
        read_identity({**SRUN, "MASTER_PORT": "70000"})


def test_mpirun_over_several_hosts_needs_rank_0s() -> None:
    with pytest.raises(ValueError, match="mpirun over several hosts: set MASTER_ADDR to rank 0's host"):
        read_identity(OPEN_MPI)
    assert is_launched(OPEN_MPI)
    assert not is_launched({**MPICH, "PMI_SIZE": "1"})
    one = read_identity({**OPEN_MPI, "MASTER_ADDR": "head"})
    assert (one.rank, one.size, one.local_size, one.store_host) == (3, 4, 2, "head")


def test_the_first_rank_on_another_kind_of_host_is_named_with_all_that_differs() -> None:
    said = [{"GPU": "H200", "driver": "580"}] * 2 + [{"GPU": "H100", "driver": "570"}]
    ranks = ["rank 0 on a", "rank 1 on a", "rank 2 on b"]
    assert (
        difference(said, ranks)
        == "rank 2 on b and rank 0 on a differ: GPU H100 against H200, driver 570 against 580"
    )
    assert difference(said[:2], ranks[:2]) == ""


def test_ranks_of_mpirun_run_cases_and_all_end_with_0(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it="from pytest_ep import EPSuite\nclass TestBaseline(EPSuite):\n    backend = 'torch_a2a'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "test_case and bf16"]
    command += [
        "--ep-shape=hidden=64,experts=16,top_k=4",
        "--ep-tokens=1",
        "--ep-size=2",
        "--ep-iterations=3",
    ]
    ranks = [
        subprocess.Popen(
            command,
            cwd=pytester.path,
            env={**inherited(), **MPICH, "PMI_RANK": rank, "MPI_LOCALRANKID": rank, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "1 passed" in said[0]
    assert said[1] == ""
