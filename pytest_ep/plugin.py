"""The pytest plugin: what pytest and pytest-benchmark call."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

import pytest

from pytest_ep.options import add_options
from pytest_ep.suite import EPSuite

if TYPE_CHECKING:
    from pytest_ep.run import Run

SHOWS = ("help", "version", "markers", "showfixtures", "show_fixtures_per_test", "cacheshow")
"""Options of pytest that print something and run nothing, which each rank would do."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ``--ep-*`` options."""
    add_options(parser)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests() -> object:
    """Tell the other ranks of a conftest that fails to import here: this rank ends before it could vote."""
    try:
        return (yield)
    except Exception as error:
        from pytest_ep.ranks.identity import read_identity
        from pytest_ep.run import announce

        with contextlib.suppress(ValueError):  # a launcher's variables, which are no matter of this error
            announce(read_identity(), "failed to import a conftest", str(error))
        raise


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Start torchrun on this very command where --ep-nproc asks for ranks.

    Not first of all: by then pytest-xdist has made --dist of -n.
    """
    nproc = config.getoption("ep_nproc")
    if nproc is None or any(config.getoption(name, False) for name in SHOWS):
        return None
    from pytest_ep.ranks.identity import Identity
    from pytest_ep.ranks.launch import has_launched
    from pytest_ep.ranks.launch import launch
    from pytest_ep.ranks.launchers import is_launched
    from pytest_ep.run import Run

    if has_launched(os.environ):
        return None  # a rank, which finds the option again wherever it was given
    if is_launched(os.environ):
        raise pytest.UsageError("--ep-nproc inside a launcher: drop it, or drop the launcher")
    if config.getoption("dist", "no") != "no":
        raise pytest.UsageError("--ep-nproc with -n or --dist: its ranks are processes already, drop one")
    _ = Run(config, Identity(size=nproc, local_size=nproc)).options  # one refusal, not one from each rank
    return launch(nproc, config.invocation_params.args)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Learn which rank this is; hold back what other ranks than 0 would print."""
    from pytest_ep.ranks.identity import Identity
    from pytest_ep.ranks.identity import read_identity
    from pytest_ep.run import RUN
    from pytest_ep.run import Run

    try:
        run = Run(config, read_identity())
    except ValueError as error:  # of no concern to a session without EP cases
        run = Run(config, Identity())
        run.usage_error = pytest.UsageError(str(error))
    config.stash[RUN] = run
    if config.getoption("ep_require"):
        from pytest_ep.gate import WithoutCases

        config.pluginmanager.register(WithoutCases(run), "ep-gate")
    if run.identity.rank:
        from pytest_ep.ranks.output import HeldOutput

        # The terminal reporter takes what it finds as stdout.
        sys.stdout = run.held = HeldOutput(sys.stdout)
    named = ("ep_sku", "ep_size", "ep_platforms", "ep_routing", "ep_token_skew")
    if any(config.getoption(name) for name in named):
        _ = run.options  # wrong here is wrong although no EP case may be collected


def _begin(run: Run) -> None:
    from pytest_ep.session import begin

    begin(run)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Load the fixtures of a case where an EPSuite is about to be collected."""
    if isinstance(collector, pytest.Class) and issubclass(collector.obj, EPSuite):
        collector.config.pluginmanager.import_plugin("pytest_ep.fixtures")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the cases of an EPSuite."""
    from pytest_ep.collection import generate
    from pytest_ep.run import RUN

    generate(metafunc, metafunc.config.stash[RUN])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    """Refuse to distribute EP cases, from pytest-xdist's controller."""
    from pytest_ep.collection import XDIST_ID
    from pytest_ep.collection import XDIST_REFUSED

    if any(f"[{XDIST_ID}]" in one for one in ids):
        raise pytest.UsageError(XDIST_REFUSED)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Register the agreement on the items after all plugins, of which pytest's cache selects, too."""
    from pytest_ep.collection import Agreement
    from pytest_ep.run import RUN

    run = session.config.stash[RUN]
    run.session = session  # a report written early needs it
    session.config.pluginmanager.register(Agreement(run, _begin), "ep-agreement")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Release what was held where nothing was collected at all; tell the launch that this is the end."""
    from pytest_ep.run import RUN

    if config.getoption("ep_nproc") is not None:
        from pytest_ep.ranks.launch import say_ended

        say_ended(os.environ)

    run = config.stash.get(RUN, None)
    if run is not None and run.held is not None and not run.active:
        run.held.release()
