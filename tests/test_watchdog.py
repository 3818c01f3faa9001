"""The watchdog where the rendezvous store gives no answer any more: its host is cut off, not closed."""

from __future__ import annotations

from pathlib import Path

from tests.launching import python

SCRIPT = """
import os, sys, threading, time
from pytest_ep.ranks.ballot import Ballot
from pytest_ep.ranks.identity import Identity
from pytest_ep.ranks.pulse import Pulse
from pytest_ep.ranks.watchdog import Limits, Watchdog

class CutOff:
    def set(self, key, value):
        threading.Event().wait()

identity = Identity(rank=1, size=2, local_rank=0, local_size=1)
ballot = Ballot(identity, CutOff(), Pulse())
ends = {"report": lambda ending: print(ending.cause, ending.alone), "printed": str, "free": lambda: None}
Watchdog(identity, CutOff(), ballot, Limits(4.0, 60.0), **ends, stderr=2).start()
time.sleep(60)
"""


def test_a_store_that_gives_no_answer_ends_the_run_within_the_rank_timeout(tmp_path: Path) -> None:
    result = python(tmp_path, "-c", SCRIPT)
    assert result.ret == 1
    assert result.duration < 4 + 5
    assert result.outlines == [
        "the rendezvous store gives no answer: its host is gone, or the way to it True"
    ]
