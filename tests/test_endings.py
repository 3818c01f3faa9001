"""Ranks share one fate: each fault class that ends a run, once. ci/soak faults has the whole table."""

from __future__ import annotations

import json
import re
import socket

import pytest

from tests.faults.launch import EVERY_T
from tests.faults.launch import MODULE
from tests.faults.launch import RANK_TIMEOUT
from tests.faults.launch import ROOT
from tests.faults.launch import SHAPE
from tests.faults.launch import FaultyRun
from tests.faults.launch import tokens
from tests.launching import python


@pytest.mark.parametrize("fault", ["prints-and-exits", "dies-in-teardown"])
def test_a_rank_that_dies_ends_the_run_and_loses_no_finished_case(faulty: FaultyRun, fault: str) -> None:
    outcome = faulty(f"{fault}@1")

    assert outcome.code == 1
    assert outcome.seconds < 15 + 10
    assert (outcome.timed, outcome.failed()) == ([1, 2], [4])
    assert "rank 1 is gone" in outcome.said
    step = "oracle before timing" if fault == "prints-and-exits" else "recording"
    assert re.search(rf"rank 1 last seen in '{step}' of .*T00004\]", outcome.said)
    if fault == "prints-and-exits":
        assert "rank 1 printed:\n    last words" in outcome.said
    assert outcome.junit_failures == 1
    assert [tokens(one["case"]) for one in outcome.json["pytest_ep"]["not_run"]] == [8, 16]


def test_when_rank_0_is_killed_the_lowest_survivor_reports(
    faulty: FaultyRun, pytester: pytest.Pytester
) -> None:
    outcome = faulty("killed@0")

    assert outcome.code == 1
    assert (outcome.timed, outcome.failed()) == ([1, 2], [4])
    assert "rank 0 is gone" in outcome.said
    assert "expert parallelism" in outcome.said
    journal = [json.loads(line) for line in pytester.path.joinpath("out.json.jsonl").read_text().splitlines()]
    assert [tokens(line["case"]) for line in journal[1:]] == [1, 2]


def test_what_all_ranks_lose_is_recovered_from_the_journal_and_resumed(
    faulty: FaultyRun, pytester: pytest.Pytester
) -> None:
    assert faulty("killed@0+1:8").json == {}
    command = ("-c", "import sys; from pytest_ep.results.cli import main; sys.exit(main())", "recover")
    recover = python(pytester.path, *command, "out.json.jsonl", "-o", "recovered.json")
    assert recover.ret == 0
    recovered = json.loads(pytester.path.joinpath("recovered.json").read_text())
    assert sorted({row["params"]["tokens"] for row in recovered["benchmarks"]}) == [1, 2, 4]
    assert [tokens(one["case"]) for one in recovered["pytest_ep"]["not_run"]] == [8, 16]
    assert python(pytester.path, *command, "out.json.jsonl", "-o", "recovered.json").ret == 2

    refused = faulty("")
    assert refused.code == 1
    assert "out.json.jsonl holds an unfinished run" in refused.stderr
    pytester.path.joinpath("out.json.jsonl").rename(pytester.path / "first.jsonl")
    resumed = faulty("before-dispatch@1:2", "--ep-resume=first.jsonl")
    assert resumed.code == 0, resumed.said
    assert resumed.timed == EVERY_T
    assert "3 skipped" in resumed.said
    earlier = [row["stats"]["data"] for row in recovered["benchmarks"]]
    assert [row["stats"]["data"] for row in resumed.json["benchmarks"]][: len(earlier)] == earlier
    again = faulty("")
    assert "out.json exists and is not overwritten" in again.stderr


@pytest.mark.parametrize("fault", ["spins", "native-wait"])
def test_a_rank_that_stops_for_ever_is_named_with_its_stack(faulty: FaultyRun, fault: str) -> None:
    outcome = faulty(f"{fault}@1")

    assert outcome.code == 1
    assert outcome.seconds < RANK_TIMEOUT + 10 + 10
    assert (outcome.timed, outcome.failed()) == ([1, 2], [4])
    assert "rank 1 stopped in 'oracle before timing', others wait for it" in outcome.said
    assert "in strike" in outcome.said


