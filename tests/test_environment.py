"""What a result file says of machine, software and start: enough, and the same again each time."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pytest_ep
from pytest_ep.matrix.machine import Machine
from pytest_ep.results import journal
from pytest_ep.results import libraries
from pytest_ep.results.environment import admit_unknown
from pytest_ep.results.environment import drop_jitter
from pytest_ep.results.environment import hardware
from pytest_ep.results.environment import software
from tests.launching import python

SUITE = """
from pytest_ep import EPSuite

class TestTorchA2a(EPSuite):
    backend = "torch_a2a"
"""


def test_hardware_holds_the_machine_its_survey_and_no_software() -> None:
    machine = Machine(sku="h200", devices=8, product="NVIDIA H200", driver="580.1")
    assert hardware(machine, "NVLink4", 450.0, (8, 8), {"memory_mib": 143771}) == {
        "sku": "h200",
        "product": "NVIDIA H200",
        "devices": 8,
        "driver": "580.1",
        "link": "NVLink4",
        "link_gbps": 450.0,
        "ranks": 16,
        "ranks_by_host": [8, 8],
        "memory_mib": 143771,
    }


def test_the_host_s_name_and_momentary_clock_rates_are_dropped() -> None:
    # Of a brand that names no rate, py-cpuinfo gives /proc/cpuinfo's of the moment as the advertised one.
    rates = {"hz_actual": [2, 0], "hz_actual_friendly": "2", "hz_advertised": [2, 0]}
    info: dict[str, Any] = {"node": "a", "machine": "x86_64", "cpu": {"brand_raw": "AMD EPYC", **rates}}
    drop_jitter(info)
    assert info == {"machine": "x86_64", "cpu": {"brand_raw": "AMD EPYC"}}


def test_a_machine_without_processor_facts_has_no_jitter_to_drop() -> None:
    info: dict[str, Any] = {"machine": "arm64"}
    drop_jitter(info)
    assert info == {"machine": "arm64"}


@pytest.mark.parametrize(("commit", "dirty"), [("unversioned", None), ("unknown", None), ("146a90c", False)])
def test_what_has_no_commit_is_not_called_clean(commit: str, dirty: bool | None) -> None:
    info = {"id": commit, "dirty": False}
    admit_unknown(info)
    assert info == {"id": commit, "dirty": dirty}


def test_software_names_the_loaded_torch_and_every_backend() -> None:
    facts = software({"torch_a2a": {"torch": "2"}, "flashinfer_ep": {"flashinfer-python": "0.6.15"}})
    assert facts["torch"] == torch.__version__
    assert facts["cuda"] == torch.version.cuda
    assert list(facts["backends"]) == ["flashinfer_ep", "torch_a2a"]  # type: ignore[arg-type]
    assert facts["host"] == platform.node()
    assert json.loads(json.dumps(facts)) == facts


def test_nccl_loaded_stands_beside_what_torch_was_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(libraries, "nccl_loaded", lambda: ["2.30.7"])
    monkeypatch.setattr(libraries, "cuda_driver", lambda: "13.1")
    facts = software({})
    said = {name: facts[name] for name in ("cuda", "nccl", "nccl_loaded", "cuda_driver")}
    assert said == {"cuda": "13.0", "nccl": "2.28.9", "nccl_loaded": ["2.30.7"], "cuda_driver": "13.1"}


def test_the_version_of_the_plugin_is_said_of_a_checkout_too_and_software_does_not_load_torch() -> None:
    program = (
        "import sys; from pytest_ep.results.environment import software; facts = software({});"
        f"assert facts['pytest_ep'] == {pytest_ep.__version__!r};"
        "assert facts['torch'] is None; assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    paths = ":".join(path for path in sys.path if "site-packages" not in path)
    needed = ":".join(path for path in sys.path if "site-packages" in path)
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": f"{paths}:{needed}"})


KEEPER = """
import os
import shutil

def pytest_runtest_teardown():
    if not os.path.exists("head.jsonl"):
        shutil.copy("r.json.jsonl", "head.jsonl")
"""
"""A conftest.py that keeps the first journal, which is gone when the result file is there."""

TWICE = """
import os
import sys
import pytest

assert "torch" not in sys.modules
for name in ("1.json", "2.json"):
    assert pytest.main(sys.argv[1:]) == 0
    os.rename("r.json", name)
"""


def test_the_same_command_leaves_the_same_sections_and_a_journal_that_has_them(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(KEEPER)
    (tmp_path / ".git").mkdir()  # no repository, and none further up either
    shape = "--ep-shape=hidden=64,experts=16,top_k=4"
    options = (
        "-p",
        "no:cacheprovider",
        "--ep-tokens=1",
        "--ep-iterations=6",
        shape,
        "--benchmark-json=r.json",
    )
    # A run of one rank sets the interface where it is not set, here for the run after it too.
    env = {"NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "lo"}
    cases = ("-k", "test_case and ep01 and bf16")
    done = python(tmp_path, "-c", TWICE, *cases, *options, env=env)
    assert done.ret == 0, done.stdout.str() + done.stderr.str()
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("1.json", "2.json"))
    for section in ("machine_info", "commit_info"):
        assert first[section] == second[section]
    check_journal(first, journal.read(tmp_path / "head.jsonl")[0])
    software = first["commit_info"]["pytest_ep"]
    assert software["environment"].items() >= env.items()
    assert software["launch"].startswith("python -m pytest -k ")
    assert (first["commit_info"]["id"], first["commit_info"]["dirty"]) == ("unknown", None)
    assert {"numa_nodes", "gpu_links", "rdma"} <= set(first["machine_info"]["pytest_ep"])


def check_journal(result: dict[str, Any], head: dict[str, Any]) -> None:
    """Whether a journal's head has what the result file has, but for the transports: none was there yet."""
    assert head["machine_info"] == result["machine_info"]
    assert result["commit_info"]["pytest_ep"].pop("backends") == {"torch_a2a": {"torch": torch.__version__}}
    assert head["commit_info"]["pytest_ep"].pop("backends") == {}
    assert head["commit_info"] == result["commit_info"]


def test_the_commit_of_the_cases_is_in_the_file(pytester: pytest.Pytester) -> None:
    from pytest_benchmark.utils import get_commit_info

    git = ("git", "-c", "user.name=x", "-c", "user.email=x@x")
    pytester.makepyfile(test_x=SUITE)
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "x")):
        subprocess.run([*git, *words], check=True, cwd=pytester.path)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    info = get_commit_info()  # type: ignore[no-untyped-call]
    admit_unknown(info)
    assert (info["id"], info["dirty"]) == (head.stdout.strip(), False)
