"""Tests the table of predicted and measured memory, without the runs, because they take minutes."""

from __future__ import annotations

import os

import pytest

from benchmarks.memory_plan import (
    ITEMS,
    KINDS,
    MARK,
    MEDIA_RUNS,
    OF_MEDIA,
    QUIET,
    _peaks,
    compare,
    predicted,
    table,
)
from relax_core.plan.memory_plan import BASES


def test_every_process_of_the_plan_is_one_that_can_be_measured() -> None:
    needy = ["algo=ppo", "algo.kl_coef=0.1", "algo.old_logprobs=actor_fwd", "data=arithmetic", "reward=math"]
    needy.append("run.serve=true")
    sees = predicted([*QUIET, *MEDIA_RUNS["tiny_qwen3_vl_moe"]])
    assert set(sees) >= set(OF_MEDIA)
    assert {*predicted(needy), *sees} == {*KINDS.values(), ITEMS}
    assert set(BASES) <= set(KINDS.values())


def test_others_are_added_up_and_a_miss_is_marked() -> None:
    rows = compare(
        {"actor": 100.0, "engine": 50.0, "bus": 30.0}, {"actor": 110.0, "engine": 50.0, "x": 20.0, "bus": 20}
    )
    assert rows["others"] == {"predicted": 30.0, "measured": 40.0, "ratio": 0.75}
    assert rows["all"]["ratio"] == pytest.approx(180 / 200)
    lines = table({"demo": rows}).splitlines()
    assert "| demo | actor | 100 | 110 | 0.91 |" in lines
    assert "| demo | others | 30 | 40 | 0.75 (!) |" in lines


def test_a_processs_peak_is_read_from_linux() -> None:
    ours = {int(pid): False for pid in os.listdir("/proc") if pid.isdecimal()} | {os.getpid(): True}
    peaks = _peaks(MARK.encode(), ours)
    assert list(peaks) == [os.getpid()]
    assert 10 < peaks[os.getpid()][1] < 10_000
