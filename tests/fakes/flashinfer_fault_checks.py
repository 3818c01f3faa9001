"""What the switches of the stand-in must do."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fakes.flashinfer_rig import EIGHT
from tests.fakes.flashinfer_rig import HIDDEN
from tests.fakes.flashinfer_rig import LAST
from tests.fakes.flashinfer_rig import OLD
from tests.fakes.flashinfer_rig import SEVEN
from tests.fakes.flashinfer_rig import SIXTEEN
from tests.fakes.flashinfer_rig import TOKENS
from tests.fakes.flashinfer_rig import check
from tests.fakes.flashinfer_rig import combine
from tests.fakes.flashinfer_rig import dispatch
from tests.fakes.flashinfer_rig import echo
from tests.fakes.flashinfer_rig import fresh
from tests.fakes.flashinfer_rig import inputs
from tests.fakes.flashinfer_rig import load
from tests.fakes.flashinfer_rig import make
from tests.fakes.flashinfer_rig import other_ranks_agree
from tests.fakes.flashinfer_rig import raised
from tests.fakes.flashinfer_rig import region
from tests.fakes.flashinfer_rig import release
from tests.fakes.flashinfer_site import install


@check
def the_phase_flips_before_sanitising(rank: int) -> None:
    fresh(SIXTEEN, "raise-in-sanitize:1")
    transport = make(rank)
    assert "sanitize" in raised(dispatch, transport, *inputs(rank), TOKENS)
    assert "dispatch called twice" in raised(dispatch, transport, *inputs(rank), TOKENS)
    combine(transport, region(transport, TOKENS).fill_(0), TOKENS)
    got, expected = echo(transport, rank)
    assert torch.equal(got, expected)
    release(transport)


@check
def one_rank_builds_and_the_log_says_which(rank: int) -> None:
    names = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(names, src=0)
    fresh(SIXTEEN, "build-sleep:0.2@0", names[0])
    if rank == 0:
        load("jit.comm").gen_moe_alltoall_module().build()
    dist.barrier()
    release(make(rank))
    assert load("fake").counts.built == (rank == 0)
    log = Path(names[0]) / ".cache/flashinfer" / SIXTEEN / "90a/cached_ops/builds.log"
    assert log.read_text() == "mnnvl_moe_alltoall rank 0\n"
    dist.barrier()
    shutil.rmtree(names[0], ignore_errors=True)


@check
def switches_that_fail_construction_say_what_the_wheel_says(rank: int) -> None:
    for version, fault, text in (
        (OLD, "pidfd-refused", "--cap-add=SYS_PTRACE"),
        (EIGHT, "pidfd-refused", "errno 1: Operation not permitted"),
        (SIXTEEN, "imex-refused", "CUDA_ERROR_NOT_PERMITTED"),
        (LAST, "imex-refused@1", "NVIDIA_IMEX_CHANNELS=0"),
        (SIXTEEN, "fd-timeout:0.1", "timed out connecting"),
        (LAST, "links-down@1", "not supported on EP ranks [1]"),
        (SIXTEEN, "wrong-group-size", "workspace first dim must equal ep_size"),
        (OLD, "partial-communicator", "TorchDistBackend"),
        (SIXTEEN, "build-fails", "Ninja build failed"),
    ):
        fresh(version, fault, os.environ["CHECKS_BASE"] + "/cold" if fault == "build-fails" else "")
        assert text in raised(make, rank), (version, fault)


@check
def a_refusal_on_one_rank_leaves_the_other_constructed(rank: int) -> None:
    fresh(OLD, "pidfd-refused@1")
    comm = load("comm.mnnvl")
    backend = comm.TorchDistBackend()
    mapping = load("comm").Mapping(2, rank, 2, tp_size=2, moe_ep_size=2)
    config = comm.MnnvlConfig(comm_backend=backend)
    cls = load("comm").MoeAlltoAll
    text = raised(cls, mapping, 6, 4, 8, hidden_size=16, mnnvl_config=config)
    texts = other_ranks_agree(rank, text)
    assert texts[0] == ""
    assert "SYS_PTRACE" in texts[1]


@check
def dispatching_into_an_unmapped_peer_loses_the_context(rank: int) -> None:
    fresh(SIXTEEN, "slow-map:0.5@1")
    comm = load("comm.mnnvl")
    mapping = load("comm").Mapping(2, rank, 2, tp_size=2, moe_ep_size=2)
    config = comm.MnnvlConfig(comm_backend=comm.TorchDistBackend())
    transport = load("comm").MoeAlltoAll(mapping, 6, 4, 8, hidden_size=16, mnnvl_config=config)
    if rank == 0:
        for _ in range(2):
            assert "unspecified launch failure" in raised(dispatch, transport, *inputs(0), 6)


@check
def switches_that_spoil_results_do(rank: int) -> None:
    fresh(SIXTEEN, "missing-payload@1")
    transport = make(rank)
    assert len(dispatch(transport, *inputs(rank), TOKENS)) == 3 - (rank == 1)
    fresh(SIXTEEN, "bare-tensor")
    transport = make(rank)
    assert isinstance(dispatch(transport, *inputs(rank), TOKENS), Tensor)
    fresh(LAST, "double-combine")
    got, expected = echo(make(rank), rank)
    assert torch.equal(got, 2 * expected)
    fresh(OLD, "unreduced-combine")
    assert echo(make(rank), rank)[0].shape == (2, TOKENS, HIDDEN)
    fresh(LAST, "raise-in-combine:1@1")
    transport = make(rank)
    dispatch(transport, *inputs(rank), TOKENS)
    place = region(transport, TOKENS).fill_(1)
    if rank == 1:
        assert "combine launch failed" in raised(combine, transport, place, TOKENS)
    assert combine(transport, place, TOKENS).shape == (TOKENS, HIDDEN)


@check
def switches_that_never_return_wait_where_they_say(rank: int) -> None:
    for fault in ("block-at-T:3", "hang-dispatch:1", "hang-combine:1"):
        fresh(SIXTEEN, fault)
        transport = make(rank)
        limit = 3 if fault.startswith("block") else TOKENS
        text = raised(echo, transport, rank, limit, limit)
        assert "would wait for ever" in text, fault


@check
def the_process_is_killed_inside_dispatch(rank: int) -> None:
    fresh(SIXTEEN, "die-in-dispatch:1@1")
    transport, kill = make(rank), os.kill
    killed: list[int] = []
    os.kill = lambda _, number: killed.append(number)
    try:
        echo(transport, rank)
    finally:
        os.kill = kill
    assert len(killed) == rank


@check
def the_accumulator_can_contradict_the_version(rank: int) -> None:
    for version, expected in ((EIGHT, "float32"), (SIXTEEN, "payload")):
        fresh(version, "wrong-accumulator")
        kernels = load("comm._kernels")
        used: list[str] = []
        reduce = kernels.reduce

        def logged(terms: Tensor, mode: str, log: list[str] = used, call: Any = reduce) -> Any:
            log.append(mode)
            return call(terms, mode)

        kernels.reduce = logged
        echo(make(rank), rank)
        assert used == [expected]


@check
def prebuilt_packages_must_fit_the_release(rank: int) -> None:
    for version, jit_cache, cubin, text in (
        (OLD, "0.6.8.post1+cu130", OLD, ""),
        (EIGHT, "0.6.14+cu130", "", "flashinfer-jit-cache version (0.6.14+cu130) does not match"),
        (SIXTEEN, "", "0.6.16", "flashinfer-cubin version (0.6.16) does not match"),
        ("0.6.15", "0.6.15.post1", "", ""),
        (SEVEN, "0.7.2", "", ""),
    ):
        with tempfile.TemporaryDirectory() as folder:
            environment = install(Path(folder), version, "", jit_cache, cubin)
            sys.path.insert(0, environment["PYTHONPATH"].partition(":")[0])
            try:
                failure = raised(fresh, version)
                found = importlib.metadata.version("flashinfer-python")
                os.environ["FLASHINFER_DISABLE_VERSION_CHECK"] = "1"
                assert raised(fresh, version) == ""
            finally:
                os.environ.pop("FLASHINFER_DISABLE_VERSION_CHECK", None)
                del sys.path[0]
                for name in ("flashinfer_jit_cache", "flashinfer_cubin"):
                    sys.modules.pop(name, None)
            assert failure == "" if text == "" else text in failure, (version, failure)
            assert found == version


@check
def a_launch_failure_stays(rank: int) -> None:
    fresh(SIXTEEN, "launch-failure:2")
    transport = make(rank)
    got, expected = echo(transport, rank)
    assert torch.equal(got, expected)
    for _ in range(2):
        assert "unspecified launch failure" in raised(echo, transport, rank)


@check
def switches_that_cannot_happen_are_refused(rank: int) -> None:
    assert "unknown fault" in raised(fresh, SIXTEEN, "no-such-fault")
    assert "cannot happen in flashinfer 0.6.16" in raised(fresh, SIXTEEN, "pidfd-refused")
