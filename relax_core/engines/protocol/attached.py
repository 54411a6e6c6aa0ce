"""Waits for a server that the run attaches to and does not start."""

from __future__ import annotations

import time

from relax_core.contracts.engine import EngineError, EngineUnreachable
from relax_core.engines.protocol.engine_client import EngineClient

RETRY_S = 0.5


def wait_ready(client: EngineClient, *, timeout_s: float) -> None:
    """Waits until the server is ready.

    Raises EngineError if it is not ready within ``timeout_s`` seconds, or refuses the token.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if client.ready():
                return
            words = f"engine {client.url} is not ready"
        except EngineUnreachable as error:
            words = str(error)
        if time.monotonic() > deadline:
            raise EngineError(f"engine.urls: no server for {timeout_s:g} s: {words}")
        time.sleep(RETRY_S)
