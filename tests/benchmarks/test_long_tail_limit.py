"""Tests of the simulation of `benchmarks.long_tail`: formulas for equal lengths and turns, and the rules of the bus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.countdown_task import PROMPT_TOKENS
from benchmarks.long_tail_engine import Engine
from benchmarks.long_tail_limit import Simulation
from benchmarks.long_tail_trace import Trace, decode_seconds, read_trace
from relax_core.bus.state.settings import BusSettings
from relax_core.contracts.bus import Admission

PREFILL_S, COLUMN_S = 0.001, 1e-6  # of a prefilled token, and of a column that a decode step reads
STEP_S, TOKEN_S = 0.02, 0.0005  # of a train step without its tokens, and of each of them
RULES: dict[str, Any] = {  # what a run's settings allow
    "staleness": st.integers(0, 4),
    "spare": st.integers(0, 3),
    "running": st.integers(2, 40),
    "aborts": st.integers(0, 2),
}


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
    **RULES,
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


# -- several turns ----------------------------------------------------------------------------------------------------
ENTRY_S = 0.003  # of a turn that enters


def turns_trace(turns: list[list[int]], waits_s: list[list[float]], *, steps: int = 3, **changes: Any) -> Trace:
    """A trace whose groups are all alike; ``turns`` and ``waits_s`` are those of a group's samples."""
    trace = made_trace([[sum(one) for one in turns]], steps=steps, groups=1, **changes)
    count = len(trace.lengths)
    return msgspec.structs.replace(trace, turns=[turns] * count, waits_s=[waits_s] * count, entry_s=ENTRY_S)


def turn_s(samples: int, length: int, *, context: int) -> float:
    """The time of the decode steps of equal turns that are decoded together behind so many tokens."""
    columns = sum(context + done for done in range(1, length))
    return (length - 1) * decode_step_s(samples) + COLUMN_S * samples * columns


@pytest.mark.parametrize(("first", "prefilled"), [(40, 3), (31, 3), (30, 34), (5, 9)])
def test_a_turn_enters_with_what_is_new_behind_its_tool(first: int, prefilled: int) -> None:
    """The engine keeps 32 computed tokens or more: prompt and answer without the newest token, so 31 tokens and up."""
    found = Simulation(turns_trace([[first, 50]], [[0.3]])).run()
    prefills = (PROMPT_TOKENS + prefilled) * PREFILL_S + 2 * ENTRY_S
    decode = turn_s(1, first, context=PROMPT_TOKENS) + turn_s(1, 50, context=first + 2 * PROMPT_TOKENS)
    step = prefills + decode + 0.3 + STEP_S + TOKEN_S * (first + 50)
    assert found.ended_s == pytest.approx([step, 2 * step, 3 * step])
    assert found.tokens == [first + 50] * 3
    last = found.counts[-1]
    assert (last.prefilled, last.steps) == (3 * (PROMPT_TOKENS + prefilled), 3 * (first + 50 - 2))
    assert last.tools_s == pytest.approx(3 * 0.3)


def test_tools_run_beside_each_other_and_beside_decode_steps() -> None:
    """The first sample plays its second turn while the tool of the second one runs; then the second plays its own."""
    found = Simulation(turns_trace([[60, 20], [60, 30]], [[0.1], [2.0]], steps=1)).run()
    together = PROMPT_TOKENS * PREFILL_S + 2 * ENTRY_S + turn_s(2, 60, context=PROMPT_TOKENS)
    alone = 3 * PREFILL_S + ENTRY_S + turn_s(1, 30, context=60 + 2 * PROMPT_TOKENS)
    assert found.ended_s == pytest.approx([together + 2.0 + alone + STEP_S + TOKEN_S * 170])
    assert found.counts[0].tools_s == pytest.approx(2.1)
    equal = Simulation(turns_trace([[60, 20], [60, 20]], [[0.1], [0.1]], steps=1)).run()
    second = 6 * PREFILL_S + 2 * ENTRY_S + turn_s(2, 20, context=60 + 2 * PROMPT_TOKENS)
    assert equal.ended_s == pytest.approx([together + 0.1 + second + STEP_S + TOKEN_S * 160])


def test_a_turn_that_goes_on_stands_before_new_groups() -> None:
    """With one slot, the new group waits until the samples whose tools have ended have run."""
    engine = Engine(trace=turns_trace([[40, 8]], [[0.0]], running=1))
    for index in range(2):
        engine.add(Admission(group_uid=f"g{index}", index=index, attempt=0, min_version=0))
    ended = []
    for _ in range(100):
        engine.begin(0.0, 0)
        ended += [group.admission.group_uid for group in engine.end(0.0)]
        engine.end_tools(0.0)
    assert ended == ["g0", "g1"] and engine.counts.steps == 2 * (39 + 7)
    assert engine.counts.prefilled == 2 * (PROMPT_TOKENS + 3)


