"""Fixtures of the plugin's own tests."""

from __future__ import annotations

import pytest

from tests.launching import Torchrun

pytest_plugins = ["pytester"]


@pytest.fixture
def torchrun(pytester: pytest.Pytester) -> Torchrun:
    """Start ranks in pytester's folder: ``torchrun(2, "-k", "torch_a2a", "--benchmark-json=r.json")``."""
    return Torchrun(pytester.path)
