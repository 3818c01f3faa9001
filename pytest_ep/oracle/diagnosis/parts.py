"""The guess that a result is a sum of other messages than the token's own.

Which messages a result is made of is found by correlation: ordinary columns are hashes, so a message that is
in the sum correlates with it by 1, and every other by little. What was found is added up, and must then
equal what was got bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_ep.oracle.diagnosis.guess import Guess
from pytest_ep.oracle.diagnosis.guess import exactly
from pytest_ep.oracle.diagnosis.scene import Scene
from pytest_ep.oracle.diagnosis.scene import Setting
from pytest_ep.oracle.diagnosis.search import SAID
from pytest_ep.oracle.diagnosis.search import most_rows
from pytest_ep.oracle.diagnosis.search import relation
from pytest_ep.oracle.diagnosis.search import searched
from pytest_ep.oracle.reduction import Contributions
from pytest_ep.workload import contents

IN_THE_SUM = 0.5
"""Correlation from which a message counts as part of a sum."""
ORDINARY = 64 * contents.UNIT
"""The largest magnitude in a column that is no canary."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Messages [C, H] of ranks ``rank`` [C] for tokens ``source`` [C]; of constant rows, for their planes."""

    rows: Tensor
    rank: Tensor
    source: Tensor


def other_messages(scene: Scene) -> Iterator[Guess]:
    """The sum of what was found, for tokens in whose sum there is a strange message."""
    yield exactly(scene, "", lambda: _values(scene))


def notes(scene: Scene) -> list[str]:
    """Whose the strange messages are, how related to the right ones, and some of them."""
    known, planes = scene.setting.once(_known), scene.setting.planes
    token, part = _found(scene)
    strange = _strange(scene, token, part)
    token, part = scene.source[token[strange]], part[strange]
    found = list(zip(token.tolist(), known.rank[part].tolist(), known.source[part].tolist(), strict=True))
    whose = f"of rank {', '.join(map(str, sorted({rank for _, rank, _ in found})))}"
    if planes is not None:
        spelled = [f"token {one} has that of rank {rank} for plane {other}" for one, rank, other in found]
        return [whose, *spelled[:SAID]]
    related = relation(scene.setting.problem, [(one, other) for one, _, other in found])
    spelled = [f"token {one} has rank {rank}'s for token {other}" for one, rank, other in found]
    return [f"{whose}, for {related}", *spelled[:SAID]]


def _known(setting: Setting) -> Rows:
    """Those of this rank's tokens, then of as many others as are worth the time; or every constant row."""
    problem = setting.problem
    if setting.planes is not None:
        ranks = torch.arange(problem.ep_size, device=problem.x.device)
        rank, plane = ranks.repeat_interleave(setting.planes), ranks[: setting.planes].repeat(len(ranks))
        rows = contents.constant_messages(rank, plane, problem.shape.hidden, problem.ep_size)
        return Rows(rows, rank, plane)
    most = most_rows(problem) // min(problem.ep_size, problem.shape.top_k)
    sent = [(setting.sent(source), source) for source in searched(setting, most)]
    return Rows(
        torch.cat([given.rows for given, _ in sent]),
        torch.cat([given.rank for given, _ in sent]),
        torch.cat([source[given.token] for given, source in sent]),
    )


def _filter(setting: Setting) -> tuple[Tensor, Tensor]:
    """The ordinary columns, bool [H], and the known messages there over their power: FP32 [C, columns]."""
    rows = setting.once(_known).rows.float()
    ordinary = rows.abs().amax(dim=0) <= ORDINARY
    rows = rows[:, ordinary]
    return ordinary, rows / (rows**2).sum(dim=1, keepdim=True).clamp(min=contents.UNIT**2)


def _found(scene: Scene) -> tuple[Tensor, Tensor]:
    """(token, known message) of every message in a token's sum."""
    ordinary, rows = scene.setting.once(_filter)
    inside = scene.got.nan_to_num(0.0, 0.0, 0.0)[:, ordinary] @ rows.T > IN_THE_SUM
    token, part = torch.nonzero(inside, as_tuple=True)
    return token, part


def _strange(scene: Scene, token: Tensor, part: Tensor) -> Tensor:
    """Which of the found messages are not their token's own."""
    setting = scene.setting
    own = scene.source if setting.planes is None else torch.zeros_like(scene.source)
    if setting.planes is not None and setting.planes > 1:
        own = own + setting.problem.rank
    return setting.once(_known).source[part] != own[token]


def _values(scene: Scene) -> Tensor:
    known = scene.setting.once(_known)
    token, part = _found(scene)
    strange = torch.zeros(len(scene.want), dtype=torch.bool, device=token.device)
    strange[token[_strange(scene, token, part)]] = True
    rank = known.rank[part]
    given = Contributions(
        known.rows[part], token, rank, _choices(scene)[token, rank], scene.given.tokens, scene.given.top_k
    )
    return torch.where(strange[:, None], scene.setting.reduction(given), scene.want)


def _choices(scene: Scene) -> Tensor:
    """The choice at which each rank's message for a token stands, or might stand: int64 [n, R]."""
    ranks = scene.setting.problem.ep_size
    choice = torch.arange(ranks, device=scene.want.device) % scene.given.top_k
    choice = choice.repeat(scene.given.tokens, 1)
    choice[scene.given.token, scene.given.rank] = scene.given.choice
    return choice
