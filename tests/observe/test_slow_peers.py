"""Tests stragglers among peers: properties for any times, and the limits at which a process is reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from relax_core.observe.stragglers import (
    MAX_EXCESS_MS,
    MAX_SLOWDOWN,
    TRIMMED,
    WINDOW_STEPS,
    WINDOWS,
    Compared,
    DecodeTime,
    Streak,
    Work,
    advanced,
    compared_decoding,
    compared_work,
    without,
)

NAMES = ("actor-0", "actor-1", "actor-2", "actor-3")
milliseconds = st.floats(min_value=0.5, max_value=5_000.0)
amounts = st.floats(min_value=1.0, max_value=100_000.0)
works = st.builds(
    Work,
    wall_ms=st.fixed_dictionaries({"forward": milliseconds, "backward": milliseconds}),
    cpu_ms=st.fixed_dictionaries({"forward": milliseconds}),
    amount=amounts,
)
windows = st.integers(2, 5).flatmap(
    lambda ranks: st.lists(
        st.fixed_dictionaries({f"actor-{rank}": works for rank in range(ranks)}), min_size=1, max_size=20
    )
)
sizes = st.dictionaries(
    st.integers(1, 8),
    st.builds(DecodeTime, st.integers(1, 500), st.floats(min_value=1e-3, max_value=9.0), st.just(0.0)),
    max_size=6,
)


def scaled(work: Work, factor: float) -> Work:
    return replace(work, wall_ms={part: factor * ms for part, ms in work.wall_ms.items()})


@given(steps=windows)
def test_not_all_are_slow_and_the_fastest_never_is(steps: list[dict[str, Work]]) -> None:
    found = compared_work(steps)
    assert set(found) == set(steps[0])
    slow = [name for name, compared in found.items() if compared.is_slow]
    assert len(slow) < len(found)
    fastest = min(found, key=lambda name: found[name].own_ms / found[name].others_ms)
    assert fastest not in slow
    for name, compared in found.items():
        assert name not in compared.others and set(compared.others) == set(found) - {name}


@given(work=works, factors=st.lists(amounts, min_size=WINDOW_STEPS, max_size=WINDOW_STEPS))
def test_equals_with_different_amounts_of_work_are_not_slow(work: Work, factors: list[float]) -> None:
    """A rank with twice as many token rows may take twice the time."""
    steps = [
        {
            name: Work(wall_ms=scaled(work, (place + 1) * factor).wall_ms, amount=(place + 1) * factor)
            for place, name in enumerate(NAMES)
        }
        for factor in factors
    ]
    for compared in compared_work(steps).values():
        assert compared.slower == pytest.approx(0.0, abs=1e-6) and not compared.is_slow


@given(steps=windows, factor=st.floats(min_value=1.0, max_value=10.0), chosen=st.integers(0, 4))
def test_a_slower_process_stays_slow(steps: list[dict[str, Work]], factor: float, chosen: int) -> None:
    names = sorted(steps[0])
    name = names[chosen % len(names)]
    before = compared_work(steps)[name]
    after = compared_work([{**step, name: scaled(step[name], factor)} for step in steps])[name]
    assert after.slower == pytest.approx(factor * (1.0 + before.slower) - 1.0)
    assert after.is_slow or not before.is_slow or before.slower == pytest.approx(MAX_SLOWDOWN)
    assert after.cpu_slower == pytest.approx(before.cpu_slower), "processor time is reported separately"


@given(work=works, slower=st.floats(min_value=0.0, max_value=3.0), chosen=st.sampled_from(NAMES))
def test_one_slow_rank_of_four_is_named_by_both_limits(work: Work, slower: float, chosen: str) -> None:
    whole_ms = sum(work.wall_ms.values())
    assume(abs(slower - MAX_SLOWDOWN) > 1e-6 and abs(slower * whole_ms - MAX_EXCESS_MS) > 1e-6)
    steps = [{name: scaled(work, 1.0 + slower * (name == chosen)) for name in NAMES}] * WINDOW_STEPS
    found = compared_work(steps)
    assert [name for name in NAMES if found[name].is_slow] == (
        [chosen] if slower > MAX_SLOWDOWN and slower * whole_ms > MAX_EXCESS_MS else []
    )
    assert found[chosen].slower == pytest.approx(slower, abs=1e-6)
    assert found[chosen].excess_ms == pytest.approx(slower * whole_ms, rel=1e-6, abs=1e-6)


@given(work=works, pauses=st.lists(st.floats(min_value=1.0, max_value=1e6), max_size=TRIMMED))
def test_single_pauses_do_not_count(work: Work, pauses: list[float]) -> None:
    steps = [dict.fromkeys(NAMES, work) for _ in range(WINDOW_STEPS)]
    for place, pause in enumerate(pauses):
        steps[place] = {**steps[place], NAMES[1]: scaled(work, 1.0 + pause)}
    assert not any(compared.is_slow for compared in compared_work(steps).values())


def test_the_part_with_the_largest_difference_is_told_and_who_is_missing_is_left_out() -> None:
    usual = Work(wall_ms={"forward": 20.0, "backward": 40.0}, cpu_ms={"forward": 10.0})
    late = Work(wall_ms={"forward": 45.0, "backward": 42.0}, cpu_ms={"forward": 10.5})
    steps = [{"actor-0": usual, "actor-1": late, "actor-2": usual}] * 5
    steps[2] = {"actor-0": usual, "actor-1": late}
    found = compared_work(steps)
    assert set(found) == {"actor-0", "actor-1"}
    assert found["actor-1"].part == "forward" and found["actor-1"].cpu_slower == pytest.approx(0.05)
    assert found["actor-0"].slower < 0
    assert compared_work([]) == {} and compared_work([{"actor-0": usual}]) == {}
    assert compared_work([{"actor-0": usual, "actor-1": replace(usual, amount=0.0)}]) == {}


# -- engines ----------------------------------------------------------------------------------------------------------
@given(times=sizes, engines=st.integers(2, 4), share=st.floats(min_value=0.1, max_value=5.0))
def test_engines_with_other_batches_of_the_same_speed_are_equal(
    times: dict[int, DecodeTime], engines: int, share: float
) -> None:
    """An engine that decodes more, fewer or other batches is not slower. Only the time of a decode step counts."""
    found = compared_decoding(
        {
            f"engine-{engine}": {
                size: DecodeTime(decode_time.steps * (1 + engine), decode_time.seconds * (1 + engine))
                for place, (size, decode_time) in enumerate(sorted(times.items()))
                if engine == 0 or place % engines != engine
            }
            for engine in range(engines)
        },
        steps=10,
    )
    for compared in found.values():
        assert compared.slower == pytest.approx(0.0, abs=1e-6) and compared.part == "decode"
    assert compared_decoding({"engine-0": {}, "engine-1": times}, steps=10) == {}, "an idle engine is not compared"


@given(times=sizes.filter(bool), slower=st.floats(min_value=0.0, max_value=3.0))
def test_one_slow_engine_of_three_is_named_by_both_limits(times: dict[int, DecodeTime], slower: float) -> None:
    whole_ms = 1e3 * sum(decode_time.seconds for decode_time in times.values()) / 10
    assume(abs(slower - MAX_SLOWDOWN) > 1e-6 and abs(slower * whole_ms - MAX_EXCESS_MS) > 1e-6)
    slow = {
        size: DecodeTime(decode_time.steps, (1.0 + slower) * decode_time.seconds) for size, decode_time in times.items()
    }
    found = compared_decoding({"engine-0": times, "engine-1": slow, "engine-2": times}, steps=10)
    expected = slower > MAX_SLOWDOWN and slower * whole_ms > MAX_EXCESS_MS
    assert {name: compared.is_slow for name, compared in found.items()} == {
        "engine-0": False,
        "engine-1": expected,
        "engine-2": False,
    }
    assert found["engine-1"].others == ("engine-0", "engine-2")


def test_an_engine_whose_batches_no_other_decoded_is_not_compared() -> None:
    alone = {64: DecodeTime(100, 9.0), 1: DecodeTime(10, 0.1)}
    other_times = {1: DecodeTime(10, 0.1)}
    assert set(compared_decoding({"engine-0": alone, "engine-1": other_times}, steps=1)) == {"engine-1"}


# -- waits for a core -------------------------------------------------------------------------------------------------
@given(waits=st.lists(st.floats(min_value=0.1, max_value=0.9), min_size=4, max_size=4))
def test_where_all_wait_for_cores_the_waits_are_chance(waits: list[float]) -> None:
    """The ranks do the same work. With too few cores, their waits for a core differ by a factor of up to ten."""
    ranks = {
        name: Work(wall_ms={"forward": 60.0 / (1.0 - wait)}, core_wait_ms=60.0 / (1.0 - wait) - 60.0)
        for name, wait in zip(NAMES, waits, strict=True)
    }
    for compared in compared_work([ranks] * WINDOW_STEPS).values():
        assert compared.slower == pytest.approx(0.0, abs=1e-6)
    engines = {
        f"engine-{number}": {8: DecodeTime(100, 1.0 / (1.0 - wait), 1.0 / (1.0 - wait) - 1.0)}
        for number, wait in enumerate(waits)
    }
    for compared in compared_decoding(engines, steps=10).values():
        assert compared.slower == pytest.approx(0.0, abs=1e-6)


@given(wait=st.floats(min_value=0.2, max_value=0.9))
def test_where_one_alone_waits_for_a_core_it_is_slow(wait: float) -> None:
    """Another program uses the core of this rank."""
    usual = Work(wall_ms={"forward": 60.0})
    late = Work(wall_ms={"forward": 60.0 / (1.0 - wait)}, core_wait_ms=60.0 / (1.0 - wait) - 60.0)
    found = compared_work([{**dict.fromkeys(NAMES, usual), NAMES[2]: late}] * WINDOW_STEPS)
    assert [name for name in NAMES if found[name].is_slow] == [NAMES[2]]
    held = DecodeTime(100, 10.0 / (1.0 - wait), 10.0 / (1.0 - wait) - 10.0)
    engines = {"engine-0": {8: DecodeTime(100, 10.0)}, "engine-1": {8: held}}
    slow = {name: compared.is_slow for name, compared in compared_decoding(engines, steps=10).items()}
    assert slow == {"engine-0": False, "engine-1": True}


# -- consecutive windows -----------------------------------------------------------------------------------------------
def beside(slower: float) -> Compared:
    return Compared(own_ms=100.0 * (1.0 + slower), others_ms=100.0, part="forward", others=("actor-1",))


@settings(max_examples=300)
@given(seen=st.lists(st.sampled_from([0.0, 0.3, None]), max_size=20))
def test_three_slow_windows_in_a_row_name_a_process(seen: list[float | None]) -> None:
    streaks: dict[str, Streak] = {}
    in_a_row = 0
    for place, slower in enumerate(seen):
        window = {} if slower is None else {"actor-0": beside(slower), "actor-1": beside(0.0)}
        streaks = advanced(streaks, window, from_step=place * 15, to_step=place * 15 + 14)
        in_a_row = in_a_row if slower is None else in_a_row + 1 if slower else 0
        named = {name for name, streak in streaks.items() if streak.is_named}
        assert named == ({"actor-0"} if in_a_row >= WINDOWS else set())
    assert without(streaks, ["actor-0"]) == {}
