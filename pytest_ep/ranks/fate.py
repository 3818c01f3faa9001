"""One outcome on all ranks: work done together, reports agreed."""

from __future__ import annotations

import contextlib
import math
import re
import traceback
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import pytest

from pytest_ep.ranks.ballot import FAILING
from pytest_ep.ranks.ballot import LEAVING
from pytest_ep.ranks.ballot import AgreedExit
from pytest_ep.ranks.ballot import Ballot
from pytest_ep.ranks.ballot import OutOfStep

STEP = "step: "
"""Begins the topic of work done together, as opposed to a report of an item."""
MEANT = (pytest.exit.Exception, pytest.Session.Interrupted, pytest.Session.Failed, KeyboardInterrupt)
"""End a session as someone wished: they are no faults of it."""
REPORTS = ("setup of ", "call of ", "teardown of ")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a case failed, the same on every rank: ``code`` names the checks, the rest locates the element.

    ``diagnosis`` is a sentence that names the cause and lines under it, ``evidence`` the same as JSON types.
    """

    reason: str
    code: str = ""
    rank: int | None = None
    token: int | None = None
    column: int | None = None
    error: float | None = None
    bit_exact: float | None = None
    diagnosis: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


class AgreedFailure(pytest.fail.Exception):  # type: ignore[misc, name-defined]
    """A failure that every rank raises at the same point, so that nobody is left in a collective."""

    def __init__(self, failure: Failure) -> None:
        said = [failure.reason, failure.diagnosis]
        if failure.evidence:  # the cause in a sentence first, then what failed, then the rest
            cause, _, lines = failure.diagnosis.partition("\n")
            said = [cause, failure.reason, lines]
        super().__init__("\n".join(filter(None, said)), pytrace=False)
        self.failure = failure


class AgreedSkip(pytest.skip.Exception):  # type: ignore[misc, name-defined]
    """A skip that every rank raises at the same point."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class Unavailable(Exception):
    """Raised inside ``together``: not a fault but a refusal, which becomes the same skip on every rank."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Vote:
    """What a rank says at an agreement point; ``place`` is its place among those that failed."""

    outcome: str
    text: str = ""
    place: int = 0
    skip: tuple[str, str] | None = None
    stop: str = ""
    value: Any = field(default=None, compare=False)


class Fate:
    """What the ranks share: the ballot, and the way out of a collective that a peer has left.

    ``abandon`` is set once process groups exist; it frees peers which wait in one of them. ``say`` prints a
    line of a rank that reports nothing itself, at once and past pytest's capture.
    """

    def __init__(self, ballot: Ballot, say: Callable[[str], None]) -> None:
        self.ballot = ballot
        self._say = say
        self.broken_by = ""
        self.abandon: Callable[[], None] = lambda: None

    def together(self, phase: str, work: Callable[[], Any]) -> list[Any]:
        """Do ``work`` on every rank and return what each said, by rank (pickled values).

        Where it raised on any rank, every rank raises AgreedFailure with the first failing rank's phase
        and traceback; where it raised Unavailable and nothing else, or called pytest.skip on all ranks, every
        rank raises AgreedSkip.
        """
        self.ballot.enter(phase)
        vote = self._attempt(phase, work)
        try:
            votes = self.ballot.gather(f"{STEP}{phase}", vote)
        except OutOfStep as apart:
            raise self._deserted(phase, apart) from None
        left = self._first(votes, "left")
        if left is not None:
            raise AgreedExit(f"rank {left} left the session in {phase}: {votes[left].text}")
        if all(vote.outcome == "skips" for vote in votes):
            raise AgreedSkip("skipped", votes[0].text)
        failed = self._first(votes, "failed", "skips")
        if failed is not None:
            raise AgreedFailure(_failure(failed, phase, votes))
        if self._first(votes, "skipped") is not None:
            # The lowest rank's, so that the reason is the same in every run.
            raise AgreedSkip(*next(vote.skip for vote in votes if vote.skip is not None))
        return [vote.value for vote in votes]

    def _attempt(self, phase: str, work: Callable[[], Any]) -> Vote:
        """Do ``work``; free the peers where it does not come to its end."""
        try:
            return Vote("passed", value=work())
        except (AgreedFailure, AgreedSkip):  # every rank raises it
            raise
        except Unavailable as refusal:
            place = self.leave(phase)
            return Vote("skipped", refusal.reason, place, (refusal.code, refusal.reason))
        except pytest.skip.Exception as skip:
            return Vote("skips", str(skip), self.leave(phase))
        except pytest.exit.Exception as error:
            return Vote("left", str(error), self.leave(phase))
        except (Exception, pytest.fail.Exception, SystemExit):  # the last two are no Exception
            text = traceback.format_exc()
            place = self.leave(phase)
            if place == 1:  # a later rank mostly fails of what the first one left it with
                self.say_failed(phase, text)
            return Vote("failed", text, place)

    def settle(self, phase: str, vote: Vote) -> tuple[list[Vote], Failure | None]:
        """Compare the ranks' reports of one phase of one item; return the votes and what all must report.

        None where all agree. A failure anywhere is everyone's; so is a skip on some ranks only.
        """
        while True:
            try:
                votes: list[Vote] = self.ballot.gather(phase, vote)
                break
            except OutOfStep as apart:
                # Who is still in a step of this item hears of this report there, and comes here next.
                if not all(there == phase or there.startswith(STEP) for there in apart.topics):
                    raise
        failed, alike = self._first(votes, "failed"), len({vote.outcome for vote in votes}) == 1
        if failed is not None and (votes[failed].place or alike):
            return votes, _failure(failed, phase, votes)
        if alike:
            return votes, None
        said = ", ".join(f"rank {rank} {_told(vote)}" for rank, vote in enumerate(votes))
        return votes, Failure(f"the ranks disagree on {phase}: {said}")

    def leave(self, phase: str) -> int:
        """Take a place among the failing ranks, then free the peers; returns the place."""
        place = self.ballot.place(phase)
        self.broken_by = self.ballot.pulse.case or phase
        with contextlib.suppress(Exception):  # must not hide the failure that is being reported
            self.abandon()
        return place

    def part(self, error: BaseException) -> None:
        """Leave the session for ``error``. The others hear of it and leave, too, unless they do already."""
        self.broken_by = self.broken_by or "the end of the session"
        if isinstance(error, AgreedExit):
            return
        self.leave("session")
        topic = f"{LEAVING}{str(error) or type(error).__name__}"
        if not isinstance(error, MEANT):
            topic = f"{FAILING}{type(error).__name__}: {error}"
        with contextlib.suppress(AgreedExit):  # the others hear it the same way
            self.ballot.gather(topic, None)

    def say_failed(self, phase: str, text: str) -> None:
        """Say a failure where it happened, at once: the end of the session may never come."""
        self._say(f"rank {self.ballot.rank} failed in {phase} of {self.ballot.pulse.case}: {_one_line(text)}")

    def _deserted(self, phase: str, apart: OutOfStep) -> BaseException:
        """Return what to raise in a step to which some rank will not come: it has ended this item already."""
        gone = [rank for rank, there in enumerate(apart.topics) if not there.startswith(STEP)]
        steps = {there for there in apart.topics if there.startswith(STEP)}
        if steps != {f"{STEP}{phase}"} or not all(apart.topics[rank].startswith(REPORTS) for rank in gone):
            return apart
        return AgreedFailure(
            Failure(f"rank {gone[0]} did not come to {phase}: it is at {apart.topics[gone[0]]}")
        )

    def _first(self, votes: list[Vote], *outcomes: str) -> int | None:
        ranks = [rank for rank, vote in enumerate(votes) if vote.outcome in outcomes]
        if any(votes[rank].place for rank in ranks):
            self.broken_by = self.broken_by or self.ballot.pulse.case
            self.ballot.catch_up()
        # Who has no place fails of what another said.
        return min(ranks, key=lambda rank: (votes[rank].place or math.inf, rank), default=None)


def _told(vote: Vote) -> str:
    if vote.outcome == "failed":  # of what another rank did: else it had a place
        return "could not go on"
    return f"{vote.outcome} ({_one_line(vote.text)})" if vote.text else vote.outcome


def _failure(rank: int, phase: str, votes: list[Vote]) -> Failure:
    """The exception in one line; below it its whole traceback, and what the ranks that failed later said.

    Those mostly fail of what the first one left them with, but a cause may lose that race.
    """
    later = [
        f"rank {other} failed after it: {_one_line(vote.text)}"
        for other, vote in enumerate(votes)
        if vote.outcome == "failed" and vote.place and other != rank
    ]
    text = votes[rank].text
    if votes[rank].outcome == "skips":
        text = f"it called pytest.skip, which not all ranks did: {text}"
    diagnosis = "\n".join([text.strip(), *later])
    return Failure(f"rank {rank} failed in {phase}: {_one_line(text)}", diagnosis=diagnosis)


def _one_line(traceback: str) -> str:
    """The innermost exception's name and the first line of what it says; else the last line."""
    lines = traceback.strip().splitlines() or [""]
    lines = [line[1:].strip() for line in lines if line.startswith("E  ")] or lines  # pytest's own form
    named = [line for line in lines if re.match(r"[\w.]*[A-Z]\w*(: |$)", line)]
    return (named or lines)[-1]
