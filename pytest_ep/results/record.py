"""What became of each case, and how its timings become three rows of pytest-benchmark."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from itertools import chain
from itertools import repeat
from typing import TYPE_CHECKING
from typing import Any
from typing import Literal
from typing import TypeAlias

from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.cells import Key
from pytest_ep.matrix.skew import NO_SKEW

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from pytest_ep.ranks.fate import Failure
    from pytest_ep.timing.statistics import Samples
    from pytest_ep.timing.traffic import Traffic

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
Rows: TypeAlias = "Mapping[str, Mapping[str, JSON]]"
"""``extra_info`` of a case's rows, by component."""

SCHEMA = 1
"""Version of the ``pytest_ep`` section of a result file."""
COMPONENTS = ("dispatch", "combine", "roundtrip")
CLOSING, DRIFT = ASIDE = ("closing", "drift")
"""What may fail of a key although it is no test: the run fails, and no case is charged with it."""
CLOCKS = ("host", "event", "graph", "kernel")
"""What may have timed a row."""


class StillClock:
    """A clock that stands still until it is told the time.

    As pytest-benchmark's timer it turns durations measured elsewhere into rounds, bit for bit: it is set to
    zero before each round, and to the sample within.
    """

    __name__ = "replayed"

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self._now

    def replay(self, benchmark: BenchmarkFixture, seconds: list[float]) -> None:
        """Record ``seconds`` as the rounds of ``benchmark``, whose timer must be this clock."""
        # --benchmark-cprofile asks for one round more than it was given.
        pending = chain(seconds, repeat(seconds[-1]))

        def rewind() -> tuple[tuple[float], dict[str, object]]:
            self._now = 0.0
            return (next(pending),), {}

        def advance(sample: float) -> None:
            self._now = sample

        benchmark.pedantic(advance, setup=rewind, rounds=len(seconds))  # type: ignore[no-untyped-call]


CLOCK = StillClock()
"""The timer of every case: ``pytest.mark.benchmark(timer=CLOCK)``."""


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """One case, measured and agreed on by all ranks.

    ``clock`` names what timed it; ``seconds`` and ``spread``, by component, are [n] per-iteration maxima
    over ranks and maxima less minima; ``link_gbps`` is the link's peak per direction in GB/s, None where
    unknown; ``error`` and ``bit_exact`` (a share, 0 to 1) are the oracle's; ``max_tokens`` is what the
    transport was sized for; ``extra`` joins the ``extra_info`` of all rows, ``by_component`` that of one.
    """

    clock: str
    seconds: Mapping[str, Samples]
    spread: Mapping[str, Samples]
    traffic: Traffic
    link_gbps: float | None
    error: float
    bit_exact: float
    reduction: str
    max_tokens: int
    extra: Mapping[str, JSON] = field(default_factory=dict)
    by_component: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict)

    def rows(self) -> dict[str, dict[str, JSON]]:
        """Return ``extra_info`` of each component, from all samples.

        ``gbps`` is ``bytes`` over the median, in 1e9 bytes per second; ``link_share`` what of it goes over
        the scale-up link, as a share of the link's peak; ``tokens_per_s`` the group's tokens over the
        median roundtrip. Raises SampleError where a sample is no duration.
        """
        return {component: self._row(component) for component in COMPONENTS}

    def _row(self, component: str) -> dict[str, JSON]:
        from pytest_ep.timing import statistics

        seconds = statistics.checked(self.seconds[component], component)
        middle = statistics.median(seconds)
        moved = self.traffic.total.of(component)
        scale_up = self.traffic.scale_up.of(component)
        pair = statistics.median(statistics.checked(self.seconds["roundtrip"], "roundtrip"))
        return {
            "clock": self.clock,
            "samples": seconds.size,
            "p50_us": middle * 1e6,
            "p90_us": statistics.percentile(seconds, 90) * 1e6,
            "p99_us": statistics.percentile(seconds, 99) * 1e6,
            "noise": statistics.noise(seconds),
            "spread_us": statistics.median(self.spread[component]) * 1e6,
            "copies": self.traffic.copies,
            "bytes": moved,
            "scale_up_bytes": scale_up,
            "scale_out_bytes": self.traffic.scale_out.of(component),
            "metadata_bytes": self.traffic.metadata_bytes,
            "gbps": moved / middle / 1e9,
            "link_share": scale_up / middle / 1e9 / self.link_gbps if self.link_gbps else None,
            "tokens_per_s": self.traffic.tokens / pair,
            "error": self.error,
            "bit_exact": self.bit_exact,
            "reduction": self.reduction,
            "max_tokens": self.max_tokens,
            **self.extra,
            **self.by_component.get(component, {}),
        }


