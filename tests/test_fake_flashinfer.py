"""The stand-in for flashinfer has the limits, phases, sums and refusals of the wheels: on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAKES = ROOT / "tests" / "fakes"
CHECKS = (
    "each_token_arrives_once_per_rank_in_an_order_of_its_own",
    "padding_ids_pass_for_experts_unless_sanitised",
    "combine_sums_what_each_rank_staged",
    "what_is_staged_stays_valid_for_the_next_dispatch",
    "each_generation_adds_in_its_own_precision",
    "release_candidates_fall_on_the_side_that_the_wheels_show",
    "signatures_differ_as_in_the_wheels",
    "the_workspace_is_as_large_as_the_wheel_says",
    "pairs_are_strict",
    "the_phase_flips_before_sanitising",
    "limits_are_those_of_the_release",
    "the_last_release_refuses_before_it_builds",
    "a_row_that_does_not_fit_its_plane_is_a_misaligned_store",
    "workspaces_are_cached_counted_and_freed",
    "one_rank_builds_and_the_log_says_which",
    "switches_that_fail_construction_say_what_the_wheel_says",
    "a_refusal_on_one_rank_leaves_the_other_constructed",
    "dispatching_into_an_unmapped_peer_loses_the_context",
    "switches_that_spoil_results_do",
    "switches_that_never_return_wait_where_they_say",
    "the_process_is_killed_inside_dispatch",
    "the_accumulator_can_contradict_the_version",
    "prebuilt_packages_must_fit_the_release",
    "a_launch_failure_stays",
    "switches_that_cannot_happen_are_refused",
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each check said on two ranks, from one launch; "" where it held."""
    folder = tmp_path_factory.mktemp("fake")
    environment = {**os.environ, "PYTHONPATH": str(FAKES), "CHECKS_BASE": str(folder)}
    command = [sys.executable, "-m", "tests.fakes.flashinfer_checks"]
    tails = [str(folder / "store"), str(folder / "results")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *tails],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output = "".join(rank.communicate(timeout=120)[0] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], output
    found: dict[str, str] = json.loads((folder / "results.0").read_text())
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(outcome: dict[str, str], name: str) -> None:
    assert outcome[name] == "", outcome[name]


def test_no_check_goes_unread(outcome: dict[str, str]) -> None:
    assert set(outcome) == set(CHECKS)
