"""One probe of a key, run on all ranks before its cases."""

from __future__ import annotations

from pytest_ep.matrix.cells import Cell
from pytest_ep.oracle import accumulator
from pytest_ep.oracle.accumulator import Finding
from pytest_ep.oracle.probes import PROBES
from pytest_ep.oracle.probes import probe_problem
from pytest_ep.oracle.probes import run_probe
from pytest_ep.ranks.fate import AgreedFailure
from pytest_ep.ranks.fate import Failure
from pytest_ep.results.record import CaseResult
from pytest_ep.run import Run
from pytest_ep.transports import SEED
from pytest_ep.transports import Live
from pytest_ep.workload.problem import Problem
from pytest_ep.workload.problem import build_problem
from pytest_ep.workload.routing import load_trace

ACCUMULATOR = "accumulator"


class ProbeCase:
    """A probe of a live transport."""

    def __init__(self, run: Run, live: Live, cell: Cell, name: str, nodeid: str) -> None:
        self._run = run
        self._live = live
        self._cell = cell
        self._name = name
        self._nodeid = nodeid

    def run(self) -> None:
        """Run the probe; AgreedFailure on all ranks where it finds something wrong on any."""
        says = self._accumulator() if self._name == ACCUMULATOR else self._structural()
        self._run.ledger.add(
            CaseResult(self._nodeid, self._cell, "probed", f"{self._name}: {says}", probe=self._name)
        )

    def _structural(self) -> str:
        probe = PROBES[self._name]

        def work() -> str:
            return run_probe(probe, self._live.backend, probe_problem(probe, self._standard()))

        said: list[str] = self._run.fate.together(f"probe {self._name}", work)
        wrong = [rank for rank, text in enumerate(said) if text]
        if wrong:
            more = f" (wrong on ranks {', '.join(map(str, wrong))})" if len(wrong) > 1 else ""
            text = f"probe {self._name}: {said[wrong[0]]}{more}"
            raise AgreedFailure(Failure(text, code=f"probe {self._name}", rank=wrong[0]))
        return "as expected"

    def _accumulator(self) -> str:
        size = self._cell.key.ep_size
        if size < accumulator.NEEDED:
            return f"not observable: needs {accumulator.NEEDED} ranks, has {size}"
        domain = self._live.domain

        def work() -> Finding:
            return accumulator.observe(self._live.backend, self._standard(), domain)

        findings = self._run.fate.together("probe accumulator", work)
        right, says = accumulator.judge(findings, self._live.reduction.name)
        if not right:
            raise AgreedFailure(Failure(says, code="probe accumulator"))
        return says

    def _standard(self) -> Problem:
        tokens = min(self._cell.tokens, self._live.max_tokens)
        ranks = self._run.ranks
        return build_problem(
            self._cell.shape,
            # Plain, whatever routing the cases have: a probe is to say what moved where.
            load_trace(self._cell.shape, SEED, tokens * ranks.size, None, write=False),
            ranks.rank,
            (tokens,) * ranks.size,
            ranks.device,
            self._live.facts.index_dtype,
        )
