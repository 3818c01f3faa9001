"""Ranks share one fate: each fault class that a run survives, once. ci/soak faults has the whole table."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ep.backends.torch_a2a import TorchA2A
from pytest_ep.gate import complaints
from pytest_ep.gate import judge
from pytest_ep.matrix.cells import PROBE_NAMES
from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.cells import Key
from pytest_ep.matrix.routing import UNIFORM
from pytest_ep.matrix.shapes import Shape
from pytest_ep.oracle.reduction import named
from pytest_ep.ranks.ballot import AgreedExit
from pytest_ep.ranks.ballot import Ballot
from pytest_ep.ranks.fate import Fate
from pytest_ep.ranks.fate import Vote
from pytest_ep.ranks.identity import Identity
from pytest_ep.ranks.pulse import Pulse
from pytest_ep.reports import Reports
from pytest_ep.results.record import Ledger
from pytest_ep.run import PLANNED
from pytest_ep.transports import ROUTING_LIMIT
from pytest_ep.transports import Live
from pytest_ep.transports import Transports
from pytest_ep.transports import stop_on_different_routing
from pytest_ep.workload import routes
from pytest_ep.workload.routes import Routes
from pytest_ep.workload.routes import load_routes
from tests.faults.launch import EVERY_T
from tests.faults.launch import MODULE
from tests.faults.launch import ROOT
from tests.faults.launch import SHAPE
from tests.faults.launch import FaultyRun
from tests.faults.launch import tokens
from tests.launching import Torchrun


def test_a_failed_case_is_everyones_and_the_next_case_runs_as_if_alone(faulty: FaultyRun) -> None:
    outcome = faulty("before-dispatch@1:1,between@1:2,in-combine@0:4,in-recording@1:8")

    assert outcome.code == 1
    assert outcome.failed() == [1, 2, 4, 8]
    assert outcome.timed == [16]
    assert outcome.junit_failures == 4
    assert "rank 1 failed in oracle before timing" in outcome.said
    assert "rank 0 failed in oracle before timing" in outcome.said
    assert "rank 1 failed in recording" in outcome.said
    assert "receive: InjectedError: injected" in outcome.said
    assert "pytest_ep: rank 1 failed in recording" in outcome.stderr
    assert "T00004" not in outcome.stderr, "rank 1 failed there only because rank 0 had"


def test_setup_teardown_and_a_lone_skip_are_everyones_too(faulty: FaultyRun) -> None:
    # At the first T the others are about to build their groups, at the next a library ends the process.
    outcome = faulty("skips-alone@1:1,gives-up@1:2,in-oracle@0+1:4,in-teardown@1:8")

    assert outcome.code == 1
    assert outcome.failed() == [1, 2, 4, 8]
    assert outcome.timed == [16]
    assert outcome.seconds < 15
    assert "rank 1 failed in oracle before timing: SystemExit: library gives up" in outcome.said
    assert re.search(
        r"the ranks disagree on setup of .*T00001\]: rank 0 could not go on, rank 1 skipped \(only here\)",
        outcome.said,
    )
    assert "rank 1 failed in teardown" in outcome.said


def test_a_rank_that_skips_alone_while_others_recover_spares_the_next_case(faulty: FaultyRun) -> None:
    outcome = faulty("skips-inside@1:1,in-teardown@1:2,skips-alone@1:4,in-teardown@0:8")

    assert outcome.code == 1
    assert outcome.failed() == [1, 2, 4, 8]
    assert outcome.timed == [16]
    assert re.search(
        r"the ranks disagree on setup of .*T00004\]: rank 0 could not go on, rank 1 skipped", outcome.said
    )
    assert (
        "rank 1 failed in oracle before timing: it called pytest.skip, which not all ranks did: not today"
        in outcome.said
    )


def test_what_fails_when_timed_again_is_not_charged_to_the_case_before(
    faulty: FaultyRun,
) -> None:
    outcome = faulty("again@1:1")

    assert outcome.code == 1
    assert outcome.timed == EVERY_T
    (failed,) = outcome.json["pytest_ep"]["failed"]
    assert failed["case"].endswith("T00001] again, after the last")
    assert "drift FAILED  rank 1 failed in timing: warm-up: " in outcome.said
    assert re.search(r"^ep: .*T00001\] again, after the last: rank 1 failed in timing", outcome.said, re.M)


def test_a_transport_that_cannot_be_closed_fails_the_run_and_no_case() -> None:
    class Stuck:
        def close(self) -> None:
            raise OSError("still mapped")

    run = one_rank()
    transports = Transports(run)
    facts = TorchA2A.modes["normal"]
    sum_ = named("rank-sum-fp32", 1)
    transports._live = Live(CELL.key, Stuck(), sum_, facts, CELL, 8, 1, None, 1)  # type: ignore[arg-type]
    transports.close()
    (failed,) = run.ledger
    assert failed.reason == "rank 0 failed in closing the transport: OSError: still mapped"
    assert (failed.probe, failed.outcome) == ("closing", "failed")
    assert complaints(run) == [f"closing {CELL.key}: {failed.reason}"]
    assert judge(run) == pytest.ExitCode.TESTS_FAILED


def test_a_construction_that_fails_on_one_rank_ends_the_key_at_once(faulty: FaultyRun) -> None:
    outcome = faulty("in-setup@1")

    assert outcome.code == 1
    assert outcome.failed() == EVERY_T
    assert "rank 1 failed in construction" in outcome.said
    assert "no case was executed" not in outcome.said, "the exit code is not that one's"
    assert re.search(r"not run: no transport since .*T00001\]", outcome.said)


def test_a_rank_that_is_late_but_alive_is_waited_for(
    faulty: FaultyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_EP_FAULT_SLEEP", "1")

    # The last case alone takes longer than that: nothing is left that would not fit.
    outcome = faulty("sleeps@1:16", "--ep-session-budget=12s")

    assert outcome.code == 0, outcome.said
    assert outcome.timed == EVERY_T


def test_ranks_that_collect_differently_stop_and_name_the_difference(faulty: FaultyRun) -> None:
    outcome = faulty("collects-differently@1")

    assert outcome.code == 1
    assert (
        "the ranks collected different cases: only rank 1 has test_faulty.py::test_only_here"
        in outcome.stderr
    )
    assert outcome.json == {}


def test_a_module_that_fails_to_import_on_one_rank_stops_all_with_its_text(faulty: FaultyRun) -> None:
    outcome = faulty("fails-to-import@1")

    assert outcome.code == 1
    assert "rank 1 failed to collect: E   tests.faults.fate.InjectedError" in outcome.said


def test_a_conftest_that_fails_to_import_on_one_rank_stops_all_with_its_text(
    faulty: FaultyRun, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest("import os\nif os.environ['RANK'] == '1':\n    raise RuntimeError('only here')\n")

    outcome = faulty("")

    # Rank 0 may not have come far enough to report; rank 1's own error is then all there is to say.
    assert outcome.code == 1
    assert "RuntimeError: only here" in outcome.said + outcome.stderr


def test_ctrl_c_and_pytest_exit_on_one_rank_stop_all_after_the_same_case(
    faulty: FaultyRun, pytester: pytest.Pytester
) -> None:
    interrupted = faulty("interrupted@1:4")
    assert interrupted.code == 1
    assert interrupted.timed == [1, 2, 4]
    assert "interrupted (Ctrl-C)" in interrupted.said
    assert [tokens(one["case"]) for one in interrupted.json["pytest_ep"]["not_run"]] == [8, 16]
    pytester.path.joinpath("out.json").unlink()

    left = faulty("exit-call@1:4")
    assert left.code == 1
    assert left.timed == [1, 2]
    assert "rank 1 left the session in oracle before timing: injected" in left.said
    pytester.path.joinpath("out.json").unlink()

    alone = faulty("exit-fixture@1:4")
    assert (alone.code, alone.timed) == (1, [1, 2])
    assert "rank 1 leaves the session: injected" in alone.said
    assert alone.seconds < 15
    assert {one["reason"] for one in alone.json["pytest_ep"]["not_run"]} == {
        "rank 1 leaves the session: injected"
    }


@pytest.mark.parametrize("hook", ["pytest_collection_modifyitems", "pytest_runtestloop"])
def test_a_hook_that_fails_on_one_rank_stops_all_with_its_text(
    faulty: FaultyRun, pytester: pytest.Pytester, hook: str
) -> None:
    pytester.makeconftest(
        f"""
        import os, pytest

        @pytest.hookimpl(wrapper=True)
        def {hook}():
            if os.environ["RANK"] == "1":
                raise RuntimeError("only here")
            return (yield)
        """
    )

    outcome = faulty("")

    assert outcome.code == 1
    assert outcome.seconds < 15
    assert "rank 1 fails in the session: RuntimeError: only here" in outcome.said


def test_ranks_whose_hosts_differ_stop_before_the_first_case(
    faulty: FaultyRun, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(
        "import os, platform\nif os.environ['RANK'] == '1':\n    platform.python_version = lambda: '3.0'\n"
    )

    outcome = faulty("")

    assert outcome.code == 1
    assert re.search(r"rank 1 on \S+ and rank 0 on \S+ differ: Python 3\.0 against 3\.", outcome.stderr)
    assert outcome.json == {}


CELL = Cell(Key("b", "cpu", 1, "normal", "bf16", "m"), Shape("m", 64, 16, 4), UNIFORM.name, 8)


def one_rank() -> Any:
    """What transports and reports need of a run."""
    ballot = Ballot(Identity(), None, Pulse())
    return SimpleNamespace(
        active=True,
        executed=1,
        fate=Fate(ballot, print),
        pulse=ballot.pulse,
        identity=Identity(),
        options=SimpleNamespace(selection=SimpleNamespace(routing=UNIFORM), case_timeout=77.0),
        config=SimpleNamespace(getoption=lambda name: None),
        session=None,
        began=0.0,
        trace_cache=None,
        ledger=Ledger(),
    )


def test_a_test_that_is_no_case_has_the_time_of_a_case_to_give_a_sign_of_life() -> None:
    run = one_rank()
    reports = Reports(run)
    item: Any = SimpleNamespace(nodeid="plain", stash=pytest.Stash())
    protocol: Any = reports.pytest_runtest_protocol(item, None)
    next(protocol)
    assert (run.pulse.status().long, reports.current) == (77.0, item)
    with pytest.raises(StopIteration):
        protocol.send(None)
    assert (run.pulse.status().long, reports.current) == (0.0, None)
    item.stash[PLANNED] = object()
    next(reports.pytest_runtest_protocol(item, None))  # type: ignore[call-overload]
    assert run.pulse.status().long == 0.0


def test_routing_that_takes_long_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    run, limits = one_rank(), []

    def load(*args: object, **options: object) -> Routes:
        limits.append(run.pulse.status().long)
        return load_routes(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(routes, "load_routes", load)
    assert Transports(run)._routing(CELL, 1).tokens == 8
    assert limits == [ROUTING_LIMIT]
    assert run.pulse.status().long == 0


def test_a_cause_that_loses_the_race_to_its_effect_is_told_below() -> None:
    texts = [
        "Traceback\nRuntimeError: closed by peer",
        "conftest.py:1: in x\nE   OSError: bad handle\nconftest.py:5: OSError",
    ]
    votes = [Vote("failed", text, place) for text, place in zip(texts, (1, 2), strict=True)]
    fate = Fate(SimpleNamespace(gather=lambda *_: votes, catch_up=list, pulse=Pulse()), print)  # type: ignore[arg-type]
    _, failure = fate.settle("call", votes[0])
    assert failure is not None
    assert failure.reason == "rank 0 failed in call: RuntimeError: closed by peer"
    assert failure.diagnosis.endswith("\nrank 1 failed after it: OSError: bad handle")


def test_a_rank_that_could_not_go_on_is_not_blamed_for_who_failed() -> None:
    votes = [Vote("failed", "rank 1 did not come"), Vote("failed", "SystemExit: gives up", 1)]
    fate = Fate(SimpleNamespace(gather=lambda *_: votes, catch_up=list, pulse=Pulse()), print)  # type: ignore[arg-type]
    _, failure = fate.settle("call", votes[0])
    assert failure is not None
    assert failure.reason == "rank 1 failed in call: SystemExit: gives up"


def test_different_routing_stops_every_rank() -> None:
    stop_on_different_routing(["a", "a"])
    with pytest.raises(
        AgreedExit, match="rank 2 built other routing than rank 0 \\(b against a\\)"
    ) as raised:
        stop_on_different_routing(["a", "a", "b"])
    assert raised.value.returncode == pytest.ExitCode.TESTS_FAILED


def test_a_session_budget_stops_before_the_case_that_would_not_fit(
    faulty: FaultyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_EP_FAULT_SLEEP", "0.3")

    outcome = faulty("sleeps@1:2", "--ep-session-budget=5s")

    assert outcome.code == 1
    assert outcome.timed == [1, 2]
    assert "--ep-session-budget: 5 s would not hold another case" in outcome.said
    assert {one["reason"][:19] for one in outcome.json["pytest_ep"]["not_run"]} == {"--ep-session-budget"}


def test_a_device_whose_context_is_lost_ends_the_key_on_all_ranks(
    faulty: FaultyRun, pytester: pytest.Pytester
) -> None:
    sticky = """
