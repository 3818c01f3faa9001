"""Ranks share one fate: each fault class once, on real ranks. ci/soak faults has the whole table."""

from __future__ import annotations

import json
import re
import socket
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.launching import Torchrun
from tests.launching import python

ROOT = Path(__file__).parents[1]
RANK_TIMEOUT = 6
MODULE = """
from tests.faulty.fate import *

class TestFaulty(FaultySuite):
    pass
"""
SHAPE = "hidden=64,experts=16,top_k=4"
EVERY_T = [1, 2, 4, 8, 16]


class Outcome:
    """What a faulty run left."""

    def __init__(self, folder: Path, result: pytest.RunResult) -> None:
        self.said = "\n".join(result.outlines)
        self.stderr = "\n".join(result.errlines)
        self.code = result.ret
        self.seconds = result.duration
        path = folder / "out.json"
        self.json = json.loads(path.read_text()) if path.exists() else {}
        junit = folder / "junit.xml"
        self.junit_failures = len(ET.parse(junit).findall(".//failure")) if junit.exists() else -1

    @property
    def timed(self) -> list[int]:
        """T of each timed case, in order."""
        return sorted({row["params"]["tokens"] for row in self.json["benchmarks"]})

    def failed(self) -> list[int]:
        """T of each failed case, in order."""
        return [tokens(one["case"]) for one in self.json["pytest_ep"]["failed"]]


def tokens(case: str) -> int:
    """T of a node id; 0 of one that is no case."""
    found = re.search(r"T(\d{5})\]", case)
    return int(found[1]) if found else 0


@pytest.fixture
def faulty(torchrun: Torchrun, pytester: pytest.Pytester) -> object:
    """Run two ranks with faults and return the outcome."""
    pytester.path.joinpath("test_faulty.py").write_text(MODULE)

    def run(faults: str, *arguments: str, ranks: int = 2) -> Outcome:
        result = torchrun(
            ranks,
            "-q",
            f"--ep-shape={SHAPE}",
            "--ep-tokens=1..16",
            f"--ep-size={ranks}",
            "--ep-iterations=3",
            f"--ep-rank-timeout={RANK_TIMEOUT}",
            "--benchmark-json=out.json",
            "--junit-xml=junit.xml",
            "-k=bf16 or here",
            *arguments,
            "test_faulty.py",
            env={"PYTHONPATH": str(ROOT), "PYTEST_EP_FAULT": faults},
        )
        return Outcome(pytester.path, result)

    return run


def test_a_failed_case_is_everyones_and_the_next_case_runs_as_if_alone(faulty) -> None:  # type: ignore[no-untyped-def]
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


def test_setup_teardown_and_a_lone_skip_are_everyones_too(faulty) -> None:  # type: ignore[no-untyped-def]
    outcome = faulty("skips-alone@1:2,in-oracle@0+1:4,in-teardown@1:8")

    assert outcome.code == 1
    assert outcome.failed() == [2, 4, 8]
    assert outcome.timed == [1, 16]
    assert re.search(
        r"the ranks disagree on setup of .*T00002\]: rank 0 passed, rank 1 skipped", outcome.said
    )
    assert "rank 1 failed in teardown" in outcome.said


def test_a_construction_that_fails_on_one_rank_ends_the_key_at_once(faulty) -> None:  # type: ignore[no-untyped-def]
    outcome = faulty("in-setup@1")

    assert outcome.code == 1
    assert outcome.failed() == EVERY_T
    assert "rank 1 failed in construction" in outcome.said
    assert re.search(r"not run: no transport since .*T00001\]", outcome.said)


@pytest.mark.parametrize("fault", ["exits", "segfault"])
def test_a_rank_that_dies_ends_the_run_and_loses_no_finished_case(faulty, fault: str) -> None:  # type: ignore[no-untyped-def]
    outcome = faulty(f"{fault}@1")

    assert outcome.code == 1
    assert outcome.seconds < 15 + 10
    assert (outcome.timed, outcome.failed()) == ([1, 2], [4])
    assert "rank 1 is gone" in outcome.said
    assert outcome.junit_failures == 1
    assert [tokens(one["case"]) for one in outcome.json["pytest_ep"]["not_run"]] == [8, 16]


