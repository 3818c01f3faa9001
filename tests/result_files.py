"""Small result files, made by hand, for tests of what reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

COMPONENTS = ("dispatch", "combine", "roundtrip")
MEDIANS = {"dispatch": 10.0, "combine": 20.0, "roundtrip": 30.0}
VERSIONS = {"flashinfer-python": "0.6.15.post1"}


def params(tokens: int, **other: Any) -> dict[str, Any]:
    """Return a case's coordinates."""
    return {
        "backend": "flashinfer_ep",
        "sku": "h200",
        "ep_size": 2,
        "mode": "normal",
        "precision": "bf16",
        "model": "deepseek_v3",
        "routing": "uniform",
        "tokens": tokens,
        **other,
    }


def nodeid(of: Mapping[str, Any], test: str = "cases/test_x.py::TestX::test_case") -> str:
    """Return the node id of a case."""
    key = f"{of['sku']}-ep{of['ep_size']:02d}-{of['mode']}-{of['precision']}-{of['model']}"
    tokens = f"T{of['tokens']:05d}" if of["tokens"] else "Tany"
    return f"{test}[{key}-{of['routing']}-{tokens}]"


@dataclass
class ResultFile:
    """What a launch left. ``add`` its cases, then ``write`` it."""

    clock: str = "graph"
    versions: Mapping[str, str] = field(default_factory=lambda: dict(VERSIONS))
    software: Mapping[str, Any] = field(default_factory=lambda: {"torch": "2.11.0", "nccl": "2.28.9"})
    machine: Mapping[str, Any] = field(
        default_factory=lambda: {"sku": "h200", "driver": "580.1", "devices": 2}
    )
    node: str = "node-a"
    commit: Mapping[str, Any] = field(default_factory=dict)
    test: str = "cases/test_x.py::TestX::test_case"
    rows: list[dict[str, Any]] = field(default_factory=list)
    section: dict[str, Any] = field(
        default_factory=lambda: {
            "schema": 1,
            **{name: [] for name in ("failed", "skipped", "checked", "probed", "not_run", "cases")},
            **{name: [] for name in ("construction", "drift", "fits")},
        }
    )

    def timed(
        self,
        tokens: int,
        us: Mapping[str, float] = MEDIANS,
        samples: int = 16,
        sd: float = 0.005,
        seed: int = 0,
        of: Mapping[str, Any] | None = None,
        **info: Any,
    ) -> ResultFile:
        """Add a case whose samples have the medians ``us`` and a relative deviation of ``sd``."""
        coordinates = params(tokens) if of is None else {**of, "tokens": tokens}
        name = nodeid(coordinates, self.test)
        rng = random.Random(f"{seed} {tokens}")
        for component, median in us.items():
            drawn = sorted(rng.gauss(0, sd) for _ in range(samples))
            middle = (drawn[(samples - 1) // 2] + drawn[samples // 2]) / 2
            rng.shuffle(drawn)
            seconds = [median * 1e-6 * (1 + one - middle) for one in drawn]
            self.rows.append(
                _row(name, {**coordinates, "component": component}, seconds, median, self.clock, info)
            )
        self._add(
            "cases", coordinates, outcome="timed", reason="", identity="0", versions=dict(self.versions)
        )
        return self

    def failed(
        self, tokens: int, reason: str = "combine_values: error 1", code: str = "combine_values"
    ) -> ResultFile:
        """Add a case that failed."""
        self._add("failed", params(tokens), code=code, reason=reason, diagnosis="", evidence={})
        return self

    def skipped(self, tokens: int, reason: str = "no such kernel", code: str = "no-kernel") -> ResultFile:
        """Add a case that was skipped; 0 for all of its key."""
        self._add("skipped", params(tokens), code=code, reason=reason)
        return self

    def checked(self, tokens: int, reason: str = "several ranks on one device") -> ResultFile:
        """Add a case that passed and was not timed."""
        self._add("checked", params(tokens), reason=reason)
        self._add("cases", params(tokens), outcome="checked", reason=reason, identity="0", versions={})
        return self

    def not_run(self, tokens: int, reason: str = "the session's budget is spent") -> ResultFile:
        """Add a case that the run did not get to."""
        self.section["not_run"].append({"case": nodeid(params(tokens), self.test), "reason": reason})
        return self

    def probe(self, outcome: str, name: str = "slots", **entry: Any) -> ResultFile:
        """Add a probe that ended so, as files have it since they tell its params."""
        key = nodeid(params(8), self.test.replace("test_case", "test_probe")).replace("uniform-T00008", name)
        entry = {"case": key, "params": params(8), "probe": name, "reason": f"{name}: said", **entry}
        self.section[outcome].append(entry)
        return self

    def constructed(self, memory: float = 500 * 2**20, seconds: float = 2.0) -> ResultFile:
        """Add what constructing the transport took."""
        entry = {
            "backend": "flashinfer_ep",
            "key": "h200-ep02-normal-bf16-deepseek_v3",
            "device_memory_bytes": memory,
            "build_s": 0.0,
            "construction_s": seconds,
            "first_pair_s": 0.03,
        }
        self.section["construction"].append(entry)
        return self

    def content(self) -> dict[str, Any]:
        """Return the file's content."""
        return {
            "machine_info": {"node": self.node, "pytest_ep": dict(self.machine)},
            "commit_info": {
                **self.commit,
                "pytest_ep": {**self.software, "backends": {"flashinfer_ep": dict(self.versions)}},
            },
            "benchmarks": self.rows,
            "datetime": "2026-11-29T20:00:00+00:00",
            "version": "5.3.1",
            "pytest_ep": self.section,
        }

    def write(self, path: Path) -> Path:
        """Write the file, making its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.content()))
        return path

    def _add(self, section: str, of: Mapping[str, Any], **entry: Any) -> None:
        self.section[section].append({"case": nodeid(of, self.test), "params": dict(of), **entry})


def _row(
    name: str,
    of: Mapping[str, Any],
    seconds: Sequence[float],
    median: float,
    clock: str,
    info: Mapping[str, Any],
) -> dict[str, Any]:
    tokens, share = of["tokens"], 2 if of["component"] == "roundtrip" else 1
    moved = tokens * 14336 * share
    return {
        "group": "",
        "name": "",
        "fullname": f"{name[:-1]}-{of['component']}]",
        "params": dict(of),
        "param": "",
        "extra_info": {
            "clock": clock,
            "samples": len(seconds),
            "p50_us": median,
            "p99_us": max(seconds) * 1e6,
            "noise": 0.5,
            "spread_us": 0.1,
            "copies": 2 * tokens,
            "bytes": moved,
            "metadata_bytes": tokens * 64,
            "gbps": moved / median / 1e3,
            "error": 0.0,
            "bit_exact": 1.0,
            "reduction": "rank-sum-fp32",
            "max_tokens": 8192,
            **info,
        },
        "options": {"timer": "replayed"},
        "stats": {"median": median * 1e-6, "data": list(seconds), "rounds": len(seconds)},
    }
