"""The transports: one module per backend, imported only when its cases are collected."""

from __future__ import annotations

import importlib
import importlib.util

from pytest_ep.backends.base import EPBackend


def adapter(backend: str) -> type[EPBackend] | None:
    """Return the adapter class of a backend by name, or None where there is no adapter yet.

    Adapters import torch and their libraries inside their methods only, so this is cheap.
    """
    if not backend.isidentifier() or importlib.util.find_spec(f"{__name__}.{backend}") is None:
        return None
    module = importlib.import_module(f"{__name__}.{backend}")
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, EPBackend) and vars(value).get("name") == backend:
            return value
    return None
