"""Guesses about single messages: lost, doubled, scaled, changed, or one too many."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import replace

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
        yield exactly(
            scene,
            which,
            lambda chosen=chosen: scene.setting.reduction(only(scene.given, ~chosen())),  # type: ignore[misc]
        )


def doubled(scene: Scene) -> Iterator[Guess]:
    """A message was added twice."""
    for which, chosen in _chosen(scene):
        yield exactly(scene, which, lambda chosen=chosen: _scaled(scene, chosen().float() + 1))  # type: ignore[misc]


def alone(scene: Scene) -> Iterator[Guess]:
    """One message stands for the sum: written over the others, or never added to them."""
    for which, chosen in _chosen(scene):
        yield exactly(
            scene,
            which,
            lambda chosen=chosen: scene.setting.reduction(only(scene.given, chosen())),  # type: ignore[misc]
        )


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
    """A rank that has no expert of the token was added too: what timing left in its slot."""
    ranks, hidden = scene.setting.problem.ep_size, scene.want.shape[1]
    member = torch.zeros((scene.given.tokens, ranks), dtype=torch.bool, device=scene.want.device)
    member[scene.given.token, scene.given.rank] = True
    planes = [0, scene.setting.problem.rank]
    if scene.setting.planes is not None:
        planes = planes[scene.setting.planes > 1 :][:1]
    for rank in range(ranks):
        token = torch.nonzero(~member[:, rank]).squeeze(1)
        if not len(token):
            continue
        for plane in dict.fromkeys(planes):
            left = contents.constant_messages(
                torch.tensor([rank], device=token.device),
                torch.tensor([plane], device=token.device),
                hidden,
                ranks,
            )
            yield exactly(
                scene,
                f"rank {rank}",
                lambda token=token, rank=rank, left=left: scene.setting.reduction(  # type: ignore[misc]
                    _joined(scene.given, token, rank, left.expand(len(token), -1))
                ),
            )


def other_plane(scene: Scene) -> Iterator[Guess]:
    """The messages for another source rank: what timing staged in its plane."""
    planes = scene.setting.planes
    if planes is None or planes == 1:
        return
    for plane in range(planes):
        if plane != scene.setting.problem.rank:
            rows = contents.constant_messages(
                scene.given.rank, torch.full_like(scene.given.rank, plane), scene.want.shape[1], planes
            )
            yield exactly(scene, f"rank {plane}", lambda rows=rows: scene.reduce(rows))  # type: ignore[misc]


def fp8(scene: Scene) -> Iterator[Guess]:
    """The messages went through an FP8 format."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz):
        name = str(dtype).removeprefix("torch.float8_")
        yield exactly(scene, name, lambda dtype=dtype: through(dtype)(scene.given))  # type: ignore[misc]


def message_step(scene: Scene) -> Iterator[Guess]:
    """One rank's message is one BF16 step away."""
    for rank in scene.ranks():
        yield locally(scene, f"rank {rank}", lambda rank=rank: _stepped(scene, rank))  # type: ignore[misc]


def _stepped(scene: Scene, rank: int) -> Tensor:
    found = scene.wrong & False
    moved = (scene.given.rank == rank)[:, None] & (scene.given.rows != 0)
    bits = scene.given.rows.contiguous().view(torch.int16)
    for step in (1, -1):
        rows = torch.where(moved, bits + step, bits).view(torch.bfloat16)
        found |= scene.reduce(rows) == scene.got
    return found


def _chosen(scene: Scene) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Pairs, bool [P], that a fault of one place may have hit, one for each token at most."""
    given = scene.given
    for rank in scene.ranks():
        yield f"rank {rank}", lambda rank=rank: given.rank == rank  # type: ignore[misc]
    own = scene.setting.problem.rank
    yield "each token's own rank", lambda: given.rank == own
    yield "the first contributing rank", lambda: _edge(given, first=True)
    yield "the last contributing rank", lambda: _edge(given, first=False)
    yield "the rank of the first choice", lambda: given.choice == 0
    last = given.choice.new_zeros(given.tokens).scatter_reduce(0, given.token, given.choice, "amax")
    yield "the rank that the choices name last", lambda: given.choice == last[given.token]


def _edge(given: Contributions, first: bool) -> Tensor:
    bound = given.rank.new_zeros(given.tokens).scatter_reduce(
        0, given.token, given.rank, "amin" if first else "amax", include_self=False
    )
    return given.rank == bound[given.token]


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


def _joined(given: Contributions, token: Tensor, rank: int, rows: Tensor) -> Contributions:
    """With one more message for each of ``token`` [m], at a choice that holds none, where there is one."""
    taken = torch.zeros((given.tokens, given.top_k), dtype=torch.int8, device=token.device)
    taken[given.token, given.choice] = 1
    return replace(
        given,
        rows=torch.cat([given.rows, rows]),
        token=torch.cat([given.token, token]),
        rank=torch.cat([given.rank, torch.full_like(token, rank)]),
        choice=torch.cat([given.choice, taken[token].argmin(dim=1)]),
    )
