from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_core.observe.panel_view import BLOCKS, duration, number, sparkline, staleness_shares


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=60),
    st.integers(min_value=1, max_value=20),
)
def test_a_sparkline_has_its_width_and_only_blocks(values: list[float], width: int) -> None:
    line = sparkline(values, width=width)
    assert len(line) <= width
    assert set(line) <= set(BLOCKS)


def test_a_sparkline_is_the_mean_of_each_share() -> None:
    assert sparkline([0.0, 1.0], width=8) == "▁█"
    assert sparkline([0.0, 0.0, 1.0, 1.0, 0.5, 0.5], width=3) == "▁█▅"
    assert sparkline([0.5], width=4, low=0.0, high=1.0) == "▅"
    assert sparkline([3.0, 3.0], width=4) == "▁▁"
    assert sparkline([float("nan")], width=4) == ""


def test_staleness_shares_leave_no_gap() -> None:
    assert staleness_shares({}) == []
    assert staleness_shares({0: 1, 2: 3, 5: 0}) == [(0, 0.25), (1, 0.0), (2, 0.75)]


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "–"), (0.4, "0 s"), (59.9, "59 s"), (185, "3:05 min"), (7620, "2:07 h")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_an_unknown_number_is_a_dash() -> None:
    assert number(None, ".3f") == "–" and number(0.5, ".3f") == "0.500"
