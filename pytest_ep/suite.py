"""The suite that a backend's test module inherits."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import ClassVar

import pytest

from pytest_ep.matrix.cells import MODES

if TYPE_CHECKING:
    from pytest_ep.backends.base import EPBackend
    from pytest_ep.case import Case
    from pytest_ep.probe import ProbeCase


class EPSuite:
    """Every case of one backend as a test.

    Subclass it in a test module as ``class TestMine(EPSuite): backend = "torch_a2a"``, or with an
    ``EPBackend`` subclass of your own as ``backend``; nothing needs to be registered.
    """

    backend: ClassVar[str | type[EPBackend]]

    def test_probe(self, ep_probe: ProbeCase) -> None:
        """One plain exchange of small integers, before the cases: a wrong result says what moved where."""
        ep_probe.run()

    def test_case(self, ep_case: Case) -> None:
        """One cell: checked by the oracle, timed, checked again, recorded."""
        ep_case.run()


LAYOUTS = ("token-rank",)
WEIGHTINGS = ("unweighted-rank-sum",)
"""What the oracle can judge."""


def check_suite(suite: type[EPSuite]) -> None:
    """Raise pytest.UsageError for a suite whose backend cannot be planned or judged."""
    from pytest_ep.backends.base import EPBackend

    where = f"{suite.__module__}.{suite.__qualname__}"
    backend = getattr(suite, "backend", None)
    if isinstance(backend, str):
        return  # the plan knows the names
    if not (isinstance(backend, type) and issubclass(backend, EPBackend)):
        told = "has no backend" if backend is None else f"has the backend {backend!r}"
        raise pytest.UsageError(f"{where} {told}: give a name or a subclass of EPBackend")
    name, modes = getattr(backend, "name", None), getattr(backend, "modes", None)
    if not (isinstance(name, str) and name.isidentifier()):
        raise pytest.UsageError(
            f"{where}: its backend's name is {name!r}: give an identifier, which -k can find"
        )
    if not modes or not set(modes) <= set(MODES):
        raise pytest.UsageError(
            f"{where}: {name}.modes must have some of {', '.join(MODES)} and nothing else"
        )
    for mode, facts in modes.items():
        if facts.layout not in LAYOUTS or facts.weighting not in WEIGHTINGS:
            told = f"{facts.layout} layout with {facts.weighting}: there is an oracle for"
            raise pytest.UsageError(
                f"{where}: {name} {mode} has a {told} {LAYOUTS[0]} with {WEIGHTINGS[0]} only"
            )


def backend_name(suite: type[EPSuite]) -> str:
    """Return the name of a suite's backend, as -k and the matrix know it."""
    return suite.backend if isinstance(suite.backend, str) else suite.backend.name


def backend_class(suite: type[EPSuite]) -> type[EPBackend] | None:
    """Return the adapter of a suite's backend, or None where the name has none yet."""
    from pytest_ep.backends import adapter

    return adapter(suite.backend) if isinstance(suite.backend, str) else suite.backend
