"""Fixtures of the plugin's own tests."""

from __future__ import annotations

import pytest

from tests.faulty.launch import FaultyRun
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
