"""Fixtures of the plugin's own tests."""

from __future__ import annotations

import os

import pytest

from tests.faults.launch import FaultyRun
from tests.launching import Torchrun

pytest_plugins = ["pytester"]


@pytest.fixture
def torchrun(pytester: pytest.Pytester) -> Torchrun:
    """Start ranks in pytester's folder: ``torchrun(2, "-k", "torch_a2a", "--benchmark-json=r.json")``."""
    return Torchrun(pytester.path)


@pytest.fixture
def faulty(torchrun: Torchrun) -> FaultyRun:
    """Run two ranks with named faults: ``faulty("killed@1,skips-alone@0:8")``."""
    return FaultyRun(torchrun)


@pytest.fixture(autouse=True)
def _no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide pytest-xdist from what a test starts: pytest-benchmark measures nothing in a worker."""
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)
