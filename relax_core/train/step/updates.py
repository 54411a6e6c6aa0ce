"""Makes the optimizer updates of one train step: mini-batches in order of arrival, then shuffled epochs over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from relax_core.contracts.columns import ADVANTAGES
from relax_core.contracts.train import RankTimes, StepMetrics
from relax_core.contracts.tree import TokenTree
from relax_core.train.packing.micro_batches import MicroBatcher
from relax_core.train.packing.packed_media import NO_TOWER, TowerWork
from relax_core.train.step.rank_clock import times_of_step


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
