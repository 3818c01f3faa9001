"""``--ep-nproc``: plain pytest starts torchrun on itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

EXIT_FILE = "PYTEST_EP_EXIT_FILE"
"""Names the file in which the reporting rank leaves its exit code, which torchrun flattens to 1.

Rank 0 of a session without EP cases leaves it empty: it has come to its end.
"""
PR_SET_PDEATHSIG = 1
"""Of prctl: the signal that a process gets once the one that started it is gone. Linux."""


def has_launched(env: Mapping[str, str]) -> bool:
    """Whether this process is one of the ranks that ``launch`` has started."""
    return EXIT_FILE in env and "RANK" in env


def launch(nproc: int, arguments: Sequence[str]) -> int:
    """Run pytest with ``arguments`` in ``nproc`` ranks on this node; return rank 0's exit code.

    Returns torchrun's own where rank 0 left none, and where it left a 0 although a rank failed after that; 1
    where no rank failed and yet rank 0 did not come to its session's end.
    """
    with tempfile.TemporaryDirectory(prefix="pytest_ep-") as folder:
        left = Path(folder) / "exit"
        command = [sys.executable, "-m", __name__, str(os.getpid())]
        command += [f"--nproc-per-node={nproc}", "--standalone", "-m", "pytest", *arguments]
        env = {**os.environ, EXIT_FILE: str(left)}
        # torchrun would set it to 1 itself, with a banner.
        env.setdefault("OMP_NUM_THREADS", "1")
        ended = _wait(subprocess.Popen(command, env=env))
        if not ended and not left.exists():
            said = "rank 0 left with exit code 0 before its session had ended, so nothing says what passed"
            print(f"pytest_ep: {said}: look for what ends the process", file=sys.stderr)
            return 1
        return _left(left) or ended


def say_ended(env: Mapping[str, str]) -> None:
    """Leave word that this rank's session has come to its end, where it reports for a launch."""
    if has_launched(env) and env["RANK"] == "0":
        Path(env[EXIT_FILE]).touch()


def _left(path: Path) -> int:
    return int(path.read_text() or 0) if path.exists() else 0


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for torchrun, whatever signal comes: the ranks report before they end."""

    def end(number: int, frame: object) -> None:
        process.send_signal(signal.SIGTERM)  # whichever came: torchrun need know one end

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    if handlers[signal.SIGHUP] == signal.SIG_IGN:  # as nohup wants it
        del handlers[signal.SIGHUP]
    for number in handlers:
        signal.signal(number, end)
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                # torchrun heard it too and passes it on to the ranks: they end their case and report.
                continue
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end_with(parent: int) -> None:
    """Have this process told to end when ``parent`` is gone: nobody else would end the ranks then."""
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # gone already
        sys.exit(1)


def main(parent: int, arguments: list[str]) -> int:
    """Be torchrun for ``parent``, but say nothing of a rank that failed where rank 0's report has said it."""
    _end_with(parent)
    import logging

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        run.main(arguments)
    except ChildFailedError as error:
        _say_unreported(error)
        return 1
    except SignalException:
        return 1
    return 0


def _say_unreported(error: ChildFailedError) -> None:
    left = Path(os.environ[EXIT_FILE])
    if left.exists() and left.read_text() == "0":
        rank, failure = error.get_first_failure()
        print(
            f"pytest_ep: rank {rank} ended with exit code {failure.exitcode} after rank 0 reported a pass: "
            "see what it printed as it ended",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
