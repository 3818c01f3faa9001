"""One rank's evidence, from what the failed check has at hand. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from pytest_ep.backends.base import Received
from pytest_ep.oracle import dispatch
from pytest_ep.oracle import expected
from pytest_ep.oracle.diagnosis.arrivals import arrivals
from pytest_ep.oracle.diagnosis.dispatch_faults import FAULTS
from pytest_ep.oracle.diagnosis.elements import Worst
from pytest_ep.oracle.diagnosis.evidence import Combined
from pytest_ep.oracle.diagnosis.evidence import Finding
from pytest_ep.oracle.diagnosis.evidence import Tried
from pytest_ep.oracle.diagnosis.explanations import EXPLANATIONS
from pytest_ep.oracle.diagnosis.scene import Scene
from pytest_ep.oracle.diagnosis.scene import Setting
from pytest_ep.oracle.diagnosis.scene import scene
from pytest_ep.oracle.diagnosis.spread import Counts
from pytest_ep.workload import contents
from pytest_ep.workload.problem import Problem

LEAST = 16
"""Tokens of a sample, where so many are wrong."""
HOPELESS = 0.05
"""An explanation of less than this share of a sample's wrong elements is not tried on all."""
HOPEFUL = 16
"""At most as many variants are."""

Variant = tuple[str, str]
"""Name and variant of an explanation."""


def of_combine(setting: Setting, got: Tensor) -> Combined:
    """What there is to say of a combine's output ``got`` [T, H] BF16.

    Every explanation is tried on a sample of the wrong tokens, evenly spaced; those with some hope on all.
    """
    counts, worst = Counts(setting.problem), Worst()
    _compare(setting, got, counts, worst)
    wrong = counts.wrong_tokens()
    tried = _tried(setting, got, wrong) if len(wrong) else []
    fitting = {one.name for one in tried}
    first = setting.problem.first_token(setting.problem.rank)
    return Combined(
        rank=setting.problem.rank,
        declared=setting.reduction.name,
        tokens=frozenset((wrong + first).tolist()),
        spread=counts.spread(),
        worst=worst.elements(setting, got),
        tried=tuple(tried),
        ruled_out=tuple(name for name in EXPLANATIONS if name not in fitting),
    )


def of_dispatch(
    problem: Problem, received: Received, source: Tensor
) -> tuple[tuple[Finding, ...], frozenset[int]]:
    """The faults of what was received, and the tokens that they befell; ``source`` [N] as decoded."""
    misshapen = dispatch.misshapen(problem, received)
    findings = [
        Finding("shape", f"{check} on {{ranks}}: {text}", 1, 1, ()) for check, text in misshapen.items()
    ]
    if "weights" in misshapen:
        received = replace(received, weights=None)
    if "counts" in misshapen:
        received = replace(received, expert_counts=expected.expert_counts(problem))
    found = arrivals(problem, received, source)
    findings += [finding for fault in FAULTS if (finding := fault(found)) is not None]
    return tuple(findings), frozenset(torch.nonzero(found.befallen()).squeeze(1).tolist())


def _compare(setting: Setting, got: Tensor, counts: Counts, worst: Worst) -> None:
    from pytest_ep.oracle.checks import COMBINE_REL_TOL
    from pytest_ep.oracle.checks import relative_error

    for start, want in setting.wanted():
        have = got[start : start + len(want)].float()
        wrong = have != want
        error = torch.where(wrong, relative_error(have, want), 0.0)
        counts.add(wrong, error >= COMBINE_REL_TOL)
        worst.add(start, error)


def _tried(setting: Setting, got: Tensor, wrong: Tensor) -> list[Tried]:
    """The variants that explain anything, in the table's order; ``wrong`` are the wrong tokens [n]."""
    size = max(LEAST, contents.chunk_rows(got.device, 16 * setting.problem.shape.hidden))
    sample = wrong
    if len(wrong) > size:
        sample = wrong[torch.linspace(0, len(wrong) - 1, size, device=wrong.device).long()]
    first = scene(setting, got, sample)
    found = _try(first, None)
    if len(sample) < len(wrong):
        hopeful = _hopeful(found.values())
        whole: dict[Variant, Tried] = {}
        shape = setting.problem.shape
        step = contents.chunk_rows(got.device, shape.hidden * shape.top_k)
        for token in torch.split(wrong, step):
            for variant, one in _try(scene(setting, got, token), hopeful).items():
                whole[variant] = _added(whole[variant], one) if variant in whole else one
        found |= whole
    return [_with_notes(one, first) for one in found.values() if one.explained]


def _try(where: Scene, only: set[Variant] | None) -> dict[Variant, Tried]:
    found: dict[Variant, Tried] = {}
    wrong = int(where.wrong.sum())
    names = {name for name, _ in only} if only is not None else set(EXPLANATIONS)
    for name, explanation in EXPLANATIONS.items():
        for guess in explanation.guesses(where) if name in names else ():
            if only is None or (name, guess.which) in only:
                fit = guess.fit()
                one = Tried(name, guess.which, int(fit.explained.sum()), int(fit.denied.sum()), wrong)
                before = found.get((name, guess.which))
                if before is None or before.explained < one.explained:
                    found[name, guess.which] = one
    return found


def _hopeful(found: Iterable[Tried]) -> set[Variant]:
    some = [one for one in found if one.explained and one.explained >= HOPELESS * one.tried]
    some.sort(key=lambda one: (-one.explained, one.denied))
    return {(one.name, one.which) for one in some[:HOPEFUL]}


def _added(one: Tried, other: Tried) -> Tried:
    return Tried(
        one.name,
        one.which,
        one.explained + other.explained,
        one.denied + other.denied,
        one.tried + other.tried,
    )


def _with_notes(one: Tried, where: Scene) -> Tried:
    if 2 * one.explained < one.tried:
        return one
    notes = tuple(EXPLANATIONS[one.name].notes(where))
    return Tried(one.name, one.which, one.explained, one.denied, one.tried, notes)
