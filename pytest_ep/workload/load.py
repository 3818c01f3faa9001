"""How evenly a routing loads experts and ranks, and how far its tokens go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def figures(
    expert_ids: npt.NDArray[np.int64], owned: Sequence[int], tokens_by_rank: Sequence[int]
) -> dict[str, float | int]:
    """Figures of a trace, for the row of a case.

    ``expert_ids`` [N, K], -1 for none, are in the order of ranks; ``owned`` are ``Shape.owned``'s bounds. An
    expert's load is its assignments, a rank's the copies that arrive there, its own tokens' included: each
    load's maximum over its mean, and of experts the coefficient of variation (standard deviation of all
    experts / mean). ``fan_out`` is the number of ranks that a token goes to, over tokens that go to any.
    ``local_fraction``: the share of copies that stay on the token's rank. Zero where nothing is sent.
    """
    experts, ranks = owned[-1], len(tokens_by_rank)
    load = np.bincount(expert_ids[expert_ids >= 0], minlength=experts)
    destinations = np.searchsorted(np.asarray(owned), expert_ids, side="right") - 1
    # A masked choice has destination -1, which lands in the spare last column.
    reached = np.zeros((len(expert_ids), ranks + 1), dtype=bool)
    reached[np.arange(len(expert_ids))[:, None], destinations] = True
    reached = reached[:, :ranks]
    source = np.repeat(np.arange(ranks), tokens_by_rank)
    fan_out = reached.sum(axis=1)
    copies, going = int(fan_out.sum()), int((fan_out > 0).sum())
    return {
        "expert_load_max_over_mean": _over(load.max(), load.mean()),
        "expert_load_cv": _over(load.std(), load.mean()),
        "rank_load_max_over_mean": _over(reached.sum(axis=0).max(), copies / ranks),
        "fan_out_mean": _over(copies, going),
        "fan_out_max": int(fan_out.max(initial=0)),
        "local_fraction": _over(reached[np.arange(len(source)), source].sum(), copies),
        "empty_experts": int((load == 0).sum()),
    }


def _over(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
