"""From the matrix to items, and one selection on all ranks."""

from __future__ import annotations

import platform
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from typing import TYPE_CHECKING
from typing import Any
from typing import NoReturn

import pytest

from pytest_ep.alike import difference
from pytest_ep.gate import repeated
from pytest_ep.gate import reruns
from pytest_ep.matrix.cells import PROBE_NAMES
from pytest_ep.matrix.cells import PROBE_TOKENS
from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.routing import UNIFORM
from pytest_ep.run import PLANNED
from pytest_ep.run import Coordinates
from pytest_ep.run import Run
from pytest_ep.run import announce
from pytest_ep.run import is_xdist_worker
from pytest_ep.suite import EPSuite
from pytest_ep.suite import backend_class
from pytest_ep.suite import backend_name
from pytest_ep.suite import check_suite

if TYPE_CHECKING:
    from pytest_ep.backends.base import EPBackend
    from pytest_ep.matrix.plan import Planned

ARGUMENTS = ("backend", "sku", "ep_size", "mode", "precision", "model", "routing", "tokens")
NO_CASE_ID = "no-case"
XDIST_ID = "not-under-xdist"
XDIST_REFUSED = (
    "EP cases are not distributed by -n or --dist: their ranks are processes already; use --ep-nproc N"
)


def generate(metafunc: pytest.Metafunc, run: Run) -> None:
    """Make one item of each planned cell of an EPSuite."""
    suite = metafunc.cls
    if not (isinstance(suite, type) and issubclass(suite, EPSuite) and "ep_cell" in metafunc.fixturenames):
        return
    run.active = True
    try:
        _generate(metafunc, suite, run)
    except pytest.UsageError as error:
        # Raised again once all is collected: here pytest would make a collection error of it.
        run.usage_error = run.usage_error or error
        _stand_in(metafunc, NO_CASE_ID)


def _generate(metafunc: pytest.Metafunc, suite: type[EPSuite], run: Run) -> None:
    if is_xdist_worker(metafunc.config):  # the controller refuses once it hears of this id
        _stand_in(metafunc, XDIST_ID)
        return
    if metafunc.config.getoption("dist", "no") != "no":
        raise pytest.UsageError(XDIST_REFUSED)
    from pytest_ep.matrix.plan import plan
    from pytest_ep.results.record import parameters

    if not metafunc.config.pluginmanager.has_plugin("benchmark"):
        raise pytest.UsageError("EP cases record through pytest-benchmark: drop -p no:benchmark")
    check_suite(suite)
    backend, name = backend_class(suite), backend_name(suite)
    _one_class(suite, name, run.backends.setdefault(name, backend), backend)
    cells = plan(
        name,
        backend,
        run.options.selection,
        run.machine,
        run.platforms,
        ranks=run.identity.size,
        local_ranks=run.identity.local_size,
    )
    items: dict[str, tuple[Planned, tuple[str, ...]]] = {one.cell.id: (one, ()) for one in cells}
    if "probe" in metafunc.fixturenames:
        items = dict(_probes(cells))
    values: dict[Coordinates, Planned] = {}
    for planned, extra in items.values():
        coordinates = parameters(planned.cell)
        key = (*(coordinates[argument] for argument in ARGUMENTS), *extra)
        values[key] = planned
    run.planned.update(values)
    if values:
        metafunc.parametrize(_arguments(metafunc), list(values), ids=list(items))
    else:
        _stand_in(metafunc, NO_CASE_ID)


def _stand_in(metafunc: pytest.Metafunc, name: str) -> None:
    """Make one item that is no case: of an empty set pytest makes one, too, or an error, as its ini says."""
    names = _arguments(metafunc)
    metafunc.parametrize(names, [(None,) * len(names)], ids=[name])


def _one_class(
    suite: type[EPSuite], name: str, known: type[EPBackend] | None, found: type[EPBackend] | None
) -> None:
    """Refuse a second class of a backend's name: results are known by the name, and would be of either."""
    if known is not found:
        both = f"{_place(found)} and {_place(known)}"
        raise pytest.UsageError(
            f"{suite.__module__}.{suite.__qualname__}: {both} are both named {name!r}: "
            "give each a name of its own"
        )


def _place(backend: type[EPBackend] | None) -> str:
    return "nothing" if backend is None else f"{backend.__module__}.{backend.__qualname__}"


