"""An SGLang server that somebody else started: met and left, never ended by us."""

from __future__ import annotations

import time

from relax_core.contracts.engine import EngineError, EngineUnreachable
from relax_core.engines.client import EngineClient
from relax_core.engines.sglang.version import version_problem

RETRY_S = 0.5


def meet_server(client: EngineClient, *, timeout_s: float) -> str:
    """Waits until it answers and returns its version. Raises EngineError for one that is not supported, refuses our
    key, or does not answer for ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if client.ready():
                break
            words = f"engine {client.url} is not ready"
        except EngineUnreachable as error:
            words = str(error)
        if time.monotonic() > deadline:
            raise EngineError(f"engine.urls: no server for {timeout_s:g} s: {words}")
        time.sleep(RETRY_S)
    version = str(client.server_info().get("version", "of no known version"))
    if (problem := version_problem(version)) is not None:
        raise EngineError(f"engine {client.url}: {problem}")
    return version
