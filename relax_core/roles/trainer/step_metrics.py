"""The trainer's metrics of a step: rewards and lengths of its groups, and the parts of its time on all ranks.

docs/metrics.md has the unit of every figure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from relax_core.contracts import columns as c
from relax_core.contracts.bus import BusTimeout, Group, Lease
from relax_core.contracts.train import RankTimes, StepMetrics
from relax_core.contracts.tree import TokenTree
from relax_core.observe.event_log import ACTOR, HistogramRecord
from relax_core.roles.role_context import worker_name
from relax_core.train.updates import MOMENTS, StepResult, explained_variance

LeaseT = TypeVar("LeaseT", Lease, Lease | None)


@dataclass(kw_only=True)
class StepClock:
    """Milliseconds of one step on the lead rank, by part.

    ``wait_ms`` is the wait for groups, and ``bus_ms`` the rest of the calls that lease and acknowledge. ``push_ms`` is
    the time of the last push, which runs beside the trainer; only the wait for its end is in ``sync_ms``. ``stall_ms``
    is how long the push stopped an engine's decoding.
    """

    wait_ms: float = 0.0
    bus_ms: float = 0.0
    decode_ms: float = 0.0
    train_ms: float = 0.0
    sync_ms: float = 0.0
    push_ms: float = 0.0
    stall_ms: float = 0.0
    checkpoint_ms: float = 0.0

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the block's time to ``part``."""
        began = time.perf_counter()
        yield
        self._add(part, time.perf_counter() - began)

    def timed_lease(self, call: Callable[[], LeaseT], *, timeout_s: float) -> LeaseT:
        """Calls the bus for a lease; a call that raises `BusTimeout` has waited ``timeout_s`` for groups."""
        began = time.perf_counter()
        try:
            lease = call()
        except BusTimeout:
            self._add_bus_call(time.perf_counter() - began, waited_s=timeout_s)
            raise
        self._add_bus_call(time.perf_counter() - began, waited_s=0.0 if lease is None else lease.waited_s)
        return lease

    def _add_bus_call(self, seconds: float, *, waited_s: float) -> None:
        self._add("wait_ms", waited_s)
        self._add("bus_ms", seconds - waited_s)

    def _add(self, part: str, seconds: float) -> None:
        setattr(self, part, getattr(self, part) + 1e3 * seconds)


def rank_values(ranks: Sequence[RankTimes], *, now_s: float) -> dict[str, float]:
    """Returns the numbers of a step's record of all ranks of the policy, which is made at Unix time ``now_s``.

    A rank's ``step_ms`` is the time from its first call of the step to the end of its last one, and ``lag_ms`` the time
    from there to the record. The clocks of several hosts are taken to agree.
    """
    values: dict[str, float] = {}
    for rank, times in enumerate(ranks):
        name = worker_name("actor", rank)
        values[f"{name}/step_ms"] = 1e3 * (times.ended_s - times.began_s)
        values[f"{name}/lag_ms"] = 1e3 * (now_s - times.ended_s)
        values[f"{name}/core_wait_ms"] = times.core_wait_ms
        values[f"{name}/rows"] = float(times.rows)
        values |= {f"{name}/{part}_ms": ms for part, ms in times.wall_ms.items()}
        values |= {f"{name}/cpu/{part}_ms": ms for part, ms in times.cpu_ms.items()}
    return {name: round(value, 3) for name, value in values.items()}


QUANTILES = (10, 50, 90)
HISTOGRAM_BINS = 20


@dataclass(kw_only=True)
class StepGroups:
    """Holds the groups that a step consumed.

    ``leased`` are the groups as leased, ``lease_ids`` their leases, and ``groups`` the trainer's trees made of them, in
    the same order. ``dropped`` maps uids of episodes that were masked as a whole to the reasons.
    """

    leased: list[Group] = field(default_factory=list)
    groups: list[TokenTree] = field(default_factory=list)
    lease_ids: list[int] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)

    def values(self, *, step: int) -> dict[str, float]:
        """Returns the figures over the step's samples; figures without data are left out."""
        episodes = [one for group in self.groups for one in group.episodes]
        staleness = [step - version for row in self.leased for version in row.versions]
        parts: dict[str, list[float]] = {}
        for one in episodes:
            for name, value in one.parts.items():
                parts.setdefault(name, []).append(value)
        count = len(episodes)
        return {
            **reward_values([group.rewards for group in self.groups]),
            "exact": sum(parts.pop("exact", [0.0])) / count,
            **{f"reward_{name}": sum(values) / len(values) for name, values in parts.items()},
            **length_values(self._lengths()),
            "truncated": sum(one.ended == "length" for one in episodes) / count,
            **sampled_entropy(self.groups),
            "staleness_max": float(max(staleness)),
            "staleness_mean": sum(staleness) / count,
            **self._modality_values(step=step),
        }

    def _modality_values(self, *, step: int) -> dict[str, float]:
        """Returns samples, mean reward and mean staleness by modality; a run on text has none."""
        values: dict[str, float] = {}
        for name in sorted({row.modality for row in self.leased} - {""}):
            mine = [(row, group) for row, group in zip(self.leased, self.groups, strict=True) if row.modality == name]
            rewards = np.concatenate([group.rewards for _, group in mine])
            staleness = [step - version for row, _ in mine for version in row.versions]
            values[f"modality/{name}/samples"] = float(len(rewards))
            values[f"modality/{name}/reward"] = float(rewards.mean())
            values[f"modality/{name}/staleness_mean"] = sum(staleness) / len(staleness)
        return values

    def histograms(self, *, step: int) -> list[HistogramRecord]:
        """Returns the distributions of the samples' lengths, staleness, rewards and, if known, mean advantages."""
        staleness = np.array([step - version for row in self.leased for version in row.versions])
        advantages = [group_advantages(group) for group in self.groups]
        return [
            whole_histogram("response_tokens", self._lengths(), step=step),
            whole_histogram("staleness", np.sort(staleness), step=step),
            real_histogram("reward", np.concatenate([group.rewards for group in self.groups]), step=step),
            *(
                [real_histogram("advantage", np.concatenate([one for one in advantages if one is not None]), step=step)]
                if all(one is not None for one in advantages)
                else []
            ),
        ]

    def _lengths(self) -> np.ndarray:
        """Returns the tokens of each answer, int64 ``[samples]``, in ascending order."""
        return np.sort(np.concatenate([group.lengths for group in self.groups]))


