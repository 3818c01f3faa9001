"""Guesses about the output as a whole: not written, not this combine's, or changed after the sum."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from pytest_ep.oracle import expected
from pytest_ep.oracle.diagnosis.arithmetic import models
from pytest_ep.oracle.diagnosis.guess import Guess
from pytest_ep.oracle.diagnosis.guess import exactly
from pytest_ep.oracle.diagnosis.guess import locally
from pytest_ep.oracle.diagnosis.scene import Scene
from pytest_ep.oracle.diagnosis.scene import narrow
from pytest_ep.workload import contents

SHIFTS = (1, 2, 4, 8, 16, 32, 64, 128)


def not_finite(scene: Scene) -> Iterator[Guess]:
    """NaN or infinity."""
    yield locally(scene, "NaN, which is what --ep-poison leaves where nothing is written", scene.got.isnan)
    yield locally(scene, "infinity", scene.got.isinf)


def unwritten(scene: Scene) -> Iterator[Guess]:
    """What the memory held before."""
    yield exactly(scene, "zeros", lambda: torch.zeros_like(scene.want))


def stale(scene: Scene) -> Iterator[Guess]:
    """What another combine returned, of this case or of one with fewer T; or that with this one added."""
    for name, before in _before(scene):
        yield exactly(scene, name, partial(torch.clone, before))
        yield exactly(scene, f"{name}, with this one added", partial(narrow, before + scene.want))


def _before(scene: Scene) -> Iterator[tuple[str, Tensor]]:
    setting = scene.setting
    problem, reduction = setting.problem, setting.reduction
    if setting.planes is not None:
        yield "the oracle's", reduction(expected.sent(problem, scene.source))
        return
    for planes in {1, problem.ep_size}:
        name = "timing's" if planes > 1 else "timing's (one plane)"
        yield name, reduction(expected.sent_constant(problem, scene.source, planes))
    token = scene.source - problem.first_token(problem.rank)
    if len(set(problem.tokens_by_rank)) > 1:
        return
    tokens = 1
    while tokens < problem.tokens:
        held = token < tokens
        before = scene.want.clone()
        before[held] = reduction(expected.sent(problem, problem.rank * tokens + token[held]))
        yield f"the case's of T={tokens}", before
        tokens *= 2


def tokens_returned(scene: Scene) -> Iterator[Guess]:
    """Combine read where dispatch had written."""
    own = contents.tokens(scene.source, scene.want.shape[1])
    yield exactly(scene, "the dispatched token", own.float)
    yield exactly(
        scene, "the sum of the dispatched copies of the token", lambda: scene.reduce(own[scene.given.token])
    )


def factors(scene: Scene) -> Iterator[Guess]:
    """One common factor."""
    problem = scene.setting.problem
    top_k, ranks = problem.shape.top_k, problem.ep_size
    known: dict[float, str] = {2.0: "2", 0.5: "1/2", 4.0: "4", 0.25: "1/4", -1.0: "-1"}
    for value, name in ((top_k, f"top_k, {top_k}"), (ranks, f"ep_size, {ranks}")):
        known.setdefault(float(value), name)
        known.setdefault(1 / value, f"1 / {name}")
    known.pop(1.0, None)
    rows = scene.given.rows.float()
    for factor, name in known.items():
        yield exactly(scene, name, partial(_scaled, scene.reduce, rows, factor))
        if factor < 1:
            yield exactly(scene, f"{name} after the sum", partial(_scaled, narrow, scene.want, factor))
    count = torch.bincount(scene.given.token, minlength=scene.given.tokens)[:, None]
    yield exactly(scene, "1 / contributing ranks: a mean", partial(_scaled, narrow, scene.want, 1 / count))


def _scaled(finish: Callable[[Tensor], Tensor], values: Tensor, factor: float | Tensor) -> Tensor:
    return finish(values * factor)


def reductions(scene: Scene) -> Iterator[Guess]:
    """Another way to add the same messages."""
    for name, model in models(scene.setting.problem.ep_size):
        yield exactly(scene, name, partial(model, scene.given))


def columns(scene: Scene) -> Iterator[Guess]:
    """The right row with its columns moved."""
    hidden = scene.want.shape[1]
    for shift in SHIFTS:
        if shift < hidden:
            for by in (shift, -shift):
                yield exactly(scene, f"by {by:+d}", partial(torch.roll, scene.want, by, dims=1))
    even = hidden // 2 * 2

    def exchanged() -> Tensor:
        pairs = scene.want[:, :even].view(len(scene.want), -1, 2).flip(2).reshape(len(scene.want), -1)
        return torch.cat([pairs, scene.want[:, even:]], dim=1)

    yield exactly(scene, "by exchange of neighbours", exchanged)


def result_step(scene: Scene) -> Iterator[Guess]:
    """The result is one BF16 step away."""
    want = scene.want.to(torch.bfloat16).view(torch.int16).int()
    yield locally(
        scene,
        "",
        lambda: ((scene.bits.int() - want).abs() == 1) & (want & 0x7FFF != 0) & scene.got.isfinite(),
    )


def one_bit(scene: Scene) -> Iterator[Guess]:
    """One bit of the result differs."""
    want = scene.want.to(torch.bfloat16).view(torch.int16).int()

    def matches() -> Tensor:
        changed = (scene.bits.int() ^ want) & 0xFFFF
        return (changed != 0) & (changed & (changed - 1) == 0)

    yield locally(scene, "", matches)