class Recorder:
    """The three rows of one case.

    ``benchmarks`` are three fixtures by component, all timed by ``CLOCK``; roundtrip's is the stock
    ``benchmark``, which --benchmark-only and --benchmark-skip look for.
    """

    def __init__(self, benchmarks: Mapping[str, BenchmarkFixture], cell: Cell) -> None:
        self._benchmarks = benchmarks
        self._cell = cell

    @property
    def disabled(self) -> bool:
        """Whether pytest-benchmark was told to measure nothing."""
        return any(bench.disabled for bench in self._benchmarks.values())

    def record(self, measurement: Measurement) -> None:
        """Hand the samples to pytest-benchmark: all three rows, or none and a SampleError.

        Where benchmarks are disabled nothing is kept. To be called once, after all ranks agreed.
        """
        from pytest_ep.timing.statistics import thin

        rows = measurement.rows()
        for component in COMPONENTS:
            bench = self._benchmarks[component]
            label(bench, self._cell, measurement.clock, component)
            bench.extra_info.update(rows[component])
            CLOCK.replay(bench, thin(measurement.seconds[component]).tolist())

    def rows(self) -> list[dict[str, JSON]]:
        """Return the recorded rows as pytest-benchmark writes them."""
        return [
            bench.stats.as_dict(include_data=True)
            for bench in self._benchmarks.values()
            if bench.stats is not None and not bench.has_error
        ]

    def discard(self) -> None:
        """Keep this case's rows out of every result file."""
        for bench in self._benchmarks.values():
            bench.has_error = True

    def close(self) -> None:
        """Finish: a case that recorded nothing is no misuse of its fixtures.

        To be called from a fixture's teardown; after call, pytest-benchmark overwrites what is set here.
        """
        for bench in self._benchmarks.values():
            bench.skipped = True


def label(bench: BenchmarkFixture, cell: Cell, clock: str, component: str) -> None:
    """Name a row for its cell and component, so that stock tools list, group and select it."""
    bench.name = _tagged(bench.name, component)
    bench.fullname = _tagged(bench.fullname, component)
    bench.param = f"{bench.param}-{component}" if bench.param else component
    # A new dict: this one belongs to the item and is shared by its three rows.
    bench.params = {**(bench.params or {}), **parameters(cell), "component": component}
    key = cell.key
    bench.group = (
        f"{key.backend} {key.sku} ep{key.ep_size:02d} {key.mode} {key.precision} {key.model}"
        f" {cell.routing}{_skewed(cell)} {clock} {component}"
    )


def parameters(cell: Cell) -> dict[str, JSON]:
    """Return a cell's coordinates as the scalars that rows carry, and items but for ``token_skew``."""
    key = cell.key
    skew: dict[str, JSON] = {} if cell.skew == NO_SKEW else {"token_skew": cell.skew.name}
    return {
        "backend": key.backend,
        "sku": key.sku,
        "ep_size": key.ep_size,
        "mode": key.mode,
        "precision": key.precision,
        "model": key.model,
        "routing": cell.routing,
        "tokens": cell.tokens,
        **skew,
    }


def _skewed(cell: Cell) -> str:
    return "" if cell.skew == NO_SKEW else f" skew_{cell.skew.name}"


