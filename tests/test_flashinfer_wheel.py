"""What the adapter decides from an installation's metadata and files alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.version import Version

from pytest_ep.backends import adapter
from pytest_ep.backends import flashinfer_wheel
from pytest_ep.backends.flashinfer_ep import FlashInferEP
from pytest_ep.backends.flashinfer_wheel import Wheel
from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.cells import Key
from pytest_ep.matrix.cells import Skip
from pytest_ep.matrix.machine import Machine
from pytest_ep.matrix.shapes import Shape
from tests.fakes.flashinfer_site import install
from tests.fakes.flashinfer_site import write_distribution

SHAPE = Shape("deepseek_v3", 7168, 256, 8)
H200 = Machine("h200", 8, "NVIDIA H200")
OLD, EIGHT, SIXTEEN, SEVEN, LAST = "0.6.8.post1", "0.6.15.post1", "0.6.16.post4", "0.7.2.post1", "0.7.4"
KERNELS = "flashinfer/data/csrc/nv_internal/tensorrt_llm/kernels/communicationKernels/moeAlltoAllKernels"
SWITCH = """\
    case 5: before the macro
#define SWITCH_TOP_K(top_k, TOP_K, ...) \\
  switch (top_k) {                      \\
    case 9: {                           \\
      constexpr int TOP_K = 9;          \\
    }                                   \\
    case 3:                             \\
    {                                   \\
    }                                   \\
  }
    case 7: behind it
