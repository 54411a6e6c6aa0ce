"""Tests of the simulation of `benchmarks.long_tail`: formulas for equal lengths, and the rules of the bus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.long_tail_limit import PROMPT_TOKENS, Simulation, Trace, decode_seconds, read_trace
from relax_core.bus.state.settings import BusSettings

PREFILL_S, COLUMN_S = 0.001, 1e-6  # of a prefilled token, and of a column that a decode step reads
STEP_S, TOKEN_S = 0.02, 0.0005  # of a train step without its tokens, and of each of them


def decode_step_s(samples: int) -> float:
    return 0.004 + 0.0002 * samples


def answers_s(groups: int, size: int, length: int) -> float:
    """The time of the engine for equal answers that it decodes together, by a formula."""
    samples = groups * size
    columns = sum(PROMPT_TOKENS + done for done in range(1, length))
    steps = (length - 1) * decode_step_s(samples) + COLUMN_S * samples * columns
    return groups * PROMPT_TOKENS * PREFILL_S + steps


def made_trace(
    lengths: list[list[int]], *, steps: int, groups: int, staleness: int = 0, running: int = 10_000, **changes: Any
) -> Trace:
    """A trace of a run with lengths, which are repeated until all groups have some."""
    bus = BusSettings(
        groups_per_step=groups,
        group_size=len(lengths[0]),
        max_staleness=staleness,
        on_stale="drop",
        total_steps=steps,
        inline_bytes=1 << 20,
        max_row_bytes=1 << 24,
        spare_groups=changes.pop("spare_groups", 0),
    )
    return Trace(
        bus=bus,
        lengths=(lengths * (steps * groups))[: max(steps * groups, len(lengths))],
        decode_s=[(1.0, decode_step_s(1)), (1000.0, decode_step_s(1000))],
        column_s=COLUMN_S,
        prefill_s=PREFILL_S,
        train_s=(STEP_S, TOKEN_S),
        max_running_samples=running,
        **changes,
    )


@pytest.mark.parametrize("whole_steps", [True, False])
@pytest.mark.parametrize(("groups", "size", "length"), [(1, 1, 1), (1, 2, 2), (4, 4, 50), (16, 2, 7)])
def test_without_staleness_generation_and_training_take_turns(
    groups: int, size: int, length: int, whole_steps: bool
) -> None:
    steps = 5
    found = Simulation(made_trace([[length] * size], steps=steps, groups=groups, whole_steps=whole_steps)).run()
    decode = answers_s(groups, size, length)
    train = STEP_S + TOKEN_S * groups * size * length
    assert found.ended_s == pytest.approx([(step + 1) * (decode + train) for step in range(steps)])
    assert found.staleness == {0: steps * groups * size} and found.dropped == {}


@pytest.mark.parametrize(("token_s", "slower"), [(0.0001, "decode"), (0.01, "train")])
def test_with_much_staleness_the_slower_of_both_determines_the_rate(token_s: float, slower: str) -> None:
    """The engine has room for the samples of one step, so it makes one step's answers after the other."""
    steps, groups, size, length = 40, 4, 2, 30
    trace = made_trace([[length] * size], steps=steps, groups=groups, staleness=4, running=groups * size)
    found = Simulation(msgspec.structs.replace(trace, train_s=(STEP_S, token_s))).run()
    decode = answers_s(groups, size, length)
    train = STEP_S + token_s * groups * size * length
    assert (decode > train) is (slower == "decode")
    assert found.ended_s[-2] - found.ended_s[9] == pytest.approx((steps - 11) * max(decode, train))
    assert found.samples_per_s(10) == pytest.approx(groups * size / max(decode, train))


def test_a_long_answer_stops_the_steps_only_without_staleness() -> None:
    lengths = [[100, 100]] + [[10, 10]] * 15
    times = {
        staleness: Simulation(made_trace(lengths, steps=16, groups=4, staleness=staleness)).run().ended_s[-1]
        for staleness in (0, 1, 4)
    }
    assert times[0] > times[1] > times[4]
    assert times[4] >= 16 * (STEP_S + TOKEN_S * 80)  # the trainer alone; every fourth step has 260 tokens


@given(
    lengths=st.lists(st.lists(st.integers(1, 60), min_size=2, max_size=2), min_size=1, max_size=40),
    groups=st.integers(1, 6),
    staleness=st.integers(0, 4),
    spare=st.integers(0, 3),
    running=st.integers(2, 40),
    aborts=st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_no_sample_is_lost_or_trained_twice_and_none_is_too_stale(
    lengths: list[list[int]], groups: int, staleness: int, spare: int, running: int, aborts: int
) -> None:
    """`Simulation.run` itself fails if the ledger has a lost sample or one that was trained twice."""
    steps = 12
    trace = made_trace(
        lengths, steps=steps, groups=groups, staleness=staleness, running=running, spare_groups=spare, max_aborts=aborts
    )
    found = Simulation(trace).run()
    assert found.samples == [groups * 2] * steps
    assert max(found.staleness) <= staleness and sum(found.staleness.values()) == sum(found.samples)
    assert found.ended_s == sorted(found.ended_s)
    train = steps * STEP_S + TOKEN_S * sum(found.tokens)
    assert found.ended_s[-1] - sum(found.waited_s) == pytest.approx(train)
    assert found.dropped.keys() <= {"stale", "over_sampled"}
    if not spare and not staleness:
        assert found.dropped == {}


def test_decode_times_are_interpolated() -> None:
    table = [(1.0, 4.0), (3.0, 8.0), (5.0, 7.0)]
    assert [decode_seconds(table, samples) for samples in (1, 2, 3, 4, 5, 9)] == [4.0, 6.0, 8.0, 7.5, 7.0, 10.0]
    assert decode_seconds(table[:2], 5) == 12.0
    assert decode_seconds(table[:1], 5) == 4.0


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"decode_s": []}, "decode_s=[]"),
        ({"decode_s": [(1, 0.0)]}, "decode_s="),
        ({"train_s": (0.0, 0.0)}, "train_s="),
        ({"prefill_s": -1.0}, "prefill_s=-1"),
        ({"column_s": -1.0}, "column_s=-1"),
        ({"lengths": [[3]]}, "lengths has 1 groups of the 6"),
        ({"train_s": None}, "train_s"),
    ],
)
def test_a_trace_without_times_is_refused(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    trace = made_trace([[3, 3]], steps=3, groups=2)
    file = tmp_path / "trace.json"
    file.write_bytes(msgspec.json.encode(trace))
    assert read_trace(file) == trace
    file.write_bytes(msgspec.json.encode(msgspec.to_builtins(trace) | changes))
    with pytest.raises(ValueError, match="long_tail") as raised:
        read_trace(file)
    assert key in str(raised.value) and "--keep FOLDER" in str(raised.value)
