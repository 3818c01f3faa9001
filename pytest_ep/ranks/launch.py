"""``--ep-nproc``: plain pytest starts torchrun on itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

EXIT_FILE = "PYTEST_EP_EXIT_FILE"
"""Names the file in which the reporting rank leaves its exit code, which torchrun flattens to 1."""


def without_nproc(arguments: Sequence[str]) -> list[str]:
    """Return pytest's arguments without ``--ep-nproc N``, in any spelling that argparse takes."""
    kept: list[str] = []
    takes_value = False
    for argument in arguments:
        if takes_value:
            takes_value = False
        elif argument == "--ep-nproc":
            takes_value = True
        elif not argument.startswith("--ep-nproc="):
            kept.append(argument)
    return kept


def launch(nproc: int, arguments: Sequence[str]) -> int:
    """Run pytest with ``arguments`` in ``nproc`` ranks on this node; return rank 0's exit code.

    Returns torchrun's own where rank 0 left none.
    """
    with tempfile.TemporaryDirectory(prefix="pytest_ep-") as folder:
        left = Path(folder) / "exit"
        command = [sys.executable, "-m", __name__, f"--nproc-per-node={nproc}", "--standalone"]
        command += ["-m", "pytest", *without_nproc(arguments)]
        env = {**os.environ, EXIT_FILE: str(left)}
        # torchrun would set it to 1 itself, with a banner.
        env.setdefault("OMP_NUM_THREADS", "1")
        ended = _wait(subprocess.Popen(command, env=env))
        return int(left.read_text()) if left.exists() else ended


def _wait(process: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # torchrun heard it too and passes it on to the ranks: they end their case and report.
            continue


def main(arguments: list[str]) -> int:
    """Be torchrun, but say nothing of a rank that failed: rank 0's report has said it."""
    import logging

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        run.main(arguments)
    except (ChildFailedError, SignalException):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
