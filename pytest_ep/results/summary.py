"""The table that a person reads at the end of a run: fixed-width plain text."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Any

from pytest_ep.matrix.routing import UNIFORM
from pytest_ep.matrix.skew import NO_SKEW
from pytest_ep.results.notes import marks
from pytest_ep.results.notes import notes
from pytest_ep.results.record import ASIDE
from pytest_ep.results.record import COMPONENTS
from pytest_ep.results.record import CaseResult

if TYPE_CHECKING:
    import pytest

    from pytest_ep.matrix.cells import Cell
    from pytest_ep.matrix.cells import Key
    from pytest_ep.results.record import Ledger

    Constructed = Mapping[Key, Mapping[str, float]]
    Drift = Mapping[Key, Mapping[str, Any]]

WIDTH = 110

# (title, unit, width); each width leaves a blank before the widest number.
_COLUMNS = (
    ("T", "", 6),
    ("dispatch", "us", 10),
    ("p99", "us", 9),
    ("combine", "us", 10),
    ("p99", "us", 9),
    ("roundtrip", "us", 11),
    ("p99", "us", 9),
    ("noise", "%", 8),
    ("GB/s", "", 8),
    ("%link", "", 7),
    ("error", "", 9),
    ("exact", "%", 8),
)
_WIDTHS = tuple(width for _, _, width in _COLUMNS)

_CLOCKS = {
    "host": "the host's monotonic clock",
    "event": "CUDA events",
    "graph": "CUDA events within a graph",
    "kernel": "kernel durations of torch.profiler",
}


def summary(
    results: Iterable[CaseResult], constructed: Constructed | None = None, drift: Drift | None = None
) -> list[str]:
    """Return the lines: one block per key, then the skips, then what the numbers are.

    ``constructed`` has what each key's construction took, as ``EPBackend.facts``, and ``drift`` how its first
    case was timed again.
    """
    run, skips = [], Counter[tuple[str, str]]()
    for result in results:
        if result.outcome == "skipped":
            skips[result.code, result.reason] += 1
        else:
            run.append(result)
    blocks: dict[Key, list[CaseResult]] = {}
    for result in run:
        blocks.setdefault(result.cell.key, []).append(result)
    lines: list[str] = []
    for key, block in blocks.items():
        lines += [
            *_block(block, (constructed or {}).get(key, {})),
            *_notes(block, (drift or {}).get(key)),
            "",
        ]
    for (code, reason), count in skips.most_common():
        lines += _wrapped(f"skipped {count}: ", f"{code}: {reason}" if code else reason)
    lines += _legend([result for result in run if result.outcome == "timed"])
    return lines


def write_summary(terminal: pytest.TerminalReporter, ledger: Ledger) -> None:
    """Write the summary, where there is anything to say."""
    lines = summary(ledger, ledger.constructed, ledger.drift)
    if lines:
        terminal.section("expert parallelism")
        for line in lines:
            terminal.write_line(line)


def case_line(result: CaseResult) -> str:
    """Return what ``-v`` adds to a case's line: three medians and the error; empty where there are none."""
    if not result.rows:
        return ""
    medians = " ".join(f"{result.rows[component]['p50_us']:.1f}" for component in COMPONENTS)
    return f"{medians} us err {result.error:.1e}"


def _construction(facts: Mapping[str, float]) -> str:
    """Say what construction took: its seconds, of them the kernels' build apart, first pair, memory."""
    said = f"construction {facts['construction_s']:.1f} s, kernels built in {facts['build_s']:.1f} s"
    memory = facts["device_memory_bytes"] / 2**20
    return f"{said}, first pair {facts['first_pair_s'] * 1e3:.1f} ms, {memory:.0f} MiB of device memory"


def _block(results: list[CaseResult], facts: Mapping[str, float]) -> Iterator[str]:
    probes = [result for result in results if result.probe]
    results = [result for result in results if not result.probe]
    yield f" {_title((results or probes)[0].cell)} ".center(WIDTH, "-")
    if facts:
        yield from _wrapped("", _construction(facts))
    yield from _probes(probes)
    if not results:
        return
    yield from _load(results)
    yield _row(title for title, _, _ in _COLUMNS)
    yield _row(f"({unit})" if unit else "" for _, unit, _ in _COLUMNS).rstrip()
    for result in sorted(results, key=lambda result: result.cell.tokens):
        tokens = str(result.cell.tokens or "any").rjust(_WIDTHS[0])
        if result.outcome == "timed":
            yield f"{tokens}{_numbers(result)} {marks(result)}".rstrip()
        elif result.outcome == "checked":
            yield from _wrapped(f"{tokens}  checked, ", result.reason)
        elif result.code:
            # One failed check names itself in the reason; of several it names those that its rank saw.
            checks = f"{result.code}: " if "," in result.code else ""
            yield from _wrapped(f"{tokens}  WRONG  ", f"{_place(result)}{checks}{result.reason}")
        else:
            yield from _wrapped(f"{tokens}  FAILED  ", f"{_place(result)}{result.reason}")


def _notes(results: list[CaseResult], drift: Mapping[str, Any] | None) -> Iterator[str]:
    timed = [result for result in results if result.outcome == "timed"]
    for note in notes(sorted(timed, key=lambda result: result.cell.tokens), drift):
        yield from _wrapped("", note)


