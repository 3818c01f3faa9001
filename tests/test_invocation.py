"""How a run was started, as its result file says it."""

from __future__ import annotations

import pytest

from pytest_ep.ranks.identity import Identity
from pytest_ep.ranks.launch import EXIT_FILE
from pytest_ep.results.invocation import arguments
from pytest_ep.results.invocation import launch_line
from pytest_ep.results.invocation import started
from pytest_ep.results.invocation import variables

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}
ALONE = Identity()
SIXTEEN = Identity(size=16, local_size=8)


@pytest.mark.parametrize(
    ("identity", "environ", "line"),
    [
        (ALONE, {}, "python -m pytest cases"),
        (ALONE, TORCHRUN, "torchrun --nproc-per-node=1 -m pytest cases"),
        (ALONE, {"SLURM_STEP_NUM_TASKS": "1"}, "python -m pytest cases"),
        (SIXTEEN, TORCHRUN, "torchrun --nnodes=2 --nproc-per-node=8 -m pytest cases"),
        (
            SIXTEEN,
            {**TORCHRUN, "SLURM_STEP_NUM_TASKS": "2"},
            "srun --nodes=2 --ntasks-per-node=1 torchrun --nnodes=2 --nproc-per-node=8 -m pytest cases",
        ),
        (
            SIXTEEN,
            {"SLURM_STEP_NUM_TASKS": "16", "PMI_SIZE": "16"},
            "srun --nodes=2 --ntasks-per-node=8 python -m pytest cases",
        ),
        (SIXTEEN, {"OMPI_COMM_WORLD_SIZE": "16"}, "mpirun -n 16 python -m pytest cases"),
        (
            SIXTEEN,
            {"SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "16"},
            "mpirun -n 16 python -m pytest cases",
        ),
        (SIXTEEN, {"PMI_SIZE": "16", "MPI_LOCALNRANKS": "8"}, "mpirun -n 16 python -m pytest cases"),
        (SIXTEEN, {}, "WORLD_SIZE=16 python -m pytest cases"),
        (
            Identity(size=4, local_size=4),
            {**TORCHRUN, EXIT_FILE: "exit"},
            "python -m pytest cases --ep-nproc=4",
        ),
    ],
)
def test_the_launcher_is_known_by_what_it_left(
    identity: Identity, environ: dict[str, str], line: str
) -> None:
    assert launch_line(["cases"], identity, environ) == line


@pytest.mark.parametrize("result", [["--benchmark-json=runs/1.json"], ["--benchmark-json", "runs/1.json"]])
def test_the_result_file_of_its_own_that_each_run_has_is_left_out(result: list[str]) -> None:
    assert arguments(["cases", *result, "-k", "a or b"]) == ["cases", "-k", "a or b"]
    assert launch_line([*result, "-k", "a or b"], ALONE, {}) == "python -m pytest -k 'a or b'"


@pytest.mark.parametrize("option", [["--ep-nproc=4"], ["--ep-nproc", "4"]])
def test_the_number_of_ranks_is_said_once_where_the_command_names_it(option: list[str]) -> None:
    line = launch_line(["cases", *option], Identity(size=4, local_size=4), {EXIT_FILE: "exit"})
    assert line == " ".join(["python -m pytest cases", *option])


def test_variables_that_change_behaviour_are_kept_and_others_are_not() -> None:
    kept = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "EP_DISABLE_GIN": "1",
        "LD_PRELOAD": "/x.so",
        "NCCL_EP_TOKENS_PER_CHUNK": "64",
        "OMP_NUM_THREADS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    others = {"HOME": "/root", "MASTER_PORT": "4711", "TORCHELASTIC_RUN_ID": "a1", "SLURM_JOB_ID": "5"}
    labels = {"CUDA_VERSION": "13.0.2", "NCCL_VERSION": "2.28.3-1", "FLASHINFER_WORKSPACE_BASE": "kept/here"}
    anew = {"NCCL_COMM_ID": "10.0.0.1:4711", "NVSHMEM_BOOTSTRAP_UID_SESSION_ID": "10.0.0.1:4712"}
    secret = {"FLASHINFER_TOKEN": "x", "TRTLLM_API_KEY": "x", "NCCL_PASSWORD": "x"}
    assert variables({**others, **labels, **anew, **secret, **kept}) == kept


def test_what_a_launcher_makes_anew_each_time_is_nowhere() -> None:
    first = {**TORCHRUN, "MASTER_PORT": "1", "NCCL_DEBUG": "WARN", "TORCHELASTIC_ERROR_FILE": "a/error.json"}
    second = {
        **first,
        "MASTER_PORT": "2",
        "TORCHELASTIC_RUN_ID": "b",
        "TORCHELASTIC_ERROR_FILE": "b/error.json",
    }
    one = started(["cases", "--benchmark-json=1.json"], SIXTEEN, first)
    assert one == started(["cases", "--benchmark-json=2.json"], SIXTEEN, second)
    assert set(one) == {"argv", "launch", "environment"}
