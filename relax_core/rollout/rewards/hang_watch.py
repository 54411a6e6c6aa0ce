"""Sees that a reward in the rollout's own process hangs, which stands where nobody can end it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from relax_core.contracts.reward import RewardConfig

LOOK_S = 1.0  # a pause of the whole process counts as one look
OnHang = Callable[[RuntimeError], None]


class HangWatch:
    """Calls ``on_hang`` once, in a thread of its own, where scoring takes longer than ``config.timeout_s`` an answer.
    ``shared``: the calls under way share one interpreter, so a second in which n of them are is 1/n second of each."""

    def __init__(self, config: RewardConfig, on_hang: OnHang, *, shared: bool) -> None:
        self._config = config
        self._on_hang = on_hang
        self._shared = shared
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._left_s: dict[object, float] = {}
        threading.Thread(target=self._look, name="reward-watch", daemon=True).start()

    @contextmanager
    def scoring(self, answers: int) -> Iterator[None]:
        """For as long as the block runs, ``answers`` answers are scored; from any thread."""
        call = object()
        with self._lock:
            self._left_s[call] = self._config.timeout_s * answers
        try:
            yield
        finally:
            with self._lock:
                del self._left_s[call]

    def close(self) -> None:
        self._closed.set()

    def _look(self) -> None:
        look_s = min(LOOK_S, self._config.timeout_s)
        while not self._closed.wait(look_s):
            with self._lock:
                hangs = any(left_s <= 0 for left_s in self._left_s.values())
                passed_s = look_s / len(self._left_s) if self._shared and self._left_s else look_s
                self._left_s = {call: left_s - passed_s for call, left_s in self._left_s.items()}
            if hangs:
                self._on_hang(
                    RuntimeError(
                        f"reward {self._config.name}: a group's answers took longer than reward.timeout_s="
                        f"{self._config.timeout_s:g} each, and a reward that is not isolated cannot be ended. Set "
                        "isolated=True in its SPEC, or raise reward.timeout_s."
                    )
                )
                return