def test_when_rank_0_is_killed_the_lowest_survivor_reports(faulty, pytester: pytest.Pytester) -> None:  # type: ignore[no-untyped-def]
    outcome = faulty("killed@0")

    assert outcome.code == 1
    assert (outcome.timed, outcome.failed()) == ([1, 2], [4])
    assert "rank 0 is gone" in outcome.said
    assert "expert parallelism" in outcome.said
    journal = [json.loads(line) for line in pytester.path.joinpath("out.json.jsonl").read_text().splitlines()]
    assert [tokens(line["case"]) for line in journal[1:]] == [1, 2]


def test_what_all_ranks_lose_is_recovered_from_the_journal_and_resumed(  # type: ignore[no-untyped-def]
    faulty, pytester: pytest.Pytester
) -> None:
    assert faulty("killed@0+1:8").json == {}
    recover = pytester.run("pytest-ep", "recover", "out.json.jsonl", "-o", "recovered.json")
    assert recover.ret == 0
    recovered = json.loads(pytester.path.joinpath("recovered.json").read_text())
    assert sorted({row["params"]["tokens"] for row in recovered["benchmarks"]}) == [1, 2, 4]
    assert [tokens(one["case"]) for one in recovered["pytest_ep"]["not_run"]] == [8, 16]
    assert pytester.run("pytest-ep", "recover", "out.json.jsonl", "-o", "recovered.json").ret == 2

    refused = faulty("")
    assert refused.code == 1
    assert "out.json.jsonl holds an unfinished run" in refused.stderr
    pytester.path.joinpath("out.json.jsonl").rename(pytester.path / "first.jsonl")
    resumed = faulty("before-dispatch@1:2", "--ep-resume=first.jsonl")
    assert resumed.code == 0, resumed.said
    assert resumed.timed == EVERY_T
    assert "2 passed" not in resumed.said
    assert "3 skipped" in resumed.said
    earlier = [row["stats"]["data"] for row in recovered["benchmarks"]]
    assert [row["stats"]["data"] for row in resumed.json["benchmarks"]][: len(earlier)] == earlier
    again = faulty("")
    assert "out.json exists and is not overwritten" in again.stderr


@pytest.mark.parametrize("fault", ["spins", "native-wait"])
def test_a_rank_that_stops_for_ever_is_named_with_its_stack(faulty, fault: str) -> None:  # type: ignore[no-untyped-def]
    outcome = faulty(f"{fault}@1")

    assert outcome.code == 1
    assert outcome.seconds < RANK_TIMEOUT + 10 + 10
    assert (outcome.timed, outcome.failed()) == ([1, 2], [4])
    assert "rank 1 stopped in 'oracle before timing', others wait for it" in outcome.said
    assert "in strike" in outcome.said


def test_a_rank_stuck_with_the_interpreter_locked_is_named_with_its_dumped_stack(faulty) -> None:  # type: ignore[no-untyped-def]
    outcome = faulty("holds-the-gil@1")

    assert outcome.code == 1
    assert outcome.seconds < RANK_TIMEOUT + 10 + 10
    assert (outcome.timed, outcome.failed()) == ([1, 2], [4])
    assert re.search(
        r"rank 1 is gone \(killed, crashed, exited, or stuck holding the interpreter\)", outcome.said
    )
    assert "in strike" in outcome.said


