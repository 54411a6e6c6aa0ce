"""The autoscaler orders more engines while the trainer waits for samples, and fewer engines while engines are idle.

The main signal is the trainer's wait as a fraction of the train steps' time. Busy engines alone are no reason for more
engines.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from relax_core.config.schema import RelaxConfig
from relax_core.control.engine_set import autoscaler_bounds
from relax_core.control.worker_health import WorkerHeartbeat
from relax_core.observe.event_log import ACTOR, MetricRecord
from relax_core.server.engine_order_store import EngineOrderStore
from relax_core.server.order_types import Refusal, ScaleDecision

OUT_WAIT, IN_WAIT = 0.20, 0.05  # wait / step time; one engine more above OUT_WAIT, one fewer below IN_WAIT
FULL_CACHE = 0.85  # above this fraction of used cache tokens, engines are full even if no sample waits
IN_IDLE = 0.5  # an engine is removed only if all engines were idle for more than this fraction of the time
LOAD_S = 1.0  # interval of load samples and decisions in seconds
HELD = 10  # for this number of cooldowns, a number of engines that was too small is not chosen again
TIMEOUT_S = 600.0  # timeout of an order
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Signals:
    """Holds the signals of one window. The fields have the same meaning as in `ScaleDecision`."""

    wait_share: float
    waiting: float
    idle_share: float
    cache_share: float


class SignalWindow:
    """Holds train steps and engine loads of the newest ``window_s`` seconds.

    All times are seconds of the same clock.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._since: float | None = None
        self._steps: deque[tuple[float, float, float]] = deque()  # end time, duration, wait time
        # Time, running samples, waiting samples, and the fraction of used cache tokens.
        self._loads: deque[tuple[float, int, int, float]] = deque()

    def clear(self) -> None:
        """Clears the window. Call this method when the number of engines changes."""
        self._since = None
        self._steps.clear()
        self._loads.clear()

    def add_step(self, now: float, *, step_s: float, wait_s: float) -> None:
        """Records a finished train step."""
        self._steps.append((now, step_s, wait_s))

    def add_load(self, now: float, *, running: int, waiting: int, cache_share: float = 0.0) -> None:
        """Records the number of samples in all engines, and the mean fraction of used cache tokens."""
        self._since = now if self._since is None else self._since
        self._loads.append((now, running, waiting, cache_share))

    def signals(self, now: float) -> Signals | None:
        """Returns the signals, or None if the window is not full or has no end of a train step."""
        for seen in (self._steps, self._loads):
            while seen and seen[0][0] < now - self._window_s:
                seen.popleft()
        if self._since is None or now - self._since < self._window_s or not self._steps or not self._loads:
            return None
        steps_s = sum(step_s for _, step_s, _ in self._steps)
        return Signals(
            wait_share=sum(wait_s for *_, wait_s in self._steps) / steps_s if steps_s else 0.0,
            waiting=sum(waiting for _, _, waiting, _ in self._loads) / len(self._loads),
            idle_share=sum(not running + waiting for _, running, waiting, _ in self._loads) / len(self._loads),
            cache_share=sum(share for *_, share in self._loads) / len(self._loads),
        )


class ScaleRules:
    """Decides the number of engines, between ``least`` and ``most``.

    After a change the number of engines stays the same for ``cooldown_s`` seconds. A number that was too small is not
    chosen again for `HELD` cooldowns. So if the right number is between two numbers, the decision does not oscillate.
    """

    def __init__(self, *, least: int, most: int, cooldown_s: float) -> None:
        assert least <= most
        self._least, self._most = least, most
        self._cooldown_s = cooldown_s
        self._changed = -math.inf
        self._too_few: dict[int, float] = {}  # number of engines that was too small → time of that decision

    def decide(self, now: float, *, engines: int, signals: Signals | None) -> tuple[int, str]:
        """Returns the target number of engines and the reason. Call `changed` when the change is made."""
        if signals is None:
            return engines, "the window is not full yet"
        message = f"the trainer waits {signals.wait_share:.0%} of its steps' time"
        if now - self._changed < self._cooldown_s:
            return engines, f"{message}; the last change is less than cooldown_s={self._cooldown_s:g} ago"
        if signals.wait_share > OUT_WAIT:
            if not signals.waiting and signals.cache_share <= FULL_CACHE:
                return engines, f"{message}, but no sample waits in an engine, so another engine would get none"
            if engines >= self._most:
                return engines, f"{message}; more than {self._most} engines are not allowed or would get no samples"
            full = f"{signals.waiting:.1f} samples wait in engines with caches that are {signals.cache_share:.0%} full"
            return engines + 1, f"{message}, more than {OUT_WAIT:.0%}, and {full}"
        if signals.wait_share < IN_WAIT and signals.idle_share > IN_IDLE:
            message += f", less than {IN_WAIT:.0%}, and engines were idle {signals.idle_share:.0%} of the time"
            if engines <= self._least:
                return engines, f"{message}; {self._least} engines stay"
            if now - self._too_few.get(engines - 1, -math.inf) < HELD * self._cooldown_s:
                return engines, f"{message}; {engines - 1} engines were too few before"
            return engines - 1, message
        return engines, message

    def changed(self, now: float, *, engines: int, target: int) -> None:
        """Records a change of the number of engines."""
        self._changed = now
        if target > engines:
            self._too_few[engines] = now


