"""Tests the notifications of a run with a real receiver: one message per event, reminders, and the event's end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.config.notify_rules import PRESETS
from relax_core.config.schema import EVENTS
from relax_core.contracts.sink import MetricRecord
from relax_core.control import run_alarms
from relax_core.control.run_alarms import UNKNOWN_RECORDS, RunAlarms
from relax_core.observe.alarms import read_alarms
from relax_core.observe.event_log import RESUMED, RUN
from relax_core.observe.stragglers import Straggler
from relax_core.server.engine_order_store import EngineOrderStore
from tests.observe.receivers import Message, http_receiver


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def inbox() -> Iterator[Message]:
    with http_receiver() as receiver:
        yield receiver


def alarms(folder: Path, inbox: Message, *overrides: str, clock: Clock, again: bool = False) -> RunAlarms:
    urls = folder / "urls"
    urls.write_text(f"json://127.0.0.1:{inbox.port}\n")
    urls.chmod(0o600)
    run_dir = folder / "run"
    run_dir.mkdir(exist_ok=True)
    every = f"notify.events=[{', '.join(EVENTS)}]"
    config = load_config([f"run.dir={run_dir}", f"notify.urls_file={urls}", every, "run.steps=50", *overrides])
    return RunAlarms(config, again=again, clock=clock)


def record(step: int, *, time_s: float = 2000.0, source: str = "actor", **values: float) -> MetricRecord:
    return MetricRecord(source=source, step=step, time_s=time_s, values=values)


def slow(*, ended: bool) -> Straggler:
    return Straggler(
        kind="rank",
        who="actor-1",
        part="forward",
        from_step=1,
        to_step=45,
        slower=0.3,
        excess_ms=9.0,
        compared_with=("actor-0",),
        ended=ended,
    )


def test_each_event_is_one_message(tmp_path: Path, inbox: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_alarms, "RESTARTS_PER_HOUR", 1)
    monkeypatch.setattr(run_alarms, "DISK_GIB", 1e6)
    clock = Clock()
    run = alarms(tmp_path, inbox, "notify.rules=[nan]", clock=clock)
    run.watch(engine_lost=lambda: {"engine-7": "its probe differs"}, order_failed=lambda: {"o1": "no room"})
    for _ in range(3):
        run.restarted("reward-worker-0 was killed by SIGKILL")
    run.restarted("engine-2 was killed by SIGKILL")
    run.happened("recovery", "tier 2", "actor-0 died: ValueError: the answer 'own words' is wrong")
    run.happened("stalled", "no train step", "no train step ended for 120 s; blocker: engine-2")
    run.stragglers([slow(ended=False)])
    run.add_records([record(3, loss=math.nan), record(4, loss=math.nan)])
    for step in (5, 6):
        run.look()
        run.tick(step=step)
    run.close("failed", "the last words")
    events = [alarm.event for alarm in read_alarms(tmp_path / "run")]
    expected = ["started", "restarts", "engine_lost", "engine_lost", "recovery", "stalled", "straggler", "rule"]
    assert sorted(events) == sorted([*expected, "disk_low", "order_failed", "failed"])
    texts = "\n".join(f"{title}\n{text}" for title, text in inbox.messages)
    for words in (
        "engine-7: its probe differs",
        "o1: no room",
        "blocker: engine-2",
        "actor-1 is slow",
        "actor/loss is nan",
    ):
        assert words in texts, texts
    assert "own words" not in texts and "actor-0 died: ValueError (the run's logs say more)" in texts


def test_the_end_of_a_run_is_reported_after_its_orders_have_ended(tmp_path: Path, inbox: Message) -> None:
    """Orders that failed earlier are reported, too. Orders that are still open at the run's end are not reported."""
    run = alarms(tmp_path, inbox, clock=Clock())
    book = EngineOrderStore(tmp_path / "run")

    def failed() -> dict[str, str]:
        return {order.request_id: order.failure for order in book.orders() if order.status == "FAILED"}

    run.watch(engine_lost=dict, order_failed=failed)
    order = book.place("scale_out", {"num_replicas": 2})
    book.move(order, "FAILED", failure="engine-1: no memory is left")
    open_order = book.place("scale_out", {"num_replicas": 2})
    run.stop_watching()
    book.end_orders()
    run.close("stopped", "in the run's folder")
    events = {alarm.event: alarm.text for alarm in read_alarms(tmp_path / "run")}
    assert "no memory is left" in events["order_failed"] and open_order.request_id not in events["order_failed"]
    assert "stopped" in events


def test_what_is_over_is_told_once_and_a_cause_that_lasts_again(
    tmp_path: Path, inbox: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_alarms, "REPEAT_S", 60.0)
    clock = Clock()
    run = alarms(tmp_path, inbox, "notify.rules=['actor/reward < 0.5 for 2 steps']", clock=clock)
    for step in range(6):
        run.add_records([record(step, reward=0.1)])
        clock.now += 20.0
        run.tick(step=step)
    run.add_records([record(6, reward=0.9)])
    run.stragglers([slow(ended=False), slow(ended=True), slow(ended=True)])
    run.tick(step=7)
    run.close("finished", "")
    found = [(alarm.event, alarm.kind) for alarm in read_alarms(tmp_path / "run")]
    assert found == [
        *(("started", "new"), ("rule", "new"), ("rule", "again"), ("rule", "over")),
        *(("straggler", "new"), ("straggler", "over"), ("finished", "new")),
    ]


