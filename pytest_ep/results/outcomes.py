"""What became of each case on the two sides of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import TypeAlias

from pytest_ep.matrix.skew import NO_SKEW
from pytest_ep.results.phrases import among
from pytest_ep.results.sides import PROBE
from pytest_ep.results.sides import Case
from pytest_ep.results.sides import Outcome
from pytest_ep.results.sides import ResultError
from pytest_ep.results.sides import Side
from pytest_ep.results.verdicts import FIXED
from pytest_ep.results.verdicts import MISSING
from pytest_ep.results.verdicts import NEW
from pytest_ep.results.verdicts import NEWLY_SKIPPED
from pytest_ep.results.verdicts import NEWLY_WRONG

Subject: TypeAlias = "Case | str"
"""A case, or the node id of one whose coordinates no file tells."""

PASSED = ("timed", "checked", "probed")


@dataclass(frozen=True, slots=True)
class CaseVerdict:
    """A case whose outcome differs between the sides: its word, and why in one line."""

    subject: Subject
    word: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tally:
    """The outcomes of one case in the launches of a side that say any."""

    launches: int
    outcomes: Sequence[Outcome] = ()

    def of(self, *kinds: str) -> list[Outcome]:
        """Return the outcomes of some kinds."""
        return [outcome for outcome in self.outcomes if outcome.what in kinds]

    @property
    def reached(self) -> bool:
        """Whether any launch was to run it."""
        return any(outcome.what != "skipped" for outcome in self.outcomes)

    @property
    def ran(self) -> bool:
        """Whether any launch has a result of it."""
        return bool(self.of(*PASSED, "failed"))

    @property
    def passed(self) -> bool:
        """Whether it passed in a launch and failed in none."""
        return bool(self.of(*PASSED)) and not self.of("failed")

    def told(self, kind: str) -> str:
        """Return in how many launches it ended so, where there are several, and why."""
        those = self.of(kind)
        reasons = ", ".join(dict.fromkeys(_reason(outcome) for outcome in those))
        return among(len(those), self.launches) + reasons


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The cases that differ, the cases to compare by their times, and what else is to be said of cases."""

    differing: list[CaseVerdict] = field(default_factory=list)
    timed: list[Case] = field(default_factory=list)
    remarks: list[tuple[Subject, str]] = field(default_factory=list)


def compare_outcomes(base: Side, new: Side) -> Outcomes:
    """Return what became of each case, in the order of their coordinates.

    Newly wrong: it failed in a launch of NEW, and in none of BASE. Fixed: the reverse, and it passed in NEW.
    Of a case that ran in BASE: newly skipped where NEW skipped it, or its whole key, and missing where NEW
    did not time it for any other reason. New: it passed in NEW alone. Only cases that failed nowhere are
    compared by their times. A probe counts where it failed: to run none is a choice. Raises ResultError where
    nothing that ran on one side is known to the other, or where no case that ran in BASE ran in NEW, and
    NEW has nothing wrong.
    """
    found, common, kept = Outcomes(), False, False
    for subject, before, after in _pairs(base, new):
        common |= bool(before.outcomes and after.outcomes and (before.reached or after.reached))
        kept |= before.ran and after.ran and not _is_probe(subject)
        if verdict := _verdict(subject, before, after):
            found.differing.append(verdict)
        elif before.of("failed"):
            found.remarks.append((subject, _still_wrong(before, after)))
        elif isinstance(subject, Case) and before.of("timed") and after.of("timed"):
            found.timed.append(subject)
            for name, tally in (("BASE", before), ("NEW", after)):
                found.remarks.extend((subject, f"{name}: {said}") for said in _untimed(tally))
        elif before.of("checked"):
            found.remarks.append((subject, "passed on both sides, not timed"))
    if not common:
        raise ResultError(
            f"{base.name} and {new.name} have no case in common: compare runs of the same cases"
        )
    words = {verdict.word for verdict in found.differing}
    if not kept and words & {NEWLY_SKIPPED, MISSING} and NEWLY_WRONG not in words:
        reasons = (verdict.reason for verdict in found.differing if verdict.word in (NEWLY_SKIPPED, MISSING))
        why = next(filter(None, reasons), "compare runs of the same cases")
        raise ResultError(f"no case that ran in {base.name} ran in {new.name}: {why}")
    return found


def together(remarks: Iterable[tuple[Subject, str]]) -> Iterator[tuple[str, str]]:
    """Yield (cases, remark), the T of one curve together where the remark is the same."""
    found: dict[tuple[str, str], list[int]] = {}
    for subject, remark in remarks:
        if isinstance(subject, Case) and not subject.probe:
            found.setdefault((subject.curve, remark), []).append(subject.tokens)
        else:
            found[str(subject), remark] = []
    for (name, remark), sizes in found.items():
        yield f"{name} T={tokens(sizes)}" if sizes else name, remark


