"""Guesses about single messages: lost, doubled, scaled, changed, or one too many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pytest_ep.oracle.diagnosis.arithmetic import through
from pytest_ep.oracle.diagnosis.guess import Guess
from pytest_ep.oracle.diagnosis.guess import exactly
from pytest_ep.oracle.diagnosis.guess import locally
from pytest_ep.oracle.diagnosis.guess import nearly
from pytest_ep.oracle.diagnosis.scene import Scene
from pytest_ep.oracle.diagnosis.scene import only
from pytest_ep.oracle.reduction import Contributions
from pytest_ep.workload import contents

ROUNDING = 2.0**-8
"""Half a BF16 step, relative: what one narrowing may change."""


def missing(scene: Scene) -> Iterator[Guess]:
    """A message was not added."""
    for which, chosen in _chosen(scene):
        yield exactly(scene, which, partial(_without, scene, chosen))


def doubled(scene: Scene) -> Iterator[Guess]:
    """A message was added twice."""
    for which, chosen in _chosen(scene):
        yield exactly(scene, which, partial(_scaled, scene, 1 + chosen.float()))


def alone(scene: Scene) -> Iterator[Guess]:
    """One message stands for the sum: written over the others, or never added to them."""
    for which, chosen in _chosen(scene):
        yield exactly(scene, which, partial(_without, scene, ~chosen))


def _without(scene: Scene, pairs: Tensor) -> Tensor:
    return scene.setting.reduction(only(scene.given, ~pairs))


def per_choice(scene: Scene) -> Iterator[Guess]:
    """A message was added once for each of its token's choices on that rank."""
    yield exactly(scene, "", lambda: _scaled(scene, scene.here.sum(dim=1).float()))


def gates(scene: Scene) -> Iterator[Guess]:
    """Each message was multiplied by the gate weights of its token's choices on that rank."""
    yield nearly(scene, "", lambda: _gated(scene, _gate(scene)))


def gates_twice(scene: Scene) -> Iterator[Guess]:
    """As ``gates``, and the product again."""
    yield nearly(scene, "", lambda: _gated(scene, _gate(scene) ** 2))


def extra(scene: Scene) -> Iterator[Guess]:
    """Ranks that have no expert of the token were added too: what timing left in their slots."""
    setting, problem = scene.setting, scene.setting.problem
    member = torch.zeros((scene.given.tokens, problem.ep_size), dtype=torch.bool, device=scene.want.device)
    member[scene.given.token, scene.given.rank] = True
    planes = [0, problem.rank] if setting.planes is None else [problem.rank if setting.planes > 1 else 0]
    for plane in dict.fromkeys(planes):
        for rank in range(problem.ep_size):
            token = torch.nonzero(~member[:, rank]).squeeze(1)
            values = partial(_with_constant, scene, token, torch.full_like(token, rank), plane)
            yield exactly(scene, f"rank {rank}", values)
        token, others = torch.nonzero(~member, as_tuple=True)
        values = partial(_with_constant, scene, token, others, plane)
        yield exactly(scene, "every other rank", values)


def _with_constant(scene: Scene, token: Tensor, rank: Tensor, plane: int) -> Tensor:
    hidden, ranks = scene.want.shape[1], scene.setting.problem.ep_size
    rows = contents.constant_messages(rank, torch.full_like(rank, plane), hidden, ranks)
    return scene.setting.reduction(_joined(scene.given, token, rank, rows))


def other_plane(scene: Scene) -> Iterator[Guess]:
    """The messages for another source rank: what timing staged in its plane."""
    planes = scene.setting.planes
    if planes is None or planes == 1:
        return
    for plane in range(planes):
        if plane != scene.setting.problem.rank:
            yield exactly(scene, f"rank {plane}", partial(_of_plane, scene, plane, planes))


def _of_plane(scene: Scene, plane: int, planes: int) -> Tensor:
    there = torch.full_like(scene.given.rank, plane)
    return scene.reduce(contents.constant_messages(scene.given.rank, there, scene.want.shape[1], planes))


def fp8(scene: Scene) -> Iterator[Guess]:
    """The messages went through an FP8 format."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz):
        name = str(dtype).removeprefix("torch.float8_")
        yield exactly(scene, name, partial(through(dtype), scene.given))


def message_step(scene: Scene) -> Iterator[Guess]:
    """One rank's message is one BF16 step away."""
    for rank in scene.ranks():
        yield locally(scene, f"rank {rank}", partial(_stepped, scene, rank))


def _stepped(scene: Scene, rank: int) -> Tensor:
    found = scene.wrong & False
    moved = (scene.given.rank == rank)[:, None] & (scene.given.rows != 0)
    bits = scene.given.rows.contiguous().view(torch.int16)
    for step in (1, -1):
        rows = torch.where(moved, bits + step, bits).view(torch.bfloat16)
        found |= scene.reduce(rows) == scene.got
    return found


def _chosen(scene: Scene) -> Iterator[tuple[str, Tensor]]:
    """Pairs, bool [P], that a fault of one place may have hit, one for each token at most."""
    given = scene.given
    for rank in scene.ranks():
        yield f"rank {rank}", given.rank == rank
    yield "each token's own rank", given.rank == scene.setting.problem.rank
    yield "the first contributing rank", _edge(given, given.rank, "amin")
    yield "the last contributing rank", _edge(given, given.rank, "amax")
    yield "the rank of the first choice", given.choice == 0
    yield "the rank that the choices name last", _edge(given, given.choice, "amax")


def _edge(given: Contributions, place: Tensor, side: str) -> Tensor:
    """The pair of each token whose ``place`` [P] is the least (amin) or the greatest (amax)."""
    bound = place.new_zeros(given.tokens).scatter_reduce(0, given.token, place, side, include_self=False)
    return place == bound[given.token]


def _scaled(scene: Scene, factor: Tensor) -> Tensor:
    """The result with each message times its ``factor`` [P]."""
    return scene.reduce(scene.given.rows.float() * factor[:, None])


def _gate(scene: Scene) -> Tensor:
    """FP32 [P]: the weights, added, of the token's choices that the pair's rank owns."""
    return torch.where(scene.here, scene.routing[1][scene.given.token], 0.0).sum(dim=1)


def _gated(scene: Scene, gate: Tensor) -> tuple[Tensor, Tensor]:
    rows = scene.given.rows.float() * gate[:, None]
    magnitude = rows.new_zeros(scene.want.shape).index_add_(0, scene.given.token, rows.abs())
    return scene.reduce(rows), 2 * ROUNDING * magnitude


def _joined(given: Contributions, token: Tensor, rank: Tensor, rows: Tensor) -> Contributions:
    """With one more message for each of ``token`` [m], at a choice that holds none, where there is one."""
    taken = torch.zeros((given.tokens, given.top_k), dtype=torch.int8, device=token.device)
    taken[given.token, given.choice] = 1
    return replace(
        given,
        rows=torch.cat([given.rows, rows]),
        token=torch.cat([given.token, token]),
        rank=torch.cat([given.rank, rank]),
        choice=torch.cat([given.choice, taken[token].argmin(dim=1)]),
    )
