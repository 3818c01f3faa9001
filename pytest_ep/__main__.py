"""``python -m pytest_ep``: the ``pytest-ep`` command where the package is not installed."""

from __future__ import annotations

import sys

from pytest_ep.results.cli import main

sys.exit(main())