def test_a_restarted_controller_repeats_neither_the_start_nor_old_records(tmp_path: Path, inbox: Message) -> None:
    clock = Clock()
    rule = "notify.rules=['actor/reward < 0.5 for 1 step']"
    first = alarms(tmp_path, inbox, rule, clock=clock)
    first.add_records([record(0, reward=0.1)])
    first.tick(step=1)
    second = alarms(tmp_path, inbox, rule, clock=clock, again=True)
    second.add_records([record(0, time_s=1.0, reward=0.1), record(1, reward=0.1)])
    second.tick(step=2)
    second.close("stopped", "")
    assert [alarm.event for alarm in read_alarms(tmp_path / "run")] == ["started", "rule", "stopped"]


def test_a_resume_begins_anew_and_an_unknown_metric_is_reported(tmp_path: Path, inbox: Message) -> None:
    rules = "'actor/reward < 0.5 for 2 steps', 'actor/algorithm/rewrad > 1 for 2 steps'"
    run = alarms(tmp_path, inbox, f"notify.rules=[{rules}]", clock=Clock())
    resumed = record(0, source=RUN, **{RESUMED: 1.0})
    run.add_records([record(0, reward=0.1), resumed, record(1, reward=0.1)])
    run.tick(step=2)
    assert [alarm.event for alarm in read_alarms(tmp_path / "run")] == ["started"]
    run.add_records(record(step, reward=1.0) for step in range(2, UNKNOWN_RECORDS))
    lines = [line for line in run.take_lines() if "notify.rules" in line]
    assert len(lines) == 1 and "actor/algorithm/rewrad was in none of 100 records of actor" in lines[0]
    run.close("finished", "")


def test_a_named_rule_reports_no_number_that_the_run_lacks(tmp_path: Path, inbox: Message) -> None:
    """A run without a shadow reward has no metric actor/hack_onset."""
    run = alarms(tmp_path, inbox, f"notify.rules=[{', '.join(PRESETS)}]", clock=Clock())
    run.add_records(record(step, reward=1.0) for step in range(2 * UNKNOWN_RECORDS))
    assert [line for line in run.take_lines() if "notify.rules" in line] == []
    run.close("finished", "")


def test_only_the_chosen_events_are_reported(tmp_path: Path, inbox: Message) -> None:
    run = alarms(tmp_path, inbox, "notify.events=[failed]", clock=Clock())
    run.happened("recovery", "tier 2", "the bus died")
    run.tick(step=1)
    run.close("failed", "the bus died")
    assert [title.partition(": ")[2] for title, _ in inbox.messages] == ["the run has failed"]


def test_a_run_without_a_learning_signal_is_told_on_the_screen_with_what_to_try(
    tmp_path: Path, inbox: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each condition is reported once, and again only if it ends and returns. A resume resets the count."""
    rules = ("actor/truncated >= 1 for 3 steps", "actor/groups_without_signal > 0.5 for 2 steps")
    monkeypatch.setattr(run_alarms, "SIGNAL_RULES", rules)

    def lines(records: list[MetricRecord]) -> list[tuple[int, str]]:
        run = alarms(tmp_path, inbox, "rollout.max_new_tokens=8", "notify.events=[]", clock=Clock(), again=True)
        found = []
        for record in records:
            run.add_records([record])
            found += [(record.step, line) for line in run.take_lines()]
        run.close("finished", "")
        return found

    shares = [1.0, 1.0, 0.99, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    cut = lines([record(step, truncated=share) for step, share in enumerate(shares)])
    assert [step for step, _ in cut] == [5, 11]
    assert "rollout.max_new_tokens=8 for 3 train steps, to step 5" in cut[0][1]
    for exact, words in ((0.1, "algo=dapo"), (0.97, "97% of the answers are right")):
        equal = [0.5, 0.5, 0.51, 0.9, 1.0]
        ((step, line),) = lines(
            [record(step, groups_without_signal=share, exact=exact) for step, share in enumerate(equal)]
        )
        assert step == 3 and words in line and "for 2 train steps, to step 3" in line
    resumed = record(1, source=RUN, **{RESUMED: 1.0})
    before, after = [record(step, truncated=1.0) for step in (0, 1)], [record(step, truncated=1.0) for step in (1, 2)]
    assert lines([*before, record(1, source="rollout", truncated=1.0), resumed, *after]) == []
    assert [step for step, _ in lines([*before, resumed, *after, record(3, truncated=1.0)])] == [3]


@pytest.mark.parametrize(
    ("shares", "exact", "words"),
    [
        ([1.0, 0.5, 0.75, 1.0, 0.5], 0.02, "In 75% of the groups of the first 5 train steps all rewards were equal, "
         "mostly because no answer of a group is right (2% of all are), and such a group trains nothing. Lower "
         "rollout.temperature=1, raise algo.group_size=16, or use easier rows."),
        ([0.9] * 5, 0.95, "because all answers of a group are right (95% of all are), and such a group trains nothing. "
         "Use harder rows, or raise algo.group_size=16."),
        ([1.0, 0.5, 0.7, 1.0, 0.5], 0.02, None),
        ([0.0] * 5 + [1.0] * 10, 0.02, None),
    ],
)  # fmt: skip
def test_first_steps_that_train_hardly_any_group_are_told_once(
    tmp_path: Path, inbox: Message, shares: list[float], exact: float, words: str | None
) -> None:
    run = alarms(tmp_path, inbox, "notify.events=[]", clock=Clock(), again=True)
    run.add_records(record(step, groups_without_signal=share, exact=exact) for step, share in enumerate(shares))
    lines = run.take_lines()
    assert len(lines) == (words is not None) and all(words is not None and words in line for line in lines)
    run.add_records(record(step, groups_without_signal=1.0, exact=exact) for step in range(5, 15))
    resumed = record(15, source=RUN, **{RESUMED: 1.0})
    run.add_records([resumed, *(record(step, groups_without_signal=1.0, exact=exact) for step in range(15, 25))])
    assert run.take_lines() == []
    run.close("finished", "")