from pytest_ep.ranks.group import Ranks

FAULTS["before-dispatch"] = lambda: setattr(Ranks, "synchronize", broken)

def broken(ranks):
    raise RuntimeError("CUDA error: unspecified launch failure")
"""
    pytester.path.joinpath("test_faulty.py").write_text(MODULE + sticky)

    outcome = faulty("before-dispatch@1:2")

    assert outcome.code == 1
    assert (outcome.timed, outcome.failed()) == ([1], [2, 4, 8, 16])
    assert re.search(r"not run: a device's context is lost since .*T00002\]", outcome.said)


def test_rank_0s_selection_and_order_are_everyones(torchrun: Torchrun, pytester: pytest.Pytester) -> None:
    pytester.path.joinpath("test_faulty.py").write_text(MODULE)
    pytester.makeconftest(
        """
        import os, random

        def pytest_collection_modifyitems(items):
            random.Random(os.environ["RANK"]).shuffle(items)
            if os.environ["RANK"] == "1":
                del items[::2]
        """
    )
    arguments = (
        "-q",
        f"--ep-shape={SHAPE}",
        "--ep-tokens=1..16",
        "--ep-size=2",
        "--ep-iterations=3",
        "-k=bf16",
    )
    # One for each, as on hosts that share no folder.
    cache = ("-p", "cacheprovider", "-o", f"cache_dir={pytester.path / 'cache$RANK'}")
    env = {"PYTHONPATH": str(ROOT), "PYTEST_EP_FAULT": "before-dispatch@1:4"}

    first = torchrun(2, *arguments, *cache, env=env)
    assert (first.parseoutcomes()["failed"], first.parseoutcomes()["passed"]) == (1, 4 + len(PROBE_NAMES))
    again = torchrun(2, *arguments, *cache, "--lf", env={**env, "PYTEST_EP_FAULT": ""})

    assert again.ret == 0
    assert again.parseoutcomes()["passed"] == 1
    stopped = torchrun(2, *arguments, *cache, "-x", env=env)
    assert stopped.parseoutcomes()["failed"] == 1
