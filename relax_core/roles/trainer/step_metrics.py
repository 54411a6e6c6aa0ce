"""What the trainer tells of a step: rewards and lengths of the rows that it consumed, and where its time went. The unit
of every figure stands in docs/metrics.md."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from relax_core.contracts.bus import LeasedRow
from relax_core.contracts.train import StepMetrics
from relax_core.contracts.tree import TokenTree
from relax_core.observe.service.records import ACTOR, HistogramRecord
from relax_core.roles.trainer.step_timing import StepClock
from relax_core.train.step.updates import StepResult
from relax_core.train.step.value_moments import MOMENTS, explained_variance

QUANTILES = (10, 50, 90)
HISTOGRAM_BINS = 20


@dataclass(kw_only=True)
class StepRows:
    """The rows that a step consumed, by which leases, and the trainer's groups that were made of them, in the same
    order. ``dropped``: uids that were masked whole, and why."""

    rows: list[LeasedRow] = field(default_factory=list)
    groups: list[TokenTree] = field(default_factory=list)
    lease_ids: list[int] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)

    def values(self, *, step: int) -> dict[str, float]:
        """Figures over the step's samples; what has no data is left out."""
        episodes = [one for group in self.groups for one in group.episodes]
        staleness = [step - version for row in self.rows for version in row.versions]
        parts: dict[str, list[float]] = {}
        for one in episodes:
            for name, value in one.parts.items():
                parts.setdefault(name, []).append(value)
        count = len(episodes)
        return {
            **reward_values([group_rewards(group) for group in self.groups]),
            "exact": sum(parts.pop("exact", [0.0])) / count,
            **{f"reward_{name}": sum(values) / len(values) for name, values in parts.items()},
            **length_values(self._lengths()),
            "truncated": sum(one.ended == "length" for one in episodes) / count,
            **sampled_entropy(self.groups),
            "staleness_max": float(max(staleness)),
            "staleness_mean": sum(staleness) / count,
        }

    def length_histogram(self, *, step: int) -> HistogramRecord:
        """How the lengths of the answers are distributed, in at most `HISTOGRAM_BINS` bins of equal width."""
        lengths = self._lengths()
        least, largest = int(lengths[0]), int(lengths[-1])
        width = math.ceil((largest - least + 1) / HISTOGRAM_BINS)
        limits = np.arange(least + width - 1, largest + width, width)
        counts = np.diff(np.searchsorted(lengths, limits, side="right"), prepend=0)
        return HistogramRecord(
            source=ACTOR,
            step=step,
            time_s=time.time(),
            name="response_tokens",
            limits=limits.astype(float).tolist(),
            counts=counts.tolist(),
            least=float(least),
            largest=float(largest),
            total=float(lengths.sum()),
            total_of_squares=float((lengths * lengths).sum()),
        )

    def _lengths(self) -> np.ndarray:
        """Tokens of each answer, int64 ``[samples]``, in ascending order."""
        return np.sort(np.concatenate([group.lengths for group in self.groups]))


def group_rewards(group: TokenTree) -> np.ndarray:
    """The rewards of a group's episodes, float32 ``[episodes]``; an episode without one never gets here."""
    return np.array([one.reward for one in group.episodes], dtype=np.float32)


def reward_values(groups: list[np.ndarray]) -> dict[str, float]:
    """``groups``: the rewards of each group's samples. A group without signal has several samples and one reward."""
    rewards = np.concatenate(groups)
    several = [group for group in groups if len(group) > 1]
    values = {
        "reward": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
    }
    if several:
        values["groups_without_signal"] = sum(bool((group == group[0]).all()) for group in several) / len(several)
    return values


def length_values(lengths: np.ndarray) -> dict[str, float]:
    """``lengths``: int64 ``[samples]``, in ascending order. A quantile p is the least length that p % of the answers do
    not exceed."""
    return {
        "response_tokens": float(lengths.mean()),
        "response_tokens/min": float(lengths[0]),
        **{f"response_tokens/p{q}": float(lengths[-(-q * len(lengths) // 100) - 1]) for q in QUANTILES},
        "response_tokens/max": float(lengths[-1]),
    }


def sampled_entropy(groups: list[TokenTree]) -> dict[str, float]:
    """−mean log-prob of the trained tokens in the engine: an estimate, from samples, of the entropy of what they were
    drawn from, in nats a token."""
    trained = np.concatenate([group.logprobs[group.loss_mask] for group in groups])
    tokens = len(trained)
    if not tokens:
        return {}
    return {"entropy": -float(trained.sum(dtype=np.float64)) / tokens}


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
        "rows": metrics.rows,
        "repeated_rows": 1.0 - sum(group.computed_rows for group in rows.groups) / max(1, metrics.rows),
        "samples_per_s": 1e3 * metrics.samples / step_ms,
        "tokens_per_s": 1e3 * metrics.tokens / step_ms,
        **logprob_gap(metrics),
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


def logprob_gap(metrics: StepMetrics) -> dict[str, float]:
    """Where no token was compared, which stale samples alone do not allow, there is no gap: it is left out."""
    if not metrics.logprob_gap_tokens:
        return {"logprob_gap_tokens": 0.0}
    return {
        "logprob_gap_max": metrics.logprob_gap_max,
        "logprob_gap_mean": metrics.logprob_gap_mean,
        "logprob_gap_tokens": float(metrics.logprob_gap_tokens),
    }


def critic_values(metrics: StepMetrics) -> dict[str, float]:
    """The critic's part: its loss, the mean return, what its algorithm tells, and the variance that it explained."""
    found = {name: value for name, value in metrics.algorithm.items() if name not in MOMENTS}
    found |= {"loss": metrics.loss, "grad_norm": metrics.grad_norm, "return": metrics.algorithm["return"]}
    explained = explained_variance(metrics.algorithm)
    if explained is not None:
        found["explained_variance"] = explained
    return {f"value/{name}": value for name, value in found.items()}