def test_a_rank_stuck_with_the_interpreter_locked_ends_with_its_stack(faulty: FaultyRun) -> None:
    outcome = faulty("holds-the-gil@1")

    assert outcome.code == 1
    assert outcome.seconds < RANK_TIMEOUT + 10 + 10
    assert (outcome.timed, outcome.failed()) == ([1, 2], [4])
    assert "rank 1 is gone (killed, crashed, exited, or stuck holding the interpreter)" in outcome.said
    assert "in strike" in outcome.stderr


def test_ranks_that_are_all_stuck_so_end_too(faulty: FaultyRun, pytester: pytest.Pytester) -> None:
    outcome = faulty("holds-the-gil@0+1")

    assert outcome.code == 1
    assert outcome.seconds < RANK_TIMEOUT + 10 + 10
    assert "in strike" in outcome.stderr
    # The first that ends lets torchrun wake another, which may still report: then the result file is whole.
    kept = [path for path in (pytester.path / "out.json.jsonl", pytester.path / "out.json") if path.exists()]
    assert any("T00002" in path.read_text() for path in kept)


def test_a_case_may_not_take_longer_than_its_limit(
    faulty: FaultyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_EP_FAULT_SLEEP", "1.5")

    outcome = faulty("sleeps@1:4", "--ep-case-timeout=4")

    assert outcome.code == 1
    assert (outcome.timed, outcome.failed()) == ([1, 2], [4])
    assert "the case takes more than 4 s (--ep-case-timeout)" in outcome.said


AGENTS = """
import json, os, pathlib, signal, subprocess, sys, time
from tests.launching import _descendants

port, victim, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-id=two"]
line += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "-m", "pytest", "-q"]
line += ["-p", "no:cacheprovider"]
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
    iterations = 3 if victim < 0 else 300
    arguments = [f"--ep-shape={SHAPE}", "--ep-tokens=1..64", "--ep-size=4", f"--ep-iterations={iterations}"]
    arguments += [
        f"--ep-rank-timeout={RANK_TIMEOUT}",
        "--benchmark-json=out.json",
        "-k=bf16 and not test_probe",
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
    assert "T00001" in pytester.path.joinpath("out.json").read_text()
    if victim == 0:
        assert "the rendezvous store is gone" in said
        assert re.search(r"rank 2 was in .* s after its last step", said)
        assert not re.search(r"rank 3 was in", said), "one rank of a host reports"


FINISH = """
import time
import pytest

@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    open("finishing", "w").close()
    time.sleep({seconds})
"""
TERMINATE = """
import os, signal, subprocess, sys, time
started = subprocess.Popen([sys.executable, *sys.argv[1:]])
while not os.path.exists("finishing"):
    time.sleep(0.05)
started.send_signal(signal.SIGTERM)
sys.exit(started.wait())
"""


@pytest.mark.parametrize("seconds", [0.5, 30])
def test_a_run_that_is_told_to_end_as_it_ends_blames_no_case_and_keeps_all(
    pytester: pytest.Pytester, seconds: float
) -> None:
    pytester.makeconftest(FINISH.format(seconds=seconds))
    pytester.makepyfile(terminate=TERMINATE, test_faulty=MODULE)
    options = (f"--ep-shape={SHAPE}", "--ep-tokens=1,2", "--ep-iterations=3", "--ep-size=1", "-k=test_case")
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "--benchmark-json=out.json")
    result = python(pytester.path, "terminate.py", *command, env={"PYTHONPATH": str(ROOT)})

    assert result.ret == 1
    assert result.duration < 20
    file = json.loads((pytester.path / "out.json").read_text())
    assert {row["params"]["tokens"] for row in file["benchmarks"]} == {1, 2}
    assert file["pytest_ep"]["failed"] == []
    assert "FAILED" not in result.stdout.str()
    said = "pytest_ep: this job was told to end (SIGTERM), while results were written"
    assert said + ": what they lack is in the journal" * (seconds > 5) in result.errlines


def test_the_reporter_may_take_longer_to_write_than_a_rank_may_be_silent(
    faulty: FaultyRun, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(FINISH.format(seconds=8))
    outcome = faulty("", "-k=test_case and T00001")
    assert (outcome.code, outcome.timed, outcome.failed()) == (0, [1], [])
