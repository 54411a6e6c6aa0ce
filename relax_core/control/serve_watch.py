"""Watches Serve's controller, which Ray restarts in place.

No train step waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from relax_core.contracts.process_trees import LONGEST_GAP_S, kill, process_state

CONTROLLER_ACTOR, NAMESPACE = "SERVE_CONTROLLER_ACTOR", "serve"  # Serve fixes these names


class ServeLost(RuntimeError):
    """Says that Serve's controller has exited and Ray does not restart it."""


class ServeWatch:
    """Polls the controller of Serve on this machine for its process id.

    It kills a controller that has answered before and then gives no answer for ``frozen_after_s`` seconds. ``restarts``
    counts how often the controller was restarted.
    """

    def __init__(self, *, frozen_after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.restarts = 0
        self._frozen_after_s = frozen_after_s
        self._clock = clock
        self._controller = ray.get_actor(CONTROLLER_ACTOR, namespace=NAMESPACE)
        self._asked: Any = None
        self._checked = clock()
        self._pid: int | None = None
        self._silent_s = 0.0
        self._killed = ""

    def check(self) -> str | None:
        """Takes an answer if there is one, without waiting.

        Raises ServeLost. If another process of the controller answers than before, it returns how the earlier one
        ended, as a clause that follows its name; else None.
        """
        now = self._clock()
        self._checked, passed = now, min(now - self._checked, LONGEST_GAP_S)
        if self._asked is None:
            self._asked = self._controller.get_pid.remote()
        try:
            pid = int(ray.get(self._asked, timeout=0))
        except GetTimeoutError:
            self._count_silence(passed)
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

    def _count_silence(self, passed: float) -> None:
        if self._pid is None or self._killed:
            return
        self._silent_s += passed
        if self._silent_s > self._frozen_after_s:
            state = process_state(self._pid)
            self._killed = f"froze (no answer for {self._silent_s:.0f} s, state {state}) and was killed by SIGKILL"
            kill(self._pid)
