"""Orders more engines while the trainer waits for samples, and fewer while it does not and engines are idle.

It looks at what matters to the run: the share of the train steps' time in which the trainer waits. Busy engines are no
reason for more of them while the trainer waits for nothing.
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
from relax_core.control.worker_health import Beat
from relax_core.observe.event_log import ACTOR, MetricRecord
from relax_core.server.order_book import OrderBook
from relax_core.server.orders import Refusal, ScaleDecision

OUT_WAIT, IN_WAIT = 0.20, 0.05  # shares of the steps' time: above the first one more engine, below the second one fewer
FULL_CACHE = 0.85  # share of the caches' tokens above which engines take no more samples at once though none waits
IN_IDLE = 0.5  # an engine goes only if all were idle for more than this share of the time
LOAD_S = 1.0  # how often the load of the engines is noted, and a decision is made
HELD = 10  # cooldowns for which a number of engines that was too small is not gone back to
TIMEOUT_S = 600.0  # of an order
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Signals:
    """Holds the numbers of one window, which are those of `ScaleDecision`."""

    wait_share: float
    waiting: float
    idle_share: float
    cache_share: float


class SignalWindow:
    """Holds what was seen in the newest ``window_s`` seconds; all times are in seconds of one clock."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._since: float | None = None
        self._steps: deque[tuple[float, float, float]] = deque()  # when it ended, its seconds, those of waiting
        # When, samples that ran, samples that waited, and the share of the caches' tokens that was taken.
        self._loads: deque[tuple[float, int, int, float]] = deque()

    def clear(self) -> None:
        """Forgets everything, because the number of engines changes."""
        self._since = None
        self._steps.clear()
        self._loads.clear()

    def add_step(self, now: float, *, step_s: float, wait_s: float) -> None:
        """Notes a train step that has ended."""
        self._steps.append((now, step_s, wait_s))

    def add_load(self, now: float, *, running: int, waiting: int, cache_share: float = 0.0) -> None:
        """Notes the samples of all engines together, and the mean share of their caches' tokens that is taken."""
        self._since = now if self._since is None else self._since
        self._loads.append((now, running, waiting, cache_share))

    def signals(self, now: float) -> Signals | None:
        """Returns the numbers, or None while the window is not full or no train step ended in it."""
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
    """Decides about the number of engines, which stays between ``least`` and ``most``.

    After a change nothing changes for ``cooldown_s`` seconds. A number of engines from which the run had to go up again
    is not gone back to for `HELD` cooldowns, so a load between two numbers does not make engines come and go.
    """

    def __init__(self, *, least: int, most: int, cooldown_s: float) -> None:
        assert least <= most
        self._least, self._most = least, most
        self._cooldown_s = cooldown_s
        self._changed = -math.inf
        self._too_few: dict[int, float] = {}  # a number of engines that was too small → when that was seen

    def decide(self, now: float, *, engines: int, signals: Signals | None) -> tuple[int, str]:
        """Returns how many engines the run is to have, and why; call `changed` if that comes about."""
        if signals is None:
            return engines, "the window is not full yet"
        told = f"the trainer waits {signals.wait_share:.0%} of its steps' time"
        if now - self._changed < self._cooldown_s:
            return engines, f"{told}; the last change is less than cooldown_s={self._cooldown_s:g} ago"
        if signals.wait_share > OUT_WAIT:
            if not signals.waiting and signals.cache_share <= FULL_CACHE:
                return engines, f"{told}, but no sample waits in an engine, so one more would get none"
            if engines >= self._most:
                return engines, f"{told}; more than {self._most} engines are not allowed or would get no samples"
            full = f"{signals.waiting:.1f} samples wait in engines, whose caches are {signals.cache_share:.0%} full"
            return engines + 1, f"{told}, more than {OUT_WAIT:.0%}, and {full}"
        if signals.wait_share < IN_WAIT and signals.idle_share > IN_IDLE:
            told += f", less than {IN_WAIT:.0%}, and engines were idle {signals.idle_share:.0%} of the time"
            if engines <= self._least:
                return engines, f"{told}; {self._least} engines stay"
            if now - self._too_few.get(engines - 1, -math.inf) < HELD * self._cooldown_s:
                return engines, f"{told}; {engines - 1} engines were too few before"
            return engines - 1, told
        return engines, told

    def changed(self, now: float, *, engines: int, target: int) -> None:
        """Notes that the number of engines changes."""
        self._changed = now
        if target > engines:
            self._too_few[engines] = now


class Autoscaler:
    """Looks at one run and orders engines through its order book, as a client would.

    ``clock`` returns monotonic seconds.
    """

    def __init__(
        self,
        config: RelaxConfig,
        book: OrderBook,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = config.engine.autoscaler
        least, most = autoscaler_bounds(config)
        self._rules = ScaleRules(least=least, most=most, cooldown_s=settings.cooldown_s)
        self._window = SignalWindow(settings.cooldown_s / 2)
        self._book, self._clock = book, clock
        self._looked = -math.inf
        self._began = time.time()

    def tick(self, records: Iterable[MetricRecord], beats: Mapping[str, Beat], *, stopping: bool) -> None:
        """Notes what has happened, and decides once a second; ``records`` are the new ones.

        Where an order cannot be written now, the next second decides.
        """
        now = self._clock()
        for record in records:
            if record.source == ACTOR and record.time_s >= self._began:  # not those of an attempt before
                values = record.values
                self._window.add_step(now, step_s=values["step_ms"] / 1e3, wait_s=values["wait_ms"] / 1e3)
        if now - self._looked < LOAD_S:
            return
        self._looked = now
        try:
            if not self._book.autoscaler or stopping:
                self._window.clear()
                return
            self._note_load(now, beats)
            self._decide(now)
        except OSError as error:
            log.info("the autoscaler waits, because its order cannot be written: %s", error)

    def _note_load(self, now: float, beats: Mapping[str, Beat]) -> None:
        statuses = [status for beat in beats.values() if (status := beat.alive) is not None]
        loads = [one.engine for one in statuses if one.engine is not None and one.engine.running is not None]
        if loads:
            self._window.add_load(
                now,
                running=sum(one.running or 0 for one in loads),
                waiting=sum(one.waiting or 0 for one in loads),
                cache_share=sum(one.cache_share or 0.0 for one in loads) / len(loads),
            )

    def _decide(self, now: float) -> None:
        engines = sum(row.present for row in self._book.engines())
        if busy := next((one.request_id for one in self._book.open_orders()), None):
            self._window.clear()
            reason = f"order {busy} is under way"
            self._book.decided(
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
        self._book.decided(decision)

    def _place(self, target: int, *, more: bool) -> str | None:
        """Places the order and returns its id; None if a client was faster."""
        body = (
            {"num_replicas": target, "partial": "rollback_all", "timeout_secs": TIMEOUT_S}
            if more
            else {"num_replicas": target, "engine_ids": None, "force": False, "timeout_secs": None}
        )
        try:
            return self._book.place("scale_out" if more else "scale_in", body).request_id
        except Refusal:
            return None