def _tagged(name: str, component: str) -> str:
    return f"{name[:-1]}-{component}]" if name.endswith("]") else f"{name}[{component}]"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What became of one case.

    ``reason`` is one line: why it was skipped, only checked, or failed; empty where it was timed.
    ``diagnosis`` and ``evidence`` say what caused a wrong result, to people and to programs.
    ``code`` is the skip code, or the names of the checks that found a wrong result; empty where the case
    failed otherwise. ``probe`` names what this is where it is no case: a probe or one of ``ASIDE``. ``rank``,
    ``token`` (global) and ``column`` locate a wrong result. ``rows`` are those of ``Measurement``, of a timed
    case only. ``identity`` is a digest of what its numbers depend on, but for the ``versions`` of its
    transport.
    """

    nodeid: str
    cell: Cell
    outcome: Literal["timed", "checked", "probed", "failed", "skipped"]
    reason: str = ""
    code: str = ""
    diagnosis: str = ""
    rank: int | None = None
    token: int | None = None
    column: int | None = None
    error: float | None = None
    bit_exact: float | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    rows: Rows = field(default_factory=dict)
    probe: str = ""
    identity: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def line(self) -> dict[str, JSON]:
        """Return what files say of this case, rows apart."""
        return {
            "case": self.nodeid,
            "params": parameters(self.cell),
            "probe": self.probe,
            "outcome": self.outcome,
            "code": self.code,
            "reason": self.reason,
            "diagnosis": self.diagnosis,
            "evidence": dict(self.evidence),
            "identity": self.identity,
            "versions": dict(self.versions),
        }

    @classmethod
    def resumed(cls, cell: Cell, entry: Mapping[str, Any]) -> CaseResult:
        """Return a result that an earlier run's file holds, with its rows."""
        rows = {row["params"]["component"]: row["extra_info"] for row in entry["rows"]}
        some: Mapping[str, Any] = next(iter(rows.values()), {})
        return cls(
            entry["case"],
            cell,
            entry["outcome"],
            entry["reason"],
            error=some.get("error"),
            bit_exact=some.get("bit_exact"),
            rows=rows,
            identity=entry["identity"],
            versions=entry["versions"],
        )

    @classmethod
    def failed(cls, nodeid: str, cell: Cell, failure: Failure, probe: str = "") -> CaseResult:
        """Return the result of what failed on all ranks for the same reason."""
        return cls(
            nodeid,
            cell,
            "failed",
            failure.reason,
            failure.code,
            failure.diagnosis,
            failure.rank,
            failure.token,
            failure.column,
            failure.error,
            failure.bit_exact,
            failure.evidence,
            probe=probe,
        )

    @classmethod
    def timed(cls, nodeid: str, cell: Cell, measurement: Measurement) -> CaseResult:
        """Return the result of a case that passed and was timed."""
        return cls(
            nodeid,
            cell,
            "timed",
            error=measurement.error,
            bit_exact=measurement.bit_exact,
            rows=measurement.rows(),
        )


class Ledger:
    """Every case of a session, in the order in which they ended."""

    def __init__(self) -> None:
        self._results: dict[str, CaseResult] = {}
        self.not_run: list[str] = []
        self.constructed: dict[Key, Mapping[str, float]] = {}
        self.drift: dict[Key, Mapping[str, JSON]] = {}
        self.stopped_by = ""

    def __iter__(self) -> Iterator[CaseResult]:
        return iter(self._results.values())

    def of(self, nodeid: str) -> CaseResult | None:
        """Return a case's result so far."""
        return self._results.get(nodeid)

    def add(self, result: CaseResult) -> None:
        """Note a result. A later phase may turn a case into a failed one, but no failed case into another."""
        noted = self._results.get(result.nodeid)
        if noted is None or noted.outcome != "failed":
            self._results[result.nodeid] = result

    def section(self) -> dict[str, JSON]:
        """Return the ``pytest_ep`` section of a result file."""
        said = section([result.line() for result in self], self.not_run, self.stopped_by)
        said["construction"] = [
            {"backend": key.backend, "key": str(key), **facts} for key, facts in self.constructed.items()
        ]
        said["drift"] = [dict(entry) for entry in self.drift.values()]
        return said


def section(lines: Sequence[Mapping[str, JSON]], not_run: Iterable[str], why: str) -> dict[str, JSON]:
    """Return the ``pytest_ep`` section: every case that left no timing row, and why; who finished as what.

    ``lines`` are those of ``CaseResult.line``; ``not_run`` are selected cases that were never reached.
    """

    def of(outcome: str, *names: str) -> JSON:
        # The lines of a journal that an earlier version left have fewer names.
        return [
            {name: line[name] for name in names if name in line}
            for line in lines
            if line["outcome"] == outcome
        ]

    return {
        "schema": SCHEMA,
        "failed": of("failed", "case", "params", "probe", "code", "reason", "diagnosis", "evidence"),
        "skipped": of("skipped", "case", "params", "code", "reason"),
        "checked": of("checked", "case", "params", "reason"),
        "probed": of("probed", "case", "params", "probe", "reason"),
        "not_run": [{"case": case, "reason": why} for case in not_run],
        "cases": [
            {name: line[name] for name in ("case", "params", "outcome", "reason", "identity", "versions")}
            for line in lines
            if line["outcome"] in ("timed", "checked")
        ],
    }