def tokens(sizes: Iterable[int]) -> str:
    """Return sizes as a list."""
    return ",".join(str(size) for size in sorted(sizes))


def _verdict(subject: Subject, before: Tally, after: Tally) -> CaseVerdict | None:
    if after.of("failed"):
        return None if before.of("failed") else CaseVerdict(subject, NEWLY_WRONG, after.told("failed"))
    if before.of("failed") and after.passed:
        return CaseVerdict(subject, FIXED, f"was: {before.told('failed')}")
    if _is_probe(subject):
        return None
    if before.ran:
        return _gone(subject, before, after)
    if after.passed:
        return CaseVerdict(subject, NEW, "".join(f"was {said}" for said in [*_untimed(before)][:1]))
    return None


def _gone(subject: Subject, before: Tally, after: Tally) -> CaseVerdict | None:
    """Say of a case that ran in BASE, and did not fail in NEW, whether NEW has it as well."""
    if after.of("timed"):
        newly_timed = not before.of("timed", "failed")
        return CaseVerdict(subject, NEW, "was checked, not timed") if newly_timed else None
    if after.of("checked") and not before.of("timed"):
        return None
    if after.of("skipped"):
        return CaseVerdict(subject, NEWLY_SKIPPED, after.told("skipped"))
    return CaseVerdict(subject, MISSING, "; ".join(_untimed(after)))


def _still_wrong(before: Tally, after: Tally) -> str:
    """Say of what failed in BASE, and is neither fixed nor gone, what NEW has: a probe need not run."""
    if after.of("failed"):
        return f"wrong on both sides: {after.told('failed')}"
    return f"wrong in BASE: {before.told('failed')}; NEW: {'; '.join(_untimed(after)) or 'none'}"


def _untimed(tally: Tally) -> Iterator[str]:
    """Say in which launches that reached a case, or gave it up, it was not timed."""
    for kind, said in (("checked", "checked, not timed"), ("skipped", "skipped"), ("not_run", "not run")):
        if tally.of(kind):
            yield f"{said}{' ' if tally.launches > 1 else ': '}{tally.told(kind)}"


def _is_probe(subject: Subject) -> bool:
    return bool(subject.probe) if isinstance(subject, Case) else PROBE in subject


def _pairs(base: Side, new: Side) -> Iterator[tuple[Subject, Tally, Tally]]:
    known = {
        outcome.nodeid: _subject(case)
        for launch in (*base.launches, *new.launches)
        for case, outcome in launch.outcomes.items()
    }
    before, after = (_tallies(side, known) for side in (base, new))
    for subject in sorted({*before, *after}, key=_order):
        yield subject, _tally(before, subject, base), _tally(after, subject, new)


def _tallies(side: Side, known: Mapping[str, Case]) -> dict[Subject, list[Outcome]]:
    """Collect each case's outcomes; cases that a launch leaves to other machines are none of its."""
    tallies: dict[Subject, list[Outcome]] = {}
    for launch in side.launches:
        for case, outcome in launch.outcomes.items():
            if outcome.what != "skipped" or launch.reaches(case):
                tallies.setdefault(_subject(case), []).append(outcome)
        for nodeid, outcome in launch.unplaced.items():
            subject = known.get(nodeid, nodeid)
            if outcome.what != "skipped" or isinstance(subject, str) or launch.reaches(subject):
                tallies.setdefault(subject, []).append(outcome)
    return tallies


def _subject(case: Case) -> Case:
    """Return a case as itself, and a probe as its key's: of which cell it was made says nothing of it."""
    return replace(case, routing="", token_skew=NO_SKEW.name, tokens=0) if case.probe else case


def _tally(tallies: Mapping[Subject, Sequence[Outcome]], subject: Subject, side: Side) -> Tally:
    """Return a case's tally; where the launches say nothing of it, what they say of its whole key."""
    outcomes = tallies.get(subject, ())
    if not outcomes and isinstance(subject, Case):
        outcomes = [
            outcome
            for case, those in tallies.items()
            if isinstance(case, Case) and case.whole and case.key == subject.key
            for outcome in those
        ]
    return Tally(len(side.launches), outcomes)


def _reason(outcome: Outcome) -> str:
    code = f"{outcome.code}: " if outcome.code and not outcome.reason.startswith(outcome.code) else ""
    return f"{code}{outcome.reason}"


def _order(subject: Subject) -> tuple[bool, str, int, str]:
    if isinstance(subject, Case):
        return False, f"{subject.key} {subject.routing} {subject.token_skew}", subject.tokens, subject.probe
    return True, subject, 0, ""
