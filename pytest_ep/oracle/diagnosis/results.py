"""The guess that a row is another token's result, whole or in blocks of columns.

Blocks of 128 columns are found again by a hash among the expected results of the group's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from pytest_ep.oracle.diagnosis.guess import Guess
from pytest_ep.oracle.diagnosis.guess import exactly
from pytest_ep.oracle.diagnosis.scene import BLOCK
from pytest_ep.oracle.diagnosis.scene import Scene
from pytest_ep.oracle.diagnosis.scene import Setting
from pytest_ep.oracle.diagnosis.search import SAID
from pytest_ep.oracle.diagnosis.search import most_rows
from pytest_ep.oracle.diagnosis.search import relation
from pytest_ep.oracle.diagnosis.search import searched


def other_token(scene: Scene) -> Iterator[Guess]:
    """Constant rows know no token: only the oracle's results are looked up."""
    if scene.setting.planes is None:
        yield exactly(scene, "", lambda: _values(scene))


def notes(scene: Scene) -> list[str]:
    """How the tokens whose results were found are related to those that belong there, and some of them."""
    found = _find(scene)
    row, block = torch.nonzero((found >= 0) & (found != scene.source[:, None]), as_tuple=True)
    pairs = list(dict.fromkeys(zip(scene.source[row].tolist(), found[row, block].tolist(), strict=True)))
    spelled = [f"token {token} has that of token {other}" for token, other in pairs[:SAID]]
    return [relation(scene.setting.problem, pairs), *spelled]


def _known(setting: Setting) -> tuple[Tensor, Tensor]:
    """Hashes of all blocks of the expected results, ascending, and the token of each."""
    keys, sources = [], []
    for source in searched(setting, most_rows(setting.problem)):
        key = _hashes(setting.reduction(setting.sent(source)))
        keys.append(key.flatten())
        sources.append(source.repeat_interleave(key.shape[1]))
    key, order = torch.cat(keys).sort(stable=True)
    return key, torch.cat(sources)[order]


def _find(scene: Scene) -> Tensor:
    """The token whose result each block is: int64 [n, blocks], -1 where it is none's."""
    known, source = scene.setting.once(_known)
    key = _hashes(scene.got)
    place = torch.searchsorted(known, key).clamp(max=len(known) - 1)
    return torch.where(known[place] == key, source[place], -1)


def _values(scene: Scene) -> Tensor:
    found = _find(scene)
    wanted, place = torch.unique(found.clamp(min=0), return_inverse=True)
    if len(wanted) > 4 * len(found) + 1:
        return scene.want  # blocks of many tokens in every row: nothing that a person could be told
    values = _blocks(scene.setting.reduction(scene.setting.sent(wanted)))
    block = torch.arange(found.shape[1], device=found.device).expand_as(found)
    values = torch.where((found >= 0)[:, :, None], values[place, block], _blocks(scene.want))
    return values.flatten(1)[:, : scene.want.shape[1]]


def _blocks(values: Tensor) -> Tensor:
    """[n, H] as [n, blocks, 128], the last block filled up with zeros."""
    hidden = values.shape[1]
    return functional.pad(values, (0, -hidden % BLOCK)).view(len(values), -1, BLOCK)


def _hashes(values: Tensor) -> Tensor:
    """One int64 for each block of columns, different for each block: [n, blocks]."""
    bits = _blocks(values + 0.0).to(torch.bfloat16).view(torch.int16)  # + 0.0: -0.0 is 0.0
    hashed = bits.new_zeros(bits.shape[:2], dtype=torch.int64)
    place = torch.arange(1, bits.shape[1] * BLOCK + 1, device=bits.device).view(bits.shape[1:])
    factor = (place * -0x61C8864680B583EB) | 1
    factor = (factor ^ (factor >> 29)) * 0x5851F42D4C957F2D | 1
    for column in range(BLOCK):
        hashed += bits[:, :, column].long() * factor[:, column]
    return hashed + place[:, 0]
