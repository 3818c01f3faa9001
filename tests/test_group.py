"""The groups of a rank that has a device."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from pytest_ep.ranks.group import Ranks


def test_torch_s_own_watchdog_ends_no_rank_before_ours_reports_whatever_torchrun_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does
    monkeypatch.setenv("TORCH_NCCL_RETHROW_CUDA_ERRORS", "1")
    found: list[tuple[str, str]] = []

    def new_group(**_: Any) -> object:
        names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS")
        found.append((os.environ[names[0]], os.environ[names[1]]))
        return object()

    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "new_group", new_group)
    ranks = Ranks.__new__(Ranks)
    vars(ranks).update(
        {"rank": 0, "size": 1, "devices": 1, "identity": SimpleNamespace(local_size=1), "_store": None}
        | {"_generation": 0, "_timeout": timedelta(seconds=1)}
    )
    ranks._build()
    assert found == [("0", "0")]