@pytest.mark.parametrize(("version", "prefilled"), [(0, 3), (1, 44)])
def test_other_weights_compute_the_whole_context_of_a_later_turn(version: int, prefilled: int) -> None:
    engine = Engine(trace=turns_trace([[40, 8]], [[1.0]]))
    engine.add(Admission(group_uid="g0", index=0, attempt=0, min_version=0))
    for _ in range(39):
        assert not engine.tools
        engine.begin(0.0, 0)
        assert engine.end(5.0) == []
    assert [at for at, *_ in engine.tools] == [6.0]
    engine.end_tools(5.9)
    assert engine.waiting == []
    engine.end_tools(6.0)
    before = engine.counts.prefilled
    engine.begin(6.0, version)
    assert engine.counts.prefilled - before == prefilled


def test_with_much_staleness_the_trainer_waits_for_no_tool() -> None:
    turns, waits_s = [[20, 20], [20, 20]], [[0.4], [0.1]]
    trace = turns_trace(turns, waits_s, steps=30, staleness=8)
    slow = msgspec.structs.replace(trace, train_s=(0.5, 0.0))
    assert Simulation(slow).run().samples_per_s(10) == pytest.approx(2 / 0.5)
    none = Simulation(turns_trace(turns, waits_s, steps=30)).run().samples_per_s(10)
    assert none < Simulation(trace).run().samples_per_s(10)


@given(
    lengths=st.lists(st.lists(st.integers(1, 60), min_size=2, max_size=2), min_size=12, max_size=40),
    staleness=st.integers(0, 4),
    running=st.integers(2, 40),
    aborts=st.integers(0, 2),
)
@settings(max_examples=30, deadline=None)
def test_one_turn_is_an_answer_without_turns(
    lengths: list[list[int]], staleness: int, running: int, aborts: int
) -> None:
    trace = made_trace(lengths, steps=12, groups=1, staleness=staleness, running=running, max_aborts=aborts)
    turns = [[[length] for length in group] for group in lengths]
    same = msgspec.structs.replace(trace, turns=turns, waits_s=[[[] for _ in group] for group in lengths])
    assert Simulation(same).run() == Simulation(trace).run()


@given(
    turns=st.lists(
        st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=4), min_size=2, max_size=2), min_size=24, max_size=40
    ),
    wait_s=st.sampled_from([0.0, 0.01, 0.5]),
    **RULES,
)
@settings(max_examples=60, deadline=None)
def test_turns_lose_no_sample_and_train_none_that_is_too_stale(
    turns: list[list[list[int]]], wait_s: float, staleness: int, spare: int, running: int, aborts: int
) -> None:
    """Each sample waits for its tools at least as long as they take, unless its group is given up."""
    lengths = [[sum(one) for one in group] for group in turns]
    waits_s = [[[wait_s * (1 + number) for number in range(len(one) - 1)] for one in group] for group in turns]
    trace = made_trace(
        lengths, steps=12, groups=2, staleness=staleness, running=running, spare_groups=spare, max_aborts=aborts
    )
    found = Simulation(msgspec.structs.replace(trace, turns=turns, waits_s=waits_s)).run()
    assert found.samples == [4] * 12 and max(found.staleness) <= staleness
    assert found.ended_s == sorted(found.ended_s) and found.dropped.keys() <= {"stale", "over_sampled"}
    if not spare and not staleness:
        assert found.counts[-1].tools_s == pytest.approx(sum(sum(map(sum, group)) for group in waits_s[:24]))
        assert found.counts[-1].decoded >= sum(tokens - 1 for group in turns[:24] for one in group for tokens in one)


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
        ({"entry_s": -1.0}, "entry_s=-1"),
        ({"turns": [[[1, 2], [3]]] * 6}, "waits_s has 0 entries"),
        ({"waits_s": [[[0.1], []]] * 6}, "turns has 0 entries"),
        ({"turns": [[[1, 2]]] * 6, "waits_s": [[[0.1], []]] * 6}, "turns has 6 entries"),
        ({"turns": [[[1, 1], [3]]] * 6, "waits_s": [[[0.1], []]] * 6}, "turns=[1, 1] of an answer of 3 tokens"),
        ({"turns": [[[3, 0], [3]]] * 6, "waits_s": [[[0.1], []]] * 6}, "turns=[3, 0] of an answer of 3 tokens"),
        ({"turns": [[[1, 2], [3]]] * 6, "waits_s": [[[], []]] * 6}, "waits_s=[] between 2 turns"),
        ({"turns": [[[1, 2], [3]]] * 6, "waits_s": [[[-0.1], []]] * 6}, "waits_s=[-0.1] between 2 turns"),
    ],
)
def test_a_trace_without_times_is_refused(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    trace = made_trace([[3, 3]], steps=3, groups=2)
    file = tmp_path / "trace.json"
    old = msgspec.to_builtins(trace)
    for part in ("turns", "waits_s", "entry_s"):  # a trace of an older benchmark has none of them
        del old[part]
    file.write_bytes(msgspec.json.encode(old))
    assert read_trace(file) == trace
    file.write_bytes(msgspec.json.encode(msgspec.to_builtins(trace) | changes))
    with pytest.raises(ValueError, match="long_tail") as raised:
        read_trace(file)
    assert key in str(raised.value) and "--keep FOLDER" in str(raised.value)