def _is_no_case(node: object) -> bool:
    return _is_ours(node) and _coordinates(node)[0] is None


def _is_ours(node: object) -> bool:
    suite = getattr(node, "cls", None)
    ours = isinstance(suite, type) and issubclass(suite, EPSuite)
    return ours and "backend" in getattr(getattr(node, "callspec", None), "params", {})


def _coordinates(item: object) -> Coordinates:
    """The parameters that ``_generate`` gave, whatever others the item has."""
    params = item.callspec.params  # type: ignore[attr-defined]
    return tuple(params[name] for name in (*ARGUMENTS, "probe") if name in params)


def _arguments(metafunc: pytest.Metafunc) -> tuple[str, ...]:
    return (*ARGUMENTS, "probe") if "probe" in metafunc.fixturenames else ARGUMENTS


def _probes(cells: Iterable[Planned]) -> Iterator[tuple[str, tuple[Planned, tuple[str, ...]]]]:
    """Make the probes of each key that has a case to run; a skipped key has said why at its cases."""
    from pytest_ep.matrix.plan import Planned

    for key, cell in {one.cell.key: one.cell for one in cells if one.skip is None}.items():
        planned = Planned(Cell(key, cell.shape, UNIFORM.name, PROBE_TOKENS), None)
        yield from ((f"{key}-{probe}", (planned, (probe,))) for probe in PROBE_NAMES)


def mark(items: list[pytest.Item], run: Run) -> None:
    """Tie each item to its cell: keywords, the still clock, and the skip of a cell that cannot run."""
    from pytest_ep.results.record import CLOCK

    for item in filter(_is_ours, items):
        item.stash[PLANNED] = planned = run.planned[_coordinates(item)]
        item.extra_keyword_matches.add(planned.cell.key.backend)
        item.add_marker(pytest.mark.benchmark(timer=CLOCK))
        if planned.skip is not None:
            item.add_marker(pytest.mark.skip(reason=f"{planned.skip.code}: {planned.skip.told}"))


def by_key(items: list[pytest.Item]) -> None:
    """Sort stably: each key of a module is one run of items, probes first, so it is constructed once."""
    first: dict[object, int] = {}

    def place(item: pytest.Item) -> tuple[int, bool]:
        planned = item.stash.get(PLANNED, None)
        key = item if planned is None else (item.path, planned.cell.key)
        return first.setdefault(key, len(first)), "probe" not in getattr(item, "fixturenames", ())

    items.sort(key=place)


@dataclass(frozen=True, slots=True)
class Collected:
    """What a rank says once it has collected: of its items, of what kept it from more, and of its host."""

    digest: str
    errors: dict[str, str]
    refusal: str
    facts: dict[str, str]
    host: str
    local_size: int


