from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from relax_core.data.row_order import BLOCK_PROMPTS, Mixture, apportion, block_shares, row_of


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
    # Over 400 seeds the mean position of row 0 is near the middle. The standard error for uniform positions is 1.4.
    places = [
        next(index for index in range(100) if row_of(index, rows=100, seed=seed, shuffle=True) == 0)
        for seed in range(400)
    ]
    assert 42 < sum(places) / len(places) < 57


def test_without_shuffle_rows_follow_each_other() -> None:
    assert [row_of(index, rows=3, seed=5, shuffle=False) for index in range(5)] == [0, 1, 2, 0, 1]


def test_another_process_agrees() -> None:
    code = (
        "from relax_core.data.row_order import row_of; "
        "print([row_of(i, rows=50, seed=3, shuffle=True) for i in range(9)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == str([row_of(i, rows=50, seed=3, shuffle=True) for i in range(9)])


WEIGHTS = st.lists(st.integers(1, 10_000).map(lambda weight: weight / 100), min_size=1, max_size=6)


@given(weights=WEIGHTS, seed=st.integers(0, 2**31), first=st.integers(0, 10**6))
def test_a_mixture_keeps_its_shares_and_leaves_no_index_out(weights: list[float], seed: int, first: int) -> None:
    """Over complete blocks, each part gets its exact share, and each index of a part occurs once, without gaps."""
    assume(min(weights) > sum(weights) / BLOCK_PROMPTS)
    mixture = Mixture(weights, seed=seed)
    length = sum(mixture.shares)
    start = first // length * length
    places = [mixture.place(index) for index in range(start, start + 2 * length)]
    for part, share in enumerate(mixture.shares):
        mine = sorted(place for of, place in places if of == part)
        begin = start // length * share
        assert mine == list(range(begin, begin + 2 * share))
        assert share / length == pytest.approx(weights[part] / sum(weights), abs=1 / BLOCK_PROMPTS)


@pytest.mark.parametrize(
    ("weights", "shares"),
    [([3, 1], [3, 1]), ([0.7, 0.3], [7, 3]), ([1, 1, 1], [1, 1, 1]), ([0.5], [1]), ([2, 0.5], [4, 1])],
)
def test_blocks_are_as_short_as_the_weights_allow(weights: list[float], shares: list[int]) -> None:
    assert block_shares(weights) == shares


def test_seats_go_to_the_largest_remainders() -> None:
    # The method's textbook case: 10 seats for 1500, 1500, 900, 500, 500 and 200 of 5100 votes.
    assert apportion(10, [1500, 1500, 900, 500, 500, 200]) == [3, 3, 2, 1, 1, 0]
    assert apportion(0, [1, 2]) == [0, 0]
