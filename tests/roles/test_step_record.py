"""The trainer's record of a step, against figures worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

from relax_core.contracts import columns as c
from relax_core.contracts.bus import LeasedRow
from relax_core.contracts.sample import Group, Sample, VersionSpan
from relax_core.contracts.train import StepMetrics
from relax_core.roles.step_clock import StepClock
from relax_core.roles.step_record import StepRows, step_values
from relax_core.train.updates import StepResult, UpdateMetrics


def sample(
    reward: float, tokens: int, version: int, *, finish: Literal["stop", "length"] = "stop", parts: dict[str, float]
) -> Sample:
    return Sample(
        uid="",
        response_ids=[1] * tokens,
        rollout_logprobs=[-1.0] * tokens,
        loss_mask=[1] * tokens,
        weight_versions=[VersionSpan(0, tokens, version)],
        finish_reason=finish,
        reward=reward,
        reward_parts=parts,
    )


def row(*samples: Sample) -> LeasedRow:
    columns = c.encode_group(Group(group_uid="g", index=0, prompt_ids=[1], samples=list(samples)))
    versions = [one.version for one in samples]
    return LeasedRow(group_uid="g", index=0, uids=[""] * len(samples), versions=versions, columns=columns)


ROWS = StepRows(
    rows=[
        row(
            sample(1.0, 4, 9, parts={"exact": 1.0, "format": 0.5}),
            sample(0.0, 8, 9, finish="length", parts={"exact": 0.0, "format": 0.25}),
        ),
        row(  # degenerate: all rewards equal
            sample(0.5, 3, 8, parts={"exact": 0.0}),
            sample(0.5, 1, 7, parts={"exact": 0.0}),
            sample(0.5, 2, 10, parts={"exact": 0.0}),
        ),
    ],
    lease_ids=[1, 2],
)


def test_means_are_over_samples_not_over_groups() -> None:
    assert ROWS.values(step=10) == pytest.approx(
        {
            "reward": (1.0 + 0.0 + 3 * 0.5) / 5,
            "exact": 1 / 5,
            "reward_format": (0.5 + 0.25) / 2,  # over the samples that have this part
            "response_tokens": (4 + 8 + 3 + 1 + 2) / 5,
            "truncated": 1 / 5,
            "degenerate_groups": 1.0,
            "staleness_max": 3.0,
            "staleness_mean": (1 + 1 + 2 + 3 + 0) / 5,
        }
    )


METRICS = StepMetrics(
    loss=-0.5,
    grad_norm=2.0,
    learning_rate=1e-3,
    tokens=18,
    samples=5,
    logprob_gap_max=1e-6,
    logprob_gap_mean=1e-7,
    logprob_gap_tokens=2,
    algorithm={"kl": 0.1},
    timings_ms={"pack": 3.0},
)


def test_a_group_of_one_is_not_degenerate() -> None:
    alone = StepRows(rows=[row(sample(1.0, 4, 9, parts={})), row(sample(0.5, 4, 9, parts={}))], lease_ids=[1])
    assert alone.values(step=9)["degenerate_groups"] == 0.0


def test_the_critics_figures_have_their_own_prefix() -> None:
    # returns 1 and 3 (mean square 5, variance 1), errors 0.5 and -0.5: a quarter of it is left
    moments = {"return": 2.0, "return_squared": 5.0, "error": 0.0, "error_squared": 0.25}
    critic = dataclasses.replace(METRICS, loss=0.7, grad_norm=3.0, algorithm={"clip": 0.1, **moments})
    result = StepResult(metrics=UpdateMetrics(policy=METRICS, critic=critic), updates=4)
    values = step_values(ROWS, result, StepClock(), step=10, step_ms=48.0)
    assert {name: value for name, value in values.items() if name.startswith("value/")} == {
        "value/loss": 0.7,
        "value/grad_norm": 3.0,
        "value/clip": 0.1,
        "value/return": 2.0,
        "value/explained_variance": 0.75,
    }
    assert (values["loss"], values["updates"]) == (-0.5, 4)
    equal = dataclasses.replace(
        critic, algorithm={"return": 2.0, "return_squared": 4.0, "error": 1.0, "error_squared": 1.0}
    )
    result = StepResult(metrics=UpdateMetrics(policy=METRICS, critic=equal), updates=4)
    assert "value/explained_variance" not in step_values(ROWS, result, StepClock(), step=10, step_ms=48.0)


def test_a_record_holds_metrics_clock_and_prefixed_names() -> None:
    clock = StepClock(wait_ms=1.0, bus_ms=1.5, decode_ms=2.0, train_ms=30.0, sync_ms=4.0)
    clock.push_ms, clock.checkpoint_ms = 5.0, 6.0
    result = StepResult(metrics=UpdateMetrics(policy=METRICS), updates=1)
    values = step_values(ROWS, result, clock, step=10, step_ms=48.0)
    assert values.items() >= ROWS.values(step=10).items()
    told = {"loss": -0.5, "grad_norm": 2.0, "learning_rate": 1e-3, "tokens": 18, "samples": 5}
    gaps = {"logprob_gap_max": 1e-6, "logprob_gap_mean": 1e-7, "logprob_gap_tokens": 2}
    waited = {"step_ms": 48.0, "wait_ms": 1.0, "bus_ms": 1.5, "push_ms": 5.0}
    worked = {"decode_ms": 2.0, "train_ms": 30.0, "checkpoint_ms": 6.0}
    assert values.items() >= (told | gaps | waited | worked).items()
    assert values["sync_ms"] == 4.0 and not any(name.startswith("value/") for name in values)
    assert (values["algorithm/kl"], values["train/pack"]) == (0.1, 3.0)
