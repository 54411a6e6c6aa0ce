"""Tests stragglers found in a run's records: names, the time of the report, its text, and the effect of a resume."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from relax_core.observe.event_log import RANK, RESUMED, ROLLOUT, RUN, EventWriter, MetricRecord, read_texts
from relax_core.observe.stragglers import (
    STRAGGLER,
    WINDOW_STEPS,
    WINDOWS,
    DecodeTime,
    StragglerWatch,
    reported_stragglers,
    straggler_numbers,
    straggler_row,
    straggler_text,
)

RANKS = [f"actor-{rank}" for rank in range(4)]
USUAL_MS = {"pack": 2.0, "forward": 20.0, "sums": 3.0, "backward": 40.0}


def step_record(step: int, *, slow: str = "", by: float = 0.3, time_s: float = 100.0) -> MetricRecord:
    """Returns a step's record of all ranks. The slow rank computes longer; the other ranks wait for it in reduce."""
    values: dict[str, float] = {}
    for name in RANKS:
        longer = 1.0 + by if name == slow else 1.0
        values |= {f"{name}/{part}_ms": longer * ms for part, ms in USUAL_MS.items()}
        values |= {f"{name}/cpu/{part}_ms": ms for part, ms in USUAL_MS.items()}
        values |= {f"{name}/rows": 512.0, f"{name}/reduce_ms": 1.0 if name == slow else 30.0}
    return MetricRecord(source=RANK, step=step, time_s=time_s, values=values)


@pytest.mark.parametrize("began", range(WINDOW_STEPS, 2 * WINDOW_STEPS))
def test_a_rank_that_becomes_slow_is_named_within_sixty_steps_and_its_end_is_told(began: int) -> None:
    watch = StragglerWatch([RANKS], began_s=0.0)
    ended, named_at = 130, {}
    for step in range(200):
        watch.add_records([step_record(step, slow="actor-2" if began <= step < ended else "")])
        for straggler in watch.take():
            named_at[step] = straggler
    (first_at, first), (last_at, last) = named_at.items()
    assert first_at - began < 60 and ended <= last_at <= ended + 2 * WINDOW_STEPS
    assert (first.kind, first.who, first.part, first.cpu_slower) == ("rank", "actor-2", "backward", 0.0)
    assert first.compared_with == ("actor-0", "actor-1", "actor-3")
    assert abs(first.from_step - began) < WINDOW_STEPS and first.to_step == first_at
    assert first.slower == pytest.approx(0.3) and 0.2 * 65.0 < first.excess_ms <= 0.3 * 65.0
    assert not first.ended and last.ended and last.from_step == first.from_step
    assert watch.all_of_run() == [last] and watch.present() == []


def test_other_ranks_wait_for_the_slow_one_and_nobody_else_is_named() -> None:
    watch = StragglerWatch([RANKS], began_s=0.0)
    watch.add_records([step_record(step, slow="actor-0") for step in range(WINDOWS * WINDOW_STEPS)])
    assert [straggler.who for straggler in watch.present()] == ["actor-0"]
    undisturbed = StragglerWatch([RANKS], began_s=0.0)
    undisturbed.add_records([step_record(step) for step in range(300)])
    assert undisturbed.all_of_run() == []
    alone = StragglerWatch([["actor-0"]], began_s=0.0)
    alone.add_records([step_record(step, slow="actor-0") for step in range(300)])
    assert alone.all_of_run() == []


def test_records_of_an_earlier_process_do_not_count_and_a_resume_begins_a_window_anew() -> None:
    watch = StragglerWatch([RANKS], began_s=200.0)
    watch.add_records([step_record(step, slow="actor-1", time_s=199.0) for step in range(100)])
    assert watch.all_of_run() == []
    resumed = MetricRecord(source=RUN, step=40, time_s=201.0, values={RESUMED: 1.0})
    watch.add_records([step_record(step, time_s=201.0) for step in range(50, 60)])
    watch.add_records([resumed, *(step_record(step, slow="actor-1", time_s=202.0) for step in range(40, 85))])
    assert [(straggler.who, straggler.from_step, straggler.to_step) for straggler in watch.present()] == [
        ("actor-1", 40, 84)
    ]


