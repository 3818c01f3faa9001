"""``pytest-ep compare --expect``: a rack's result files against a file of expectations, without a base."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pytest_ep.results.expectations import load
from pytest_ep.results.judgement import Finding
from pytest_ep.results.judgement import Judgement
from pytest_ep.results.judgement import judge
from pytest_ep.results.phrases import escaped
from pytest_ep.results.phrases import launches
from pytest_ep.results.sides import load_side


def qualify(expected: Path, news: Sequence[str], style: str) -> int:
    """Print how the sides ``news`` do against a file, as text, markdown or json; return the exit code.

    0 where every expectation is met, 1 where one is not. Raises ResultError where that cannot be judged.
    """
    expectations = load(expected)
    judgements = [judge(expectations, load_side(new)) for new in news]
    if style == "json":
        print(json.dumps(_document(expected, judgements), indent=2))
    else:
        write = _markdown if style == "markdown" else _text
        print("\n".join(line for judgement in judgements for line in write(expected, judgement)))
    return int(any(judgement.unmet for judgement in judgements))


def _text(expected: Path, judgement: Judgement) -> Iterator[str]:
    yield f"{_title(judgement)} against {expected}"
    for key, findings in _by_key(judgement.unmet):
        if key:
            yield f"  {key}"
        for finding in findings:
            yield f"    {finding.what:<12}{finding.subject}  {_said(finding)}"
    yield f"  {_counted(judgement)}"


def _markdown(expected: Path, judgement: Judgement) -> Iterator[str]:
    title = f"{_title(judgement)} against {expected}"
    yield from (f"### {escaped(title)}", "", escaped(_counted(judgement)), "")
    if judgement.unmet:
        yield from ("| verdict | row | what |", "|---|---|---|")
    for key, findings in _by_key(judgement.unmet):
        for finding in findings:
            cells = (finding.what, f"{key} {finding.subject}".strip(), _said(finding))
            yield f"| {' | '.join(map(escaped, cells))} |"


def _document(expected: Path, judgements: Sequence[Judgement]) -> dict[str, object]:
    return {
        "expected": str(expected),
        "met": not any(judgement.unmet for judgement in judgements),
        "sides": [asdict(judgement) for judgement in judgements],
    }


def _title(judgement: Judgement) -> str:
    return f"{judgement.side} ({launches(judgement.launches)})"


def _by_key(findings: Sequence[Finding]) -> list[tuple[str, list[Finding]]]:
    blocks: dict[str, list[Finding]] = {}
    for finding in findings:
        blocks.setdefault(finding.key, []).append(finding)
    return list(blocks.items())


def _said(finding: Finding) -> str:
    if finding.value is None:
        return finding.reason
    said = (
        f"{finding.value:.2f} {finding.unit}, {finding.limit} {finding.bound:.2f}:"
        f" {finding.beyond:.1f} % {finding.what}"
    )
    if finding.launches > 1:
        worst = "" if finding.worst is None else f" {finding.worst:.2f}"
        said += f"; worst launch{worst} ({finding.worst_launch})"
    return said


def _counted(judgement: Judgement) -> str:
    counts = Counter(finding.what for finding in judgement.findings)
    met = counts.pop("met", 0)
    unmet = ", ".join(f"{count} {what}" for what, count in counts.items())
    rows = f"; {judgement.unexpected} rows without an expectation" if judgement.unexpected else ""
    return f"{f'not met: {unmet}; ' if unmet else ''}met: {met}{rows}"
