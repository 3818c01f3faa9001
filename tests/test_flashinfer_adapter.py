"""The FlashInfer adapter on the stand-in for five releases: what passes, and what each fault gives."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import flashinfer_site
from tests.fakes import flashinfer_suites
from tests.fakes.flashinfer_suites import DEVELOPMENT
from tests.fakes.flashinfer_suites import EIGHT
from tests.fakes.flashinfer_suites import FP32
from tests.fakes.flashinfer_suites import LAST
from tests.fakes.flashinfer_suites import OLD
from tests.fakes.flashinfer_suites import RELEASES
from tests.fakes.flashinfer_suites import SEVEN
from tests.fakes.flashinfer_suites import SIXTEEN
from tests.fakes.flashinfer_suites import TREE
from tests.fakes.flashinfer_suites import spelled
from tests.launching import Torchrun

ROOT = Path(__file__).resolve().parents[1]
TOKENS = (1, 3, 8, 64)

REFUSED = {
    "ptrace_refused": ("needs-ptrace", "--cap-add=SYS_PTRACE"),
    "ptrace_refused_on_one": ("needs-ptrace", "--cap-add=SYS_PTRACE"),
    "ptrace_refused_after_peer": ("needs-ptrace", "--cap-add=SYS_PTRACE"),
    "imex_refused_on_one": ("needs-imex", "/dev/nvidia-caps-imex-channels/channel0"),
    "imex_refused_agreed": ("needs-imex", "/dev/nvidia-caps-imex-channels/channel0"),
    "descriptor_late_on_one": ("needs-shared-tmpdir", "TMPDIR"),
    "links_down_on_one": ("links-down", "not supported on EP ranks [1]"),
    "jit_disabled": ("kernels-not-built", "flashinfer-jit-cache"),
    "shadowed": ("flashinfer-mixed", f"flashinfer {EIGHT} is imported where {SIXTEEN} is installed"),
}
HARMLESS = ("no_bridge", "maps_late", "builds_slowly", "development")
WRONG = {
    "payload_lost_on_one": "receive: RuntimeError: dispatch returned planes",
    "payload_lost_on_one_last": "receive: RuntimeError: dispatch returned planes",
    "bare_tensor": "receive: RuntimeError: dispatch returned planes",
    "doubled": "combine_values: error 1.0e+00",
    "unreduced": "combine_values: combined bfloat16 [2, ",
}
NOT_CONSTRUCTED = {
    "group_too_large": "workspace first dim must equal ep_size",
    "build_fails": "Ninja build failed",
}
HEALTHY_AGAIN = {
    "sanitize_raises_on_one": "moe_a2a_sanitize_expert_ids launch failed",
    "combine_raises_on_one": "moe_a2a_combine launch failed",
    "combine_raises_on_one_last": "moe_a2a_combine launch failed",
}

Case = tuple[str, int]
"""Backend, tokens per rank."""


@dataclass(frozen=True)
class Launch:
    """One launch: its output, rows of the result file by case, failed and skipped cases with reasons."""

    folder: Path
    result: pytest.RunResult
    timed: dict[Case, dict[str, Any]]
    failed: dict[Case, str]
    skipped: dict[Case, tuple[str, str]]
    outcomes: dict[Case, str]

    def told(self, backend: str, rank: int) -> dict[str, Any]:
        """What the backend said of itself on a rank once it was constructed."""
        told: dict[str, Any] = json.loads((self.folder / f"{backend}-{rank}.json").read_text())
        return told


Launcher = Callable[..., Launch]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """Run the suites that ``chosen`` (of -k) names, at one EP size, with two samples a component."""

    def run(ep_size: int, chosen: str, tokens: tuple[int, ...], *more: str) -> Launch:
        folder = tmp_path_factory.mktemp("flashinfer")
        shutil.copy(flashinfer_suites.__file__, folder / "test_fakes.py")
        for release in (*RELEASES, DEVELOPMENT):
            flashinfer_site.install(folder / "sites" / release, release)
        result = Torchrun(folder)(
            ep_size,
            "-q",
            "-s",
            "--tb=no",
            "-rN",
            f"--ep-size={ep_size}",
            f"--ep-tokens={','.join(map(str, tokens))}",
            "--ep-shape=hidden=128,experts=32,top_k=8",
            "--ep-iterations=2",
            "-k",
            f"test_case and ({chosen})",
            "--benchmark-json=results.json",
            *more,
            env={"PYTHONPATH": f"{ROOT}:{flashinfer_site.FAKES}"},
        )
        assert (folder / "results.json").exists(), result.stderr.str()
        results = json.loads((folder / "results.json").read_text())
        section = results["pytest_ep"]
        return Launch(
            folder=folder,
            result=result,
            timed={
                (row["params"]["backend"], row["params"]["tokens"]): row["extra_info"]
                for row in results["benchmarks"]
                if row["params"]["component"] == "roundtrip"
            },
            failed={_case(entry["case"]): entry["reason"] for entry in section["failed"]},
            skipped={_case(entry["case"]): (entry["code"], entry["reason"]) for entry in section["skipped"]},
            outcomes={_case(entry["case"]): entry["outcome"] for entry in section["cases"]},
        )

    return run


def _case(nodeid: str) -> Case:
    found = re.search(r"::Test(\w+)::test_case\[.*-T(\d{5}|any)\]", nodeid)
    assert found, nodeid
    return found[1], 0 if found[2] == "any" else int(found[2])


@pytest.fixture(scope="module")
def at_four(launch: Launcher) -> Launch:
    return launch(4, "passes or forced or wrong_accumulator", TOKENS, "--ep-poison")


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_passes_bit_for_bit_and_with_unequal_tokens_and_open_pairs(
    at_four: Launch, release: str
) -> None:
    name = f"{spelled(release)}_passes"
    model = TREE if release in {OLD, EIGHT} else FP32
    for tokens in TOKENS:
        assert (name, tokens) not in at_four.failed, at_four.failed[name, tokens]
        row = at_four.timed[name, tokens]
        assert (row["error"], row["bit_exact"], row["reduction"]) == (0.0, 1.0, model)
    assert at_four.told(name, 3)["versions"] == {"flashinfer-python": release}


@pytest.mark.parametrize("name", ["forced_fp32", "forced_tree", "wrong_accumulator"])
def test_the_wrong_reduction_fails_at_every_number_of_tokens(at_four: Launch, name: str) -> None:
    for tokens in TOKENS:
        assert "combine_values: error 1." in at_four.failed[name, tokens]
        assert (name, tokens) not in at_four.timed


def test_uneven_experts_run_where_the_wheel_takes_them_and_are_skipped_elsewhere(launch: Launcher) -> None:
    at_three = launch(3, "uneven", (5,))
    assert not at_three.failed
    assert {name for name, _ in at_three.timed} == {f"{spelled(v)}_uneven" for v in (SIXTEEN, SEVEN)}
    assert all(row["bit_exact"] == 1.0 for row in at_three.timed.values())
    for release in (OLD, EIGHT, LAST):
        code, reason = at_three.skipped[f"{spelled(release)}_uneven", 0]
        assert code == "uneven-experts"
        assert f"flashinfer-python {release}" in reason
        assert "32 on 3 ranks" in reason


@pytest.fixture(scope="module")
def faulty(launch: Launcher) -> Launch:
    return launch(2, " or ".join(flashinfer_suites.FAULTS), (1, 8))


def test_every_fault_of_the_suites_is_judged_here() -> None:
    judged = {*REFUSED, *HARMLESS, *WRONG, *NOT_CONSTRUCTED, *HEALTHY_AGAIN, "device_lost"}
    assert judged == set(flashinfer_suites.FAULTS)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_on_any_rank_is_a_skip_that_says_what_to_grant(faulty: Launch, name: str) -> None:
    expected, words = REFUSED[name]
    for tokens in (1, 8):
        code, reason = faulty.skipped[name, tokens]
        assert code == expected
        assert words in reason
        assert "\n" not in reason


@pytest.mark.parametrize("name", HARMLESS)
def test_what_the_adapter_makes_up_for_does_not_show(faulty: Launch, name: str) -> None:
    for tokens in (1, 8):
        assert (name, tokens) not in faulty.failed, faulty.failed[name, tokens]
        assert faulty.timed[name, tokens]["bit_exact"] == 1.0


@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_fail_and_leave_no_rank_behind(faulty: Launch, name: str) -> None:
    for tokens in (1, 8):
        assert faulty.failed[name, tokens].startswith(WRONG[name])
        assert (name, tokens) not in faulty.timed


@pytest.mark.parametrize("name", NOT_CONSTRUCTED)
def test_a_fault_in_construction_fails_and_is_not_repeated(faulty: Launch, name: str) -> None:
    assert NOT_CONSTRUCTED[name] in faulty.failed[name, 1]
    assert "failed in construction" in faulty.failed[name, 1]
    assert "not run: no transport since" in faulty.failed[name, 8]


@pytest.mark.parametrize("name", HEALTHY_AGAIN)
def test_an_exception_on_one_rank_inside_a_pair_spares_the_next_case(faulty: Launch, name: str) -> None:
    assert "rank 1 failed in oracle before timing: " in faulty.failed[name, 1]
    assert HEALTHY_AGAIN[name] in faulty.failed[name, 1]
    assert faulty.timed[name, 8]["bit_exact"] == 1.0


def test_a_lost_device_fails_its_case_and_all_after_it(faulty: Launch) -> None:
    for tokens in (1, 8):
        assert "unspecified launch failure" in faulty.failed["device_lost", tokens]


def test_one_rank_builds_says_so_and_its_time_is_no_part_of_construction(faulty: Launch) -> None:
    built = faulty.folder / "caches/builds_slowly/.cache/flashinfer" / SIXTEEN / "90a/cached_ops/builds.log"
    assert built.read_text() == "mnnvl_moe_alltoall rank 0\n"
    said = [
        line for line in faulty.result.errlines if f"still building the FlashInfer {SIXTEEN} kernels" in line
    ]
    assert said
    assert re.search(r"\(mnnvl_moe_alltoall\) on \S+, for \d+ s$", said[0])
    facts = [faulty.told("builds_slowly", rank)["facts"] for rank in range(2)]
    assert facts[0]["build_s"] == facts[1]["build_s"] >= 0.7
    assert facts[0]["first_pair_s"] == facts[1]["first_pair_s"] > 0
    for told in facts:
        assert told["first_pair_s"] <= told["construction_s"]
        assert told["device_memory_bytes"] == 0
    harmless = faulty.told("no_bridge", 1)["facts"]
    assert harmless["build_s"] < 0.7


def test_a_development_build_is_said_to_be_a_guess(faulty: Launch) -> None:
    said = [line for line in faulty.result.errlines if "is a development build" in line]
    assert said == [
        f"pytest_ep: flashinfer {DEVELOPMENT} is a development build: {TREE} is a guess by its order"
    ]


def test_a_dispatch_that_never_returns_ends_the_run_within_the_timeout(launch: Launcher) -> None:
    hung = launch(2, "blocks_on_one", (1, 3, 8), "--ep-rank-timeout=4")
    assert hung.result.ret == 1
    assert hung.result.duration < 60
    assert hung.timed["blocks_on_one", 1]["bit_exact"] == 1.0
    assert "rank 1" in hung.failed["blocks_on_one", 3]
    assert ("blocks_on_one", 8) not in hung.outcomes


def test_a_rank_killed_inside_dispatch_ends_the_run_and_finished_cases_stay(launch: Launcher) -> None:
    killed = launch(2, "killed_on_one", (1, 8), "--benchmark-disable", "--ep-rank-timeout=6")
    assert killed.result.ret == 1
    assert killed.result.duration < 60
    assert killed.outcomes["killed_on_one", 1] == "checked"
    assert ("killed_on_one", 8) in killed.failed


def test_without_a_gpu_every_case_is_skipped_with_a_reason_to_act_on(torchrun: Torchrun) -> None:
    shutil.copy(ROOT / "cases/test_flashinfer_ep.py", torchrun.folder)
    result = torchrun(2, "-k", "flashinfer_ep", env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.ret == 1
    assert result.duration < 60
    assert set(result.parseoutcomes()) <= {"skipped", "deselected"}
    said = " ".join(result.stdout.str().split())
    assert "needs-accelerator: this transport consists of GPU kernels, and a cpu has none to run them" in said
    assert "no case was executed: exit code 5" in said
