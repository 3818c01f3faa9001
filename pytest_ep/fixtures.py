"""The fixtures of a case."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

# A fixture imported under another name is another fixture: a case has one benchmark for each component.
from pytest_benchmark.plugin import benchmark as ep_combine_benchmark  # noqa: F401
from pytest_benchmark.plugin import benchmark as ep_dispatch_benchmark  # noqa: F401

from pytest_ep.matrix.cells import Cell
from pytest_ep.results.record import COMPONENTS
from pytest_ep.results.record import Recorder
from pytest_ep.run import PLANNED
from pytest_ep.run import RUN
from pytest_ep.run import Run
from pytest_ep.suite import EPSuite
from pytest_ep.suite import backend_class


@pytest.fixture(scope="session")
def ep_run(pytestconfig: pytest.Config) -> Run:
    """What every case of this session shares."""
    return pytestconfig.stash[RUN]


@pytest.fixture(scope="module")
def ep_transports(ep_run: Run) -> Iterator[object]:
    """The live transport of the current key; the last one of the module is closed with it."""
    from pytest_ep.transports import Transports

    transports = Transports(ep_run)
    yield transports
    transports.close()


@pytest.fixture
def ep_cell(  # noqa: PLR0917 - pytest asks for the parameters by name
    request: pytest.FixtureRequest,
    backend: str,
    sku: str,
    ep_size: int,
    mode: str,
    precision: str,
    model: str,
    routing: str,
    tokens: int,
) -> Cell:
    """The cell under test. Its coordinates are the item's parameters, scalars that reports can read."""
    return request.node.stash[PLANNED].cell  # type: ignore[no-any-return]


@pytest.fixture
def ep_recorder(
    ep_cell: Cell,
    ep_dispatch_benchmark: BenchmarkFixture,  # noqa: F811
    ep_combine_benchmark: BenchmarkFixture,  # noqa: F811
    benchmark: BenchmarkFixture,
) -> Iterator[Recorder]:
    """The case's three rows."""
    fixtures = (ep_dispatch_benchmark, ep_combine_benchmark, benchmark)
    recorder = Recorder(dict(zip(COMPONENTS, fixtures, strict=True)), ep_cell)
    yield recorder
    recorder.close()


@pytest.fixture
def ep_live(request: pytest.FixtureRequest, ep_run: Run, ep_cell: Cell, ep_transports: object) -> object:
    """The transport that serves this cell, constructed on all ranks together."""
    from pytest_ep.transports import Transports

    assert isinstance(ep_transports, Transports)
    suite: type[EPSuite] = request.cls
    adapter = backend_class(suite)
    assert adapter is not None, "a cell without an adapter carries a skip mark"
    return ep_transports.of(ep_cell, adapter, request.session.items)


@pytest.fixture
def ep_case(
    request: pytest.FixtureRequest, ep_run: Run, ep_cell: Cell, ep_recorder: Recorder, ep_live: object
) -> object:
    """The case, ready to run."""
    from pytest_ep.case import Case
    from pytest_ep.transports import Live

    assert isinstance(ep_live, Live)
    return Case(ep_run, ep_live, ep_cell, ep_recorder, request.node.nodeid)


@pytest.fixture
def ep_probe(
    request: pytest.FixtureRequest, ep_run: Run, ep_cell: Cell, ep_live: object, probe: str
) -> object:
    """The probe, ready to run."""
    from pytest_ep.probe import ProbeCase
    from pytest_ep.transports import Live

    assert isinstance(ep_live, Live)
    return ProbeCase(ep_run, ep_live, ep_cell, probe, request.node.nodeid)
