"""What is said of a wrong combine: the sentence, and the lines under it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pytest_ep.oracle.diagnosis.arrivals import rank_names
from pytest_ep.oracle.diagnosis.evidence import Combined
from pytest_ep.oracle.diagnosis.evidence import Element
from pytest_ep.oracle.diagnosis.evidence import Spread
from pytest_ep.oracle.diagnosis.explanations import EXPLANATIONS
from pytest_ep.oracle.diagnosis.scene import BLOCK
from pytest_ep.oracle.diagnosis.verdicts import Cover
from pytest_ep.oracle.diagnosis.verdicts import chosen
from pytest_ep.oracle.diagnosis.verdicts import covers
from pytest_ep.oracle.diagnosis.verdicts import nearest

SHOWN = (4, 4)
"""Elements and explanations shown."""
BRIEFLY = (2, 2)
"""As many where dispatch takes the room."""
SHOWN_RANKS = 8
SMALL = 0.05
"""Explanations of a smaller share count as ruled out."""


def sentence(combined: Sequence[Combined], found: Sequence[Cover], ranks: int) -> str:
    """The explanation that covers the wrong elements; else the two best and what would tell them apart."""
    declared = combined[0].declared
    wrong = sum(spread.wrong for spread in _spreads(combined))
    cover, alike = chosen(found)
    if cover is not None:
        where = f" on {rank_names([one.rank for one in combined])}" if len(combined) < ranks else ""
        counted = f"{cover.explained} of {wrong} wrong elements{where}"
        return f"{_says(cover, declared)}: {counted}{_alike(cover, alike, declared)}"
    best = [one for one in nearest(found) if one.share >= SMALL]
    if not best:
        probes = "uniform or rank_powers or slots or columns"
        return f"no explanation fits the {wrong} wrong elements; see what -k 'test_probe and ({probes})' says"
    says = ", or ".join(f"{_says(one, declared)} ({one.share:.0%})" for one in best)
    names = dict.fromkeys(EXPLANATIONS[one.name].probe for one in best)
    tells = f"-k 'test_probe and ({' or '.join(names)})' tells"
    return f"no single explanation of the {wrong} wrong elements: {says}; {tells}"


def lines(combined: Sequence[Combined], brief: bool) -> list[str]:
    """Spread, worst elements, explanations tried and ruled out: at most 18 lines, 11 where ``brief``."""
    found = covers(combined)
    cover, _ = chosen(found)
    tried = [one for one in found if one.share >= SMALL]
    tried.sort(key=lambda one: (-one.explained, not one.clean))
    shown = {one.name for one in tried}
    notes = cover.notes[1:] if cover is not None and not brief else ()
    elements, explanations = BRIEFLY if brief else SHOWN
    return [
        *_spread_lines(combined),
        *(_element_line(one) for one in worst(combined)[:elements]),
        *notes,
        *(_tried_line(one, combined[0].declared) for one in tried[: explanations - len(notes) // 2]),
        f"ruled out: {', '.join(name for name in EXPLANATIONS if name not in shown)}",
    ]


def data(combined: Sequence[Combined]) -> dict[str, Any]:
    """All of it."""
    found = covers(combined)
    spreads = _spreads(combined)
    shown = {one.name for one in found if one.share >= SMALL}
    return {
        "declared": combined[0].declared,
        "wrong": sum(spread.wrong for spread in spreads),
        "spread": [{"rank": one.rank, **asdict(one.spread)} for one in combined if one.spread is not None],
        "worst": [asdict(element) for element in worst(combined)],
        "explanations": [{**asdict(one), "covers": one.covers} for one in found],
        "ruled_out": [name for name in EXPLANATIONS if name not in shown],
    }


def worst(combined: Iterable[Combined]) -> list[Element]:
    """The worst elements of all ranks, the worst first."""
    everyone = [element for one in combined for element in one.worst]
    return sorted(everyone, key=lambda element: (-element.error, element.token, element.column))


def _spreads(combined: Iterable[Combined]) -> list[Spread]:
    return [one.spread for one in combined if one.spread is not None]


def _says(cover: Cover, declared: str) -> str:
    says = EXPLANATIONS[cover.name].says.format(which=cover.which, declared=declared)
    if (declared, cover.which) == ("two-level", "rank-sum-fp32"):
        says += " (two-level without the narrowing of each domain)"
    return f"{says} ({cover.notes[0]})" if cover.notes else says


def _alike(cover: Cover, alike: Sequence[Cover], declared: str) -> str:
    """Up to two others that would give the same here: by variant alone where the explanation is the same."""
    if not cover.clean:
        return ", though not for the right elements beside them"
    if not alike:
        return ""
    named = [one.which if one.name == cover.name else _says(one, declared) for one in alike]
    more = f"; and {len(named) - 2} more" if len(named) > 2 else ""
    return f"; here the same: {'; '.join(named[:2])}{more}"


def _spread_lines(combined: Sequence[Combined]) -> list[str]:
    spreads = _spreads(combined)
    wrong, over = sum(one.wrong for one in spreads), sum(one.over for one in spreads)
    elements = sum(one.tokens * one.hidden for one in spreads)
    bad, whole = sum(one.wrong_tokens for one in spreads), sum(one.whole for one in spreads)
    how = "whole rows" if whole == bad else "scattered" if not whole else f"{whole} of them whole rows"
    listed = [token for one in spreads for token in one.listed]
    by_rank = [
        (one.rank, each.wrong, each.tokens * each.hidden) for one, each in zip(combined, spreads, strict=True)
    ]
    tokens = ", ".join(map(str, listed[:SHOWN_RANKS])) + (", ..." if bad > SHOWN_RANKS else "")
    return [
        f"wrong: {wrong} of {elements} elements ({wrong / elements:.2%}), {over} beyond the tolerance",
        f"in {bad} of {sum(one.tokens for one in spreads)} tokens, {how}: {tokens}",
        f"by source rank: {_shares(by_rank)}",
        f"by contributing rank: {_shares(_summed([one.by_rank for one in spreads]))}",
        f"by choice of the message: {_shares(_summed([one.by_choice for one in spreads]))}",
        f"by column: {_blocks(spreads)}",
    ]


def _summed(counts: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int, int]]:
    return [
        (index, sum(one[index][0] for one in counts), sum(one[index][1] for one in counts))
        for index in range(len(counts[0]))
    ]


def _shares(counts: Sequence[tuple[int, int, int]]) -> str:
    """Shares of wrong elements by index; those of many that are highest."""
    shares = [(index, wrong / everything) for index, wrong, everything in counts if everything]
    if len(shares) > SHOWN_RANKS:
        shares = sorted(sorted(shares, key=lambda each: -each[1])[:SHOWN_RANKS])
    return ", ".join(f"{index}: {share:.2%}" for index, share in shares)


def _blocks(spreads: Sequence[Spread]) -> str:
    totals = [sum(counts) for counts in zip(*(one.by_block for one in spreads), strict=True)]
    hit = [block for block, count in enumerate(totals) if count]
    if len(hit) == len(totals):
        return f"all {len(totals)} blocks of {BLOCK}, {min(totals)} to {max(totals)} wrong in each"
    named = ", ".join(f"{block * BLOCK} to {block * BLOCK + BLOCK - 1}" for block in hit[:4])
    return f"{len(hit)} of {len(totals)} blocks of {BLOCK}: {named}{', ...' if len(hit) > 4 else ''}"


def _element_line(one: Element) -> str:
    sent = ", ".join(f"{rank}: {value:g}" for rank, value in one.messages)
    steps = ""
    if math.isfinite(one.result_steps):
        steps = f", {one.result_steps:g} BF16 steps of it, {one.message_steps:g} of the largest message"
    return (
        f"rank {one.rank} token {one.token} column {one.column}: got {one.got:g}, "
        f"expected {one.expected:g}{steps}; sent {sent}; cancellation {one.cancellation:.3g}"
    )


def _tried_line(one: Cover, declared: str) -> str:
    but = "" if one.clean else ", though it would change right elements nearby"
    return f"{one.share:.1%} explained: {_says(one, declared)}{but}"
