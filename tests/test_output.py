"""What other ranks would print is held back, whatever they do with stdout meanwhile."""

from __future__ import annotations

import io
from typing import Any

from pytest_ep.ranks.output import HeldOutput


def test_a_conftest_may_reconfigure_held_output_as_any_stdout() -> None:
    bytes_ = io.BytesIO()
    held: Any = HeldOutput(io.TextIOWrapper(bytes_, encoding="ascii"))
    held.reconfigure(encoding="utf-8", line_buffering=True)
    held.write("µs\n")
    assert (held.encoding, held.line_buffering, bytes_.getvalue()) == ("utf-8", True, b"")
    held.release()
    assert bytes_.getvalue() == "µs\n".encode()
    assert not hasattr(held, "of_no_stream")
