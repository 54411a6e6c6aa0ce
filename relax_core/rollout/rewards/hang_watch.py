"""Reports a reward that hangs in the rollout's own process, where no other thread can end the call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from relax_core.contracts.reward import RewardConfig

CHECK_S = 1.0  # a pause of the whole process counts as one check
OnHang = Callable[[RuntimeError], None]


class HangWatch:
    """Calls ``on_hang`` once, in its own thread, if scoring takes longer than ``config.timeout_s`` per answer.

    ``shared`` means that concurrent calls share one interpreter: of a second with n calls, 1/n second counts for each.
    """

    def __init__(self, config: RewardConfig, on_hang: OnHang, *, shared: bool) -> None:
        self._config = config
        self._on_hang = on_hang
        self._shared = shared
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._left_s: dict[object, float] = {}
        threading.Thread(target=self._check, name="reward-watch", daemon=True).start()

    @contextmanager
    def scoring(self, answers: int) -> Iterator[None]:
        """Marks that ``answers`` answers are scored while the block runs; callable from any thread."""
        call = object()
        with self._lock:
            self._left_s[call] = self._config.timeout_s * answers
        try:
            yield
        finally:
            with self._lock:
                del self._left_s[call]

    def close(self) -> None:
        """Ends the watching thread."""
        self._closed.set()

    def _check(self) -> None:
        check_s = min(CHECK_S, self._config.timeout_s)
        while not self._closed.wait(check_s):
            with self._lock:
                hangs = any(left_s <= 0 for left_s in self._left_s.values())
                passed_s = check_s / len(self._left_s) if self._shared and self._left_s else check_s
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