def batch_record(step: int, *, slow_ms: float, worker: float = 0.0) -> MetricRecord:
    """Returns the record of a batch of three reward workers. ``slow_ms`` is the third worker's time per answer."""
    times = {0: 4.0, 1: 4.2, 2: slow_ms}
    values = {f"reward_worker/{number}/ms_p50": ms for number, ms in times.items()}
    values |= {f"reward_worker/{number}/answers": 10.0 + number for number in times}
    return MetricRecord(source=ROLLOUT, step=step, time_s=100.0, values={**values, "worker": worker})


def test_a_slow_reward_worker_is_named_beside_those_of_its_own_rollout_worker() -> None:
    watch = StragglerWatch([RANKS], began_s=0.0)
    for step in range(WINDOWS * WINDOW_STEPS):
        watch.add_records([batch_record(step, slow_ms=4.1), batch_record(step, slow_ms=6.0, worker=1.0)])
    (straggler,) = watch.take()
    assert (straggler.kind, straggler.who, straggler.part) == ("reward worker", "reward-worker-1.2", "score")
    assert straggler.compared_with == ("reward-worker-1.0", "reward-worker-1.1")
    assert straggler.slower == pytest.approx(6.0 / 4.1 - 1.0, abs=1e-3) and straggler.excess_ms == pytest.approx(
        12 * 1.9, abs=0.01
    )


# -- engines ----------------------------------------------------------------------------------------------------------
def test_a_slow_engine_is_named_and_one_that_is_started_again_or_gone_is_not_compared() -> None:
    watch = StragglerWatch([], began_s=0.0)
    steps = {f"engine-{number}": 0 for number in range(3)}

    def decoded(slow: str = "") -> dict[str, dict[int, DecodeTime]]:
        return {
            name: dict.fromkeys((8, 16), DecodeTime(count, count * 1e-3 * (1.3 if name == slow else 1.0)))
            for name, count in steps.items()
        }

    for step in range(0, 100, 5):
        watch.add_decoding(step, decoded("engine-1"))
        steps = {name: count + 500 for name, count in steps.items()}
    (named,) = watch.take()
    assert (named.kind, named.who, named.part, named.from_step) == ("engine", "engine-1", "decode", 0)
    assert named.compared_with == ("engine-0", "engine-2") and round(named.slower, 3) == 0.3
    steps["engine-0"] = 10  # a new process, so its counts start again
    watch.add_decoding(100, decoded("engine-1"))
    assert watch.take() == []
    del steps["engine-1"]
    watch.add_decoding(120, decoded())
    (over,) = watch.take()
    assert over.who == "engine-1" and over.ended


def test_what_is_told_is_read_back_from_the_texts(tmp_path: Path) -> None:
    watch = StragglerWatch([RANKS], began_s=0.0)
    watch.add_records([step_record(step, slow="actor-3") for step in range(60)])
    (straggler,) = watch.take()
    assert straggler_text(straggler) == (
        "actor-3 is slow: 30% and 20 ms a train step beyond the median of actor-0, actor-1, actor-2, most of it in "
        "backward, in train steps 0 to 44; its processor time is +0%"
    )
    assert straggler_numbers(straggler)["actor-3/slower"] == 0.3
    writer = EventWriter(tmp_path, "controller")
    later = msgspec.structs.replace(straggler, to_step=74, ended=True)
    for told in (straggler, later):
        writer.record_texts(STRAGGLER, told.to_step, [straggler_row(told)])
    writer.record_texts("eval", 0, [{"prompt": "p"}])
    writer.close(timeout_s=60.0)
    assert reported_stragglers(read_texts(tmp_path)) == [later]
    assert StragglerWatch([RANKS], earlier=[later]).all_of_run() == [later]