def whole_histogram(name: str, values: np.ndarray, *, step: int) -> HistogramRecord:
    """Returns the distribution of whole numbers, given in ascending order, in bins of equal width."""
    least, largest = int(values[0]), int(values[-1])
    width = math.ceil((largest - least + 1) / HISTOGRAM_BINS)
    limits = np.arange(least + width - 1, largest + width, width)
    counts = np.diff(np.searchsorted(values, limits, side="right"), prepend=0)
    return _histogram(name, values, limits=limits, counts=counts, step=step)


def real_histogram(name: str, values: np.ndarray, *, step: int) -> HistogramRecord:
    """Returns the distribution of real numbers in bins of equal width, one if all are equal."""
    values = np.sort(values.astype(np.float64))
    bins = HISTOGRAM_BINS if values[-1] > values[0] else 1
    limits = np.linspace(values[0], values[-1], bins + 1)[1:]
    counts = np.diff(np.searchsorted(values, limits, side="right"), prepend=0)
    return _histogram(name, values, limits=limits, counts=counts, step=step)


def _histogram(name: str, values: np.ndarray, *, limits: np.ndarray, counts: np.ndarray, step: int) -> HistogramRecord:
    return HistogramRecord(
        source=ACTOR,
        step=step,
        time_s=time.time(),
        name=name,
        limits=limits.astype(float).tolist(),
        counts=counts.tolist(),
        least=float(values[0]),
        largest=float(values[-1]),
        total=float(values.sum()),
        total_of_squares=float((values * values).sum()),
    )


def group_advantages(group: TokenTree) -> np.ndarray | None:
    """Returns the mean advantage of each episode's tokens, float64 ``[episodes]``; None if the rank has none."""
    advantages = group.of_tokens(c.ADVANTAGES)
    if advantages is None:
        return None
    sums = np.bincount(group.tokens[0], weights=advantages, minlength=len(group.episodes))
    return sums / np.maximum(group.lengths, 1)


def reward_values(groups: list[np.ndarray]) -> dict[str, float]:
    """Returns figures of rewards, given one array per group; a group without signal has several equal rewards."""
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
    """Returns figures of lengths, given int64 ``[samples]`` in ascending order.

    The quantile p is the smallest length that p % of the answers do not exceed.
    """
    return {
        "response_tokens": float(lengths.mean()),
        "response_tokens/min": float(lengths[0]),
        **{f"response_tokens/p{q}": float(lengths[-(-q * len(lengths) // 100) - 1]) for q in QUANTILES},
        "response_tokens/max": float(lengths[-1]),
    }


def sampled_entropy(groups: list[TokenTree]) -> dict[str, float]:
    """Returns -mean log-prob of the trained tokens in the engine, in nats per token.

    This estimates, from samples, the entropy of the distributions that the tokens were sampled from.
    """
    trained = np.concatenate([group.logprobs[group.loss_mask] for group in groups])
    tokens = len(trained)
    if not tokens:
        return {}
    return {"entropy": -float(trained.sum(dtype=np.float64)) / tokens}


def step_values(
    consumed: StepGroups, result: StepResult, clock: StepClock, *, step: int, step_ms: float
) -> dict[str, float]:
    """Returns the trainer's record of a step as names and numbers."""
    metrics, critic = result.metrics.policy, result.metrics.critic
    needed_rows = sum(group.computed_rows for group in consumed.groups) - result.skipped_rows
    return {
        **consumed.values(step=step),
        "loss": metrics.loss,
        "grad_norm": metrics.grad_norm,
        "learning_rate": metrics.learning_rate,
        "updates": result.updates,
        "samples": metrics.samples,
        "tokens": metrics.tokens,
        "rows": metrics.rows,
        "skipped_groups": result.skipped_groups,
        "repeated_rows": 1.0 - needed_rows / max(1, metrics.rows),
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
    """Returns the gap between the trainer's and the engine's log-probs, which stale samples alone do not have."""
    if not metrics.logprob_gap_tokens:
        return {"logprob_gap_tokens": 0.0}
    return {
        "logprob_gap_max": metrics.logprob_gap_max,
        "logprob_gap_mean": metrics.logprob_gap_mean,
        "logprob_gap_tokens": float(metrics.logprob_gap_tokens),
    }


def critic_values(metrics: StepMetrics) -> dict[str, float]:
    """Returns the critic's figures: its loss, the mean return, its algorithm's metrics and the explained variance."""
    found = {name: value for name, value in metrics.algorithm.items() if name not in MOMENTS}
    found |= {"loss": metrics.loss, "grad_norm": metrics.grad_norm, "return": metrics.algorithm["return"]}
    explained = explained_variance(metrics.algorithm)
    if explained is not None:
        found["explained_variance"] = explained
    return {f"value/{name}": value for name, value in found.items()}
