"""Transports that return wrong results or times, one fault each, as the suites of one test module.

Each class is torch_a2a with one thing changed; unless it says otherwise, on rank 1 alone.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from pytest_ep import EPSuite
from pytest_ep.backends.base import Received
from pytest_ep.backends.torch_a2a import Exchange
from pytest_ep.backends.torch_a2a import TorchA2A
from pytest_ep.oracle import reduction
from pytest_ep.run import Run
from pytest_ep.timing import clocks
from pytest_ep.timing import sampling
from pytest_ep.workload.problem import Problem

CULPRIT = 1
NAN_COLUMN = 77
LATE_SECONDS = 0.1


class Reducing(TorchA2A):
    """Adds the returned messages by ``reduce`` (on every rank)."""

    def combine(self, problem: Problem, handle: Exchange, staged: Tensor) -> Tensor:
        back = self._all_to_all(staged[: sum(handle.received)], handle.received, handle.sent)
        rank = torch.arange(problem.ep_size).repeat_interleave(torch.tensor(handle.sent))
        here = self._owners[problem.expert_ids[handle.order]] == rank[:, None]
        given = reduction.Contributions(
            rows=back,
            token=handle.order,
            rank=rank,
            choice=here.int().argmax(dim=1),
            tokens=problem.tokens,
            top_k=problem.shape.top_k,
        )
        return self.reduce(given, problem).to(torch.bfloat16)

    def reduce(self, given: reduction.Contributions, problem: Problem) -> Tensor:
        return reduction.rank_sum_fp32(given)


class SlotTree(Reducing):
    name = "slot_tree"

    def reduce(self, given: reduction.Contributions, problem: Problem) -> Tensor:
        return reduction.topk_slot_tree(given)


class TwoLevel(Reducing):
    name = "two_level"

    def reduce(self, given: reduction.Contributions, problem: Problem) -> Tensor:
        return reduction.two_level(given, domain=2)


class Gated(Reducing):
    """Multiplies each message by the gates of its rank's experts, which an expert would have applied."""

    name = "gated"

    def reduce(self, given: reduction.Contributions, problem: Problem) -> Tensor:
        here = self._owners[problem.expert_ids[given.token]] == given.rank[:, None]
        gate = torch.where(here, problem.weights[given.token], 0.0).sum(dim=1)
        return reduction.rank_sum_fp32(replace(given, rows=given.rows.float() * gate[:, None]))


class Stepped(Reducing):
    """Moves one element of one message of token 0 by one BF16 step, where that shows in the narrowed sum."""

    name = "stepped"

    def reduce(self, given: reduction.Contributions, problem: Problem) -> Tensor:
        right = reduction.rank_sum_fp32(given)
        if problem.rank != CULPRIT:
            return right
        row = int((given.token == 0).nonzero()[0])
        rows = given.rows.clone()
        rows[row].view(torch.int16)[:] += 1
        wrong = reduction.rank_sum_fp32(replace(given, rows=rows))
        change = (wrong[0] - right[0]).abs()
        column = int(((change > 0) & (change <= 2**-7 * right[0].abs())).nonzero()[0])
        right[0, column] = wrong[0, column]
        return right


class SteppedExact(Stepped):
    """The same, for a suite that sets --ep-exact for itself."""

    name = "exactly_stepped"


class Dropped(TorchA2A):
    """Does not send token 0 to the first rank that it should go to."""

    name = "dropped"

    def dispatch(self, problem: Problem) -> Exchange:
        ids = problem.expert_ids.clone()
        if problem.rank == CULPRIT:
            owners = self._owners[ids[0]]
            ids[0, owners == owners[0]] = -1
        return super().dispatch(replace(problem, expert_ids=ids))


