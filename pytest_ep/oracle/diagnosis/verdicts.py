"""All ranks' evidence as one: which explanation covers the wrong elements, and what dispatch did."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_ep.oracle.diagnosis.evidence import Combined
from pytest_ep.oracle.diagnosis.evidence import Evidence
from pytest_ep.oracle.diagnosis.evidence import Finding
from pytest_ep.oracle.diagnosis.evidence import Tried
from pytest_ep.oracle.diagnosis.explanations import EXPLANATIONS

COVERS = 0.99
"""Share of the wrong elements from which an explanation covers them."""
DENIES = 0.02
"""Right elements nearby that it denies, for each that it explains, from which it is no explanation."""
GRAVITY = (
    "shape",
    "padding",
    "unreadable",
    "lost",
    "doubled",
    "misrouted",
    "corrupted",
    "ids",
    "weights",
    "counts",
)
"""Faults of dispatch in the order in which they are named."""

IMPLIED = {"stale": ("other token", "other messages"), "other token": ("other messages",)}
"""Explanations that say less of what another one explains."""


@dataclass(frozen=True, slots=True)
class Cover:
    """An explanation's fit to all ranks' wrong elements; ``share`` of them, 0 to 1, is explained."""

    name: str
    which: str
    explained: int
    share: float
    clean: bool
    notes: tuple[str, ...] = ()

    @property
    def covers(self) -> bool:
        """Whether it explains nearly all, and nothing that is right."""
        return self.share >= COVERS and self.clean


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of dispatch on ``ranks``: of ``of`` things ``count`` have it."""

    fault: str
    says: str
    ranks: tuple[int, ...]
    count: int
    of: int
    tokens: tuple[int, ...]


def covers(combined: Sequence[Combined]) -> list[Cover]:
    """Every variant that explains anything, in the table's order; also where each rank has its own."""
    wrong = sum(one.spread.wrong for one in combined if one.spread)
    merged: dict[tuple[str, str], list[Tried]] = {}
    for one in combined:
        for tried in one.tried:
            merged.setdefault((tried.name, tried.which), []).append(tried)
    order = list(EXPLANATIONS)
    found = [_cover(name, which, tried, wrong) for (name, which), tried in merged.items()]
    covered = {cover.name for cover in found if cover.covers}
    found += [cover for cover in _by_rank(combined, wrong) if cover.name not in covered]
    return sorted(found, key=lambda cover: order.index(cover.name))


def chosen(found: Sequence[Cover]) -> tuple[Cover | None, list[Cover]]:
    """The first that covers, and the others that would look the same here.

    Where none does, the first that would if right elements nearby were wrong too.
    """
    covering = [cover for cover in found if cover.covers]
    if covering:
        implied = IMPLIED.get(covering[0].name, ())
        return covering[0], [cover for cover in covering[1:] if cover.name not in implied]
    return next((cover for cover in found if cover.share >= COVERS), None), []


def nearest(found: Sequence[Cover]) -> list[Cover]:
    """The two that explain most, of different names."""
    best: dict[str, Cover] = {}
    for cover in sorted(found, key=lambda cover: (-cover.clean, -cover.explained)):
        best.setdefault(cover.name, cover)
    return sorted(best.values(), key=lambda cover: (-cover.clean, -cover.explained))[:2]


def faults(evidence: Iterable[Evidence]) -> list[Fault]:
    """What dispatch did, the gravest first: the same fault on several ranks as one."""
    merged: dict[str, list[tuple[int, Finding]]] = {}
    for one in evidence:
        for finding in one.findings:
            merged.setdefault(finding.fault, []).append((one.rank, finding))
    return [
        Fault(
            fault,
            max((finding for _, finding in merged[fault]), key=lambda finding: finding.count).says,
            tuple(rank for rank, _ in merged[fault]),
            sum(finding.count for _, finding in merged[fault]),
            sum(finding.of for _, finding in merged[fault]),
            tuple(dict.fromkeys(token for _, finding in merged[fault] for token in finding.tokens)),
        )
        for fault in GRAVITY
        if fault in merged
    ]


def _cover(name: str, which: str, tried: Sequence[Tried], wrong: int) -> Cover:
    explained = sum(one.explained for one in tried)
    most = max(tried, key=lambda one: one.explained)
    clean = sum(one.denied for one in tried) <= DENIES * explained
    return Cover(name, which, explained, explained / max(1, wrong), clean, most.notes)


def _by_rank(combined: Sequence[Combined], wrong: int) -> list[Cover]:
    """Explanations whose variant differs from rank to rank, where that is what makes them cover."""
    found = []
    for name in EXPLANATIONS:
        best = []
        for one in combined:
            clean = [
                tried
                for tried in one.tried
                if tried.name == name and tried.denied <= DENIES * tried.explained
            ]
            best += [max(clean, key=lambda tried: tried.explained)] if clean else []
        if len({tried.which for tried in best}) > 1:
            which = ", or ".join(sorted({tried.which for tried in best}))
            cover = _cover(name, which, best, wrong)
            found += [cover] if cover.covers else []
    return found