class Autoscaler:
    """Monitors one run and orders engines through the run's order book, like a client.

    ``clock`` returns monotonic seconds.
    """

    def __init__(
        self,
        config: RelaxConfig,
        order_store: EngineOrderStore,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = config.engine.autoscaler
        least, most = autoscaler_bounds(config)
        self._rules = ScaleRules(least=least, most=most, cooldown_s=settings.cooldown_s)
        self._window = SignalWindow(settings.cooldown_s / 2)
        self._order_store, self._clock = order_store, clock
        self._looked = -math.inf
        self._began = time.time()

    def tick(self, records: Iterable[MetricRecord], beats: Mapping[str, WorkerHeartbeat], *, stopping: bool) -> None:
        """Records new train steps and loads, and decides once a second. ``records`` has the new metrics.

        If an order cannot be written, the decision is made again in the next second.
        """
        now = self._clock()
        for record in records:
            if record.source == ACTOR and record.time_s >= self._began:  # ignores records of earlier attempts
                values = record.values
                self._window.add_step(now, step_s=values["step_ms"] / 1e3, wait_s=values["wait_ms"] / 1e3)
        if now - self._looked < LOAD_S:
            return
        self._looked = now
        try:
            if not self._order_store.autoscaler or stopping:
                self._window.clear()
                return
            self._note_load(now, beats)
            self._decide(now)
        except OSError as error:
            log.info("the autoscaler waits, because its order cannot be written: %s", error)

    def _note_load(self, now: float, beats: Mapping[str, WorkerHeartbeat]) -> None:
        statuses = [status for beat in beats.values() if (status := beat.alive) is not None]
        loads = [
            worker_status.engine
            for worker_status in statuses
            if worker_status.engine is not None and worker_status.engine.running is not None
        ]
        if loads:
            self._window.add_load(
                now,
                running=sum(load.running or 0 for load in loads),
                waiting=sum(load.waiting or 0 for load in loads),
                cache_share=sum(load.cache_share or 0.0 for load in loads) / len(loads),
            )

    def _decide(self, now: float) -> None:
        engines = sum(row.present for row in self._order_store.engines())
        if busy := next((order.request_id for order in self._order_store.open_orders()), None):
            self._window.clear()
            reason = f"order {busy} is under way"
            self._order_store.decided(
                ScaleDecision(at=time.time(), action="none", reason=reason, engines=engines, target=engines)
            )
            return
        signals = self._window.signals(now)
        target, reason = self._rules.decide(now, engines=engines, signals=signals)
        decision = ScaleDecision(
            at=time.time(),
            action="none" if target == engines else "out" if target > engines else "in",
            reason=reason,
            engines=engines,
            target=target,
            wait_share=None if signals is None else signals.wait_share,
            waiting=None if signals is None else signals.waiting,
            idle_share=None if signals is None else signals.idle_share,
            cache_share=None if signals is None else signals.cache_share,
            request_id=None if target == engines else self._place(target, more=target > engines),
        )
        if target != engines:
            self._rules.changed(now, engines=engines, target=target)
            self._window.clear()
        self._order_store.decided(decision)

    def _place(self, target: int, *, more: bool) -> str | None:
        """Places the order and returns its id; None if the order book refuses it, because a client ordered first."""
        body = (
            {"num_replicas": target, "partial": "rollback_all", "timeout_secs": TIMEOUT_S}
            if more
            else {"num_replicas": target, "engine_ids": None, "force": False, "timeout_secs": None}
        )
        try:
            return self._order_store.place("scale_out" if more else "scale_in", body).request_id
        except Refusal:
            return None
