"""Every fault on every rank: how long until the run ends, with what, and what is kept.

``s`` is the whole run, ``after`` the seconds from the fault to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

KINDS = [
    "exits",
    "killed",
    "segfault",
    "leaves-quietly",
    "in-setup",
    "before-dispatch",
    "between",
    "in-combine",
    "in-oracle",
    "in-recording",
    "in-teardown",
    "gives-up",
    "skips-inside",
    "dies-in-teardown",
    "spins",
    "native-wait",
    "holds-the-gil",
    "sleeps",
    "collects-differently",
    "fails-to-import",
    "skips-alone",
    "interrupted",
    "exit-call",
    "exit-fixture",
    "killed-inside",
    "none",
]
MODULE = """
from tests.faults.fate import *
class TestFaulty(FaultySuite):
    pass
"""
SHAPE = "hidden=64,experts=16,top_k=4"
CEILING = 150.0


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    kind: str
    ranks: str
    size: int
    seconds: float
    after: float | None
    code: int | None
    timed: list[int]
    failed: list[str]
    said: str


def run(kind: str, ranks: str, size: int, rank_timeout: float) -> Line:
    """Launch one faulty run and read what it left."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        (there / "test_faulty.py").write_text(MODULE)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command += [
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-q",
            f"--ep-shape={SHAPE}",
            "--ep-tokens=1..16",
        ]
        command += [f"--ep-size={size}", "--ep-iterations=3", f"--ep-rank-timeout={rank_timeout}"]
        command += [
            "--benchmark-json=out.json",
            "--junit-xml=junit.xml",
            "-k",
            "bf16 or here",
            "test_faulty.py",
        ]
        env = {**os.environ, "PYTEST_EP_FAULT": f"{kind}@{ranks}"}
        began = time.monotonic()
        job = subprocess.Popen(
            command,
            cwd=there,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output = job.communicate(timeout=CEILING)[0].decode(errors="replace")
            code: int | None = job.returncode
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            output, code = job.communicate()[0].decode(errors="replace"), None
        seconds = time.monotonic() - began
        struck = there / "struck"
        after = time.time() - struck.stat().st_mtime if struck.exists() else None
        return Line(kind, ranks, size, seconds, after, code, *kept(there / "out.json"), said(output))


def kept(path: Path) -> tuple[list[int], list[str]]:
    """Return the tokens of timed and of failed cases; where no rank lived to write a file, of the journal."""
    recovered = [] if path.exists() else ["of the journal"]
    if recovered:
        recover = [sys.executable, "-m", "pytest_ep", "recover", f"{path}.jsonl"]
        if subprocess.run(recover, check=False, capture_output=True).returncode:
            return [], ["nothing"]
    result = json.loads(path.read_text())
    timed = sorted({row["params"]["tokens"] for row in result["benchmarks"]})
    found = [re.search(r"T(\d{5})", one["case"]) for one in result["pytest_ep"]["failed"]]
    return timed, [str(int(match[1])) for match in found if match] + recovered


def said(output: str) -> str:
    """Return the line that names the cause."""
    lines = [line.strip("E ").strip() for line in output.splitlines()]
    for pattern in (
        r"ranks? [\d, ]+ (is|are) gone",
        r"ranks? [\d, ]+ (stopped|was silent|gave no sign|leaves|fails)",
        r"the case takes",
        r"rank \d+ failed",
        r"ranks (disagree|collected|lost)",
        r"errors? during collection",
        r"interrupted",
        r"Exit:",
        r"store is gone",
        r"\d passed",
    ):
        for line in lines:
            if re.search(pattern, line):
                return line[:150]
    return "(nothing)"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--sizes", default="2,4")
    parser.add_argument("--ranks", default="0,1,0+1")
    parser.add_argument("--rank-timeout", type=float, default=8)
    options = parser.parse_args()
    print(
        f"{'fault':>21} {'rank':>4} {'of':>2} {'s':>6} {'after':>5} {'exit':>4} timed / failed / said",
        flush=True,
    )
    for kind in options.kinds.split(","):
        for size in map(int, options.sizes.split(",")):
            for ranks in options.ranks.split(","):
                line = run(kind, ranks, size, options.rank_timeout)
                print(
                    f"{line.kind:>21} {line.ranks:>4} {line.size:>2} {line.seconds:6.1f} "
                    f"{'-' if line.after is None else f'{line.after:.1f}':>5} {line.code!s:>4} "
                    f"{','.join(map(str, line.timed))} / {','.join(line.failed)} / {line.said}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
