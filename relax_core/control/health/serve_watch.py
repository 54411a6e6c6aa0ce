"""Looks after Serve's controller. Nothing of a train step waits for it, and Ray starts it again in place."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from relax_core.control.host.process_trees import LONGEST_GAP_S, kill, process_state

CONTROLLER_ACTOR, NAMESPACE = "SERVE_CONTROLLER_ACTOR", "serve"  # Serve's own names


class ServeLost(RuntimeError):
    """Serve's controller is gone, and Ray does not start it again."""


class ServeWatch:
    """Asks the controller of a Serve on this machine for its process id, again and again. One that answered once and
    then nothing for ``frozen_after_s`` seconds is killed. ``restarts``: how often it was started again."""

    def __init__(self, *, frozen_after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.restarts = 0
        self._frozen_after_s = frozen_after_s
        self._clock = clock
        self._controller = ray.get_actor(CONTROLLER_ACTOR, namespace=NAMESPACE)
        self._asked: Any = None
        self._looked = clock()
        self._pid: int | None = None
        self._silent_s = 0.0
        self._killed = ""

    def look(self) -> str | None:
        """Takes an answer that is there. How the controller ended, in words that follow its name, where another one
        answers now; else None. Raises ServeLost."""
        now = self._clock()
        self._looked, passed = now, min(now - self._looked, LONGEST_GAP_S)
        if self._asked is None:
            self._asked = self._controller.get_pid.remote()
        try:
            pid = int(ray.get(self._asked, timeout=0))
        except GetTimeoutError:
            self._note_silence(passed)
            return None
        except ActorUnavailableError:
            self._asked = None
            return None
        except ActorDiedError as error:
            raise ServeLost(f"Serve's controller died for good: {error}") from error
        self._asked, self._silent_s = None, 0.0
        earlier, self._pid = self._pid, pid
        if earlier in (None, pid):
            return None
        self.restarts += 1
        how, self._killed = self._killed or "died", ""
        return how

    def _note_silence(self, passed: float) -> None:
        if self._pid is None or self._killed:
            return
        self._silent_s += passed
        if self._silent_s > self._frozen_after_s:
            state = process_state(self._pid)
            self._killed = f"froze (no answer for {self._silent_s:.0f} s, state {state}) and was killed by SIGKILL"
            kill(self._pid)
