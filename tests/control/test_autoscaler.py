"""Tests the autoscaler on load traces, and with a real order book."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.control.autoscaler import Autoscaler, ScaleRules, SignalWindow
from relax_core.control.engine_set import usable_engines
from relax_core.control.worker_health import WorkerHeartbeat
from relax_core.observe.event_log import ACTOR, metric_record
from relax_core.preflight import settle
from relax_core.roles.worker import EngineReport, WorkerStatus
from relax_core.server.engine_order_store import EngineOrderStore
from relax_core.server.order_types import EngineRow

WINDOW_S, COOLDOWN_S = 60.0, 120.0


def counts(demand: Callable[[int], float], *, seconds: int, engines: int, lost: int = -1) -> list[int]:
    """Returns the number of engines in each second of a run that needs ``demand(second)`` engines.

    With fewer engines, the trainer waits and samples queue in engines. With more engines, some engines are idle,
    alternately. An engine is lost in second ``lost``.
    """
    rules, window = ScaleRules(least=1, most=6, cooldown_s=COOLDOWN_S), SignalWindow(WINDOW_S)
    seen = []
    for second in range(seconds):
        now, need = float(second), demand(second)
        if second == lost:
            engines -= 1
            window.clear()
        window.add_step(now, step_s=1.0, wait_s=max(0.0, 1.0 - engines / need))
        idle = (second % 10) / 10 >= need / engines
        window.add_load(now, running=0 if idle else 8 * engines, waiting=max(0, round(8 * (need - engines))))
        target, reason = rules.decide(now, engines=engines, signals=window.signals(now))
        assert reason
        if target != engines:
            rules.changed(now, engines=engines, target=target)
            window.clear()
        engines = target
        seen.append(engines)
    return seen


def changes(seen: list[int]) -> int:
    return sum(before != after for before, after in pairwise(seen))


def test_engines_follow_a_load_that_rises_and_one_that_falls() -> None:
    rising = counts(lambda second: 1.0 + 4.0 * min(1.0, second / 1800), seconds=4000, engines=1)
    assert rising == sorted(rising) and rising[-1] in (4, 5)
    falling = counts(lambda second: 5.0 - 4.5 * min(1.0, second / 1800), seconds=6000, engines=5)
    assert falling == sorted(falling, reverse=True) and falling[-1] == 1
    assert counts(lambda second: 100.0, seconds=4000, engines=1)[-1] == 6, "more engines than allowed"


def test_a_load_that_goes_up_and_down_does_not_make_engines_come_and_go() -> None:
    for period in (30, 90, 150, 300, 600):
        seen = counts(lambda second, period=period: 2.5 if second // period % 2 else 0.4, seconds=7200, engines=1)  # type: ignore[misc]
        assert changes(seen) <= 14, (period, changes(seen))
    assert changes(counts(lambda second: 1.3, seconds=7200, engines=1)) == 1, "between one and two are needed: two"


def test_an_engine_that_is_lost_is_replaced_once_it_is_missed() -> None:
    seen = counts(lambda second: 3.9, seconds=2000, engines=4, lost=500)
    assert seen[:500] == 500 * [4] and seen[500] == 3 and seen[-1] == 4 and changes(seen) == 2


def test_a_window_tells_nothing_before_it_is_full() -> None:
    window = SignalWindow(10.0)
    for second in range(10):
        window.add_step(second, step_s=2.0, wait_s=1.0)
        window.add_load(second, running=second % 2, waiting=3 * (second % 2), cache_share=0.22)
        assert window.signals(second) is None
    window.add_load(10.0, running=0, waiting=0)
    found = window.signals(10.0)
    assert found is not None and found.wait_share == 0.5
    assert found.waiting == pytest.approx(15 / 11) and found.idle_share == pytest.approx(6 / 11)
    assert found.cache_share == pytest.approx(0.2)
    window.clear()
    assert window.signals(30.0) is None


class Scaled:
    """Holds the autoscaler of a run with one engine. The test advances the clock."""

    def __init__(self, folder: Path) -> None:
        config = load_config(["engine.max_running_samples=16"], settle=settle)
        self.config = replace(
            config,
            engine=replace(
                config.engine,
                autoscaler=replace(config.engine.autoscaler, cooldown_s=COOLDOWN_S),
            ),
        )
        self.now, self.folder = 0.0, folder
        self.order_store = EngineOrderStore(folder)
        self.order_store.write_engines([EngineRow(id="engine-0", origin="start", state="serving", since=1.0)])
        self.autoscaler = Autoscaler(self.config, self.order_store, clock=lambda: self.now)

    def pass_seconds(self, seconds: int, *, wait_ms: float, waiting: int, cache_share: float = 0.5) -> None:
        report = EngineReport(url="http://h:0", version=1, running=8, waiting=waiting, cache_share=cache_share)
        status = WorkerStatus(
            name="engine-0", state="running", since=0.0, detail="", error=None, pid=1, host="h", engine=report
        )
        beats = {"engine-0": WorkerHeartbeat(name="engine-0", life="alive", status=status, silent_s=0.0)}
        for _ in range(seconds):
            self.now += 1.0
            records = [metric_record(ACTOR, 1, {"step_ms": 1000.0, "wait_ms": wait_ms})]
            self.autoscaler.tick(records, beats, stopping=False)


@pytest.fixture
def scaled(tmp_path: Path) -> Scaled:
    return Scaled(tmp_path)


def test_a_full_cache_is_a_reason_for_one_more_engine_though_no_sample_waits(scaled: Scaled) -> None:
    """SGLang moves samples out of its queue and back, so the queue may look empty."""
    scaled.order_store.enable_autoscaler(True)
    scaled.pass_seconds(70, wait_ms=500.0, waiting=0, cache_share=0.80)
    last = scaled.order_store.last_decision
    assert last is not None and last.action == "none" and "no sample waits in an engine" in last.reason
    assert last.cache_share == pytest.approx(0.80)
    scaled.pass_seconds(60, wait_ms=500.0, waiting=0, cache_share=0.97)
    (change,) = scaled.order_store.decisions()
    assert change.target == 2 and re.search(r"with caches that are (8[5-9]|9\d)% full", change.reason), change.reason


def test_it_orders_engines_as_a_client_does_and_says_why(scaled: Scaled) -> None:
    scaled.pass_seconds(90, wait_ms=500.0, waiting=4)
    assert scaled.order_store.last_decision is None and not scaled.order_store.open_orders(), "the autoscaler is off"
    scaled.order_store.enable_autoscaler(True)
    scaled.pass_seconds(55, wait_ms=500.0, waiting=4)
    last = scaled.order_store.last_decision
    assert last is not None and last.reason == "the window is not full yet" and last.wait_share is None
    scaled.pass_seconds(10, wait_ms=500.0, waiting=4)
    (order,) = scaled.order_store.open_orders()
    (change,) = scaled.order_store.decisions()
    assert (change.action, change.engines, change.target, change.request_id) == ("out", 1, 2, order.request_id)
    assert change.wait_share == pytest.approx(0.5) and "50%" in change.reason and "4.0 samples wait" in change.reason
    assert order.kind == "scale_out" and order.body["num_replicas"] == 2
    last = scaled.order_store.last_decision
    assert last is not None and last.reason == f"order {order.request_id} is under way"


def test_it_orders_none_that_the_samples_in_flight_could_not_fill(scaled: Scaled) -> None:
    rollout, mode = scaled.config.rollout, scaled.config.mode
    groups = (1 + mode.max_staleness) * rollout.prompts_per_step + rollout.spare_prompts
    usable = usable_engines(scaled.config)
    assert 16 * (usable - 1) < groups * scaled.config.algo.group_size <= 16 * usable
    serving = [
        EngineRow(id=f"engine-{number}", origin="added", state="serving", since=1.0) for number in range(1, usable)
    ]
    scaled.order_store.write_engines(serving)
    scaled.order_store.enable_autoscaler(True)
    scaled.pass_seconds(200, wait_ms=500.0, waiting=4)
    last = scaled.order_store.last_decision
    assert last is not None and f"more than {usable} engines" in last.reason and not scaled.order_store.open_orders()


def test_an_order_that_cannot_be_written_is_placed_later(scaled: Scaled) -> None:
    scaled.order_store.enable_autoscaler(True)
    (scaled.folder / "events").rename(scaled.folder / "moved")
    (scaled.folder / "events").touch()
    scaled.pass_seconds(70, wait_ms=500.0, waiting=4)
    assert not scaled.order_store.open_orders()
    (scaled.folder / "events").unlink()
    scaled.pass_seconds(1, wait_ms=500.0, waiting=4)
    assert len(scaled.order_store.open_orders()) == 1
