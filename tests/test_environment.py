from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch

from pytest_ep.matrix.machine import Machine
from pytest_ep.results.environment import drop_jitter
from pytest_ep.results.environment import hardware
from pytest_ep.results.environment import software


def test_hardware_holds_the_machine_and_no_software() -> None:
    machine = Machine(sku="h200", devices=8, product="NVIDIA H200", driver="580.1")
    assert hardware(machine, "NVLink4", 450.0, (8, 8)) == {
        "sku": "h200",
        "product": "NVIDIA H200",
        "devices": 8,
        "driver": "580.1",
        "link": "NVLink4",
        "link_gbps": 450.0,
        "ranks": 16,
        "ranks_by_host": [8, 8],
    }


def test_momentary_clock_rates_are_dropped_and_the_nominal_one_kept() -> None:
    info: dict[str, Any] = {
        "node": "a",
        "cpu": {"hz_actual": [2, 0], "hz_actual_friendly": "2 GHz", "hz_advertised": [3, 0]},
    }
    drop_jitter(info)
    assert info == {"node": "a", "cpu": {"hz_advertised": [3, 0]}}


def test_a_machine_without_processor_facts_has_no_jitter_to_drop() -> None:
    info: dict[str, Any] = {"node": "a"}
    drop_jitter(info)
    assert info == {"node": "a"}


def test_software_names_the_loaded_torch_and_every_backend() -> None:
    facts = software({"torch_a2a": {"torch": "2"}, "flashinfer_ep": {"flashinfer-python": "0.6.15"}})
    assert facts["torch"] == torch.__version__
    assert facts["cuda"] == torch.version.cuda
    assert list(facts["backends"]) == ["flashinfer_ep", "torch_a2a"]  # type: ignore[arg-type]
    assert json.loads(json.dumps(facts)) == facts


def test_software_does_not_load_torch() -> None:
    program = (
        "import sys; from pytest_ep.results.environment import software; facts = software({});"
        "assert facts['torch'] is None; assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path)})
