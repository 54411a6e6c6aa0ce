from __future__ import annotations

import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.data.order import row_of


@given(rows=st.integers(1, 300), seed=st.integers(0, 2**63), epoch=st.integers(0, 5))
@settings(deadline=None)  # the first call may wait for a busy machine
def test_every_epoch_holds_each_row_once(rows: int, seed: int, epoch: int) -> None:
    start = epoch * rows
    got = [row_of(index, rows=rows, seed=seed, shuffle=True) for index in range(start, start + rows)]
    assert sorted(got) == list(range(rows))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def order(start: int, seed: int) -> list[int]:
        return [row_of(index, rows=100, seed=seed, shuffle=True) for index in range(start, start + 100)]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(0, 0)), tuple(order(100, 0)), tuple(order(0, 1)), tuple(range(100))}) == 4


def test_places_are_spread_evenly() -> None:
    # Row 0's mean place over 400 seeds lies near the middle: the standard error of a uniform place is 1.4.
    places = [
        next(index for index in range(100) if row_of(index, rows=100, seed=seed, shuffle=True) == 0)
        for seed in range(400)
    ]
    assert 42 < sum(places) / len(places) < 57


def test_without_shuffle_rows_follow_each_other() -> None:
    assert [row_of(index, rows=3, seed=5, shuffle=False) for index in range(5)] == [0, 1, 2, 0, 1]


def test_another_process_agrees() -> None:
    code = (
        "from relax_core.data.order import row_of; print([row_of(i, rows=50, seed=3, shuffle=True) for i in range(9)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == str([row_of(i, rows=50, seed=3, shuffle=True) for i in range(9)])
