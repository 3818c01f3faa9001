from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.cells import Key
from pytest_ep.matrix.shapes import Shape
from pytest_ep.results.record import CaseResult
from pytest_ep.results.record import Ledger
from pytest_ep.results.record import Measurement
from pytest_ep.results.record import parameters
from pytest_ep.results.record import section
from pytest_ep.timing.statistics import SampleError
from pytest_ep.timing.traffic import Leaving
from pytest_ep.timing.traffic import Traffic

CELL = Cell(
    Key("torch_a2a", "h200", 8, "normal", "bf16", "deepseek_v3"),
    Shape("deepseek_v3", 7168, 256, 8),
    "uniform",
    64,
)
TRAFFIC = Traffic(512, 45, Leaving(10, 20, 30), Leaving(8, 16, 24), Leaving(2, 4, 6), 7)
SAMPLES = {
    "dispatch": [0.1 + 0.2, 1e-9, 3.3e-6, 1 / 3, 5e-324],
    "combine": [2e-6] * 5,
    "roundtrip": [4e-6, 5e-6, 6e-6, 7e-6, 8e-6],
}
KEYS = [
    "clock",
    "samples",
    "p50_us",
    "p90_us",
    "p99_us",
    "noise",
    "spread_us",
    "copies",
    "bytes",
    "scale_up_bytes",
    "scale_out_bytes",
    "metadata_bytes",
    "gbps",
    "link_share",
    "tokens_per_s",
    "error",
    "bit_exact",
    "reduction",
    "max_tokens",
]
PARAMS = parameters(CELL)

# A suite of one case that measures nothing and records SAMPLES, on the plugin's recording path alone.
CONFTEST = f"""
import numpy as np
import pytest
from pytest_benchmark.plugin import benchmark as first_benchmark
from pytest_benchmark.plugin import benchmark as second_benchmark

from pytest_ep.matrix.cells import Cell, Key
from pytest_ep.matrix.shapes import Shape
from pytest_ep.matrix.skew import TokenSkew
from pytest_ep.results.record import CLOCK, COMPONENTS, Measurement, Recorder
from pytest_ep.timing.traffic import Leaving, Traffic

CELL = {CELL!r}

def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=CLOCK))

@pytest.fixture
def recorder(first_benchmark, second_benchmark, benchmark):
    fixtures = (first_benchmark, second_benchmark, benchmark)
    recorder = Recorder(dict(zip(COMPONENTS, fixtures)), CELL)
    yield recorder
    recorder.close()

@pytest.fixture
def measurement():
    seconds = {{name: np.array(samples) for name, samples in {SAMPLES!r}.items()}}
    traffic = {TRAFFIC!r}
    return Measurement("host", seconds, seconds, traffic, 2.0, 0.0, 1.0, "two-level", 64, {{"note": "x"}})
"""
ONE_CASE = """
import pytest

@pytest.mark.parametrize("tokens", [64], ids=["h200-ep08-T00064"])
def test_case(recorder, measurement, tokens):
    recorder.record(measurement)
"""


def bench(pytester: pytest.Pytester, test: str, *options: str) -> pytest.RunResult:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_x=test)
    return pytester.runpytest_inprocess("-W", "error", "--benchmark-json=out.json", *options)


def rows(pytester: pytest.Pytester) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads((pytester.path / "out.json").read_text())["benchmarks"]
    return loaded


def measured(**changes: Any) -> Measurement:
    seconds = {name: np.array(samples) for name, samples in SAMPLES.items()}
    facts: dict[str, Any] = {
        "clock": "event",
        "seconds": seconds,
        "spread": seconds,
        "traffic": TRAFFIC,
        "link_gbps": None,
        "error": 0.0,
        "bit_exact": 1.0,
        "reduction": "two-level",
        "max_tokens": 64,
    }
    return Measurement(**{**facts, **changes})


def test_a_case_leaves_three_rows_named_for_their_component(pytester: pytest.Pytester) -> None:
    bench(pytester, ONE_CASE).assert_outcomes(passed=1)
    found = rows(pytester)
    assert [row["name"] for row in found] == [
        f"test_case[h200-ep08-T00064-{component}]" for component in SAMPLES
    ]
    assert [row["fullname"] for row in found] == [f"test_x.py::{row['name']}" for row in found]
    assert [row["param"] for row in found] == [f"h200-ep08-T00064-{component}" for component in SAMPLES]
    assert [row["group"] for row in found] == [
        f"torch_a2a h200 ep08 normal bf16 deepseek_v3 uniform host {component}" for component in SAMPLES
    ]
    assert found[2]["params"] == {
        "backend": "torch_a2a",
        "sku": "h200",
        "ep_size": 8,
        "mode": "normal",
        "precision": "bf16",
        "model": "deepseek_v3",
        "routing": "uniform",
        "tokens": 64,
        "component": "roundtrip",
    }


