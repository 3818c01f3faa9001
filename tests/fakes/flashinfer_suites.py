"""The adapter on the stand-in, release by release and fault by fault, as the suites of one test module.

Each suite imports the stand-in anew as its release with its fault, so that one launch serves many; a fault of
one life is gone when the transport is constructed again.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from typing import ClassVar

import torch

from pytest_ep import EPSuite
from pytest_ep.backends import flashinfer_setup
from pytest_ep.backends import flashinfer_wheel
from pytest_ep.backends.flashinfer_ep import FlashInferEP
from pytest_ep.backends.flashinfer_wheel import Wheel
from pytest_ep.matrix.shapes import Shape
from pytest_ep.oracle import checks
from pytest_ep.oracle import reduction as models
from pytest_ep.ranks.group import Ranks
from pytest_ep.workload import routing
from pytest_ep.workload.problem import Problem
from pytest_ep.workload.problem import build_problem

OLD, EIGHT, SIXTEEN, SEVEN, LAST = "0.6.8.post1", "0.6.15.post1", "0.6.16.post4", "0.7.2.post1", "0.7.4"
RELEASES = (OLD, EIGHT, SIXTEEN, SEVEN, LAST)
DEVELOPMENT = "0.6.16.dev20260715"
TREE, FP32 = "topk-slot-tree", "rank-sum-fp32"

flashinfer_setup.PROGRESS_EVERY = 0.2


class OnFake(FlashInferEP):
    """The adapter as it is, on the stand-in for ``release``, which needs no device."""

    needs_device: ClassVar[bool] = False
    release: ClassVar[str] = SIXTEEN
    installed: ClassVar[str] = ""
    fault: ClassVar[str] = ""
    one_life: ClassVar[bool] = False
    environment: ClassVar[dict[str, str]] = {}
    constructed: ClassVar[set[str]] = set()

    @classmethod
    def wheel(cls) -> Wheel | None:
        return flashinfer_wheel.read([f"sites/{cls.installed or cls.release}/site"])

    def __init__(self, ranks: Ranks, shape: Shape, mode: str, precision: str, max_tokens: int) -> None:
        again = self.name in self.constructed
        self.constructed.add(self.name)
        if self.one_life or not again:
            for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
                del sys.modules[name]
        os.environ.update(
            PYTEST_EP_FAKE_FLASHINFER=self.release,
            PYTEST_EP_FAKE_FAULT="" if again and self.one_life else self.fault,
            FLASHINFER_WORKSPACE_BASE=str(Path(f"caches/{self.name}").resolve()),
            **self.environment,
        )
        try:
            super().__init__(ranks, shape, mode, precision, max_tokens)
        finally:
            for name in self.environment:
                del os.environ[name]
        told = {"facts": dict(self.facts), "versions": dict(self.versions), "reduction": self.reduction}
        Path(f"{self.name}-{ranks.rank}.json").write_text(json.dumps(told))

    def close(self) -> None:
        super().close()
        counts = importlib.import_module("flashinfer.fake").counts
        assert counts.live == 0, f"{counts.live} workspaces are still mapped"


class Thorough(OnFake):
    """Before its cases it runs what the suite does not ask of a transport."""

    def __init__(self, ranks: Ranks, shape: Shape, mode: str, precision: str, max_tokens: int) -> None:
        super().__init__(ranks, shape, mode, precision, max_tokens)
        for tokens in ((4, 0, 1, 3), (0, 0, 0, 2), (2, 2, 2, 2)):
            problem = small_problem(ranks, shape, tokens)
            passes(self, problem)
            self.stage_constant(problem, torch.zeros(ranks.size, shape.hidden, dtype=torch.bfloat16))
        # A pair that an exception left open on every rank, then on one.
        self.dispatch(problem)
        passes(self, problem)
        handle = self.dispatch(problem)
        if ranks.rank != 1:
            self.combine(problem, handle, self._regions[handle.limit])
        passes(self, problem)
        # A shape that no dispatch has shown the place of, staged first, as the timed loop does.
        alone = small_problem(ranks, shape, (5, 5, 5, 5))
        rows = checks.constant_rows(alone, ranks.size)
        staged = self.stage_constant(alone, rows)
        output = self.combine(alone, self.dispatch(alone), staged)
        verdict = checks.check_timed_output(alone, output, models.named(self.reduction, 1), ranks.size)
        assert verdict.passed, verdict.message


def small_problem(ranks: Ranks, shape: Shape, tokens: tuple[int, ...]) -> Problem:
    trace = routing.load_trace(shape, 67, sum(tokens), None, write=False)
    return build_problem(shape, trace, ranks.rank, tokens, "cpu", "int32")


def passes(backend: FlashInferEP, problem: Problem) -> None:
    verdict = checks.run_oracle(backend, problem, models.named(backend.reduction, 1), exact=True)
    assert verdict.passed, f"{problem.tokens_by_rank}: {verdict.message}"
    assert verdict.error == 0.0


class Forced(OnFake):
    """Claims the other reduction than its release has."""

    def __init__(self, ranks: Ranks, shape: Shape, mode: str, precision: str, max_tokens: int) -> None:
        super().__init__(ranks, shape, mode, precision, max_tokens)
        self.reduction = {TREE: FP32, FP32: TREE}[self.reduction]


def suite(base: type[OnFake], name: str, **facts: Any) -> None:
    """Define ``Test<name>`` in this module, of a backend ``name`` that differs from ``base`` in ``facts``."""
    backend = type(name, (base,), {"name": name, **facts})
    globals()[f"Test{name}"] = type(f"Test{name}", (EPSuite,), {"backend": backend})


def spelled(release: str) -> str:
    return "fi_" + release.replace(".", "_")


for _release in RELEASES:
    suite(Thorough, f"{spelled(_release)}_passes", release=_release)
    suite(OnFake, f"{spelled(_release)}_uneven", release=_release)
suite(Forced, "forced_fp32", release=EIGHT)
suite(Forced, "forced_tree", release=SIXTEEN)
suite(OnFake, "wrong_accumulator", fault="wrong-accumulator")

FAULTS: dict[str, dict[str, Any]] = {
    "ptrace_refused": {"release": OLD, "fault": "pidfd-refused"},
    "ptrace_refused_on_one": {"release": EIGHT, "fault": "pidfd-refused@1"},
    "ptrace_refused_after_peer": {"release": OLD, "fault": "pidfd-refused@1"},
    "imex_refused_on_one": {"fault": "imex-refused@1"},
    "imex_refused_agreed": {"release": LAST, "fault": "imex-refused@1"},
    "descriptor_late_on_one": {"release": SEVEN, "fault": "fd-timeout:0.2@1"},
    "links_down_on_one": {"release": LAST, "fault": "links-down@1"},
    "jit_disabled": {"environment": {"FLASHINFER_DISABLE_JIT": "1"}},
    "shadowed": {"release": EIGHT, "installed": SIXTEEN},
    "no_bridge": {"fault": "partial-communicator"},
    "maps_late": {"fault": "slow-map:0.5@1"},
    "builds_slowly": {"fault": "build-sleep:0.7"},
    "development": {"release": DEVELOPMENT},
    "payload_lost_on_one": {"fault": "missing-payload@1"},
    "payload_lost_on_one_last": {"release": LAST, "fault": "missing-payload@1"},
    "bare_tensor": {"fault": "bare-tensor"},
    "doubled": {"fault": "double-combine"},
    "unreduced": {"release": EIGHT, "fault": "unreduced-combine"},
    "group_too_large": {"fault": "wrong-group-size"},
    "build_fails": {"fault": "build-fails"},
    "device_lost": {"fault": "launch-failure:2"},
    "sanitize_raises_on_one": {"fault": "raise-in-sanitize:2@1", "one_life": True},
    "combine_raises_on_one": {"fault": "raise-in-combine:2@1", "one_life": True},
    "combine_raises_on_one_last": {"release": LAST, "fault": "raise-in-combine:2@1", "one_life": True},
}
FATAL: dict[str, dict[str, Any]] = {
    "blocks_on_one": {"fault": "block-at-T:3@1"},
    "killed_on_one": {"fault": "die-in-dispatch:3@1"},
}
for _name, _facts in {**FAULTS, **FATAL}.items():
    suite(OnFake, _name, **_facts)
