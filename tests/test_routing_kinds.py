"""Every kind of routing and of token skew: what is drawn, what is refused, what ids and rows say of it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from pytest_ep.backends.base import ModeFacts
from pytest_ep.backends.torch_a2a import TorchA2A
from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.cells import Key
from pytest_ep.matrix.machine import Machine
from pytest_ep.matrix.plan import Planned
from pytest_ep.matrix.plan import Selection
from pytest_ep.matrix.plan import plan
from pytest_ep.matrix.platforms import load
from pytest_ep.matrix.routing import UNIFORM
from pytest_ep.matrix.routing import Recording
from pytest_ep.matrix.routing import Routing
from pytest_ep.matrix.routing import parse_routing
from pytest_ep.matrix.shapes import SHAPES
from pytest_ep.matrix.shapes import Shape
from pytest_ep.matrix.skew import NO_SKEW
from pytest_ep.matrix.skew import TokenSkew
from pytest_ep.matrix.skew import parse_skew
from pytest_ep.options import parse_options
from pytest_ep.ranks.identity import Identity
from pytest_ep.results.record import COMPONENTS
from pytest_ep.results.record import CaseResult
from pytest_ep.results.record import Measurement
from pytest_ep.results.record import parameters
from pytest_ep.results.summary import summary
from pytest_ep.run import Run
from pytest_ep.timing.traffic import Leaving
from pytest_ep.timing.traffic import Traffic
from pytest_ep.workload import recorded
from pytest_ep.workload import routing
from pytest_ep.workload.load import figures
from pytest_ep.workload.routes import load_routes
from pytest_ep.workload.routing import Trace

DEEPSEEK = SHAPES["deepseek_v3"]
ODD = Shape("odd", hidden=64, experts=10, top_k=3)
FULL = Shape("full", hidden=64, experts=4, top_k=4)
KINDS = ("uniform", "balanced", "local", "zipf:1.2", "zipf:4", "hot:1", "hot:4", "hot:9")
GOLDEN = {
    "balanced": [[207, 141, 184, 221, 67, 56, 239, 121], [105, 204, 33, 218, 106, 156, 62, 6]],
    "local": [[212, 2, 139, 9, 44, 15, 236, 5], [29, 230, 4, 243, 28, 50, 0, 45]],
    "zipf:1.2": [[169, 91, 132, 45, 54, 177, 158, 81], [85, 91, 170, 132, 203, 201, 94, 44]],
    "hot:4": [[215, 169, 198, 91, 121, 170, 109, 132], [132, 113, 169, 218, 170, 95, 91, 126]],
}
"""The experts of tokens 0 and 1, EP8: what runs of other days are compared by."""

Ids = npt.NDArray[np.int64]


def trace(kind: str, shape: Shape = DEEPSEEK, shares: tuple[int, ...] = (32,) * 8) -> Trace:
    return load_routes(parse_routing(kind), shape, 67, sum(shares), None, write=False).of(shares)


def of_own_rank(ids: Ids, shape: Shape, shares: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    bounds = np.array(shape.owned(len(shares)))
    rank = np.repeat(np.arange(len(shares)), shares)[:, None]
    return (ids >= bounds[rank]) & (ids < bounds[rank + 1])


@pytest.mark.parametrize("kind", GOLDEN)
def test_tokens_choose_the_same_experts_on_every_machine_and_day(kind: str) -> None:
    assert trace(kind).expert_ids[:2].tolist() == GOLDEN[kind]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *((kind, shape) for kind in KINDS for shape in (DEEPSEEK, ODD)),
        *((kind, FULL) for kind in KINDS if kind not in {"hot:4", "hot:9"}),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_token_s_experts_are_distinct_and_its_weights_are_the_uniform_ones(kind: str, shape: Shape) -> None:
    found = trace(kind, shape, (40, 0, 7, 53))
    in_order = np.sort(found.expert_ids, axis=1)
    assert in_order.shape == (100, shape.top_k)
    assert (in_order[:, 1:] > in_order[:, :-1]).all()
    assert in_order.min() >= 0
    assert in_order.max() < shape.experts
    np.testing.assert_array_equal(found.weights, trace("uniform", shape, (100,)).weights)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_kind_is_not_uniform_and_another_seed_is_another_routing(kind: str) -> None:
    chosen = trace(kind).expert_ids
    assert (chosen != trace("uniform").expert_ids).any()
    other = load_routes(parse_routing(kind), DEEPSEEK, 68, 256, None, write=False).of((32,) * 8)
    assert (chosen != other.expert_ids).any()


@pytest.mark.parametrize("experts_and_choices", [(256, 8), (10, 3), (384, 7), (5, 4), (4, 4), (7, 1)])
def test_balanced_gives_every_expert_as_many_assignments_or_one_more_at_every_length(
    experts_and_choices: tuple[int, int],
) -> None:
    shape = Shape("any", 64, *experts_and_choices)
    ids = trace("balanced", shape, (300,)).expert_ids
    load = np.zeros(shape.experts, dtype=np.int64)
    for row in ids:
        load[row] += 1
        assert load.max() - load.min() <= 1


def test_zipf_draws_in_proportion_among_the_experts_that_are_left() -> None:
    ids = trace("zipf:1", Shape("three", 64, experts=3, top_k=2), (20_000,)).expert_ids
    order = np.bincount(ids[:, 0]).argsort()[::-1]
    share = {order[0]: 6 / 11, order[1]: 3 / 11, order[2]: 2 / 11}
    for first, before in share.items():
        for second in share.keys() - {first}:
            expected = before * share[second] / (1 - before)
            found = ((ids == [first, second]).all(axis=1)).mean()
            assert abs(found - expected) < 5 * np.sqrt(expected / len(ids))


def test_a_larger_exponent_puts_more_on_the_first_experts_of_one_order() -> None:
    def busiest(kind: str) -> list[int]:
        load = np.bincount(trace(kind).expert_ids.ravel(), minlength=256)
        return [int(expert) for expert in load.argsort(kind="stable")[::-1]]

    def heaviest(kind: str) -> float:
        return figures(trace(kind).expert_ids, DEEPSEEK.owned(8), (32,) * 8)["expert_load_max_over_mean"]

    assert heaviest("uniform") < heaviest("zipf:0.5") < heaviest("zipf:1") < heaviest("zipf:2")
    assert busiest("zipf:2")[0] == busiest("zipf:1")[0]
    assert set(busiest("zipf:2")[:4]) == set(busiest("hot:4")[:4])


@pytest.mark.parametrize(
    ("hot", "choices", "share"),
    [
        (4, 8, 1 / 2),
        (16, 8, 1 / 2),
        (1, 8, 1 / 8),
        (3, 8, 3 / 8),
        (8, 1, 1 / 2),
        (8, 3, 1 / 2),
        (62, 8, 3 / 4),
    ],
)
def test_hot_experts_take_half_of_the_choices_as_far_as_a_token_s_are_distinct(
    hot: int, choices: int, share: float
) -> None:
    shape = Shape("any", 64, experts=64, top_k=choices)
    given = np.sort(np.bincount(trace(f"hot:{hot}", shape, (2000,)).expert_ids.ravel(), minlength=64))
    of_hot = given[-hot:] if share > hot / 64 else given[:hot]
    assert of_hot.sum() == share * 2000 * choices


@pytest.mark.parametrize("shares", [(8, 8, 8, 8), (0, 5, 11, 16), (32, 0, 0, 0)], ids=str)
def test_local_gives_half_of_a_token_s_choices_to_its_own_rank(shares: tuple[int, ...]) -> None:
    own = of_own_rank(trace("local", DEEPSEEK, shares).expert_ids, DEEPSEEK, shares)
    token, slot = np.indices(own.shape)
    assert (own == ((token + slot) % 2 == 1)).all()


def test_local_goes_elsewhere_where_the_own_rank_has_too_few_experts() -> None:
    shape = Shape("few", 64, experts=10, top_k=8)
    shares = (6, 6, 6, 6)  # ranks own 3, 3, 2, 2
    own = of_own_rank(trace("local", shape, shares).expert_ids, shape, shares).sum(axis=1)
    assert own.tolist() == [3] * 12 + [2] * 12
    assert of_own_rank(trace("local", shape, (24,)).expert_ids, shape, (24,)).all()


def test_local_experts_are_used_evenly() -> None:
    ids = trace("local", DEEPSEEK, (4000,) * 2).expert_ids
    load = np.bincount(ids.ravel(), minlength=256)
    assert abs(load - load.mean()).max() < 5 * np.sqrt(load.mean())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "local"])
def test_a_shorter_case_is_the_beginning_of_a_longer_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "BLOCK_TOKENS", 64)
    wanted = parse_routing(kind)
    whole = load_routes(wanted, ODD, 67, 200, None, write=False)
    for tokens in (1, 63, 64, 65, 200):
        for write in (True, False):
            part = load_routes(wanted, ODD, 67, tokens, tmp_path, write).of((tokens,))
            assert part.expert_ids.tolist() == whole.of((tokens,)).expert_ids.tolist()
    assert {file.name.partition("-")[0] for file in tmp_path.iterdir()} == {wanted.name}


def test_local_choices_follow_the_rank_that_a_token_is_on_and_leave_only_gates_in_the_cache(
    tmp_path: Path,
) -> None:
    routes = load_routes(parse_routing("local"), ODD, 67, 64, tmp_path, write=True)
    for shares in ((4, 4), (16, 16), (2, 6), (32, 32)):
        assert routes.of(shares).expert_ids.tolist() == trace("local", ODD, shares).expert_ids.tolist()
    assert routes.digest((32, 32)) != routes.digest((16, 16, 16, 16))
    assert [file.name for file in tmp_path.iterdir()] == ["uniform-s67-e10-k3-b00000.bin"]


def test_a_later_piece_of_a_routing_is_another_one_for_the_same_ranks() -> None:
    routes = load_routes(parse_routing("local"), DEEPSEEK, 67, 64, None, write=False)
    first, second = routes.of((8, 24)), routes.of((8, 24), 32)
    assert first.digest != second.digest
    assert of_own_rank(second.expert_ids, DEEPSEEK, (8, 24)).sum(axis=1).tolist() == [4] * 32
    np.testing.assert_array_equal(second.weights, trace("uniform", DEEPSEEK, (64,)).weights[32:])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("zpif", "known are uniform, balanced, local, zipf:S, hot:N, or a .npy or .npz file"),
        ("uniform:2", "known are uniform, balanced"),
        ("zipf", "known are uniform, balanced"),
        ("zipf:0", "S is a number above 0 and up to 4"),
        ("zipf:4.5", "S is a number above 0 and up to 4"),
        ("zipf:1.2345", "with at most 3 decimals"),
        ("zipf:-1", "S is a number above 0"),
        ("zipf:nan", "S is a number above 0"),
        ("hot:0", "N is a whole number of experts, at least 1"),
        ("hot:1.5", "N is a whole number of experts, at least 1"),
        ("ids.txt", "or a .npy or .npz file"),
    ],
)
def test_a_routing_that_is_none_is_refused(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error.replace(".", r"\.")):
        parse_routing(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("uniform", "uniform"),
        ("balanced", "balanced"),
        ("local", "local"),
        ("zipf:1.2", "zipf1_2"),
        ("zipf:1.200", "zipf1_2"),
        ("zipf:2", "zipf2"),
        ("zipf:0.001", "zipf0_001"),
        ("hot:04", "hot4"),
        ("runs/my rec-1.npy", "file_my_rec_1"),
        ("balanced.npz", "file_balanced"),
    ],
)
def test_a_routing_s_name_is_an_identifier(text: str, name: str) -> None:
    assert parse_routing(text).name == name
    assert name.isidentifier()


RECORDED = np.array([[3, 1, 2], [0, -1, 9], [-1, -1, -1], [5, 4, 6]])


def saved(path: Path, ids: Any, **named: Any) -> str:
    if path.suffix == ".npz":
        np.savez(path, **named)
    else:
        np.save(path, ids)
    return str(path)


@pytest.mark.parametrize("dtype", ["int8", "uint16", ">i4", "int64"])
def test_recorded_ids_are_taken_as_they_are_and_masked_choices_have_no_weight(
    tmp_path: Path, dtype: str
) -> None:
    ids = RECORDED[[0, 3, 0, 3]] if dtype == "uint16" else RECORDED
    path = saved(tmp_path / "rec.npy", ids.astype(dtype))
    wanted = replace(parse_routing(path), recording=recorded.describe(path, [ODD]))
    found = load_routes(wanted, ODD, 67, 3, tmp_path, write=True).of((1, 2))
    assert found.expert_ids.tolist() == ids[:3].tolist()
    gates = trace("uniform", ODD, (3,)).weights
    assert found.weights.tolist() == np.where(ids[:3] < 0, 0, gates).tolist()


def test_a_recording_is_described_by_what_is_in_it(tmp_path: Path) -> None:
    path = saved(tmp_path / "rec.npy", np.concatenate([RECORDED[2:3], RECORDED]))
    other = saved(tmp_path / "other.npz", None, topk_ids=np.concatenate([RECORDED[2:3], RECORDED]))
    found = recorded.describe(path, [ODD])
    assert (found.tokens, found.masked, found.first_choice) == (5, True, 1)
    assert recorded.describe(other, [ODD]) == found
    plain = recorded.describe(saved(tmp_path / "plain.npy", RECORDED[[0, 3]]), [ODD])
    assert not plain.masked
    assert plain.digest != found.digest


def test_a_recording_that_changes_during_the_run_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path / "rec.npy", RECORDED)
    wanted = replace(parse_routing(path), recording=recorded.describe(path, [ODD]))
    np.save(path, RECORDED[::-1])
    with pytest.raises(ValueError, match="has changed since this run began"):
        load_routes(wanted, ODD, 67, 4, None, write=False)


def test_an_archive_s_named_array_is_taken_before_its_first_one(tmp_path: Path) -> None:
    for name in recorded.KEYS:
        path = saved(tmp_path / f"{name}.npz", None, aaa=np.zeros(3), **{name: RECORDED})
        assert recorded.read(path).tolist() == RECORDED.tolist()
    assert recorded.read(saved(tmp_path / "one.npz", None, x=RECORDED)).tolist() == RECORDED.tolist()


def changed(row: int, column: int, value: int) -> Ids:
    ids = np.arange(12).reshape(4, 3) % 10
    ids[row, column] = value
    return ids


WRONG_IDS: dict[str, tuple[Any, str]] = {
    "float": (RECORDED.astype(float), "its ids are float64, not integers"),
    "flags": (RECORDED > 0, "its ids are bool, not integers"),
    "objects": (np.array([{}]), "no .npy or .npz file of plain numbers: "),
    "layers": (RECORDED[None], "its ids are [1, 4, 3], not [tokens, top_k]"),
    "empty": (RECORDED[:0], "its ids are [0, 3], not [tokens, top_k]"),
    "choices": (RECORDED[:, :2], "it has 2 choices a token, odd has top_k 3"),
    "large": (changed(2, 1, 10), "row 2 has expert 10, odd has 0 to 9, and -1 is a masked choice"),
    "low": (changed(3, 0, -2), "row 3 has expert -2, odd has 0 to 9, and -1 is a masked choice"),
    "huge": (changed(1, 1, 3).astype(np.uint64) + np.uint64(2**63), "row 0 has expert 9223372036854775807, "),
    "twice": (changed(1, 2, 4), "row 1 has expert 4 twice"),
    "masked": (np.full((4, 3), -1), "every choice in it is -1: nothing would be sent"),
}


@pytest.mark.parametrize("case", WRONG_IDS)
def test_wrong_recorded_ids_are_refused_with_their_row(tmp_path: Path, case: str) -> None:
    ids, error = WRONG_IDS[case]
    with pytest.raises(ValueError) as raised:
        recorded.describe(saved(tmp_path / "rec.npy", ids), [ODD])
    assert str(raised.value).startswith(error)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"no array", b"PK\x03\x04"])
@pytest.mark.parametrize("name", ["rec.npy", "rec.npz"])
def test_a_file_that_is_no_array_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"^no \.npy or \.npz file of plain numbers: [^\n]*$"):
        recorded.read(str(tmp_path / name))
    with pytest.raises(ValueError, match=r"^no such file$"):
        recorded.read(str(tmp_path / "missing.npy"))


@pytest.mark.parametrize(
    ("tokens", "ranks", "split"),
    [
        (1, 1, (1,)),
        (1, 2, (0, 2)),
        (1, 4, (0, 1, 1, 2)),
        (8, 4, (0, 5, 11, 16)),
        (64, 4, (0, 43, 85, 128)),
        (3, 3, (0, 3, 6)),
        (7, 8, (0, 2, 4, 6, 8, 10, 12, 14)),
        (0, 4, (0, 0, 0, 0)),
    ],
)
def test_linear_skew_gives_rank_0_none_and_the_last_twice_the_mean(
    tokens: int, ranks: int, split: tuple[int, ...]
) -> None:
    assert parse_skew("linear").split(tokens, ranks) == split
    assert sum(split) == tokens * ranks


def test_every_skew_shares_out_exactly_t_a_rank_on_average() -> None:
    for skew in (NO_SKEW, TokenSkew("linear"), TokenSkew("file_w", (5, 0, 1, 0, 3, 1000, 7))):
        for tokens in range(1, 200):
            split = skew.split(tokens, 7)
            assert sum(split) == 7 * tokens
            assert min(split) >= 0
    assert NO_SKEW.split(5, 3) == (5, 5, 5)
    assert TokenSkew("file_w", (5, 0, 1)).split(4, 3) == (10, 0, 2)


@pytest.mark.parametrize("content", ["1 0\n3", "1,0,3\n", "1\n0\n3"])
def test_weights_are_read_as_text_or_array(tmp_path: Path, content: str) -> None:
    (tmp_path / "some weights.txt").write_text(content)
    expected = TokenSkew("file_some_weights", (1, 0, 3))
    assert parse_skew(str(tmp_path / "some weights.txt")) == expected
    np.save(tmp_path / "some_weights.npy", np.array([1, 0, 3], dtype=np.uint8))
    assert parse_skew(str(tmp_path / "some_weights.npy")) == expected


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("0 0", "every weight is 0, so no rank would have a token"),
        ("", "every weight is 0, so no rank would have a token"),
        ("1 -1", "the weight of rank 1 is '-1', not a whole number from 0 to 2147483647"),
        ("1.5", "the weight of rank 0 is '1.5', not a whole number"),
        (np.array([[1]]), r"int64 \[1, 1\], not one whole number for each rank"),
        (np.array([1.0]), r"float64 \[1\], not one whole number for each rank"),
        (np.array([3, -1]), "the weight of rank 1 is -1, not from 0 to 2147483647"),
        (b"\xff\xfe", "no text: not UTF-8"),
    ],
)
def test_wrong_weights_are_refused_with_their_rank(tmp_path: Path, content: Any, error: str) -> None:
    path = tmp_path / ("w.npy" if isinstance(content, np.ndarray) else "w.txt")
    if isinstance(content, np.ndarray):
        np.save(path, content)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"^{error}[^\n]*$"):
        parse_skew(str(path))


def test_weights_are_one_for_each_rank(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^3 weights for 4 ranks, it takes one for each$"):
        TokenSkew("file_w", (1, 2, 3)).split(1, 4)
    with pytest.raises(ValueError, match=r"known are none, linear, or a file .*; no such file"):
        parse_skew("lineal")


CPU = Machine("cpu", 0, "cpu")
KEY = Key("torch_a2a", "cpu", 4, "normal", "bf16", "deepseek_v3")


class Even(TorchA2A):
    """Takes neither unequal numbers of tokens nor masked choices, and at most 100 tokens on a rank."""

    name = "even"
    modes: ClassVar[Mapping[str, ModeFacts]] = {
        "normal": ModeFacts(
            "token-rank",
            "unweighted-rank-sum",
            "int64",
            False,
            False,
            ("bf16",),
            token_cap=100,
            unequal_tokens=False,
        )
    }


def planned(backend: type[TorchA2A], ranks: int = 4, **wanted: Any) -> list[Planned]:
    usual = {"ep_sizes": (ranks,), "precisions": ("bf16",), "tokens": (1, 64)}
    selection = Selection(**{**usual, **wanted})
    return plan(backend.name, backend, selection, CPU, load(None), ranks=ranks, local_ranks=ranks)


def test_ids_name_the_routing_and_append_a_skew() -> None:
    assert [one.cell.id for one in planned(TorchA2A)] == [
        "cpu-ep04-normal-bf16-deepseek_v3-uniform-T00001",
        "cpu-ep04-normal-bf16-deepseek_v3-uniform-T00064",
    ]
    cells = planned(TorchA2A, routing=parse_routing("zipf:1.2"), skew=TokenSkew("linear"))
    assert [one.cell.id for one in cells] == [
        "cpu-ep04-normal-bf16-deepseek_v3-zipf1_2-T00001-skew_linear",
        "cpu-ep04-normal-bf16-deepseek_v3-zipf1_2-T00064-skew_linear",
    ]
    cell = cells[1].cell
    assert (cell.tokens_by_rank, cell.max_tokens) == ((0, 43, 85, 128), 128)
    assert list(parameters(cell).items())[-3:] == [
        ("routing", "zipf1_2"),
        ("tokens", 64),
        ("token_skew", "linear"),
    ]
    assert "token_skew" not in parameters(Cell(KEY, DEEPSEEK, "uniform", 64))


def test_a_transport_refuses_unequal_tokens_and_masked_ids_for_reasons_of_their_own() -> None:
    masked = Routing("file", "file_rec", path="rec.npy", recording=Recording(1024, "d", True, 0))
    linear = TokenSkew("linear")
    assert all(one.skip is None for one in planned(TorchA2A, routing=masked, skew=linear))
    (unequal,) = planned(Even, skew=linear)
    assert unequal.skip is not None
    assert (unequal.cell.id, unequal.skip.code) == (
        "cpu-ep04-normal-bf16-deepseek_v3-uniform-Tany-skew_linear",
        "unequal-tokens",
    )
    assert unequal.skip.reason == "even normal needs as many tokens on each rank: drop --ep-token-skew"
    (unmasked,) = planned(Even, routing=masked)
    assert unmasked.skip is not None
    assert (unmasked.cell.id, unmasked.skip.code) == (
        "cpu-ep04-normal-bf16-deepseek_v3-file_rec-Tany",
        "masked-ids",
    )
    assert "masked choices (id -1), which rec.npy has" in unmasked.skip.reason


def test_a_skew_that_makes_no_difference_is_no_reason_to_refuse() -> None:
    plain = Routing("file", "file_rec", path="rec.npy", recording=Recording(1024, "d", False, 0))
    assert all(one.skip is None for one in planned(Even, skew=TokenSkew("file_w", (3, 3, 3, 3))))
    assert all(one.skip is None for one in planned(Even, 1, skew=TokenSkew("linear"), routing=plain))


def test_the_token_cap_is_for_the_rank_with_the_most_tokens() -> None:
    class Uneven(Even):
        modes: ClassVar[Mapping[str, ModeFacts]] = {
            "normal": replace(Even.modes["normal"], unequal_tokens=True)
        }

    cells = planned(Uneven, tokens=(50, 51), skew=TokenSkew("linear"))
    assert [one.skip.code if one.skip else "" for one in cells] == ["", "token-cap"]


@pytest.mark.parametrize(
    ("recording", "error"),
    [
        (
            Recording(100, "d", False, 0),
            "it has 100 tokens, T=64 on 4 ranks needs 256: give --ep-tokens up to 25",
        ),
        (Recording(3, "d", False, 0), "it has 3 tokens, T=1 on 4 ranks needs 4: record at least 4"),
        (
            Recording(1024, "d", True, 4),
            "none of its first 4 tokens has a choice, so T=1 on 4 ranks would send nothing",
        ),
    ],
)
def test_a_recording_that_is_too_short_is_refused_with_both_numbers(recording: Recording, error: str) -> None:
    wanted = Routing("file", "file_rec", path="rec.npy", recording=recording)
    with pytest.raises(pytest.UsageError) as raised:
        planned(TorchA2A, routing=wanted)
    assert str(raised.value) == f"--ep-routing rec.npy: {error}"
    assert planned(TorchA2A, ep_sizes=(2,), routing=wanted)[0].skip is not None  # needs nothing: cannot run


@pytest.fixture
def configured(pytester: pytest.Pytester) -> Callable[..., pytest.Config]:
    return pytester.parseconfig


def test_wrong_options_are_one_line_each(
    configured: Callable[..., pytest.Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("rec.npy", changed(1, 2, 4))
    for args, error in (
        (("--ep-routing=hot:256",), "--ep-routing hot:256: deepseek_v3 has 256 experts: N is less than that"),
        (("--ep-routing=zipf:9",), "--ep-routing zipf:9: S is a number above 0"),
        (("--ep-routing=no.npy",), "--ep-routing no.npy: no such file"),
        (
            ("--ep-routing=rec.npy",),
            "--ep-routing rec.npy: it has 3 choices a token, deepseek_v3 has top_k 8",
        ),
        (
            ("--ep-routing=rec.npy", "--ep-shape=hidden=64,experts=10,top_k=3"),
            "--ep-routing rec.npy: row 1 has expert 4 twice",
        ),
        (("--ep-token-skew=steep",), "--ep-token-skew steep: known are none, linear"),
    ):
        with pytest.raises(pytest.UsageError) as raised:
            parse_options(configured(*args), load(None), lambda: CPU, 4)
        assert str(raised.value).startswith(error)
        assert "\n" not in str(raised.value)


def test_without_options_routing_is_uniform_and_unskewed(configured: Callable[..., pytest.Config]) -> None:
    selection = parse_options(configured(), load(None), lambda: CPU, 4).selection
    assert (selection.routing, selection.skew) == (UNIFORM, NO_SKEW)


def test_the_identity_of_a_case_depends_on_its_routing_its_skew_and_what_their_files_hold(
    configured: Callable[..., pytest.Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def identity(*args: str) -> str:
        run = Run(
            configured("--ep-shape=hidden=64,experts=10,top_k=3", *args), Identity(size=4, local_size=4)
        )
        selection = run.options.selection
        return run.identify(Cell(KEY, ODD, selection.routing.name, 1, selection.skew))

    def saved_identity(ids: Ids, weights: str) -> str:
        np.save("rec.npy", ids)
        Path("w.txt").write_text(weights)
        return identity("--ep-routing=rec.npy", "--ep-token-skew=w.txt")

    plain = [identity(), identity("--ep-routing=balanced"), identity("--ep-token-skew=linear")]
    files = [
        saved_identity(RECORDED, "1 2 3 4"),
        saved_identity(RECORDED[::-1], "1 2 3 4"),
        saved_identity(RECORDED, "1 2 3 5"),
    ]
    assert len({*plain, *files}) == 6
    assert saved_identity(RECORDED, "1\n2\n3\n4") == files[0]
    assert identity("--ep-routing=uniform", "--ep-token-skew=none") == plain[0]


def test_the_identity_of_a_case_depends_on_sampling_on_hosts_and_on_versions(
    configured: Callable[..., pytest.Config],
) -> None:
    def identity(*args: str, by_host: tuple[int, ...] = (4,), driver: str = "580") -> str:
        run = Run(configured(*args), Identity(size=4, local_size=4))
        run.ranks_by_host, run.host_facts = [*by_host], {"driver": driver}
        return run.identify(Cell(KEY, ODD, "uniform", 1, NO_SKEW))

    plain = identity()
    options = ("--ep-target-ci=5", "--ep-time-budget=1s", "--ep-idle=1ms", "--ep-repeat=2", "--ep-poison")
    others = [identity(option) for option in options]
    assert len({plain, *others, identity(by_host=(2, 2)), identity(driver="570")}) == len(options) + 3


def test_figures_of_a_small_trace_are_those_computed_by_hand() -> None:
    ids = np.array([[0, 1], [1, 2], [3, -1]])
    assert figures(ids, (0, 2, 4), (2, 1)) == pytest.approx(
        {
            "expert_load_max_over_mean": 2 / 1.25,
            "expert_load_cv": 0.1875**0.5 / 1.25,
            "rank_load_max_over_mean": 1.0,
            "fan_out_mean": 4 / 3,
            "fan_out_max": 2,
            "local_fraction": 3 / 4,
            "empty_experts": 0,
        }
    )
    # The same tokens on other ranks: one copy stays. A token that goes nowhere counts for no fan-out.
    found = figures(np.concatenate([ids, [[-1, -1]]]), (0, 1, 4), (0, 4))
    assert found["local_fraction"] == 3 / 4
    assert found["rank_load_max_over_mean"] == 3 / 2
    assert (found["fan_out_mean"], found["empty_experts"]) == (4 / 3, 0)


def test_figures_of_nothing_sent_are_zero() -> None:
    found = figures(np.full((4, 2), -1), (0, 2, 4), (4, 0))
    assert found["empty_experts"] == 4
    assert sum(found.values()) == 4
    assert all(type(value) in {int, float} for value in found.values())


def test_one_rank_keeps_every_copy() -> None:
    found = figures(trace("uniform", ODD, (8,)).expert_ids, ODD.owned(1), (8,))
    assert (found["local_fraction"], found["fan_out_mean"], found["fan_out_max"]) == (1.0, 1.0, 1)


def timed(tokens: int, kind: str, skew: TokenSkew) -> CaseResult:
    cell = Cell(KEY, DEEPSEEK, parse_routing(kind).name, tokens, skew)
    shares, seconds = cell.tokens_by_rank, dict.fromkeys(COMPONENTS, np.full(16, 1e-5))
    leaving = Leaving(1, 1, 2)
    measured = Measurement(
        clock="host",
        seconds=seconds,
        spread=seconds,
        traffic=Traffic(4 * tokens, 1, leaving, leaving, leaving, 1),
        link_gbps=None,
        error=0.0,
        bit_exact=1.0,
        reduction="two-level",
        max_tokens=128,
        extra=dict(figures(trace(kind, DEEPSEEK, shares).expert_ids, DEEPSEEK.owned(4), shares)),
    )
    return CaseResult.timed(f"case.py::test_case[{cell.id}]", cell, measured)


def test_the_summary_says_how_an_unusual_routing_loads_experts_and_ranks() -> None:
    lines = summary([timed(1, "balanced", TokenSkew("linear")), timed(64, "balanced", TokenSkew("linear"))])
    assert lines[0].strip("- ").endswith("top-8  balanced  skew linear")
    said = " ".join(line.strip() for line in lines[1:3])
    assert said.startswith("at T=64: busiest expert 1.00 x mean, 0 idle; busiest rank 1.")
    assert "% of copies stay; 0 to 128 tokens a rank" in said
    assert max(len(line) for line in lines) <= 110
    assert not any("busiest" in line for line in summary([timed(64, "uniform", NO_SKEW)]))
