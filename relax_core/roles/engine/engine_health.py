"""Detects an engine process that runs but does not answer, and kills it, so that its owner restarts it."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable

from relax_core.contracts.engine import EngineError, EngineUnreachable
from relax_core.engines.protocol.engine_client import EngineClient

ASK_S = 1.0
log = logging.getLogger(__name__)


class EngineHealth:
    """Asks one engine process for its health once a second, in its own thread, because the owner's calls may take long.

    ``kill`` is called once, after ``timeout_s`` seconds without an answer; `frozen_s` then holds the number of seconds.
    """

    def __init__(self, client: EngineClient, *, timeout_s: float, kill: Callable[[], None]) -> None:
        self.frozen_s: float | None = None
        self._client = client
        self._timeout_s = timeout_s
        self._kill = kill
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="engine-health", daemon=True).start()

    def end(self) -> None:
        """Ends the thread; call it when the process has exited or is about to."""
        self._ended.set()

    def _watch(self) -> None:
        answered = time.monotonic()
        while not self._ended.wait(ASK_S):
            try:
                self._client.ready()
                answered = time.monotonic()
            except EngineError as error:
                if not isinstance(error, EngineUnreachable):  # the engine has answered with an error
                    answered = time.monotonic()
                    log.warning("%s", error)
                    continue
                silent_s = time.monotonic() - answered
                if silent_s >= self._timeout_s and not self._ended.is_set():
                    self.frozen_s = silent_s
                    self._kill()
                    break
        self._client.close()


def how_it_ended(code: int, *, frozen_s: float | None) -> str:
    """Returns how a process with this exit code ended, as a predicate; negative exit codes are signals."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return how if frozen_s is None else f"froze (no answer for {frozen_s:.0f} s) and {how}"
