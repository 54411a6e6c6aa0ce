"""Makes the optimizer updates of one train step: mini-batches in order of arrival, then shuffled epochs over them.

It also adds up the times and the metrics of a step's updates. It imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from relax_core.contracts.columns import ADVANTAGES
from relax_core.contracts.core_wait import clock_and_core_wait_s
from relax_core.contracts.train import OWN_PARTS, RankTimes, StepMetrics
from relax_core.contracts.tree import TokenTree
from relax_core.train.micro_batches import NO_TOWER, MicroBatcher, TowerWork


class RankClock:
    """Adds up the parts of one update; its processor time is that of the thread that calls it."""

    def __init__(self) -> None:
        self._began_s = time.time()
        self._rows = 0
        self._core_wait_ms = 0.0
        self.wall_ms: dict[str, float] = {}
        self.cpu_ms: dict[str, float] = {}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the block's time in milliseconds to ``part``."""
        clock = clock_and_core_wait_s if part in OWN_PARTS else _clock_alone
        (began_s, waited_s), cpu_s = clock(), time.thread_time()
        yield
        cpu_now_s, (ended_s, wait_s) = time.thread_time(), clock()
        self.wall_ms[part] = self.wall_ms.get(part, 0.0) + 1e3 * (ended_s - began_s)
        self.cpu_ms[part] = self.cpu_ms.get(part, 0.0) + 1e3 * (cpu_now_s - cpu_s)
        self._core_wait_ms += 1e3 * (wait_s - waited_s)

    def add_rows(self, rows: int) -> None:
        """Counts token rows of this rank's passes."""
        self._rows += rows

    def times(self) -> RankTimes:
        """Returns what was measured until now."""
        return RankTimes(
            began_s=self._began_s,
            ended_s=time.time(),
            wall_ms=dict(self.wall_ms),
            cpu_ms=dict(self.cpu_ms),
            rows=self._rows,
            core_wait_ms=self._core_wait_ms,
        )


def _clock_alone() -> tuple[float, float]:
    return time.perf_counter(), 0.0


def times_of_step(updates: Sequence[RankTimes]) -> RankTimes:
    """Returns the times of one rank over all updates of a step, at least one, as one."""
    return RankTimes(
        began_s=min(one.began_s for one in updates),
        ended_s=max(one.ended_s for one in updates),
        wall_ms=_sums([one.wall_ms for one in updates]),
        cpu_ms=_sums([one.cpu_ms for one in updates]),
        rows=sum(one.rows for one in updates),
        core_wait_ms=sum(one.core_wait_ms for one in updates),
    )


def _sums(times: Sequence[dict[str, float]]) -> dict[str, float]:
    parts = dict.fromkeys(part for one in times for part in one)
    return {part: sum(one.get(part, 0.0) for one in times) for part in parts}


MOMENTS = ("return", "return_squared", "error", "error_squared")


def moment_sums(*, returns: np.ndarray, values: np.ndarray, loss_mask: np.ndarray) -> dict[str, tuple[float, float]]:
    """Returns name → (sum, count) over trained tokens of R, R², R - V and (R - V)² in float64; inputs ``[tokens]``."""
    trained = returns[loss_mask].astype(np.float64)
    error = trained - values[loss_mask]
    sums = (trained.sum(), np.square(trained).sum(), error.sum(), np.square(error).sum())
    return {name: (float(total), float(trained.size)) for name, total in zip(MOMENTS, sums, strict=True)}


def explained_variance(means: Mapping[str, float]) -> float | None:
    """Returns 1 - Var(R - V) / Var(R) from the means of the moments, or None if all returns are equal to rounding.

    The value is 1 for a perfect critic and 0 for one that predicts the mean.
    """
    variance = means["return_squared"] - means["return"] ** 2
    if variance <= 1e-9 * means["return_squared"]:
        return None
    return 1.0 - (means["error_squared"] - means["error"] ** 2) / variance


