"""Whether anybody listens at the rendezvous; without torch, which a session that is not ours never needs."""

from __future__ import annotations

import socket
import time

from pytest_ep.ranks.identity import Identity

NAP = 0.2
"""Seconds between attempts: a host that does not listen yet refuses at once."""
ATTEMPT = 5.0
"""Seconds of one attempt, where the way to the host drops what is sent."""


def unreachable(identity: Identity, limit: float) -> str:
    """Wait up to ``limit`` seconds for the host of the store to listen; return why it does not, or ""."""
    deadline = time.monotonic() + limit
    while True:
        try:
            left = max(NAP, min(ATTEMPT, deadline - time.monotonic()))
            socket.create_connection((identity.store_host, identity.store_port), timeout=left).close()
        except OSError as error:
            if time.monotonic() > deadline:
                return str(error)
            time.sleep(NAP)
        else:
            return ""