def _probes(probes: list[CaseResult]) -> Iterator[str]:
    right = [result for result in probes if result.outcome == "probed"]
    failed = [result for result in probes if result.outcome == "failed"]
    said = Counter((_what(one), f"{_place(one)}{one.reason}") for one in failed)
    for ((what, word), reason), count in said.items():
        yield from _wrapped(f"{what} {word}  " if count == 1 else f"{count} {what}s {word}  ", reason)
    if right:
        says = [result.reason for result in right if result.probe == "accumulator"]
        says = list(dict.fromkeys(says)) or ["the accumulator's was not run"]
        yield from _wrapped(f"probes passed: {len(right)}; ", "; ".join(says))


def _what(result: CaseResult) -> tuple[str, str]:
    return result.probe if result.probe in ASIDE else "probe", "WRONG" if result.code else "FAILED"


def _load(results: list[CaseResult]) -> Iterator[str]:
    """Say how a routing or a skew that is not the default loads experts and ranks, at the largest T timed."""
    timed = [result for result in results if result.outcome == "timed"]
    if not timed:
        return
    largest = max(timed, key=lambda result: result.cell.tokens)
    cell, row = largest.cell, largest.rows[COMPONENTS[0]]
    if (cell.routing == UNIFORM.name and cell.skew == NO_SKEW) or "fan_out_mean" not in row:
        return
    figures: Any = row
    shares = "" if cell.skew == NO_SKEW else f"; {_span(cell.tokens_by_rank)} tokens a rank"
    yield from _wrapped(
        f"at T={cell.tokens}: ",
        f"busiest expert {figures['expert_load_max_over_mean']:.2f} x mean, {figures['empty_experts']} idle;"
        f" busiest rank {figures['rank_load_max_over_mean']:.2f} x; fan-out {figures['fan_out_mean']:.2f};"
        f" {100 * figures['local_fraction']:.1f} % of copies stay{shares}",
    )


def _title(cell: Cell) -> str:
    key, shape = cell.key, cell.shape
    model = f"{key.model}: hidden {shape.hidden}, {shape.experts} experts, top-{shape.top_k}"
    routing = cell.routing if cell.skew == NO_SKEW else f"{cell.routing}  skew {cell.skew.name}"
    return f"{key.backend}  {key.sku} EP{key.ep_size}  {key.mode} {key.precision}  {model}  {routing}"


def _place(result: CaseResult) -> str:
    named = (("rank", result.rank), ("token", result.token), ("column", result.column))
    place = " ".join(f"{name} {index}" for name, index in named if index is not None)
    return f"{place}: " if place else ""


def _numbers(result: CaseResult) -> str:
    cells: list[str] = []
    for component in COMPONENTS:
        row: Any = result.rows[component]
        cells += [_fit(row["p50_us"], _WIDTHS[len(cells) + 1])]
        cells += [_fit(row["p99_us"], _WIDTHS[len(cells) + 1])]
    share = row["link_share"]
    cells += [
        _fit(row["noise"], _WIDTHS[7]),
        _fit(row["gbps"], _WIDTHS[8]),
        _fit(None if share is None else 100 * share, _WIDTHS[9]),
        "-" if result.error is None else f"{result.error:.1e}",
        _exact(result.bit_exact),
    ]
    return _row(cells, _WIDTHS[1:])


def _row(cells: Iterable[str], widths: tuple[int, ...] = _WIDTHS) -> str:
    return "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _fit(number: float | None, width: int) -> str:
    """Write a number in less than ``width``: two decimals below 1, else one, or none, or an exponent."""
    if number is None:
        return "-"
    for text in (f"{number:.{2 if 0 < number < 1 else 1}f}", f"{number:.0f}"):
        if len(text) < width:
            return text
    return f"{number:.1e}"


def _exact(share: float | None) -> str:
    """Write a share in percent, rounded down: 100 means every element."""
    if share is None:
        return "-"
    return "100" if share == 1 else f"{math.floor(share * 1e4) / 1e2:.2f}"


def _wrapped(first: str, text: str) -> list[str]:
    indent = " " * (_WIDTHS[0] + 2)
    return textwrap.wrap(first + text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _legend(timed: list[CaseResult]) -> list[str]:
    if not timed:
        return []
    rows: list[Any] = [row for result in timed for row in result.rows.values()]
    ranks = _span(result.cell.key.ep_size for result in timed)
    clocks = " and ".join(_CLOCKS.get(clock, clock) for clock in sorted({row["clock"] for row in rows}))
    text = (
        f"medians of per-iteration maxima over {ranks} rank{'s' * (ranks != '1')},"
        f" {_span(row['samples'] for row in rows)} samples, timed by {clocks};"
        " GB/s = bytes leaving the most loaded rank for others / median time;"
        " noise, GB/s and %link are roundtrip's"
    )
    if any("kernel_span_us" in row for row in rows):
        text += "; kernel durations are sums over kernels, and waiting for peers is inside them"
    if any("l2_flushed" in row for row in rows):
        text += "; L2 was overwritten before each pair, and a roundtrip by graph is then dispatch + combine"
    return textwrap.wrap(text, WIDTH)


def _span(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"
