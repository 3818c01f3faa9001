"""The whole table of faults on real ranks, EP2 beside EP4: CI runs EP4 alone. Arguments go to pytest."""

from __future__ import annotations

import os
import sys

import pytest

os.environ["PYTEST_EP_WHOLE_TABLE"] = "yes"
sys.exit(pytest.main(["tests/test_diagnosis_on_ranks.py", *sys.argv[1:]]))
