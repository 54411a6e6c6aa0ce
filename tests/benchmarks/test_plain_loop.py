"""Tests that the baseline loop really trains: it learns the task."""

from __future__ import annotations

from statistics import fmean

from benchmarks.plain_loop import GROUP_SIZE, PROMPTS, PlainLoop, loop_arguments


def test_it_learns_the_task() -> None:
    loop = PlainLoop(loop_arguments(None).parse_args([]))
    steps = [loop.step(step) for step in range(40)]
    assert all(step["samples"] == PROMPTS * GROUP_SIZE for step in steps)
    assert all(
        abs(step["step_ms"] - step["generate_ms"] - step["reward_ms"] - step["train_ms"]) < 1e-6 for step in steps
    )
    first, last = (fmean(step["reward"] for step in part) for part in (steps[:8], steps[-8:]))
    assert last > first + 0.08
