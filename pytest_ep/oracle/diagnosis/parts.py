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

from pytest_ep.oracle.diagnosis.arrivals import rank_names
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
COLUMNS = 1024
"""Columns that are enough to correlate."""
MOST = 32
"""Messages that a result may be a sum of, on average."""


@dataclass(frozen=True, slots=True)
class Known:
    """C messages that a result may be a sum of, in ``columns`` [m] alone, over their power: ``rows`` [C, m].

    Each is of rank ``rank`` [C] for the token ``source`` [C]; of constant rows, for the plane.
    """

    columns: Tensor
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
    whose = f"of {rank_names(sorted({rank for _, rank, _ in found}))}"
    if planes is not None:
        spelled = [f"token {one} has that of rank {rank} for plane {other}" for one, rank, other in found]
        return [whose, *spelled[:SAID]]
    related = relation(scene.setting.problem, [(one, other) for one, _, other in found])
    spelled = [f"token {one} has rank {rank}'s for token {other}" for one, rank, other in found]
    return [f"{whose}, for {related}", *spelled[:SAID]]


def _known(setting: Setting) -> Known:
    """Those of this rank's tokens, then of others, as many as are worth the time; or every constant row."""
    problem = setting.problem
    hidden = problem.shape.hidden
    columns = torch.arange(0, hidden, -(-hidden // COLUMNS), device=problem.x.device)
    if setting.planes is not None:
        ranks = torch.arange(problem.ep_size, device=problem.x.device)
        rank, source = ranks.repeat_interleave(setting.planes), ranks[: setting.planes].repeat(len(ranks))
        rows = contents.constant_messages(rank, source, hidden, problem.ep_size)[:, columns].float()
    else:
        found = []
        for tokens in searched(setting, most_rows(problem)):
            given = setting.sent(tokens)
            found.append((given.rows[:, columns].float(), given.rank, tokens[given.token]))
        rows, rank, source = (torch.cat(each) for each in zip(*found, strict=True))
    ordinary = rows.abs().amax(dim=0) <= ORDINARY
    rows = rows[:, ordinary]
    power = (rows**2).sum(dim=1, keepdim=True).clamp(min=contents.UNIT**2)
    return Known(columns[ordinary], rows / power, rank, source)


def _found(scene: Scene) -> tuple[Tensor, Tensor]:
    """(token, known message) of every message in a token's sum."""
    known = scene.setting.once(_known)
    inside = scene.got.nan_to_num(0.0, 0.0, 0.0)[:, known.columns] @ known.rows.T > IN_THE_SUM
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
    keep = strange[token]
    token, rank, source = token[keep], known.rank[part[keep]], known.source[part[keep]]
    if len(token) > MOST * len(scene.want):
        return scene.want  # noise: rows too short to correlate
    given = Contributions(
        _rows(scene.setting, rank, source),
        token,
        rank,
        _choices(scene)[token, rank],
        scene.given.tokens,
        scene.given.top_k,
    )
    return torch.where(strange[:, None], scene.setting.reduction(given), scene.want)


def _rows(setting: Setting, rank: Tensor, source: Tensor) -> Tensor:
    """The messages [m, H] of ``rank`` [m] for ``source`` [m]."""
    problem = setting.problem
    if setting.planes is not None:
        return contents.constant_messages(rank, source, problem.shape.hidden, problem.ep_size)
    tokens, place = torch.unique(source, return_inverse=True)
    given = setting.sent(tokens)
    row = torch.zeros((len(tokens), problem.ep_size), dtype=torch.int64, device=rank.device)
    row[given.token, given.rank] = torch.arange(len(given.token), device=rank.device)
    return given.rows[row[place, rank]]


def _choices(scene: Scene) -> Tensor:
    """The choice at which each rank's message for a token stands, or might stand: int64 [n, R]."""
    ranks = scene.setting.problem.ep_size
    choice = torch.arange(ranks, device=scene.want.device) % scene.given.top_k
    choice = choice.repeat(scene.given.tokens, 1)
    choice[scene.given.token, scene.given.rank] = scene.given.choice
    return choice