class Doubled(TorchA2A):
    """Sends token 0 twice to the first rank that it should go to."""

    name = "doubled"

    def dispatch(self, problem: Problem) -> Exchange:
        if problem.rank != CULPRIT:
            return super().dispatch(problem)
        owners = self._owners[problem.expert_ids[0]]
        again = problem.expert_ids[0].where(owners == owners[0], -1)
        tokens = list(problem.tokens_by_rank)
        tokens[CULPRIT] += 1
        longer = replace(
            problem,
            tokens_by_rank=tuple(tokens),
            x=torch.cat([problem.x, problem.x[:1]]),
            expert_ids=torch.cat([problem.expert_ids, again[None]]),
            weights=torch.cat([problem.weights, problem.weights[:1]]),
        )
        handle = super().dispatch(longer)
        return replace(handle, order=handle.order % problem.tokens)


class Swapped(TorchA2A):
    """Exchanges the payloads of its first and last row, which come from two ranks, but not their metadata."""

    name = "swapped"

    def dispatch(self, problem: Problem) -> Exchange:
        handle = super().dispatch(problem)
        if problem.rank == CULPRIT:
            assert sum(count > 0 for count in handle.received) > 1, "rows of one source only"
            handle.tokens[[0, -1]] = handle.tokens[[-1, 0]]
        return handle


class Receiving(TorchA2A):
    """Changes what the culprit says that it received."""

    def receive(self, problem: Problem, handle: Exchange) -> Received:
        received = super().receive(problem, handle)
        return self.change(received, handle) if problem.rank == CULPRIT else received

    def change(self, received: Received, handle: Exchange) -> Received:
        return received


class Unmasked(Receiving):
    name = "unmasked"

    def change(self, received: Received, handle: Exchange) -> Received:
        return replace(received, expert_ids=handle.metadata[:, : self._shape.top_k].long())


class Miscounted(Receiving):
    name = "miscounted"

    def change(self, received: Received, handle: Exchange) -> Received:
        received.expert_counts[0] += 1
        return received


class Weighted(Receiving):
    """The last bit of one weight."""

    name = "weighted"

    def change(self, received: Received, handle: Exchange) -> Received:
        assert received.weights is not None
        received.weights.view(torch.int32)[0, int((received.expert_ids[0] >= 0).nonzero()[0])] ^= 1
        return received


class Returning(TorchA2A):
    """Changes what the culprit's combine returns."""

    def combine(self, problem: Problem, handle: Exchange, staged: Tensor) -> Tensor:
        combined = super().combine(problem, handle, staged)
        return self.change(combined) if problem.rank == CULPRIT else combined

    def change(self, combined: Tensor) -> Tensor:
        return combined


class NotANumber(Returning):
    name = "not_a_number"

    def change(self, combined: Tensor) -> Tensor:
        combined[-1, NAN_COLUMN] = math.nan
        return combined


class Misshapen(Returning):
    name = "misshapen"

    def change(self, combined: Tensor) -> Tensor:
        return combined[:, :-1]


class Overwriting(TorchA2A):
    """Writes to its input once it has sent it."""

    name = "overwriting"

    def dispatch(self, problem: Problem) -> Exchange:
        handle = super().dispatch(problem)
        if problem.rank == CULPRIT:
            problem.x[-1, -1] += 1
        return handle


class Phased(TorchA2A):
    """Counts the combines of a case, by what was staged: the oracle's messages or constant rows."""

    def stage_constant(self, problem: Problem, rows: Tensor) -> Tensor:
        self._constant = super().stage_constant(problem, rows)
        return self._constant

    def combine(self, problem: Problem, handle: Exchange, staged: Tensor) -> Tensor:
        if getattr(self, "_problem", None) is not problem:
            self._problem, self._combined = problem, {True: 0, False: 0}
        timed = staged is getattr(self, "_constant", None)
        self._combined[timed] += 1
        combined = super().combine(problem, handle, staged)
        wrong = problem.rank == CULPRIT and self.wrong(timed, self._combined[timed])
        return torch.zeros_like(combined) if wrong else combined

    def wrong(self, timed: bool, count: int) -> bool:
        return False


class Stale(Phased):
    """Writes no output from the tenth timed combine on, and is right again afterwards."""

    name = "stale"

    def wrong(self, timed: bool, count: int) -> bool:
        return timed and count >= 10


