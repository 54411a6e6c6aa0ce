"""The trainer's record of a step, against figures worked out by hand."""

from __future__ import annotations

from typing import Literal

import pytest

from relax_core.contracts import columns as c
from relax_core.contracts.bus import LeasedRow
from relax_core.contracts.sample import Group, Sample, VersionSpan
from relax_core.contracts.train import StepMetrics
from relax_core.roles.step_record import StepClock, StepRows, step_values


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


def test_a_record_holds_metrics_clock_and_prefixed_names() -> None:
    metrics = StepMetrics(
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
    clock = StepClock(wait_ms=1.0, decode_ms=2.0, train_ms=30.0, sync_ms=4.0, push_ms=5.0, checkpoint_ms=6.0)
    values = step_values(ROWS, metrics, clock, step=10, step_ms=48.0)
    assert values.items() >= ROWS.values(step=10).items()
    told = {"loss": -0.5, "grad_norm": 2.0, "learning_rate": 1e-3, "tokens": 18, "samples": 5}
    gaps = {"logprob_gap_max": 1e-6, "logprob_gap_mean": 1e-7, "logprob_gap_tokens": 2}
    times = {"step_ms": 48.0, "wait_ms": 1.0, "decode_ms": 2.0, "train_ms": 30.0, "push_ms": 5.0, "checkpoint_ms": 6.0}
    assert values.items() >= (told | gaps | times).items()
    assert values["sync_ms"] == 4.0
    assert (values["algorithm/kl"], values["train/pack"]) == (0.1, 3.0)
