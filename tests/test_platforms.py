"""The platforms: what the built-in file says, and what a user's file may say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_ep.matrix.cells import MODES
from pytest_ep.matrix.cells import PRECISIONS
from pytest_ep.matrix.cells import Key
from pytest_ep.matrix.platforms import Platforms
from pytest_ep.matrix.platforms import load
from pytest_ep.matrix.shapes import SHAPES
from pytest_ep.matrix.shapes import parse_shape

BACKENDS = (
    "flashinfer_ep",
    "deepep_v2",
    "nccl_ep",
    "uccl_ep",
    "mori_ep",
    "torch_a2a",
    "flashinfer_two_sided",
)
X86 = ("h100", "h200", "b200", "b300")
GB = ("gb200", "gb300")
AMD = ("mi300x", "mi325x", "mi355x")


@pytest.fixture(scope="module")
def platforms() -> Platforms:
    return load(None)


def key(backend: str, sku: str, ep_size: int, mode: str = "normal", precision: str = "bf16") -> Key:
    return Key(backend, sku, ep_size, mode, precision, "deepseek_v3")


def every_key(platforms: Platforms) -> Iterator[Key]:
    for backend in platforms.backends:
        for sku in platforms.skus.values():
            for ep_size in sku.ep_sizes:
                for mode in platforms.modes(backend):
                    for precision in PRECISIONS:
                        yield key(backend, sku.name, ep_size, mode, precision)


def test_the_listed_skus_and_backends_are_those_of_the_matrix(platforms: Platforms) -> None:
    assert list(platforms.skus) == [*X86, *GB, *AMD, "cpu"]
    assert set(platforms.backends) == set(BACKENDS)


def test_every_cell_is_either_claimed_or_refused_with_a_reason_of_its_own(platforms: Platforms) -> None:
    keys = list(every_key(platforms))
    assert len(keys) > 1000
    for one in keys:
        skip = platforms.refusal(one)
        assert (skip is None) == (platforms.claim(one) is not None), one
        assert skip is None or skip.code != "not-claimed", one


def test_no_cell_is_both_claimed_and_refused(platforms: Platforms) -> None:
    (book,) = platforms.books
    general = [claim for claim in book.claims if claim.skus]
    for one in every_key(platforms):
        refused = [refusal for refusal in book.refusals if refusal.covers(one, 0)]
        assert not (refused and any(claim.covers(one) for claim in general)), one


def test_every_claim_and_every_refusal_speaks_of_a_cell_and_has_a_source(platforms: Platforms) -> None:
    (book,) = platforms.books
    keys = list(every_key(platforms))
    for claim in book.claims:
        assert any(claim.covers(one) for one in keys), claim
        assert claim.source
        assert claim.evidence in ("measured", "upstream", "expected")
    for refusal in book.refusals:
        at = 10**6 if refusal.above_tokens else 0
        assert any(refusal.covers(one, at) for one in keys), refusal
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", refusal.skip.code)
        assert refusal.skip.reason
        assert refusal.skip.link.startswith("https://")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("backend", "skus", "sizes"),
    [
        ("deepep_v2", ("h100", "h200"), {"normal": {8, 16}, "low_latency": {8}}),
        ("deepep_v2", ("b200", *GB), {"normal": {8, 16}, "low_latency": {8, 16}}),
        ("deepep_v2", ("b300",), {"normal": {8, 16}, "low_latency": set()}),
        ("uccl_ep", ("h100", "h200", "b200"), {"normal": {8}, "low_latency": {8}}),
        ("uccl_ep", ("b300", *GB), {"normal": set(), "low_latency": set()}),
        ("uccl_ep", AMD, {"normal": {8}, "low_latency": set()}),
        ("nccl_ep", X86, {"normal": {8}, "low_latency": {8}}),
        ("nccl_ep", GB, {"normal": {8, 16}, "low_latency": {8}}),
        ("flashinfer_ep", X86, {"normal": {8}, "low_latency": set()}),
        ("flashinfer_ep", GB, {"normal": {8, 16}, "low_latency": set()}),
        ("mori_ep", AMD, {"normal": {8}, "low_latency": {8}}),
        ("mori_ep", (*X86, *GB), {"normal": set(), "low_latency": set()}),
        ("flashinfer_two_sided", (*X86, *GB, *AMD), {"normal": set(), "low_latency": set()}),
    ],
)
def test_ep8_and_ep16_run_where_the_anchor_or_a_measurement_says_so(
    platforms: Platforms, backend: str, skus: tuple[str, ...], sizes: dict[str, set[int]], mode: str
) -> None:
    for sku in skus:
        runs = {size for size in (8, 16) if platforms.claim(key(backend, sku, size, mode)) is not None}
        assert runs == sizes[mode], sku


@pytest.mark.parametrize(
    ("backend", "skus", "code"),
    [
        ("uccl_ep", ("h100", "h200", "b200", *AMD), "cpu-proxy-throughput"),
        ("nccl_ep", X86, "gin-fault"),
        ("mori_ep", AMD, "internode-combine-corrupt"),
    ],
)
def test_the_unsupported_rows_of_the_anchor_are_cells_with_their_real_reason(
    platforms: Platforms, backend: str, skus: tuple[str, ...], code: str
) -> None:
    for sku in skus:
        skip = platforms.refusal(key(backend, sku, 16))
        assert skip is not None
        assert skip.code == code, sku


def test_the_two_sided_transport_is_refused_on_every_gpu_with_its_report(platforms: Platforms) -> None:
    for sku in (*X86, *GB, *AMD):
        skip = platforms.refusal(key("flashinfer_two_sided", sku, 8))
        assert skip is not None
        assert skip.link == "https://github.com/vllm-project/vllm/issues/39722"


def test_only_what_was_measured_is_called_measured(platforms: Platforms) -> None:
    evidence = {
        (sku, size): claim.evidence
        for sku in (*X86, *GB)
        for size in platforms.sku(sku).ep_sizes
        if (claim := platforms.claim(key("flashinfer_ep", sku, size)))
    }
    assert {cell for cell, kind in evidence.items() if kind == "measured"} == {
        ("h200", 2),
        ("h200", 4),
        ("h200", 8),
    }
    assert evidence["b300", 8] == evidence["gb300", 64] == "expected"
    assert evidence["gb200", 8] == "upstream"


def test_one_nvlink_domain_holds_every_ep_size_of_its_sku(platforms: Platforms) -> None:
    for sku in GB:
        assert platforms.sku(sku).ep_sizes == (1, 2, 4, 8, 16, 32, 64)
        assert max(platforms.sku(sku).ep_sizes) <= platforms.sku(sku).scale_up_domain
        assert platforms.claim(key("flashinfer_ep", sku, 64)) is not None


def test_a_low_latency_mode_is_capped_in_tokens_with_a_reason(platforms: Platforms) -> None:
    def code(backend: str, sku: str, tokens: int) -> str:
        skip = platforms.refusal(key(backend, sku, 8, "low_latency"), tokens)
        return skip.code if skip else "runs"

    assert [code("nccl_ep", "h200", tokens) for tokens in (128, 129, 512)] == [
        "runs",
        "token-cap",
        "token-cap",
    ]
    assert [code("deepep_v2", "h200", tokens) for tokens in (256, 257)] == ["runs", "token-cap"]
    assert [code("mori_ep", "mi355x", tokens) for tokens in (256, 512, 1024)] == [
        "runs",
        "token-cap",
        "decode-only",
    ]
    assert platforms.refusal(key("nccl_ep", "h200", 8), 8192) is None


def test_the_baseline_runs_on_any_device_and_the_others_on_none_that_is_not_listed(
    platforms: Platforms,
) -> None:
    assert platforms.refusal(key("torch_a2a", "a100_sxm4_80gb", 3)) is None
    skip = platforms.refusal(key("nccl_ep", "a100_sxm4_80gb", 8))
    assert skip is not None
    assert skip.code == "not-claimed"
    assert "nccl_ep normal bf16 at EP8 on a100_sxm4_80gb" in skip.reason


def test_links_are_stated_in_one_direction(platforms: Platforms) -> None:
    speeds = {name: sku.gbps for name, sku in platforms.skus.items()}
    assert speeds["h100"] == speeds["h200"] == 450
    assert {speeds[name] for name in ("b200", "b300", *GB)} == {900}
    assert (speeds["mi300x"], speeds["mi325x"], speeds["mi355x"]) == (448, 448, 537.6)
    assert speeds["cpu"] is None
    assert all(sku.source for sku in platforms.skus.values())


def test_an_unlisted_sku_has_no_link_and_the_domain_of_its_node(platforms: Platforms) -> None:
    sku = platforms.sku("l40s", devices=4)
    assert (sku.gbps, sku.link, sku.scale_up_domain, sku.gpus_per_node) == (None, "", 4, 4)
    assert sku.any_ep_size


@pytest.mark.parametrize(
    ("product", "sku"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA GB10", None),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("AMD Instinct MI300A", None),
        ("AMD Instinct MI325X", "mi325x"),
        ("AMD Instinct MI355X", "mi355x"),
        ("NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_device_names_find_their_sku_and_only_theirs(
    platforms: Platforms, product: str, sku: str | None
) -> None:
    assert platforms.match(product) == sku


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return file


def test_a_users_file_adds_a_sku_and_a_claim_on_it(tmp_path: Path) -> None:
    mine = load(
        written(
            tmp_path,
            """
            [sku.gh200]
            gpus_per_node = 1
            scale_up_domain = 32
            link = "NVLink 4"
            gbps = 450
            patterns = ['NVIDIA GH200.*']
            source = "my rack"
            [[backend.deepep_v2.normal]]
            precisions = ["bf16"]
            skus = ["gh200"]
            evidence = "expected"
            source = "my rack"
            """,
        )
    )
    assert mine.match("NVIDIA GH200 480GB") == "gh200"
    assert mine.sku("gh200").gbps == 450.0
    assert mine.refusal(key("deepep_v2", "gh200", 8)) is None
    assert mine.match("NVIDIA H200") == "h200"


MINE = "gpus_per_node = 8\nscale_up_domain = 8\nsource = 'my rack'\npatterns = ['NVIDIA H200']\n"


@pytest.mark.parametrize("sku", ["my_h200", "gb200"])
def test_a_users_sku_has_the_devices_that_a_listed_one_has_too(tmp_path: Path, sku: str) -> None:
    mine = load(written(tmp_path, f"[sku.{sku}]\n{MINE}"))
    assert mine.match("NVIDIA H200") == sku
    assert mine.match("NVIDIA H200 SXM") == "h200"
    assert set(mine.skus) == {*load(None).skus, sku}


def test_a_users_file_changes_one_field_of_a_listed_sku(tmp_path: Path) -> None:
    mine = load(written(tmp_path, "[sku.gb200]\nscale_up_domain = 36\n"))
    assert mine.sku("gb200").scale_up_domain == 36
    assert mine.sku("gb200").gbps == 900


def test_a_users_claim_wins_over_a_built_in_refusal_and_its_token_cap(tmp_path: Path) -> None:
    mine = load(
        written(
            tmp_path,
            """
            [[backend.nccl_ep.low_latency]]
            precisions = ["bf16"]
            skus = ["gb300"]
            ep_sizes = [16]
            evidence = "measured"
            source = "NCCL EP 0.2"
            """,
        )
    )
    assert mine.refusal(key("nccl_ep", "gb300", 16, "low_latency"), 512) is None
    assert mine.refusal(key("nccl_ep", "gb300", 32, "low_latency")) is not None


def test_a_users_refusal_wins_over_a_built_in_claim(tmp_path: Path) -> None:
    text = '[[refused]]\nbackends = ["deepep_v2"]\nskus = ["h200"]\ncode = "no-nic"\nreason = "no NIC here"\n'
    mine = load(written(tmp_path, text))
    skip = mine.refusal(key("deepep_v2", "h200", 8))
    assert skip is not None
    assert (skip.code, skip.reason, skip.link) == ("no-nic", "no NIC here", "")
    assert mine.refusal(key("deepep_v2", "h100", 8)) is None


def test_a_refusal_of_a_third_partys_backend_leaves_its_other_cells_alone(tmp_path: Path) -> None:
    text = '[[refused]]\nbackends = ["mine"]\nep_sizes = [4]\ncode = "odd"\nreason = "not at four"\n'
    mine = load(written(tmp_path, text + "[backend.mine]\n"))
    assert mine.refusal(key("mine", "h200", 4)) is not None
    assert mine.refusal(key("mine", "h200", 8)) is None


SKU = "[sku.x]\ngpus_per_node = 8\nscale_up_domain = 8\nsource = 's'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sku", "not TOML"),
        ("[skus.x]\n", "unknown table skus, known: sku, backend, refused"),
        ("sku = 3\n", "sku must be tables [sku.NAME]"),
        ("[sku]\nx = 3\n", "sku.x must be a table"),
        ("[sku.My-GPU]\n", "[sku.My-GPU] must be named in a-z, 0-9 and _"),
        ("[sku.x]\n", "[sku.x] lacks gpus_per_node"),
        (SKU + "gpus = 1\n", "[sku.x] unknown field gpus, known: gpus_per_node, scale_up_domain, link"),
        (SKU + "gbps = 'fast'\n", "[sku.x] gbps must be a positive number, not 'fast'"),
        (SKU + "gbps = -1.5\n", "[sku.x] gbps must be a positive number, not -1.5"),
        (SKU + "gbps = inf\n", "[sku.x] gbps must be at most 1048576, not inf"),
        (SKU + f"gbps = 1{'0' * 400}\n", "[sku.x] gbps must be at most 1048576, not 1000"),
        (SKU + f"gbps = 1{'0' * 5000}\n", "not TOML, Exceeds the limit"),
        (SKU + f"link = 0x1{'0' * 5000}\n", "not TOML, Exceeds the limit"),
        (f"x = {'[' * 3000}{']' * 3000}\n", "not TOML, "),
        (SKU + "gbps = nan\n", "[sku.x] gbps must be a positive number, not nan"),
        (SKU + "link = 4\n", "[sku.x] link must be text, not 4"),
        (SKU + "any_ep_size = 1\n", "[sku.x] any_ep_size must be true or false, not 1"),
        (SKU + "ep_sizes = [0]\n", "[sku.x] ep_sizes must be a list of positive whole numbers, not 0"),
        (SKU + "ep_sizes = [8, 2000000]\n", "[sku.x] ep_sizes must be at most 1048576, not 2000000"),
        (SKU + "ep_sizes = [true]\n", "[sku.x] ep_sizes must be a list of positive whole numbers, not True"),
        (SKU + "patterns = 'x'\n", "[sku.x] patterns must be a list of texts, not 'x'"),
        (SKU + "patterns = [3]\n", "[sku.x] patterns must be a list of texts, not 3"),
        (SKU + "patterns = ['(']\n", "[sku.x] patterns: '(' is no regular expression"),
        ("[sku.h200]\ngpus_per_node = true\n", "gpus_per_node must be a positive whole number, not True"),
        ("[sku.h200]\ngpus_per_node = 0\n", "gpus_per_node must be a positive whole number, not 0"),
        ("[sku.h200]\ngpus_per_node = 2000000\n", "gpus_per_node must be at most 1048576, not 2000000"),
        ("[backend.x]\nnormal = 3\n", "backend.x.normal must be tables [[backend.x.normal]]"),
        ("[backend.x]\nnormal = [3]\n", "[[backend.x.normal]] 1 must be a table"),
        ("[[backend.x.fast]]\n", "[[backend.x.fast]] is of no known mode, known: normal, low_latency"),
        ("[[backend.x.normal]]\nsource = 's'\n", "[[backend.x.normal]] 1 lacks evidence"),
        ("[[backend.x.normal]]\nprecisions = ['fp4']\n", "precisions has no 'fp4', known: bf16, fp8"),
        ("[[backend.x.normal]]\nskus = ['h300']\n", "skus has no 'h300', known: h100, h200"),
        ("[[backend.x.normal]]\nevidence = 'hope'\n", "evidence has no 'hope', known: measured, upstream"),
        ("[refused]\n", "refused must be tables [[refused]]"),
        ("refused = [3]\n", "[[refused]] 1 must be a table"),
        ("[[refused]]\nreason = 'r'\n", "[[refused]] 1 lacks code"),
        ("[[refused]]\ncode = ''\nreason = 'r'\n", "[[refused]] 1 code must not be empty"),
        ("[[refused]]\ncode = 'c'\nreason = ' '\n", "[[refused]] 1 reason must not be empty"),
        ("[[refused]]\ncode = 'No NIC'\nreason = 'r'\n", "1 code must be in a-z, 0-9 and -, not 'No NIC'"),
        (
            "[[refused]]\nbackends = ['flashinfer']\ncode = 'c'\nreason = 'r'\n",
            "[[refused]] 1 backends has no 'flashinfer', known: flashinfer_ep, ",
        ),
        ("[sku.all]\n", "[sku.all] is what --ep-sku calls every sku: give it another name"),
        (SKU.replace("'s'", "''"), "[sku.x] source must not be empty"),
        ("[[refused]]\nabove_tokens = 'x'\n", "above_tokens must be a positive whole number, not 'x'"),
        ("[[refused]]\nmodes = ['fast']\n", "[[refused]] 1 modes has no 'fast', known: normal, low_latency"),
        ("[[refused]]\ncode = 'c'\nreason = 'r'\nsku = 'h200'\n", "[[refused]] 1 unknown field sku, known:"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_file_and_the_field(
    tmp_path: Path, text: str, message: str
) -> None:
    file = written(tmp_path, text)
    with pytest.raises(pytest.UsageError) as raised:
        load(file)
    assert message in str(raised.value)
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_or_not_text_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(pytest.UsageError, match=r"nowhere\.toml: cannot be read, No such file"):
        load(tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(pytest.UsageError, match=r"binary\.toml: not TOML"):
        load(tmp_path / "binary.toml")


def test_shapes_are_those_of_the_models_named() -> None:
    sizes = {name: (shape.hidden, shape.experts, shape.top_k) for name, shape in SHAPES.items()}
    assert sizes == {
        "deepseek_v3": (7168, 256, 8),
        "deepseek_v4_pro": (7168, 384, 6),
        "kimi_k2": (7168, 384, 8),
        "qwen3_235b": (4096, 128, 8),
        "gpt_oss_120b": (2880, 128, 4),
        "mixtral_8x7b": (4096, 8, 2),
    }
    assert all(shape.source.startswith("https://") for shape in SHAPES.values())
    assert all(name == shape.name and name.isidentifier() for name, shape in SHAPES.items())


def test_a_shape_of_ones_own_is_named_after_its_numbers() -> None:
    shape = parse_shape("top_k=8, hidden=4096,experts=128")
    assert (shape.name, shape.hidden, shape.experts, shape.top_k) == ("h4096e128k8", 4096, 128, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no field ''"),
        ("hidden=4096,experts=8", "top_k missing"),
        ("hidden=4096", "experts and top_k missing"),
        ("hidden=4096,experts=8,top_k=2,heads=3", "no field 'heads'"),
        ("hidden=4096,experts=8,top_k=2,hidden=1", "hidden is given twice"),
        ("hidden=4096,experts=8,top_k=0", "top_k must be a positive whole number, not '0'"),
        ("hidden=4096,experts=-8,top_k=2", "experts must be a positive whole number, not '-8'"),
        ("hidden=4096,experts=8,top_k", "top_k must be a positive whole number, not ''"),
        ("hidden=4096,experts=8,top_k=9", "top_k 9 is more than 8 experts"),
        ("hidden=64,experts=99999999999999999999999,top_k=2", "experts must be at most 1048576, not 9999999"),
        ("hidden=1048577,experts=8,top_k=2", "hidden must be at most 1048576, not 1048577"),
        (f"hidden={'9' * 5000},experts=8,top_k=2", "hidden must be at most 1048576, not 9999999"),
        ("hidden=63,experts=8,top_k=2", "hidden must be at least 64, not 63"),
    ],
)
def test_a_wrong_shape_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        parse_shape(text)
    assert "\n" not in str(raised.value)


def test_experts_that_do_not_divide_go_one_each_to_the_first_ranks() -> None:
    assert SHAPES["mixtral_8x7b"].owned(3) == (0, 3, 6, 8)
