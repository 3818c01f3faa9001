"""The suite that a backend's test module inherits."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import ClassVar

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


def backend_name(suite: type[EPSuite]) -> str:
    """Return the name of a suite's backend, as -k and the matrix know it."""
    return suite.backend if isinstance(suite.backend, str) else suite.backend.name


def backend_class(suite: type[EPSuite]) -> type[EPBackend] | None:
    """Return the adapter of a suite's backend, or None where the name has none yet."""
    from pytest_ep.backends import adapter

    return adapter(suite.backend) if isinstance(suite.backend, str) else suite.backend
