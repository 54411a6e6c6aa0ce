from __future__ import annotations

import pytest

from relax_core.rollout.evaluation import eval_versions


@pytest.mark.parametrize(
    ("every", "start", "total", "expected"),
    [
        (0, 0, 100, []),
        (50, 0, 100, [0, 50, 100]),
        (50, 0, 120, [0, 50, 100, 120]),
        (50, 30, 120, [30, 50, 100, 120]),  # a resumed run begins with where it stands
        (50, 50, 50, [50]),
        (1, 0, 3, [0, 1, 2, 3]),
        (1000, 0, 3, [0, 3]),
    ],
)
def test_versions(every: int, start: int, total: int, expected: list[int]) -> None:
    assert eval_versions(every=every, start=start, total_steps=total) == expected