def test_samples_are_stored_bit_for_bit(pytester: pytest.Pytester) -> None:
    bench(pytester, ONE_CASE)
    assert {row["params"]["component"]: row["stats"]["data"] for row in rows(pytester)} == SAMPLES


@pytest.mark.parametrize(
    "options",
    [
        ["--benchmark-cprofile=cumtime"],
        ["--benchmark-warmup=on"],
        ["--benchmark-min-rounds=9"],
        ["--benchmark-disable-gc"],
        ["--benchmark-precision=0.01", "--benchmark-confidence=0.95"],
        ["--benchmark-timer=time.time"],
    ],
)
def test_no_benchmark_option_changes_the_samples(pytester: pytest.Pytester, options: list[str]) -> None:
    bench(pytester, ONE_CASE, *options).assert_outcomes(passed=1)
    assert {row["params"]["component"]: row["stats"]["data"] for row in rows(pytester)} == SAMPLES


def test_every_row_has_the_fixed_keys_and_what_the_case_adds(pytester: pytest.Pytester) -> None:
    bench(pytester, ONE_CASE)
    for row in rows(pytester):
        assert list(row["extra_info"]) == [*KEYS, "note"]
    assert [row["extra_info"]["bytes"] for row in rows(pytester)] == [10, 20, 30]


def test_two_cases_without_brackets_get_brackets(pytester: pytest.Pytester) -> None:
    bench(pytester, "def test_plain(recorder, measurement): recorder.record(measurement)")
    assert rows(pytester)[0]["name"] == "test_plain[dispatch]"
    assert rows(pytester)[0]["param"] == "dispatch"


def test_long_measurements_are_thinned_but_counted_whole(pytester: pytest.Pytester) -> None:
    case = """
        import dataclasses
        import numpy as np

        def test_case(recorder, measurement):
            long = dict.fromkeys(measurement.seconds, np.arange(1.0, 2049.0))
            recorder.record(dataclasses.replace(measurement, seconds=long))
    """
    bench(pytester, case).assert_outcomes(passed=1)
    row = rows(pytester)[0]
    assert row["stats"]["data"] == [float(first) for first in range(1, 2049, 4)]
    assert row["extra_info"]["samples"] == 2048
    assert row["extra_info"]["p50_us"] == 1024.5e6


def test_a_discarded_case_leaves_no_row(pytester: pytest.Pytester) -> None:
    case = (
        ONE_CASE
        + "    recorder.discard()\n\ndef test_kept(recorder, measurement): recorder.record(measurement)\n"
    )
    bench(pytester, case).assert_outcomes(passed=2)
    assert {row["name"].split("[")[0] for row in rows(pytester)} == {"test_kept"}


def test_one_unsound_component_leaves_no_row_at_all(pytester: pytest.Pytester) -> None:
    case = ONE_CASE + (
        "\ndef test_nan(recorder, measurement):\n"
        "    measurement.seconds['roundtrip'][3] = float('nan')\n"
        "    recorder.record(measurement)\n"
    )
    result = bench(pytester, case)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*SampleError: roundtrip: sample 3 of 5 is nan s*"])
    assert len(rows(pytester)) == 3


@pytest.mark.parametrize("body", ["pytest.skip('no link')", "pytest.fail('wrong')", "pass"])
def test_a_case_that_records_nothing_is_not_warned_about(pytester: pytest.Pytester, body: str) -> None:
    result = bench(
        pytester, f"import pytest\n\ndef test_case(recorder): {body}\n\n" + ONE_CASE.replace("case", "kept")
    )
    assert result.parseoutcomes().get("warnings", 0) == 0
    assert "errors" not in result.parseoutcomes()
    assert len(rows(pytester)) == 3


def test_disabled_benchmarks_record_nothing_and_pass(pytester: pytest.Pytester) -> None:
    result = bench(pytester, ONE_CASE, "--benchmark-disable")
    assert result.parseoutcomes() == {"passed": 1}
    assert not (pytester.path / "out.json").exists()


def test_stock_compare_shows_the_three_components(pytester: pytest.Pytester) -> None:
    bench(pytester, ONE_CASE)
    for name in ("a.json", "b.json"):
        (pytester.path / name).write_text((pytester.path / "out.json").read_text())
    (pytester.path / "conftest.py").unlink()
    compared = pytester.run(sys.executable, "-m", "pytest_benchmark", "compare", "a.json", "b.json")
    assert compared.ret == 0
    for component in SAMPLES:
        compared.stdout.fnmatch_lines_random(
            [f"*benchmark 'torch_a2a h200 ep08 * host {component}': 2 tests*", f"test_case*-{component}]*"]
        )


