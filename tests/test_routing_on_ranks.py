"""Four real ranks with recorded, masked and skewed routing; every kind and skew passes the oracle there."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pytest_ep.matrix.skew import TokenSkew
from tests import routed_suites
from tests.launching import Torchrun

RANKS, EXPERTS, CHOICES, HIDDEN = 4, 16, 4, 64
LINEAR = {tokens: TokenSkew("linear").split(tokens, RANKS) for tokens in routed_suites.TOKENS}


def recording() -> npt.NDArray[np.int64]:
    """More tokens than are needed, a fifth of their choices masked; some tokens have none."""
    draw = np.random.default_rng(1)
    ids = np.stack([draw.permutation(EXPERTS)[:CHOICES] for _ in range(300)])
    ids[draw.random(ids.shape) < 0.2] = -1
    ids[[3, 9, *range(20, 40), 255]] = -1
    return ids


@dataclass(frozen=True)
class Launch:
    folder: Path
    result: pytest.RunResult
    file: dict[str, Any]

    def rows(self, backend: str) -> list[dict[str, Any]]:
        return [row for row in self.file["benchmarks"] if row["params"]["backend"] == backend]

    def of(self, outcome: str, backend: str) -> list[dict[str, Any]]:
        suite = "::Test" + "".join(part.capitalize() for part in backend.split("_")) + "::"
        return [entry for entry in self.file["pytest_ep"][outcome] if suite in entry["case"]]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    folder = tmp_path_factory.mktemp("routed")
    shutil.copy(routed_suites.__file__, folder / "test_routed.py")
    np.savez(folder / "rec.npz", logits=np.zeros(3), topk_ids=recording().astype(np.int32))
    result = Torchrun(folder)(
        RANKS,
        f"--ep-shape=hidden={HIDDEN},experts={EXPERTS},top_k={CHOICES}",
        "--ep-routing=rec.npz",
        "--ep-token-skew=linear",
        f"--ep-tokens={','.join(map(str, routed_suites.TOKENS))}",
        f"--ep-size={RANKS}",
        "--ep-precision=bf16",
        "--ep-iterations=6",
        "--ep-exact",
        "-v",
        "-Werror",
        "-k",
        "test_case",
        "--benchmark-json=result.json",
    )
    assert (folder / "result.json").exists(), f"{result.stdout}{result.stderr}"
    return Launch(folder, result, json.loads((folder / "result.json").read_text()))


def test_every_kind_and_skew_passes_the_oracle_and_the_timed_check_on_every_rank(launch: Launch) -> None:
    expected = [
        f"{kind} {skew.name} {tokens}"
        for kind in routed_suites.KINDS
        for skew in routed_suites.SKEWS
        for tokens in routed_suites.TOKENS
    ]
    for rank in range(RANKS):
        lines = (launch.folder / f"passed-{rank}.txt").read_text().splitlines()
        assert [line.rpartition(" ")[0] for line in lines] == expected
        linear = [line.split()[3] for line in lines if line.split()[1] == "linear"][: len(LINEAR)]
        assert linear == [str(shares[rank]) for shares in LINEAR.values()]
    assert LINEAR[64] == (0, 43, 85, 128)


def test_rows_carry_routing_skew_and_the_counts_of_what_was_not_masked(launch: Launch) -> None:
    rows = launch.rows("thorough")
    assert len(rows) == 3 * len(LINEAR)
    for row in rows:
        tokens, extra = row["params"]["tokens"], row["extra_info"]
        name = (
            f"h{HIDDEN}e{EXPERTS}k{CHOICES}-file_rec-T{tokens:05d}-skew_linear-{row['params']['component']}"
        )
        assert row["name"] == f"test_case[cpu-ep04-normal-bf16-{name}]"
        assert " file_rec skew_linear host " in row["group"]
        assert (row["params"]["routing"], row["params"]["token_skew"]) == ("file_rec", "linear")
        assert (extra["max_tokens"], extra["bit_exact"], extra["error"]) == (128, 1.0, 0.0)
        ids = recording()[: RANKS * tokens]
        reached = np.stack([(ids // (EXPERTS // RANKS) == rank).any(axis=1) for rank in range(RANKS)], axis=1)
        source = np.repeat(np.arange(RANKS), LINEAR[tokens])
        assert extra["copies"] == reached.sum()
        assert extra["fan_out_mean"] == reached.sum() / reached.any(axis=1).sum()
        assert extra["local_fraction"] == reached[np.arange(len(ids)), source].sum() / reached.sum()
        if row["params"]["component"] == "dispatch":
            others = [
                int(reached[source == rank].sum() - reached[source == rank, rank].sum())
                for rank in range(RANKS)
            ]
            assert extra["bytes"] == max(others) * HIDDEN * 2
            assert others[0] == 0


def test_the_summary_shows_what_the_ranks_were_given(launch: Launch) -> None:
    launch.result.stdout.fnmatch_lines(
        [
            "*thorough  cpu EP4  normal bf16 *  file_rec  skew linear*",
            "at T=64: busiest expert * x mean, 0 idle; busiest rank * x; fan-out 2.*",
        ]
    )


def test_what_a_transport_cannot_do_is_skipped_with_its_own_reason(launch: Launch) -> None:
    (even,), (unmasked,) = launch.of("skipped", "even"), launch.of("skipped", "unmasked")
    assert (even["code"], even["reason"]) == (
        "unequal-tokens",
        "even normal needs as many tokens on each rank: drop --ep-token-skew",
    )
    assert even["case"].endswith("-file_rec-Tany-skew_linear]")
    assert unmasked["code"] == "masked-ids"
    assert "masked choices (id -1), which rec.npz has" in unmasked["reason"]


def test_a_masked_choice_that_is_sent_to_rank_0_is_found(launch: Launch) -> None:
    failed = launch.of("failed", "masked_to_rank_0")
    assert len(failed) == len(LINEAR)
    assert all("source_set" in entry["code"].split(",") for entry in failed)
    assert not launch.rows("masked_to_rank_0")


def test_a_masked_token_that_does_not_combine_to_zero_is_found(launch: Launch) -> None:
    failed = launch.of("failed", "masked_not_zero")
    assert len(failed) == len(LINEAR)
    assert {entry["code"] for entry in failed} == {"combine_values,bit_exact"}
    assert all("got 1, expected 0" in entry["reason"] for entry in failed)


def test_nothing_else_was_run(launch: Launch) -> None:
    launch.result.assert_outcomes(passed=3, failed=6, skipped=2, deselected=9 * 3)