class Agreement:
    """Registered last of all plugins, so that it sees the whole set first and the selection last.

    ``begin`` is called before the first agreement, once it is known that this is a run of EP cases.
    """

    def __init__(self, run: Run, begin: Callable[[Run], None]) -> None:
        self._run = run
        self._begin = begin
        self._errors: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Any:
        """Leave out what is no case, before pytest counts it."""
        report: pytest.CollectReport = yield
        if self._run.active and report.result and not is_xdist_worker(self._run.config):
            report.result = [node for node in report.result if not _is_no_case(node)]
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> object:
        """Compare what the ranks collected, then adopt rank 0's ordered selection."""
        run = self._run
        if not run.active:
            if self._errors:
                announce(run.identity, "failed to collect", "\n".join(self._errors.values()))
            if run.held is not None:
                run.held.release()
            return (yield)
        if is_xdist_worker(run.config):
            return (yield)
        self._begin(run)
        mark(items, run)
        collected = list(items)
        try:
            result = yield
            by_key(items)
            run.refusal = run.refusal or reruns(run.config, collected) or repeated(items)
            self._compare(collected)
            self._adopt(items, {item.nodeid: item for item in collected})
        except BaseException as error:
            self._silence()
            run.fate.part(error)
            raise
        return result

    def _adopt(self, items: list[pytest.Item], known: Mapping[str, pytest.Item]) -> None:
        run = self._run
        leads = run.identity.rank == 0
        chosen = ([item.nodeid for item in items], self._finished(items)) if leads else None
        selection, resumed = run.fate.ballot.gather("selection", chosen)[0]
        items[:] = [known[nodeid] for nodeid in selection]
        self._resume(resumed, known)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep what failed to be collected here: the other ranks need its text."""
        if report.failed:
            self._errors[report.nodeid] = f"{report.nodeid}: {report.longreprtext.strip()}"

    def _finished(self, items: list[pytest.Item]) -> dict[str, dict[str, Any]]:
        """Return what --ep-resume takes over, by node id: only rank 0 reads the file."""
        from pytest_ep.results.artifact import still_holds

        return {
            item.nodeid: entry
            for item in items
            if (entry := self._run.resumed.get(item.nodeid)) is not None
            and PLANNED in item.stash
            and still_holds(entry, self._run.identify(item.stash[PLANNED].cell))
        }

    def _resume(self, resumed: dict[str, dict[str, Any]], items: Mapping[str, pytest.Item]) -> None:
        from pytest_ep.results.record import CaseResult

        self._run.resumed = resumed
        for nodeid, entry in resumed.items():
            reason = f"resumed: finished in {self._run.options.resume}"
            items[nodeid].add_marker(pytest.mark.skip(reason=reason))
            self._run.ledger.add(CaseResult.resumed(items[nodeid].stash[PLANNED].cell, entry))

    def _compare(self, items: list[pytest.Item]) -> None:
        run, mine = self._run, sorted(item.nodeid for item in items)
        collected = Collected(
            sha256("\n".join(mine).encode()).hexdigest(),
            self._errors,
            run.refusal,
            run.host_facts,
            platform.node(),
            run.identity.local_size,
        )
        votes = self._alike(run.fate.ballot.gather("collection", asdict(collected)))
        # What fails everywhere pytest itself reports.
        for rank, vote in enumerate(votes):
            for other in votes:
                if vote.errors.keys() - other.errors.keys():
                    texts = "\n".join(vote.errors.values())
                    self._stop(f"rank {rank} failed to collect what others did:\n{texts}")
        if len({vote.digest for vote in votes}) > 1:
            self._compare_ids(run.fate.ballot.gather("collected ids", mine))

    def _compare_ids(self, every: list[list[str]]) -> None:
        """Refuse ranks that lack what rank 0 has, or have more where not --lf chose files by its cache."""
        by_cache = self._run.config.getoption("lf", False)
        for rank, ids in enumerate(every):
            if ids != every[0] and not (by_cache and set(every[0]) <= set(ids)):
                hint = "; or drop --lf, as their caches differ" if by_cache else ""
                self._stop(_difference(rank, every[0], ids) + hint)

    def _alike(self, said: list[dict[str, Any]]) -> list[Collected]:
        """Refuse hosts that differ, and an order of ranks in which a host's are not together."""
        from pytest_ep.results.hosts import ranks_by_host
        from pytest_ep.results.hosts import scattered

        if refusal := next((one["refusal"] for one in said if one.get("refusal")), ""):
            self._stop(refusal)
        hosts = [str(one.get("host")) for one in said]
        ranks = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
        # Before anything is made of it: another version of this package may say something else.
        if unlike := difference([one.get("facts", {}) for one in said], ranks):
            self._stop(f"{unlike}; give every host the same, or their numbers belong to no machine")
        if apart := scattered(hosts):
            self._stop(apart)
        votes = [Collected(**one) for one in said]
        self._run.ranks_by_host = ranks_by_host([vote.local_size for vote in votes])
        return votes

    def _stop(self, why: str) -> NoReturn:
        from pytest_ep.results.artifact import silence_benchmark

        self._silence()
        silence_benchmark(self._run.config)
        if self._run.reporter:
            raise pytest.UsageError(why)
        pytest.exit(why, returncode=pytest.ExitCode.USAGE_ERROR)

    def _silence(self) -> None:
        from pytest_ep.results.artifact import silence

        if not self._run.reporter:
            silence(self._run.config)


def _difference(rank: int, ours: list[str], theirs: list[str]) -> str:
    only = sorted(set(theirs) ^ set(ours))
    if not only:  # the same names, but some twice
        only = [
            ours_id or theirs_id for ours_id, theirs_id in zip_longest(ours, theirs) if ours_id != theirs_id
        ]
    who = f"only rank {rank}" if only[0] in theirs else f"rank 0 but not rank {rank}"
    more = f" and {len(only) - 1} more" if len(only) > 1 else ""
    return (
        f"the ranks collected different cases: {who} has {only[0]}{more}; "
        "give every rank the same files, packages and options"
    )