def test_a_rank_that_is_late_but_alive_is_waited_for(faulty, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("PYTEST_EP_FAULT_SLEEP", "2")

    outcome = faulty("sleeps@1:16")

    assert outcome.code == 0, outcome.said
    assert outcome.timed == EVERY_T


def test_a_case_may_not_take_longer_than_its_limit(faulty, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("PYTEST_EP_FAULT_SLEEP", "1.5")

    outcome = faulty("sleeps@1:4", "--ep-case-timeout=4")

    assert outcome.code == 1
    assert (outcome.timed, outcome.failed()) == ([1, 2], [4])
    assert "the case takes more than 4 s (--ep-case-timeout)" in outcome.said


def test_ranks_that_collect_differently_stop_and_name_the_difference(faulty) -> None:  # type: ignore[no-untyped-def]
    outcome = faulty("collects-differently@1")

    assert outcome.code == 1
    assert (
        "the ranks collected different cases: only rank 1 has test_faulty.py::test_only_here"
        in outcome.stderr
    )
    assert outcome.json == {}


def test_a_module_that_fails_to_import_on_one_rank_stops_all_with_its_text(faulty) -> None:  # type: ignore[no-untyped-def]
    outcome = faulty("fails-to-import@1")

    assert outcome.code == 1
    assert "rank 1 failed to collect: E   tests.faulty.fate.InjectedError" in outcome.said


def test_a_conftest_that_fails_to_import_on_one_rank_stops_all_with_its_text(  # type: ignore[no-untyped-def]
    faulty, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest("import os\nif os.environ['RANK'] == '1':\n    raise RuntimeError('only here')\n")

    outcome = faulty("")

    assert outcome.code == 1
    assert "rank 1 failed to import a conftest" in outcome.said
    assert "RuntimeError: only here" in outcome.said


def test_ctrl_c_and_pytest_exit_on_one_rank_stop_all_after_the_same_case(  # type: ignore[no-untyped-def]
    faulty, pytester: pytest.Pytester
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
    assert re.search(r"the ranks lost step: .*rank 1 is at leaving the session: injected", left.said)


def test_a_session_budget_stops_before_the_case_that_would_not_fit(  # type: ignore[no-untyped-def]
    faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_EP_FAULT_SLEEP", "0.3")

    outcome = faulty("sleeps@1:2", "--ep-session-budget=5s")

    assert outcome.code == 1
    assert outcome.timed == [1, 2]
    assert "--ep-session-budget: 5 s would not hold another case" in outcome.said
    assert {one["reason"][:19] for one in outcome.json["pytest_ep"]["not_run"]} == {"--ep-session-budget"}


def test_a_device_whose_context_is_lost_ends_the_key_on_all_ranks(  # type: ignore[no-untyped-def]
    faulty, pytester: pytest.Pytester
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
    cache = ("-p", "cacheprovider", "-o", f"cache_dir={pytester.path / 'cache'}")
    env = {"PYTHONPATH": str(ROOT), "PYTEST_EP_FAULT": "before-dispatch@1:4"}

    first = torchrun(2, *arguments, *cache, env=env)
    assert first.parseoutcomes() == {"failed": 1, "passed": 4, "deselected": 2}
    again = torchrun(2, *arguments, *cache, "--lf", env={**env, "PYTEST_EP_FAULT": ""})

    assert again.ret == 0
    assert again.parseoutcomes()["passed"] == 1
    stopped = torchrun(2, *arguments, *cache, "-x", env=env)
    assert stopped.parseoutcomes()["failed"] == 1


AGENTS = """
import json, os, pathlib, signal, subprocess, sys, time
from tests.launching import _descendants

port, victim, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-id=two",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
agents = []
for _ in range(2):
    agents.append(subprocess.Popen(line + arguments, start_new_session=True))
    time.sleep(0.5)  # the first agent hosts the store, and its ranks are 0 and 1
if victim >= 0:
    journal = pathlib.Path("out.json.jsonl")
    while not (journal.exists() and journal.read_text().count("timed")):
        time.sleep(0.1)
    for pid in (agents[victim].pid, *_descendants(agents[victim].pid)):
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    agents[1 - victim].wait(60)
    print(f"ended after {time.monotonic() - began:.0f} s")
print("codes", [agent.wait(60) for agent in agents])
"""


@pytest.mark.parametrize("victim", [-1, 0, 1])
def test_two_agents_run_one_ladder_and_neither_outlives_the_other_for_long(
    pytester: pytest.Pytester, victim: int
) -> None:
    pytester.path.joinpath("agents.py").write_text(AGENTS)
    pytester.path.joinpath("test_faulty.py").write_text(MODULE)
    iterations = 3 if victim < 0 else 3000
    arguments = [f"--ep-shape={SHAPE}", "--ep-tokens=1..64", "--ep-size=4", f"--ep-iterations={iterations}"]
    arguments += [
        f"--ep-rank-timeout={RANK_TIMEOUT}",
        "--benchmark-json=out.json",
        "-k=bf16",
        "test_faulty.py",
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    result = python(pytester.path, "agents.py", port, str(victim), *arguments, env={"PYTHONPATH": str(ROOT)})

    said = "\n".join(result.outlines)
    if victim < 0:
        assert "codes [0, 0]" in said
        return
    ended = re.search(r"ended after (\d+) s", said)
    assert ended
    assert int(ended[1]) < RANK_TIMEOUT + 10 + 5
    kept = pytester.path.joinpath("out.json.jsonl" if victim == 0 else "out.json").read_text()
    assert "T00001" in kept