def test_rates_and_shares_follow_from_bytes_and_the_median() -> None:
    found = measured(link_gbps=0.01).rows()
    assert found["combine"]["p50_us"] == pytest.approx(2.0)
    assert found["combine"]["gbps"] == pytest.approx(20 / 2e-6 / 1e9)
    assert (found["combine"]["scale_up_bytes"], found["combine"]["scale_out_bytes"]) == (16, 4)
    assert found["combine"]["link_share"] == pytest.approx(16 / 20), "the link is the scale-up domain's"
    for row in found.values():
        assert row["tokens_per_s"] == pytest.approx(512 / 6e-6)
    assert found["roundtrip"]["p99_us"] == pytest.approx(8.0)
    assert found["roundtrip"]["spread_us"] == pytest.approx(6.0)


def test_what_is_not_known_is_null() -> None:
    row = json.loads(json.dumps(measured().rows()["dispatch"]))
    assert row["link_share"] is None
    assert row["noise"] is None


def test_an_unsound_sample_has_no_rows() -> None:
    with pytest.raises(SampleError, match="dispatch"):
        measured(seconds={**measured().seconds, "dispatch": np.array([1.0, 0.0])}).rows()


def test_the_section_lists_every_case_that_left_no_row() -> None:
    ledger = Ledger()
    ledger.add(CaseResult.timed("a", CELL, measured()))
    ledger.add(CaseResult("b", CELL, "failed", reason="wrong", code="combine", diagnosis="other reduction"))
    ledger.add(CaseResult("c", CELL, "skipped", reason="8 ranks, 4 here", code="ranks"))
    ledger.add(CaseResult("d", CELL, "checked", reason="two ranks share a GPU"))
    ledger.add(CaseResult("e", CELL, "probed", reason="uniform: as expected", probe="uniform"))
    ledger.add(CaseResult("g", CELL, "failed", reason="slots: wrong", code="payload", probe="slots"))
    ledger.not_run, ledger.stopped_by = ["f"], "stopping after 1 failures"
    ledger.constructed[CELL.key] = {"build_s": 2.0}
    ledger.drift[CELL.key] = {"tokens": 1}
    said: Any = ledger.section()
    assert said["failed"] == [
        {
            "case": "b",
            "params": PARAMS,
            "probe": "",
            "code": "combine",
            "reason": "wrong",
            "diagnosis": "other reduction",
            "evidence": {},
        },
        {
            "case": "g",
            "params": PARAMS,
            "probe": "slots",
            "code": "payload",
            "reason": "slots: wrong",
            "diagnosis": "",
            "evidence": {},
        },
    ]
    assert said["skipped"] == [{"case": "c", "params": PARAMS, "code": "ranks", "reason": "8 ranks, 4 here"}]
    assert said["checked"] == [{"case": "d", "params": PARAMS, "reason": "two ranks share a GPU"}]
    assert said["probed"] == [
        {"case": "e", "params": PARAMS, "probe": "uniform", "reason": "uniform: as expected"}
    ]
    assert said["not_run"] == [{"case": "f", "reason": "stopping after 1 failures"}]
    assert said["drift"] == [{"tokens": 1}]
    assert said["construction"] == [{"backend": "torch_a2a", "key": str(CELL.key), "build_s": 2.0}]
    assert [(case["case"], case["outcome"]) for case in said["cases"]] == [
        ("a", "timed"),
        ("d", "checked"),
    ]
    before = copy.deepcopy(said)
    said["failed"] = []
    assert ledger.section() == before


def test_what_an_earlier_version_s_journal_did_not_say_is_left_out_of_the_section() -> None:
    line = CaseResult("e", CELL, "probed", reason="uniform: as expected", probe="uniform").line()
    del line["probe"]
    assert section([line], [], "")["probed"] == [
        {"case": "e", "params": PARAMS, "reason": "uniform: as expected"}
    ]


def test_a_case_that_fails_later_is_no_longer_timed() -> None:
    ledger = Ledger()
    ledger.add(CaseResult.timed("a", CELL, measured()))
    ledger.add(CaseResult("a", CELL, "failed", reason="close hung"))
    ledger.add(CaseResult("a", CELL, "skipped", reason="again"))
    assert [(result.outcome, result.reason) for result in ledger] == [("failed", "close hung")]


def test_the_recording_path_is_imported_without_numpy_torch_or_pytest_benchmark() -> None:
    program = (
        "import sys; from pytest_ep.results import environment, record, summary;"
        "assert not {'torch', 'numpy', 'pytest_benchmark'} & set(sys.modules)"
    )
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env={"PYTHONPATH": root}
    )
    assert done.returncode == 0, done.stderr
