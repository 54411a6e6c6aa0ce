"""Compares the numbers of `benchmarks.throughput` with numbers computed by hand. Does not test the runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.family_models import make_family_model
from benchmarks.harness import QUIET_RUN
from benchmarks.throughput import (
    ASYNC,
    COLOCATE,
    OVERRIDES,
    SKIPPED_STEPS,
    STRICT,
    TAIL_OVERRIDES,
    TAIL_RUN,
    TAIL_TOKENS,
    run_metrics,
)
from relax_core.config.compose import load_config
from relax_core.tools.tiny_text import write_tiny_tokenizer

STEPS = SKIPPED_STEPS + 4  # three steps are measured: not the warm-up and the last step


def actor_records(step_ms: list[float]) -> dict[int, dict[str, float]]:
    """Returns records. If warm-up and last step were included, they would distort every value."""
    spoiled = {"step_ms": 1e6, "samples": 1.0, "tokens": 1.0, "train_ms": 1e6, "sync_ms": 1e6, "push_ms": 1e6}
    spoiled |= {"bus_ms": 1e6, "wait_ms": 1e6}
    fine = {
        "samples": 128.0,
        "tokens": 768.0,
        "train_ms": 20.0,
        "sync_ms": 1.0,
        "push_ms": 2.0,
        "bus_ms": 2.0,
        "wait_ms": 13.0,
    }
    records = {step: dict(spoiled) for step in range(STEPS)}
    records |= {SKIPPED_STEPS + place: fine | {"step_ms": value} for place, value in enumerate(step_ms)}
    return records


PROMPT_BATCHES = {step: {"engine_ms": 10.0, "reward_ms": 1.0} for step in range(STEPS)}


@pytest.mark.parametrize(
    ("name", "sync", "other_ms"),
    [(COLOCATE, 1.0, 8.0), (STRICT, 3.0, 6.0), (ASYNC, 1.0, 19.0)],
)
def test_a_steps_parts_add_up(name: str, sync: float, other_ms: float) -> None:
    """A step takes 40 ms: 20 train, 11 engine and reward without overlap. One case has the push on its path."""
    metrics = run_metrics(name, actor_records([40.0, 40.0, 64.0]), PROMPT_BATCHES)
    assert metrics["step"] == 40.0
    assert metrics["sync"] == pytest.approx(sync)
    assert metrics["bus+control"] == pytest.approx(other_ms)
    assert metrics["control+bus+sync"] == pytest.approx(sync + other_ms)
    on_path = 0.0 if name == ASYNC else metrics["engine"] + metrics["reward"]
    assert metrics["train"] + on_path + metrics["control+bus+sync"] == pytest.approx(40.0)


def test_slow_steps_show_in_the_mean_only() -> None:
    metrics = run_metrics(ASYNC, actor_records([32.0, 32.0, 128.0]), PROMPT_BATCHES)
    assert metrics["samples/s"] == pytest.approx(4000.0)
    assert metrics["samples/s, mean"] == pytest.approx(1e3 * 3 * 128 / 192)
    assert metrics["tokens/s"] == pytest.approx(1e3 * 3 * 768 / 192)


@pytest.mark.parametrize("name", OVERRIDES)
def test_what_is_run_is_a_valid_configuration(name: str) -> None:
    config = load_config([*OVERRIDES[name], *QUIET_RUN])
    assert (config.mode.max_staleness, config.eval.every) == (1 if name == ASYNC else 0, 0)


@pytest.mark.parametrize(("name", "staleness"), zip(TAIL_OVERRIDES, (0, 0, 1, 2), strict=True))
def test_what_is_run_with_a_tail_is_a_valid_configuration(name: str, staleness: int, tmp_path: Path) -> None:
    make_family_model(tmp_path, "qwen3")
    write_tiny_tokenizer(tmp_path)
    config = load_config([*TAIL_OVERRIDES[name], *TAIL_RUN, *QUIET_RUN, f"model.path={tmp_path}"])
    assert (config.mode.max_staleness, config.rollout.max_new_tokens) == (staleness, TAIL_TOKENS)