class Worn(Phased):
    """Is right until timing has ended."""

    name = "worn"

    def wrong(self, timed: bool, count: int) -> bool:
        return not timed and count > 1


class TestUnfaulty(EPSuite):
    backend = "torch_a2a"


class TestSlotTree(EPSuite):
    backend = SlotTree


class TestTwoLevel(EPSuite):
    backend = TwoLevel


class TestGated(EPSuite):
    backend = Gated


class TestStepped(EPSuite):
    backend = Stepped


class TestSteppedExact(EPSuite):
    backend = SteppedExact

    @pytest.fixture(autouse=True)
    def _exact(self, ep_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ep_run, "options", replace(ep_run.options, exact=True))


class TestDropped(EPSuite):
    backend = Dropped


class TestDoubled(EPSuite):
    backend = Doubled


class TestSwapped(EPSuite):
    backend = Swapped


class TestUnmasked(EPSuite):
    backend = Unmasked


class TestMiscounted(EPSuite):
    backend = Miscounted


class TestWeighted(EPSuite):
    backend = Weighted


class TestNotANumber(EPSuite):
    backend = NotANumber


class TestMisshapen(EPSuite):
    backend = Misshapen


class TestOverwriting(EPSuite):
    backend = Overwriting


class TestStale(EPSuite):
    backend = Stale


class TestWorn(EPSuite):
    backend = Worn


class WrongClock:
    """The host's clock, of which the sixth window takes ``seconds``, the second combine."""

    def __init__(self, clock: clocks.Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._windows = 0
        self.name = clock.name

    def start(self) -> Any:
        return self._clock.start()

    def end(self) -> Any:
        return self._clock.end()

    def seconds(self, start: Any, end: Any) -> float:
        self._windows += 1
        return self._seconds if self._windows == 6 else self._clock.seconds(start, end)


class ClockSuite(EPSuite):
    """A right transport whose culprit has a wrong clock."""

    seconds: ClassVar[float]

    @pytest.fixture(autouse=True)
    def _clock(self, ep_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        choose = clocks.choose
        if ep_run.identity.rank == CULPRIT:
            monkeypatch.setattr(clocks, "choose", lambda *given: WrongClock(choose(*given), self.seconds))


def _named(name: str) -> type[TorchA2A]:
    return type(name, (TorchA2A,), {"name": name})


class TestClockZero(ClockSuite):
    backend = _named("clock_zero")
    seconds = 0.0


class TestClockBackwards(ClockSuite):
    backend = _named("clock_backwards")
    seconds = -1e-3


class TestClockNan(ClockSuite):
    backend = _named("clock_nan")
    seconds = math.nan


class TestClockInfinite(ClockSuite):
    backend = _named("clock_infinite")
    seconds = math.inf


class TestClockForgetful(EPSuite):
    """The culprit loses a sample."""

    backend = _named("clock_forgetful")

    @pytest.fixture(autouse=True)
    def _forget(self, ep_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        batch = sampling.EagerSampler.batch

        def forgetful(sampler: sampling.EagerSampler, iterations: int) -> sampling.Batch:
            taken = batch(sampler, iterations)
            if ep_run.identity.rank == CULPRIT:
                taken["roundtrip"].pop()
            return taken

        monkeypatch.setattr(sampling.EagerSampler, "batch", forgetful)


class LateClock:
    """The host's clock, before each of whose windows the rank sleeps."""

    def __init__(self, clock: clocks.Clock) -> None:
        self._clock = clock
        self.name = clock.name
        self.end = clock.end
        self.seconds = clock.seconds

    def start(self) -> Any:
        time.sleep(LATE_SECONDS)
        return self._clock.start()


class TestClockLate(EPSuite):
    """A right transport whose culprit enters every window late."""

    backend = _named("clock_late")

    @pytest.fixture(autouse=True)
    def _late(self, ep_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        choose = clocks.choose
        if ep_run.identity.rank == CULPRIT:
            monkeypatch.setattr(clocks, "choose", lambda *given: LateClock(choose(*given)))
