"""Many cases on eight ranks, a tenth of them with a random fault: every verdict must be right.

Cases are checked and not timed: ci/soak faults has the faults of timing and recording.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OUTPUTS = os.environ.get("SOAK_OUTPUTS", "")
"""Where each seed's output goes, as PREFIX-SEED.txt; nowhere unless it is set."""
SURVIVABLE = [
    "before-dispatch",
    "between",
    "in-combine",
    "in-oracle",
    "in-teardown",
    "skips-alone",
]
MODULE = """
from tests.faults.fate import *
class TestFaulty(FaultySuite):
    pass
"""


def run(seed: int, ranks: int, cases: int) -> tuple[float, set[int], set[int], set[int]]:
    """Run one seed; return seconds, the T with a fault, those that failed and those found right."""
    rng = random.Random(seed)
    faulty = {tokens: rng.choice(SURVIVABLE) for tokens in rng.sample(range(1, cases + 1), cases // 10)}
    everyone = range(ranks)
    faults = [
        f"{kind}@{'+'.join(map(str, rng.sample(everyone, rng.choice((1, 1, 2)))))}:{tokens}"
        for tokens, kind in faulty.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        (there / "test_faulty.py").write_text(MODULE)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--ep-shape=hidden=64,experts=16,top_k=4"]
        command += [f"--ep-tokens={','.join(map(str, range(1, cases + 1)))}", f"--ep-size={ranks}"]
        command += ["--benchmark-disable", "--benchmark-json=out.json", "-k", "bf16 and not test_probe"]
        began = time.monotonic()
        job = subprocess.run(
            [*command, "test_faulty.py"],
            cwd=there,
            env={**os.environ, "PYTEST_EP_FAULT": ",".join(faults)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=900,
        )
        if OUTPUTS:
            Path(f"{OUTPUTS}-{seed}.txt").write_bytes(job.stdout)
        seconds = time.monotonic() - began
        result = json.loads((there / "out.json").read_text())
    failed = {int(re.findall(r"T(\d{5})", one["case"])[0]) for one in result["pytest_ep"]["failed"]}
    right = {int(re.findall(r"T(\d{5})", one["case"])[0]) for one in result["pytest_ep"]["checked"]}
    return seconds, set(faulty), failed, right


def main() -> None:
    """Print a line for each seed, then the sum."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--cases", type=int, default=200)
    options = parser.parse_args()
    wrong = 0
    for seed in range(options.first, options.first + options.seeds):
        seconds, faulty, failed, right = run(seed, options.ranks, options.cases)
        bad = (faulty ^ failed) | (right ^ (set(range(1, options.cases + 1)) - faulty))
        wrong += len(bad)
        print(
            f"seed {seed:3d}: {seconds:6.1f} s, {len(faulty)} faults, {len(failed)} failed, "
            f"{len(right)} right, wrong verdicts: {sorted(bad) or 'none'}",
            flush=True,
        )
    print(f"{options.seeds} seeds, {options.ranks} ranks, {options.cases} cases each: {wrong} wrong verdicts")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