@dataclass(frozen=True, kw_only=True)
class UpdateMetrics:
    """Holds the metrics of one update, or of all updates of a step; ``critic`` is None without a critic.

    ``ranks`` are the times of the policy's ranks in order, and empty where they are not known.
    """

    policy: StepMetrics
    critic: StepMetrics | None = None
    ranks: tuple[RankTimes, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Holds a step's metrics and its number of updates; a mini-batch without a trained token makes no update.

    ``skipped_groups`` counts the groups of the first epoch that were not computed, and ``skipped_rows`` their rows.
    """

    metrics: UpdateMetrics
    updates: int
    skipped_groups: int = 0
    skipped_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """Describes how every train step is split: its ``groups`` form ``mini_batches`` equal parts, ``epochs`` times.

    ``budget_tokens`` bounds the work of a micro-batch on each of ``ranks`` data-parallel ranks, in rows: its packed
    token rows, and ``tower``'s work for its media. ``seed`` seeds the shuffles. If ``skips`` is True, groups without an
    advantage are counted and not computed; an update always computes one group at least.
    """

    groups: int
    mini_batches: int
    epochs: int
    budget_tokens: int
    ranks: int
    seed: int
    tower: TowerWork = NO_TOWER
    skips: bool = False


class Trainer(Protocol):
    """Acts as one trainer for all ranks of the policy, and for the critic if there is one."""

    def begin_step(self, step: int) -> None:
        """Starts an update of train step ``step``."""

    def accumulate(self, groups: Sequence[TokenTree]) -> None:
        """Adds the gradient of one micro-batch."""

    def count(self, groups: Sequence[TokenTree]) -> None:
        """Adds groups without a gradient to what the update counts."""

    def finish_step(self) -> UpdateMetrics:
        """Applies the update and returns its metrics."""


class StepUpdates:
    """Runs one train step.

    The first epoch takes groups as they arrive, micro-batch by micro-batch, while later groups are still generated.
    Each later epoch shuffles all groups with the seed (seed, step, epoch).
    """

    def __init__(self, trainer: Trainer, plan: UpdatePlan, *, step: int) -> None:
        assert plan.groups % plan.mini_batches == 0, "validation checks rollout.prompts_per_step, algo.mini_batches"
        self._trainer, self._plan, self._step = trainer, plan, step
        self._batcher = MicroBatcher(plan.budget_tokens, ranks=plan.ranks, tower=plan.tower)
        self._groups: list[TokenTree] = []
        self._left = plan.mini_batches * plan.epochs
        self._done: list[UpdateMetrics] = []
        self._skipped_groups = self._skipped_rows = 0  # of the first epoch
        self._begin()

    @property
    def made(self) -> int:
        """Returns the number of updates so far; after the first, no checkpoint can be written until the step ends."""
        return len(self._done)

    def add(self, groups: Sequence[TokenTree]) -> None:
        """Trains on the next groups of the first epoch."""
        self._groups += groups
        self._train(groups)

    def finish(self) -> StepResult:
        """Runs the later epochs and returns the step's result.

        Raises ValueError if no token of the step is trained, and whatever the trainer raises.
        """
        plan = self._plan
        assert len(self._groups) == plan.groups, "all groups of a step arrive before it ends"
        first_epoch, skipped_groups, skipped_rows = len(self._done), self._skipped_groups, self._skipped_rows
        for epoch in range(1, plan.epochs):
            order = np.random.default_rng((plan.seed, self._step, epoch)).permutation(plan.groups)
            self._train([self._groups[index] for index in order])
        if not self._done:
            raise ValueError(f"train step {self._step}: every token is masked, so there is nothing to train on.")
        critics = [one.critic for one in self._done if one.critic is not None]
        metrics = UpdateMetrics(
            policy=over_updates([one.policy for one in self._done], first_epoch=first_epoch),
            critic=over_updates(critics, first_epoch=first_epoch) if critics else None,
            ranks=tuple(times_of_step(updates) for updates in zip(*(one.ranks for one in self._done), strict=True)),
        )
        return StepResult(
            metrics=metrics, updates=len(self._done), skipped_groups=skipped_groups, skipped_rows=skipped_rows
        )

    def _train(self, groups: Sequence[TokenTree]) -> None:
        for group in groups:
            if self._plan.skips and not has_advantage(group):
                self._skipped.append(group)
            else:
                self._add(group)
            self._in_update += 1
            self._tokens += int(np.count_nonzero(group.loss_mask))
            if self._in_update == self._plan.groups // self._plan.mini_batches:
                self._end()

    def _begin(self) -> None:
        self._trainer.begin_step(self._step)
        self._in_update, self._tokens = 0, 0
        self._skipped: list[TokenTree] = []

    def _add(self, group: TokenTree) -> None:
        for batch in self._batcher.add([group]):
            self._trainer.accumulate(batch)

    def _end(self) -> None:
        if self._tokens:  # Without a trained token there is no gradient, but Adam's momentum would move the weights.
            if len(self._skipped) == self._in_update:  # Collectives of a backward pass and metrics of tokens need one.
                shown = next(index for index, group in enumerate(self._skipped) if group.loss_mask.any())
                self._add(self._skipped.pop(shown))
            self._trainer.accumulate(self._batcher.flush())
            self._trainer.count(self._skipped)
            self._done.append(self._trainer.finish_step())
            self._skipped_groups += len(self._skipped)
            self._skipped_rows += sum(group.computed_rows for group in self._skipped)
        else:
            self._batcher.flush()
        self._left -= 1
        if self._left:
            self._begin()


def has_advantage(group: TokenTree) -> bool:
    """Returns whether a trained token of a group has an advantage other than 0."""
    advantages = group.of_tokens(ADVANTAGES)
    assert advantages is not None, "the trainer leases groups with advantages"
    return bool(advantages[group.loss_mask[group.tokens[1]]].any())


def over_updates(metrics: Sequence[StepMetrics], *, first_epoch: int) -> StepMetrics:
    """Returns the updates of a step as one record: sums of timings and means of the other values.

    Each metric of the algorithm is weighted by its own counts, so groups that are not computed do not weigh, and loads
    of experts by computed rows. The loss and the gradient norm of each update count equally. Tokens and samples count
    once, over the ``first_epoch`` updates of the first epoch. The gap to the engine is that of the first update,
    because later updates no longer have the weights with which the engine sampled.
    """
    first = metrics[0]
    if len(metrics) == 1:
        return first
    counts: dict[str, float] = {}
    sums: dict[str, float] = {}
    for one in metrics:
        for name, mean in one.algorithm.items():
            counts[name] = counts.get(name, 0.0) + one.algorithm_counts[name]
            sums[name] = sums.get(name, 0.0) + mean * one.algorithm_counts[name]
    rows = sum(one.rows for one in metrics)
    parts = dict.fromkeys(part for one in metrics for part in one.timings_ms)
    return replace(
        first,
        loss=sum(one.loss for one in metrics) / len(metrics),
        grad_norm=sum(one.grad_norm for one in metrics) / len(metrics),
        tokens=sum(one.tokens for one in metrics[:first_epoch]),
        samples=sum(one.samples for one in metrics[:first_epoch]),
        rows=sum(one.rows for one in metrics[:first_epoch]),
        algorithm={name: total / counts[name] for name, total in sums.items()},
        algorithm_counts=counts,
        moe={name: sum(one.moe[name] * one.rows for one in metrics) / rows for name in first.moe},
        timings_ms={part: sum(one.timings_ms.get(part, 0.0) for one in metrics) for part in parts},
    )
