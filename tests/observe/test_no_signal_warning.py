"""The warnings of a run that has no learning signal."""

from __future__ import annotations

from collections.abc import Callable

from relax_core.observe.event_log import RESUMED, RUN, MetricRecord
from relax_core.observe.findings import SignalWatch

MakeRecord = Callable[..., MetricRecord]


def warnings(watch: SignalWatch, records: list[MetricRecord]) -> list[tuple[int, str]]:
    """Returns (step, warning), from one record at a time."""
    return [(record.step, line) for record in records for line in watch.lines([record])]


def test_answers_that_are_all_cut_are_told_once_with_what_to_try(make_record: MakeRecord) -> None:
    watch = SignalWatch(steps=3, max_new_tokens=8)
    shares = [1.0, 1.0, 0.99, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    lines = warnings(watch, [make_record("actor", step, truncated=share) for step, share in enumerate(shares)])
    assert [step for step, _ in lines] == [5, 11], "again only after it had ended"
    assert "All answers were cut at rollout.max_new_tokens=8 for 3 train steps, to step 5" in lines[0][1]
    assert "Raise rollout.max_new_tokens" in lines[0][1]


def test_most_groups_with_equal_rewards_are_told_with_what_the_accuracy_says(make_record: MakeRecord) -> None:
    for exact, words in (
        (0.1, "Try algo=dapo"),
        (0.97, "97% of the answers are right, so there is little left to learn"),
    ):
        watch = SignalWatch(steps=2, max_new_tokens=8)
        records = [
            make_record("actor", step, groups_without_signal=share, exact=exact)
            for step, share in enumerate([0.5, 0.5, 0.51, 0.9, 1.0])
        ]
        ((step, line),) = warnings(watch, records)
        assert step == 3 and words in line
        assert line.startswith("In most groups all rewards were equal for 2 train steps, to step 3: ")


def test_only_steps_in_a_row_count_whatever_else_is_reported(make_record: MakeRecord) -> None:
    def cut(step: int) -> MetricRecord:
        return make_record("actor", step, truncated=1.0)

    resumed = make_record(RUN, 1, **{RESUMED: 1.0})
    watch = SignalWatch(steps=3, max_new_tokens=8)
    assert warnings(watch, [cut(0), cut(1), cut(1), make_record("rollout", 1, truncated=1.0)]) == [], "reported twice"
    assert warnings(watch, [resumed, cut(1), cut(2)]) == [], "the steps before the checkpoint are not followed by these"
    assert [step for step, _ in warnings(watch, [cut(3), cut(4)])] == [3]
    assert warnings(watch, [make_record("actor", 5)]) == [], "a step that tells nothing of it"


def test_zero_steps_switch_it_off(make_record: MakeRecord) -> None:
    watch = SignalWatch(steps=0, max_new_tokens=8)
    assert (
        warnings(watch, [make_record("actor", step, truncated=1.0, groups_without_signal=1.0) for step in range(9)])
        == []
    )
