"""Compares Wilson's interval with published values. Tests the limit for bad rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_core.data.eval_sets import NAMED_ROWS, too_many_bad, wilson


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        # Newcombe, Two-sided confidence intervals for the single proportion (1998), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_as_published(right: int, count: int, low: float, high: float) -> None:
    assert wilson(right / count, count) == pytest.approx((low, high), abs=5e-5)


@given(right=st.integers(0, 200), wrong=st.integers(0, 200))
def test_wilson_holds_the_share_and_mirrors(right: int, wrong: int) -> None:
    count = right + wrong
    if count == 0:
        return
    low, high = wilson(right / count, count)
    assert 0.0 <= low <= right / count + 1e-12 and right / count - 1e-12 <= high <= 1.0 and low < high
    assert wilson(wrong / count, count) == pytest.approx((1.0 - high, 1.0 - low))


def test_of_all_rows_the_share_itself_counts() -> None:
    assert not too_many_bad(1, 20, rows=20, most=0.05)
    assert too_many_bad(2, 20, rows=20, most=0.05)
    assert too_many_bad(1, 1, rows=1, most=0.05)


def test_of_a_part_a_few_may_be_chance() -> None:
    assert not too_many_bad(NAMED_ROWS, NAMED_ROWS, rows=1000, most=0.05)
    assert too_many_bad(NAMED_ROWS + 1, NAMED_ROWS + 1, rows=1000, most=0.05)
    assert not too_many_bad(12, 150, rows=10_000, most=0.05)  # a sample with 8 % may come from data with 4 %
    assert too_many_bad(120, 1000, rows=10_000, most=0.05)


def test_where_none_may_be_bad_one_is_too_many() -> None:
    assert too_many_bad(1, 1000, rows=10_000, most=0.0)
    assert not too_many_bad(0, 10, rows=10, most=0.0)
