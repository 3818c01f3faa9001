"""The plan: which cells a backend has here, and why the others do not run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_ep.backends.base import EPBackend
from pytest_ep.backends.base import ModeFacts
from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.cells import Skip
from pytest_ep.matrix.machine import VISIBLE
from pytest_ep.matrix.machine import Machine
from pytest_ep.matrix.plan import DECODE
from pytest_ep.matrix.plan import PREFILL
from pytest_ep.matrix.plan import Adapter
from pytest_ep.matrix.plan import Planned
from pytest_ep.matrix.plan import Selection
from pytest_ep.matrix.plan import known_ep_sizes
from pytest_ep.matrix.plan import plan
from pytest_ep.matrix.platforms import Platforms
from pytest_ep.matrix.platforms import load
from pytest_ep.matrix.shapes import SHAPES

PLATFORMS = load(None)
CPU = Machine("cpu", 0, "cpu")
H200 = Machine("h200", 8, "NVIDIA H200")
A100 = Machine("a100_sxm4_80gb", 2, "NVIDIA A100-SXM4-80GB")


def mode(*precisions: str, cap: int | None = None) -> ModeFacts:
    return ModeFacts("token-rank", "unweighted-rank-sum", "int64", False, False, precisions, cap)


@dataclass
class Fake:
    """A transport as the matrix sees it."""

    name: str = "torch_a2a"
    modes: Mapping[str, ModeFacts] = field(default_factory=lambda: {"normal": mode("bf16")})
    per_device: int | None = None
    refuses_above: int | None = None

    def unsupported(self, cell: Cell, machine: Machine) -> Skip | None:
        if self.refuses_above is not None and cell.tokens > self.refuses_above:
            return Skip("wheel", f"no more than {self.refuses_above}")
        return None

    def ranks_per_device(self, machine: Machine) -> int | None:
        return self.per_device


def planned(
    adapter: Adapter | None,
    machine: Machine = CPU,
    ranks: int = 4,
    selection: Selection | None = None,
    name: str = "",
    local_ranks: int | None = None,
    platforms: Platforms = PLATFORMS,
) -> list[Planned]:
    return plan(
        name or (adapter.name if adapter else ""),
        adapter,
        selection or Selection(),
        machine,
        platforms,
        ranks=ranks,
        local_ranks=ranks if local_ranks is None else local_ranks,
    )


def running(cells: list[Planned]) -> list[str]:
    return [one.cell.id for one in cells if one.skip is None]


def skipped(cells: list[Planned]) -> dict[str, str]:
    return {one.cell.id: one.skip.code for one in cells if one.skip}


def reason(cells: list[Planned], cell_id: str) -> str:
    (skip,) = [one.skip for one in cells if one.cell.id == cell_id]
    assert skip is not None
    return skip.reason


def only(**wanted: object) -> Selection:
    return replace(Selection(precisions=("bf16",)), **wanted)  # type: ignore[arg-type]


def test_a_newcomers_cpu_runs_the_whole_ladder_at_the_ranks_launched() -> None:
    cells = planned(Fake())
    tokens = [one.cell.tokens for one in cells if one.skip is None]
    assert tokens == [*DECODE, *PREFILL]
    assert running(cells)[0] == "cpu-ep04-normal-bf16-deepseek_v3-uniform-T00001"
    assert skipped(cells)["cpu-ep08-normal-bf16-deepseek_v3-uniform-Tany"] == "ep-size"
    assert skipped(cells)["cpu-ep04-normal-fp8-deepseek_v3-uniform-Tany"] == "no-fp8"
    assert {one.cell.key.ep_size for one in cells} == {1, 2, 4, 8, 16}


def test_a_skip_for_the_number_of_ranks_names_both_and_the_launch() -> None:
    cells = planned(Fake(), ranks=2, selection=only(ep_sizes=(8,)))
    assert reason(cells, "cpu-ep08-normal-bf16-deepseek_v3-uniform-Tany") == (
        "needs 8 ranks, launched with 2: torchrun --nproc-per-node 8"
    )


@pytest.mark.parametrize(("machine", "sku"), [(CPU, "cpu"), (A100, "a100_sxm4_80gb")])
def test_any_number_of_ranks_is_a_case_of_the_baseline(machine: Machine, sku: str) -> None:
    cells = planned(Fake(), machine, 3, only(tokens=(1,)))
    assert running(cells) == [f"{sku}-ep03-normal-bf16-deepseek_v3-uniform-T00001"]
    chosen = planned(Fake(), machine, 3, only(tokens=(1,), ep_sizes=(3, 5)))
    assert [one.cell.key.ep_size for one in chosen] == [3, 5]


def test_an_odd_number_of_ranks_on_a_listed_gpu_is_claimed_by_the_baseline_alone() -> None:
    select = only(tokens=(1,), ep_sizes=(3,), modes=("normal",))
    assert running(planned(Fake(), H200, 3, select))
    assert list(skipped(planned(Fake("flashinfer_ep"), H200, 3, select)).values()) == ["not-claimed"]


def test_the_order_is_by_key_and_then_by_tokens() -> None:
    select = only(tokens=(64, 1), sku="all", shapes=tuple(SHAPES.values()))
    cells = planned(Fake(), selection=select)
    keys = [one.cell.key for one in cells]
    assert keys == sorted(keys, key=keys.index)
    by_key: dict[object, list[int]] = {}
    for one in cells:
        by_key.setdefault(one.cell.key, []).append(one.cell.tokens)
    assert all(tokens == sorted(tokens) for tokens in by_key.values())


def test_a_case_of_another_sku_is_one_item_per_key_that_names_both() -> None:
    cells = planned(Fake("flashinfer_ep"), selection=only(sku="h200", ep_sizes=(8,), modes=("normal",)))
    assert skipped(cells) == {"h200-ep08-normal-bf16-deepseek_v3-uniform-Tany": "other-sku"}
    assert cells[0].skip is not None
    assert cells[0].skip.reason == "a case of h200 (measured there); this machine is cpu"
    assert cells[0].skip.link


def test_what_runs_nowhere_says_so_rather_than_naming_this_machine() -> None:
    cells = planned(None, selection=only(sku="h100", ep_sizes=(8, 16), modes=("normal",)), name="nccl_ep")
    assert skipped(cells) == {
        "h100-ep08-normal-bf16-deepseek_v3-uniform-Tany": "no-adapter",
        "h100-ep16-normal-bf16-deepseek_v3-uniform-Tany": "gin-fault",
    }
    assert "no adapter for nccl_ep" in reason(cells, "h100-ep08-normal-bf16-deepseek_v3-uniform-Tany")


def test_a_mode_or_precision_that_the_adapter_lacks_says_so() -> None:
    cells = planned(Fake("deepep_v2"), H200, 8, Selection(ep_sizes=(8,), tokens=(1,)))
    assert running(cells) == ["h200-ep08-normal-bf16-deepseek_v3-uniform-T00001"]
    assert skipped(cells) == {
        "h200-ep08-normal-fp8-deepseek_v3-uniform-Tany": "no-adapter",
        "h200-ep08-low_latency-bf16-deepseek_v3-uniform-Tany": "no-adapter",
        "h200-ep08-low_latency-fp8-deepseek_v3-uniform-Tany": "no-adapter",
    }
    text = reason(cells, "h200-ep08-normal-fp8-deepseek_v3-uniform-Tany")
    assert text == "the adapter for deepep_v2 has no normal fp8 yet"


def test_more_ranks_than_experts_is_a_skip() -> None:
    shapes = (SHAPES["mixtral_8x7b"],)
    cells = planned(Fake(), ranks=16, selection=only(ep_sizes=(16,), shapes=shapes))
    assert skipped(cells) == {"cpu-ep16-normal-bf16-mixtral_8x7b-uniform-Tany": "too-few-experts"}
    assert cells[0].skip == Skip("too-few-experts", "mixtral_8x7b has 8 experts for 16 ranks")


@pytest.mark.parametrize(
    ("per_device", "ranks", "local_ranks", "runs"),
    [(1, 8, 8, True), (1, 16, 8, True), (1, 16, 16, False), (2, 16, 16, True), (None, 16, 16, True)],
)
def test_ranks_of_a_node_need_devices_of_that_node(
    per_device: int | None, ranks: int, local_ranks: int, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VISIBLE:
        monkeypatch.delenv(name, raising=False)
    fake = Fake(per_device=per_device)
    cells = planned(fake, H200, ranks, only(ep_sizes=(ranks,), tokens=(1,)), local_ranks=local_ranks)
    assert bool(running(cells)) is runs
    if not runs:
        assert cells[0].skip == Skip(
            "too-few-devices", "16 ranks on this node have 8 devices; torch_a2a takes 1 rank per device"
        )


@pytest.mark.parametrize(
    "environ",
    [{"CUDA_VISIBLE_DEVICES": "0"}, {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "1"}],
    ids=["variable", "srun"],
)
def test_ranks_that_see_one_gpu_each_are_told_how_to_see_those_of_their_host(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*VISIBLE, "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    one_gpu = Machine("h200", 1, "NVIDIA H200")
    cells = planned(Fake(per_device=1), one_gpu, 8, only(ep_sizes=(8,), tokens=(1,)))
    assert cells[0].skip is not None
    assert cells[0].skip.reason.endswith(
        "; each rank sees 1 GPU of its host: if that has more, launch with srun's --gpu-bind=none, or "
        "without CUDA_VISIBLE_DEVICES for each rank"
    )


def test_a_wheel_that_refuses_everything_is_one_item_and_else_one_per_case() -> None:
    select = only(ep_sizes=(4,), tokens=(1, 64, 512))
    key = "cpu-ep04-normal-bf16-deepseek_v3-uniform"
    assert skipped(planned(Fake(refuses_above=0), selection=select)) == {f"{key}-Tany": "wheel"}
    some = planned(Fake(refuses_above=64), selection=select)
    assert skipped(some) == {f"{key}-T00512": "wheel"}
    assert running(some) == [f"{key}-T00001", f"{key}-T00064"]


def test_tokens_above_a_cap_are_one_item_each() -> None:
    modes = {"low_latency": mode("bf16", cap=64)}
    select = only(ep_sizes=(8,), modes=("low_latency",), tokens=(64, 65, 128, 256, 1024))
    cells = planned(Fake("nccl_ep", modes), H200, 8, select)
    key = "h200-ep08-low_latency-bf16-deepseek_v3-uniform"
    assert running(cells) == [f"{key}-T00064"]
    assert skipped(cells) == {
        f"{key}-T00065": "token-cap",
        f"{key}-T00128": "token-cap",
        f"{key}-T00256": "token-cap",
        f"{key}-T01024": "decode-only",
    }
    assert reason(cells, f"{key}-T00065") == "nccl_ep low_latency takes at most 64 tokens per rank"
    assert "fence" in reason(cells, f"{key}-T00256")


def test_low_latency_is_decode_unless_more_is_asked_for() -> None:
    cells = planned(Fake("third", {"low_latency": mode("bf16")}))
    assert [one.cell.tokens for one in cells if one.skip is None] == list(DECODE)


def test_a_third_partys_backend_runs_on_any_machine_with_its_own_modes_and_precisions() -> None:
    modes = {"normal": mode("bf16"), "low_latency": mode("bf16", "fp8")}
    for machine in (CPU, H200, A100):
        cells = planned(Fake("third", modes), machine, 6, Selection(tokens=(1,)))
        kinds = {(one.cell.key.mode, one.cell.key.precision) for one in cells}
        assert kinds == {("normal", "bf16"), ("low_latency", "bf16"), ("low_latency", "fp8")}
        assert {one.cell.key.ep_size for one in cells} == {1, 2, 4, 6, 8, 16}
        assert len(running(cells)) == 3
        assert all(code == "ep-size" for code in skipped(cells).values())


def test_a_third_partys_backend_takes_a_named_sku_and_any_ep_size() -> None:
    cells = planned(Fake("third"), CPU, 4, only(sku="gb200", ep_sizes=(5,)))
    assert skipped(cells) == {"gb200-ep05-normal-bf16-deepseek_v3-uniform-Tany": "other-sku"}
    assert reason(cells, "gb200-ep05-normal-bf16-deepseek_v3-uniform-Tany").startswith("a case of gb200;")
    everywhere = planned(Fake("third"), CPU, 4, only(sku="all"))
    assert {one.cell.key.sku for one in everywhere} == {"cpu"}


def test_a_precision_or_mode_that_nobody_asked_for_is_absent() -> None:
    select = Selection(precisions=("fp8",), modes=("normal",), tokens=(1,))
    assert {one.cell.key.precision for one in planned(Fake(), selection=select)} == {"fp8"}
    assert planned(Fake(), selection=Selection(modes=("low_latency",))) == []
    assert planned(Fake("third"), selection=Selection(precisions=("fp8",))) == []


def test_a_backend_that_nobody_knows_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(pytest.UsageError, match=r"no backend 'flash', known: flashinfer_ep, .*torch_a2a"):
        planned(None, name="flash")


def test_all_skus_include_the_machines_own_where_it_is_not_listed() -> None:
    cells = planned(Fake(), A100, 2, only(sku="all", tokens=(1,)))
    assert [one.cell.key.sku for one in cells if one.skip is None] == ["a100_sxm4_80gb"]
    assert {one.cell.key.sku for one in cells} == {*PLATFORMS.skus, "a100_sxm4_80gb"}


def test_an_ep_size_of_some_skus_is_a_cell_of_those_alone() -> None:
    cells = planned(Fake("flashinfer_ep"), H200, 8, only(sku="all", ep_sizes=(64,), modes=("normal",)))
    assert {one.cell.key.sku for one in cells} == {"gb200", "gb300", "cpu"}


def test_known_ep_sizes_are_those_of_the_skus_and_on_the_machines_own_of_the_launch() -> None:
    assert known_ep_sizes(Selection(), H200, PLATFORMS, 6) == {1, 2, 4, 6, 8, 16}
    assert known_ep_sizes(Selection(sku="gb200"), H200, PLATFORMS, 8) == {1, 2, 4, 8, 16, 32, 64}
    assert known_ep_sizes(Selection(sku="h200"), CPU, PLATFORMS, 3) == {1, 2, 4, 8, 16}
    assert known_ep_sizes(Selection(), CPU, PLATFORMS, 1) is None
    assert known_ep_sizes(Selection(), A100, PLATFORMS, 1) is None


def test_a_users_claim_makes_a_refused_cell_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[[backend.nccl_ep.normal]]\nskus = ["h200"]\nevidence = "measured"\nsource = "0.2"\n')
    select = only(ep_sizes=(16,), tokens=(1,), modes=("normal",))
    assert not running(planned(Fake("nccl_ep"), H200, 16, select, local_ranks=8))
    assert running(planned(Fake("nccl_ep"), H200, 16, select, local_ranks=8, platforms=load(file)))


def test_a_backend_class_is_an_adapter() -> None:
    class Mine(EPBackend):
        name = "mine"
        modes = {"normal": mode("bf16")}  # noqa: RUF012

    adapter: Adapter = Mine
    assert len(running(planned(adapter, ranks=2, selection=only(tokens=(1,))))) == 1
    crowded = planned(adapter, replace(H200, devices=1), 2, only(tokens=(1,), ep_sizes=(2,)))
    assert reason(crowded, "h200-ep02-normal-bf16-deepseek_v3-uniform-Tany") == (
        "2 ranks on this node have 1 device; mine takes 1 rank per device"
    )


def test_the_plan_of_every_backend_and_sku_has_unique_ids_and_is_quick() -> None:
    start = time.perf_counter()
    ids = [
        f"{name} {one.cell.id}"
        for name in PLATFORMS.backends
        for one in planned(
            Fake(name, {"normal": mode("bf16", "fp8"), "low_latency": mode("bf16", "fp8")}),
            H200,
            8,
            Selection(sku="all"),
        )
    ]
    elapsed = time.perf_counter() - start
    assert len(ids) == len(set(ids)) > 1000
    assert not any(a != b and b.startswith(a) for a, b in zip(sorted(ids), sorted(ids)[1:], strict=False))
    assert elapsed < 0.3
