"""What a comparison says in text and in Markdown alike."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence

from pytest_ep.results.comparison import Comparison
from pytest_ep.results.outcomes import CaseVerdict
from pytest_ep.results.outcomes import together
from pytest_ep.results.outcomes import tokens
from pytest_ep.results.phrases import launches
from pytest_ep.results.times import DEVICE_CLOCKS
from pytest_ep.results.times import Curve
from pytest_ep.results.verdicts import CASE_WORDS
from pytest_ep.results.verdicts import LAUNCH
from pytest_ep.results.verdicts import ROW_WORDS
from pytest_ep.timing.ratios import Ratio


def title(comparison: Comparison) -> str:
    """Return which side is compared with which."""
    base, new = comparison.base, comparison.new
    names = (base.name, new.name)
    folders = (str(base.launches[0].path.parent), str(new.launches[0].path.parent))
    if names[0] == names[1] and folders[0] != folders[1]:
        names = folders
    return f"{names[1]} ({launches(len(new.launches))}) against {names[0]} ({launches(len(base.launches))})"


def legend(comparison: Comparison) -> str:
    """Return what the numbers are."""
    said = (
        "medians in us, the geometric mean over launches; change of NEW in percent +- its 99 % interval;"
        f" floor {comparison.floor}; unclear: may or may not be beyond the floor"
    )
    clocks = sorted({curve.clock for curve in comparison.curves} - set(DEVICE_CLOCKS))
    if clocks:
        said += (
            f"; by the {' and the '.join(clocks)} clock Python and launch cost are inside: what is slower is"
            " not necessarily a kernel"
        )
    return said


def verdict(comparison: Comparison, fail_on: Collection[str]) -> str:
    """Return how many rows and cases each word applies to, and whether that fails."""
    words = comparison.words
    said = []
    for kind, those in (("rows", ROW_WORDS), ("cases", CASE_WORDS)):
        counts = ", ".join(f"{words[word]} {word}" for word in those if words[word])
        if counts:
            said.append(f"{kind}: {counts}")
    if words[LAUNCH]:
        said.append(f"launch costs: {words[LAUNCH]} higher")
    failing = comparison.failing(fail_on)
    ends = f"FAILS on {', '.join(failing)}" if failing else "passes"
    return "; ".join((*said, ends))


def summary(comparison: Comparison, word: str) -> Iterator[str]:
    """Yield each curve's T with this word and their changes, by its name where there are several."""
    several = len(by_name(comparison.curves)) > 1
    for curve in comparison.curves:
        found = {row.key.case.tokens: row.ratio for row in curve.rows if row.word == word and row.ratio}
        if found:
            changes = sorted(100 * (ratio.value - 1) for ratio in found.values())
            ends = dict.fromkeys((f"{changes[0]:+.1f}", f"{changes[-1]:+.1f}"))
            name = f"{curve.name} {curve.clock} " if several else ""
            yield f"{name}{curve.component} {' to '.join(ends)} % at T={tokens(found)}"


def grouped(cases: Sequence[CaseVerdict]) -> Iterator[tuple[str, str, str]]:
    """Yield (word, cases, reason), the T of one curve together, the gravest word first."""
    for word in CASE_WORDS:
        for names, reason in together((case.subject, case.reason) for case in cases if case.word == word):
            yield word, names, reason


def by_name(curves: Iterable[Curve]) -> dict[str, list[Curve]]:
    """Return the curves of each key, routing, skew and clock."""
    found: dict[str, list[Curve]] = {}
    for curve in curves:
        found.setdefault(f"{curve.name}, {curve.clock} clock", []).append(curve)
    return found


def change(ratio: Ratio) -> str:
    """Return ``+4.2 +-0.6``, percent and half of the interval."""
    percent, half = 100 * (ratio.value - 1), 50 * (ratio.high - ratio.low)
    digits = 1 if abs(percent) < 100 and half < 10 else 0
    return f"{percent:+.{digits}f} +-{half:.{digits}f}"


def us(value: float) -> str:
    """Return microseconds with a decimal below 1000."""
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def remarks(curve: Curve) -> Iterator[str]:
    """Yield a curve's rows without a ratio, then what a device clock beside says of it."""
    groups: dict[str, list[int]] = {}
    for row in curve.rows:
        if row.ratio is None:
            groups.setdefault(row.reason, []).append(row.key.case.tokens)
    for reason, sizes in groups.items():
        yield f"{curve.component}: {reason}: no ratio at T={tokens(sizes)}"
    words: dict[str, list[int]] = {}
    for row in curve.device:
        words.setdefault(row.word, []).append(row.key.case.tokens)
    if words:
        said = ", ".join(f"{word} at T={tokens(words[word])}" for word in ROW_WORDS if word in words)
        yield f"{curve.component} by the {curve.device[0].clock} clock beside: {said}"