"""


def wheel(folder: Path, version: str, jit_cache: str = "", cubin: str = "") -> Wheel:
    install(folder, version, "", jit_cache, cubin)
    found = flashinfer_wheel.read([str(folder / "site")])
    assert found is not None
    return found


def refused(
    found: Wheel | None,
    top_k: int = 8,
    experts: int = 256,
    hidden: int = 7168,
    ep_size: int = 8,
    tokens: int = 1,
) -> tuple[str, str]:
    shape = Shape("any", hidden, experts, top_k)
    skip = flashinfer_wheel.refusal(found, shape, ep_size, tokens) or Skip("", "")
    return skip.code, skip.reason


@pytest.mark.parametrize(
    ("version", "reduction"),
    [
        ("0.6.0", "topk-slot-tree"),
        ("0.6.9", "topk-slot-tree"),
        ("0.6.15", "topk-slot-tree"),
        ("0.6.15.post1", "topk-slot-tree"),
        ("0.6.16.dev20260715", "topk-slot-tree"),
        ("0.6.16a1", "topk-slot-tree"),
        ("0.6.16rc1", "rank-sum-fp32"),
        ("0.6.16rc3", "rank-sum-fp32"),
        ("0.6.16", "rank-sum-fp32"),
        ("0.6.16+cu130", "rank-sum-fp32"),
        ("0.6.16.post4", "rank-sum-fp32"),
        ("0.6.100", "rank-sum-fp32"),
        ("0.7.0.dev1", "rank-sum-fp32"),
        ("0.7.4", "rank-sum-fp32"),
        ("1.0", "rank-sum-fp32"),
    ],
)
def test_the_accumulator_changes_with_the_first_candidate_of_0_6_16(version: str, reduction: str) -> None:
    assert flashinfer_wheel.reduction(Version(version)) == reduction


def test_only_development_builds_are_a_guess() -> None:
    assert not flashinfer_wheel.is_read(Version("0.6.16.dev20260715"))
    assert not flashinfer_wheel.is_read(Version("0.7.0.dev1+gabc"))
    assert flashinfer_wheel.is_read(Version("0.6.16rc3"))
    assert flashinfer_wheel.is_read(Version("0.6.15.post1+cu130"))


@pytest.mark.parametrize("version", [OLD, EIGHT, SIXTEEN, SEVEN, LAST])
@pytest.mark.parametrize("tokens", [1, 3, 8192])
def test_the_default_shape_runs_everywhere(tmp_path: Path, version: str, tokens: int) -> None:
    for ep_size in (1, 2, 4, 8, 16, 32, 64):
        assert refused(wheel(tmp_path / str(ep_size), version), ep_size=ep_size, tokens=tokens) == ("", "")


@pytest.mark.parametrize(
    ("version", "top_k", "runs"),
    [
        ("0.6.15", 12, False),
        ("0.6.15", 22, True),
        ("0.6.16rc3", 12, True),
        ("0.6.16", 12, True),
        (SEVEN, 18, True),
        (OLD, 3, False),
        (SIXTEEN, 3, False),
        (SEVEN, 3, False),
        (LAST, 3, True),
        (OLD, 23, False),
        (LAST, 23, False),
        (LAST, 5, False),
    ],
)
def test_a_top_k_that_is_not_compiled_is_skipped(
    tmp_path: Path, version: str, top_k: int, runs: bool
) -> None:
    code, reason = refused(wheel(tmp_path, version), top_k=top_k)
    assert code == ("" if runs else "top-k-not-compiled")
    if not runs:
        assert reason.startswith(f"top_k {top_k} is not compiled into flashinfer-python {version}, ")
        assert "which takes 1, 2, " in reason
        assert reason.endswith(", 22")


def test_the_wheels_own_kernels_overrule_the_table(tmp_path: Path) -> None:
    install(tmp_path, SIXTEEN)
    source = tmp_path / "site" / f"{KERNELS}.cu"
    source.parent.mkdir(parents=True)
    source.write_text(SWITCH)
    source.with_suffix(".h").write_text("static constexpr int kMaxRanks = 4;  // so many\n")
    found = flashinfer_wheel.read([str(tmp_path / "site")])
    assert refused(found, top_k=9, ep_size=4) == ("", "")
    assert refused(found, top_k=3, ep_size=4) == ("", "")
    for top_k in (5, 7, 8):
        assert refused(found, top_k=top_k)[1].endswith("which takes 3, 9")
    assert refused(found, top_k=9) == (
        "too-many-ranks",
        f"flashinfer-python {SIXTEEN} takes at most 4 ranks, not 8",
    )


def test_whether_experts_may_be_uneven_is_read_where_the_class_in_use_would_refuse_it(tmp_path: Path) -> None:
    def found(name: str, **files: str) -> Wheel | None:
        site = tmp_path / name / "site"
        install(tmp_path / name, SEVEN)
        for path, text in files.items():
            file = site / "flashinfer" / path.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.with_suffix(".cu" if "csrc" in path else ".py").write_text(text)
        return flashinfer_wheel.read([str(site)])

    alltoall = {"comm__trtllm_moe_alltoall": "class MoeAlltoAll: ..."}
    refuses = {"data__csrc__trtllm_moe_alltoall": '<< "num_experts must be divisible by ep_size";'}
    takes = {"data__csrc__trtllm_moe_alltoall": "// Non-divisible num_experts % ep_size is supported"}
    successor = {"moe_ep__init": "class NVLinkOneSidedAlltoAll: ..."}
    cases = {
        "refuses": ({**alltoall, **refuses}, "uneven-experts"),
        "takes": ({**alltoall, **takes}, ""),
        "trimmed": ({**alltoall}, ""),
        "both": ({**alltoall, **takes, **successor}, ""),
    }
    for name, (files, code) in cases.items():
        assert refused(found(name, **files), ep_size=3)[0] == code, name


@pytest.mark.parametrize(
    ("version", "ep_size", "runs"),
    [(OLD, 3, False), (EIGHT, 5, False), (SIXTEEN, 3, True), (SEVEN, 5, True), (LAST, 3, False)],
)
def test_uneven_experts_run_only_where_the_wheel_takes_them(
    tmp_path: Path, version: str, ep_size: int, runs: bool
) -> None:
    code, reason = refused(wheel(tmp_path, version), ep_size=ep_size)
    assert code == ("" if runs else "uneven-experts")
    if not runs:
        assert f"flashinfer-python {version}" in reason
        assert f"256 on {ep_size} ranks" in reason


@pytest.mark.parametrize(("version", "most"), [(OLD, 64), (SIXTEEN, 64), (LAST, 256)])
def test_more_ranks_than_the_wheel_takes_are_skipped(tmp_path: Path, version: str, most: int) -> None:
    found = wheel(tmp_path, version)
    assert refused(found, experts=1024, ep_size=most) == ("", "")
    code, reason = refused(found, experts=1024, ep_size=2 * most)
    assert code == "too-many-ranks"
    assert f"at most {most} ranks, not {2 * most}" in reason


@pytest.mark.parametrize(
    ("version", "hidden", "top_k", "ep_size", "tokens", "code"),
    [
        # 8200 bytes a row are 8 past a multiple of 16, and ids of top-8 are stored in units of 16.
        (OLD, 4100, 8, 1, 1, "row-alignment"),
        (OLD, 4100, 8, 3, 5, "row-alignment"),
        (OLD, 4100, 8, 1, 2, ""),
        (OLD, 4100, 8, 2, 1, ""),
        (EIGHT, 4100, 8, 1, 1, "row-alignment"),
        (SIXTEEN, 4100, 8, 3, 1, "row-alignment"),
        ("0.7.0", 4100, 8, 3, 1, "row-alignment"),
        (SEVEN, 4100, 8, 3, 1, ""),
        (LAST, 4100, 8, 3, 1, ""),
        # Ids of top-1 are stored in units of 4, of top-6 in units of 8.
        (OLD, 4100, 1, 1, 1, ""),
        (OLD, 4100, 6, 1, 1, ""),
        (OLD, 4098, 6, 1, 1, "row-alignment"),
        # No release stores an id across 4 bytes, and only the last pads its planes.
        (SEVEN, 65, 8, 1, 1, "row-alignment"),
        (SEVEN, 65, 8, 2, 1, ""),
        (LAST, 65, 8, 1, 1, ""),
    ],
)
def test_rows_that_would_be_misaligned_stores_are_skipped_with_the_numbers(
    tmp_path: Path, version: str, hidden: int, top_k: int, ep_size: int, tokens: int, code: str
) -> None:
    found = wheel(tmp_path, version)
    experts = 240  # a multiple of every ep_size here
    sizes = {"hidden": hidden, "top_k": top_k, "ep_size": ep_size, "tokens": tokens, "experts": experts}
    told, reason = refused(found, **sizes)
    assert told == code
    if code:
        assert f"{ep_size * tokens} rows of {2 * hidden} bytes end " in reason
        assert f"in flashinfer-python {version}" in reason


@pytest.mark.parametrize(
    ("python", "jit_cache", "cubin", "named"),
    [
        ("0.6.12", "0.6.11+cu130", "", "flashinfer-jit-cache 0.6.11+cu130"),
        # The import of these two would let it pass.
        ("0.6.15", "0.6.15.post1+cu130", "", "flashinfer-jit-cache 0.6.15.post1+cu130"),
        (SEVEN, "0.7.1", "", "flashinfer-jit-cache 0.7.1"),
        (SIXTEEN, "", "0.6.16", "flashinfer-cubin 0.6.16"),
        (SIXTEEN, "", "nightly-1", "flashinfer-cubin nightly-1"),
    ],
)
@pytest.mark.parametrize("bypass", [False, True])
def test_companions_of_another_version_are_refused_bypassed_or_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    python: str,
    jit_cache: str,
    cubin: str,
    named: str,
    bypass: bool,
) -> None:
    if bypass:
        monkeypatch.setenv("FLASHINFER_DISABLE_VERSION_CHECK", "1")
    code, reason = refused(wheel(tmp_path, python, jit_cache, cubin))
    assert code == "flashinfer-mixed"
    assert f"flashinfer-python {python} beside {named}: " in reason


def test_companions_of_the_same_version_run_whatever_their_cuda(tmp_path: Path) -> None:
    found = wheel(tmp_path, "0.6.16.post4", "0.6.16.post4+cu130", "0.6.16-post4")
    assert refused(found) == ("", "")
    assert found.versions["flashinfer-jit-cache"] == "0.6.16.post4+cu130"
    assert found.versions["flashinfer-cubin"] == "0.6.16-post4"


@pytest.mark.parametrize("version", ["main", "0.6.x", "0.0.0+unknown", "0.0.0.dev1"])
def test_a_version_that_says_nothing_is_refused(tmp_path: Path, version: str) -> None:
    code, reason = refused(wheel(tmp_path, version))
    assert code == "flashinfer-version"
    assert version in reason


def test_without_the_package_the_reason_says_how_to_get_it(tmp_path: Path) -> None:
    assert flashinfer_wheel.read([str(tmp_path)]) is None
    assert refused(None) == (
        "flashinfer-missing",
        "flashinfer-python is not installed: pip install flashinfer-python",
    )


def test_the_adapter_is_found_and_asks_the_installation_on_sys_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert adapter("flashinfer_ep") is FlashInferEP
    write_distribution(tmp_path, "flashinfer-python", "0.6.15")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    flashinfer_wheel.installed.cache_clear()
    try:
        cell = Cell(Key("flashinfer_ep", "h200", 8, "normal", "bf16", "x"), SHAPE, "uniform", 64)
        assert FlashInferEP.unsupported(cell, H200) is None
        twelve = Cell(cell.key, Shape("x", 7168, 256, 12), "uniform", 64)
        skip = FlashInferEP.unsupported(twelve, H200)
        assert skip is not None
        assert skip.code == "top-k-not-compiled"
        skip = FlashInferEP.unsupported(cell, Machine("cpu", 0, "cpu"))
        assert skip is not None
        assert skip.code == "needs-accelerator"
    finally:
        flashinfer_wheel.installed.cache_clear()
    assert FlashInferEP.ranks_per_device(H200) is None
