"""What the trainer tells of a step: rewards and lengths of the rows it consumed, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from relax_core.contracts import columns as c
from relax_core.contracts.bus import LeasedRow
from relax_core.contracts.train import StepMetrics
from relax_core.roles.step_clock import StepClock
from relax_core.train.updates import StepResult
from relax_core.train.value_moments import MOMENTS, explained_variance


@dataclass(kw_only=True)
class StepRows:
    """The rows that a step consumed, by which leases. ``dropped``: uids that were masked whole, and why."""

    rows: list[LeasedRow] = field(default_factory=list)
    lease_ids: list[int] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)

    def values(self, *, step: int) -> dict[str, float]:
        """Means over the step's samples; ``degenerate_groups``: groups of several whose rewards are all equal."""
        rewards = [c.decode_array(row.columns[c.REWARDS]) for row in self.rows]
        info = [one for row in self.rows for one in c.decode_sample_info(row.columns[c.SAMPLE_INFO])]
        lengths = [n for row in self.rows for n in c.decode_ragged(row.columns[c.RESPONSE_IDS]).lengths]
        staleness = [step - version for row in self.rows for version in row.versions]
        parts: dict[str, list[float]] = {}
        for one in info:
            for name, value in one.reward_parts.items():
                parts.setdefault(name, []).append(value)
        count = len(info)
        return {
            "reward": float(np.concatenate(rewards).mean()),
            "exact": sum(parts.pop("exact", [0.0])) / count,
            **{f"reward_{name}": sum(values) / len(values) for name, values in parts.items()},
            "response_tokens": sum(lengths) / count,
            "truncated": sum(one.finish_reason == "length" for one in info) / count,
            "degenerate_groups": float(sum(len(group) > 1 and bool((group == group[0]).all()) for group in rewards)),
            "staleness_max": float(max(staleness)),
            "staleness_mean": sum(staleness) / count,
        }


def step_values(rows: StepRows, result: StepResult, clock: StepClock, *, step: int, step_ms: float) -> dict[str, float]:
    """The trainer's record of a step, as names and numbers."""
    metrics, critic = result.metrics.policy, result.metrics.critic
    return {
        **rows.values(step=step),
        "loss": metrics.loss,
        "grad_norm": metrics.grad_norm,
        "learning_rate": metrics.learning_rate,
        "updates": result.updates,
        "samples": metrics.samples,
        "tokens": metrics.tokens,
        "logprob_gap_max": metrics.logprob_gap_max,
        "logprob_gap_mean": metrics.logprob_gap_mean,
        "logprob_gap_tokens": metrics.logprob_gap_tokens,
        "step_ms": step_ms,
        "wait_ms": clock.wait_ms,
        "bus_ms": clock.bus_ms,
        "decode_ms": clock.decode_ms,
        "train_ms": clock.train_ms,
        "sync_ms": clock.sync_ms,
        "push_ms": clock.push_ms,
        "stall_ms": clock.stall_ms,
        "checkpoint_ms": clock.checkpoint_ms,
        **{f"algorithm/{name}": value for name, value in metrics.algorithm.items()},
        **{f"moe/{name}": value for name, value in metrics.moe.items()},
        **({} if critic is None else critic_values(critic)),
        **{f"train/{name}": value for name, value in metrics.timings_ms.items()},
    }


def critic_values(metrics: StepMetrics) -> dict[str, float]:
    """The critic's part: its loss, the mean return, what its algorithm tells, and the variance that it explained."""
    found = {name: value for name, value in metrics.algorithm.items() if name not in MOMENTS}
    found |= {"loss": metrics.loss, "grad_norm": metrics.grad_norm, "return": metrics.algorithm["return"]}
    explained = explained_variance(metrics.algorithm)
    if explained is not None:
        found["explained_variance"] = explained
    return {f"value/{name}": value for name, value in found.items()}
