"""Tests alarms: a message per cause, reminders, a message at the end. The next controller knows the sent messages."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_core.config.notify_rules import PRESETS, Rule, read_rule, read_rules
from relax_core.observe.alarms import MAX_CHARACTERS, AlarmLog, RuleState, advanced, clean, read_alarms


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_cause_is_told_once_again_later_and_when_it_is_over(tmp_path: Path) -> None:
    clock = Clock()
    alarm_log = AlarmLog(tmp_path, repeat_s=60.0, clock=clock)
    messages = []
    for now in (0.0, 1.0, 59.0, 60.0, 61.0):
        clock.now = 1000.0 + now
        messages.append(alarm_log.report("rule", "a", title="a", text=str))
    assert [None if alarm is None else (alarm.kind, alarm.left_out) for alarm in messages] == [
        *(("new", 0), None, None, ("again", 2), None)
    ]
    assert alarm_log.report("rule", "b", title="b", text=str) is not None, "another cause has a separate message"
    over = alarm_log.over("rule", "a", title="a", text=str)
    assert over is not None and over.kind == "over" and alarm_log.over("rule", "a", title="a", text=str) is None
    again = alarm_log.report("rule", "a", title="a", text=str)
    assert again is not None and again.kind == "new"


def test_the_next_controller_goes_on_where_the_last_one_was(tmp_path: Path) -> None:
    clock = Clock()
    AlarmLog(tmp_path, repeat_s=60.0, clock=clock).report("stalled", "no step", title="t", text=lambda: "x")
    with (tmp_path / "events" / "0000.alarms.0.jsonl").open("ab") as file:
        file.write(b'{"type":"alarm","event": "half a li')
    alarm_log = AlarmLog(tmp_path, repeat_s=60.0, clock=clock)
    assert alarm_log.report("stalled", "no step", title="t", text=lambda: "x") is None
    assert alarm_log.over("stalled", "no step", title="t", text=lambda: "x") is not None
    assert [alarm.kind for alarm in read_alarms(tmp_path)] == ["new", "over"], "the incomplete line is ignored"


def test_a_message_that_cannot_be_kept_is_told_and_says_so(tmp_path: Path) -> None:
    alarm_log = AlarmLog(tmp_path, repeat_s=60.0)
    (tmp_path / "events").touch()
    assert alarm_log.report("disk_low", "disk", title="t", text=lambda: "x") is not None
    assert "the event log lacks alarms" in alarm_log.problem and "File exists" in alarm_log.problem


def test_no_file_is_no_alarm(tmp_path: Path) -> None:
    assert read_alarms(tmp_path) == []


def test_what_an_exception_quotes_and_secrets_stay_here() -> None:
    environment = {"MY_API_KEY": "abc-123-def", "PATH": "/usr/bin", "GIT_AUTHOR_NAME": "failed"}
    text = "rollout-0 failed with abc-123-def at https://me:pass@host/x?token=t0p and Bearer xyz"
    cleaned = clean(text, environment=environment)
    assert cleaned.startswith("rollout-0 failed with <redacted> at https://<redacted>@host/x?token=<redacted>")
    assert "xyz" not in cleaned
    quoted = clean("actor-0 died: ValueError: the answer 'my own words' is wrong", environment={})
    assert quoted == "actor-0 died: ValueError (the run's logs say more)"


@given(st.text(max_size=2000))
def test_any_text_becomes_a_short_one_without_control_characters(text: str) -> None:
    cleaned = clean(text, environment={})
    assert len(cleaned) <= MAX_CHARACTERS and not any(ord(char) < 9 or ord(char) == 27 for char in cleaned)


VALUES = st.lists(st.none() | st.floats(-2.0, 2.0) | st.just(math.nan), max_size=60)


def states(rule: Rule, values: list[float | None]) -> list[RuleState]:
    found = [RuleState()]
    for step, value in enumerate(values):
        found.append(advanced(rule, found[-1], value, step=step))
    return found[1:]


@given(values=VALUES, steps=st.integers(1, 8), bound=st.floats(-2.0, 2.0), sign=st.sampled_from(["<", "<=", ">", ">="]))
def test_a_rule_is_true_if_the_last_measured_values_are_all_beyond_its_bound(
    values: list[float | None], steps: int, bound: float, sign: str
) -> None:
    rule = read_rule(f"actor/x {sign} {bound!r} for {steps} steps")
    for end, state in enumerate(states(rule, values), 1):
        measured = [value for value in values[:end] if value is not None and not math.isnan(value)]
        beyond = {
            "<": lambda x: x < bound,
            "<=": lambda x: x <= bound,
            ">": lambda x: x > bound,
            ">=": lambda x: x >= bound,
        }
        expected = len(measured) >= steps and all(map(beyond[sign], measured[-steps:]))
        assert state.is_true(rule) == expected


@given(values=VALUES, steps=st.integers(1, 8), share=st.floats(0.0, 1.0))
def test_the_best_is_the_largest_mean_so_far(values: list[float | None], steps: int, share: float) -> None:
    rule = read_rule(f"actor/x < {share!r} of its best for {steps} steps")
    for end, state in enumerate(states(rule, values), 1):
        measured = [value for value in values[:end] if value is not None and not math.isnan(value)]
        means = [math.fsum(measured[at : at + steps]) / steps for at in range(len(measured) - steps + 1)]
        if means and abs(means[-1] - share * max(means)) > 1e-9:  # skips cases that depend on rounding
            assert state.is_true(rule) == (max(means) > 0 and means[-1] < share * max(means))
        assert means or not state.is_true(rule)


@given(values=VALUES)
def test_gaps_change_nothing(values: list[float | None]) -> None:
    rule = read_rule("actor/x > 0.5 for 3 steps")
    for (before, after), value in zip(pairwise([RuleState(), *states(rule, values)]), values, strict=True):
        if value is None or math.isnan(value):
            assert after == before


def test_nan_is_true_for_the_rule_that_asks_for_it() -> None:
    rule = read_rule("actor/loss is nan for 2 steps")
    assert [state.is_true(rule) for state in states(rule, [math.nan, 1.0, math.nan, None, math.nan])] == [
        *(False, False, False, False, True)
    ]


def test_a_step_that_is_done_again_begins_anew() -> None:
    rule = read_rule("actor/x > 0.5 for 3 steps")
    state = RuleState()
    for step in (0, 1, 1, 2):
        state = advanced(rule, state, 1.0, step=step)
    assert state.held == 2 and not state.is_true(rule)


def test_presets_and_texts_are_read_once() -> None:
    rules = read_rules(["nan", "gap", " actor/reward  <= .1 for 20 steps ", "gap"])
    assert [rule.words for rule in rules] == [*PRESETS["nan"], *PRESETS["gap"], "actor/reward <= .1 for 20 steps"]
    assert [rules[-1].source, rules[-1].name, rules[-1].bound, rules[-1].steps] == ["actor", "reward", 0.1, 20]
    assert read_rule("rollout/tokens/trained > 1e3 for 1 step").name == "tokens/trained"


@pytest.mark.parametrize(
    "message",
    [
        *("", "reward < 1 for 2 steps", "actor/reward < for 2 steps", "actor/reward < nan for 2 steps"),
        *("actor/reward < 1", "actor/reward < 1 for 0 steps", "actor/reward == 1 for 2 steps", "nans"),
        *("actor/reward > 0.5 of its best for 3 steps", "actor/reward < 1 for 2 steps; rm -rf"),
    ],
)
def test_a_text_that_is_no_rule_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=r"steps|best"):
        read_rule(message)
