"""A failure names its cause on real ranks too: the whole table of faults, one launch for each EP size."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.diagnosed import DOMAIN
from tests.faults.diagnosed import LADDER
from tests.faults.diagnosed import SHAPE
from tests.faults.diagnosed import SHAPE_TEXT
from tests.faults.launch import ROOT
from tests.faults.wrong_combines import COMBINE_FAULTS
from tests.faults.wrong_dispatches import DISPATCH_FAULTS
from tests.launching import Torchrun

FAULTS = {fault.name: fault for fault in (*COMBINE_FAULTS, *DISPATCH_FAULTS)}
PLATFORMS = f"[sku.cpu]\nscale_up_domain = {DOMAIN}\n"
Case = tuple[str, int]
"""A fault and T."""


@dataclass(frozen=True)
class Outcome:
    """What one launch said."""

    ep_size: int
    failed: dict[Case, dict[str, Any]]
    passed: set[Case]
    printed: str


EP_SIZES = [2, 4] if "PYTEST_EP_WHOLE_TABLE" in os.environ else [4]
"""Both under ./ci/soak diagnosed; in CI two ranks are threads, in test_diagnosis."""


@pytest.fixture(scope="module", params=EP_SIZES, ids=lambda size: f"ep{size}")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    ep_size: int = request.param
    folder = tmp_path_factory.mktemp(f"ep{ep_size}")
    (folder / "test_faulty.py").write_text("from tests.faults.diagnosed_suites import *\n")
    (folder / "platforms.toml").write_text(PLATFORMS)
    result = Torchrun(folder)(
        ep_size,
        "-q",
        f"--ep-size={ep_size}",
        f"--ep-tokens={','.join(map(str, LADDER))}",
        "--ep-iterations=3",
        "--ep-exact",
        "--ep-platforms=platforms.toml",
        f"--ep-shape={SHAPE_TEXT}",
        "-k",
        f"test_case and {SHAPE.name} and bf16",
        "--benchmark-json=results.json",
        env={"PYTHONPATH": str(ROOT)},
        limit=300,
    )
    assert result.ret == 1, result.stderr.str()
    results = json.loads((folder / "results.json").read_text())
    failed = {_case(entry["case"]): entry for entry in results["pytest_ep"]["failed"]}
    passed = {(row["params"]["backend"], row["params"]["tokens"]) for row in results["benchmarks"]}
    return Outcome(ep_size, failed, passed, result.stdout.str())


def _case(nodeid: str) -> Case:
    found = re.search(r"::Test_(\w+)::test_case\[.*-T(\d{5})\]", nodeid)
    assert found, nodeid
    return found[1], int(found[2])


def test_all_fail_wherever_the_fault_changes_an_observable(outcome: Outcome) -> None:
    unseen = {
        (name, tokens)
        for name, fault in FAULTS.items()
        for tokens in LADDER
        if fault.unseen(outcome.ep_size, tokens)
    }
    assert outcome.passed == unseen
    assert set(outcome.failed) == {(name, tokens) for name in FAULTS for tokens in LADDER} - unseen


@pytest.mark.parametrize("name", FAULTS)
def test_the_check_and_the_fault_are_named(outcome: Outcome, name: str) -> None:
    for tokens in LADDER:
        if (entry := outcome.failed.get((name, tokens))) is None:
            continue
        assert FAULTS[name].checks in entry["code"].split(",")
        sentence = entry["evidence"]["sentence"]
        assert re.search(FAULTS[name].says, sentence), entry["diagnosis"]
        assert entry["diagnosis"].startswith(f"{sentence}\n")
        assert not entry["evidence"]["notes"]


def test_a_terminal_reads_the_sentence_then_the_verdict_then_the_lines(outcome: Outcome) -> None:
    entry = outcome.failed["rank_missing", 8]
    sentence, *lines = entry["diagnosis"].splitlines()
    assert 10 <= len(lines) <= 20
    assert "\n".join([sentence, entry["reason"], *lines]) in outcome.printed


def test_the_last_line_is_the_command_that_repeats_the_case(outcome: Outcome) -> None:
    last = outcome.failed["rank_missing", 64]["diagnosis"].splitlines()[-1]
    size = outcome.ep_size
    case = f"cpu-ep{size:02d}-normal-bf16-{SHAPE.name}-uniform-T00064"
    assert last == (
        f"  repeat: torchrun --nproc-per-node={size} -m pytest test_faulty.py::Test_rank_missing -k {case}"
        f" --ep-size={size} --ep-tokens=1,8,64 --ep-iterations=3 --ep-exact --ep-platforms=platforms.toml"
        f" --ep-shape={SHAPE_TEXT}"
    )
