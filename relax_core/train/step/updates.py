"""The optimizer updates of one train step: mini-batches by arrival first, then shuffled epochs over the same groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from relax_core.contracts.train import StepMetrics
from relax_core.contracts.tree import TokenTree
from relax_core.train.packing.micro_batches import MicroBatcher


@dataclass(frozen=True, kw_only=True)
class UpdateMetrics:
    """Of one update, or over all updates of a step. ``critic``: where the algorithm has one."""

    policy: StepMetrics
    critic: StepMetrics | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """``updates``: how many the step made; a mini-batch without a trained token makes none."""

    metrics: UpdateMetrics
    updates: int


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """How every train step is cut: ``groups`` of a step, in ``mini_batches`` equal parts, ``epochs`` times.

    ``budget_tokens``: packed token rows of a micro-batch on each of ``ranks`` data-parallel ranks. ``seed``: of the
    shuffles.
    """

    groups: int
    mini_batches: int
    epochs: int
    budget_tokens: int
    ranks: int
    seed: int


class Trainer(Protocol):
    """All ranks of the policy, and the critic, as one."""

    def begin_step(self, step: int) -> None: ...

    def accumulate(self, groups: Sequence[TokenTree]) -> None: ...

    def finish_step(self) -> UpdateMetrics: ...


class StepUpdates:
    """One train step. The first epoch takes groups as they come, micro-batch by micro-batch, while later ones are still
    generated; each later epoch shuffles them by (seed, step, epoch)."""

    def __init__(self, trainer: Trainer, plan: UpdatePlan, *, step: int) -> None:
        assert plan.groups % plan.mini_batches == 0, "validated: rollout.prompts_per_step, algo.mini_batches"
        self._trainer, self._plan, self._step = trainer, plan, step
        self._batcher = MicroBatcher(plan.budget_tokens, ranks=plan.ranks)
        self._groups: list[TokenTree] = []
        self._left = plan.mini_batches * plan.epochs
        self._done: list[UpdateMetrics] = []
        self._begin()

    @property
    def made(self) -> int:
        """Updates so far. With one or more the weights are those of no step's end: nothing may be saved now."""
        return len(self._done)

    def add(self, groups: Sequence[TokenTree]) -> None:
        """Trains on the next groups of the first epoch."""
        self._groups += groups
        self._train(groups)

    def finish(self) -> StepResult:
        """The later epochs. Raises ValueError where no token of the step is trained, and what the trainer raises."""
        plan = self._plan
        assert len(self._groups) == plan.groups, "a step's groups are all there before it ends"
        first_epoch = len(self._done)
        for epoch in range(1, plan.epochs):
            order = np.random.default_rng((plan.seed, self._step, epoch)).permutation(plan.groups)
            self._train([self._groups[place] for place in order])
        if not self._done:
            raise ValueError(f"train step {self._step}: every token is masked, so there is nothing to train on.")
        critics = [one.critic for one in self._done if one.critic is not None]
        metrics = UpdateMetrics(
            policy=over_updates([one.policy for one in self._done], first_epoch=first_epoch),
            critic=over_updates(critics, first_epoch=first_epoch) if critics else None,
        )
        return StepResult(metrics=metrics, updates=len(self._done))

    def _train(self, groups: Sequence[TokenTree]) -> None:
        for group in groups:
            for batch in self._batcher.add([group]):
                self._trainer.accumulate(batch)
            self._in_update += 1
            self._tokens += int(np.count_nonzero(group.loss_mask))
            if self._in_update == self._plan.groups // self._plan.mini_batches:
                self._end()

    def _begin(self) -> None:
        self._trainer.begin_step(self._step)
        self._in_update, self._tokens = 0, 0

    def _end(self) -> None:
        last = self._batcher.flush()
        if self._tokens:  # with no trained token there is no gradient, yet Adam's momentum would move the weights
            self._trainer.accumulate(last)
            self._done.append(self._trainer.finish_step())
        self._left -= 1
        if self._left:
            self._begin()


def over_updates(metrics: Sequence[StepMetrics], *, first_epoch: int) -> StepMetrics:
    """The updates of a step as one: means, those of the algorithm weighted by trained tokens; timings are added up.

    Tokens and samples count once, over the ``first_epoch`` updates. The gap to the engine is the first update's: after
    it the weights are no longer those that the engine sampled with.
    """
    first = metrics[0]
    if len(metrics) == 1:
        return first
    names = dict.fromkeys(name for one in metrics for name in one.algorithm)
    algorithm = {}
    for name in names:
        having = [one for one in metrics if name in one.algorithm]
        total = sum(one.algorithm[name] * one.tokens for one in having)
        algorithm[name] = total / sum(one.tokens for one in having)
    parts = dict.fromkeys(part for one in metrics for part in one.timings_ms)
    return replace(
        first,
        loss=sum(one.loss for one in metrics) / len(metrics),
        grad_norm=sum(one.grad_norm for one in metrics) / len(metrics),
        tokens=sum(one.tokens for one in metrics[:first_epoch]),
        samples=sum(one.samples for one in metrics[:first_epoch]),
        rows=sum(one.rows for one in metrics[:first_epoch]),
        algorithm=algorithm,
        moe={name: sum(one.moe[name] for one in metrics) / len(metrics) for name in first.moe},
        timings_ms={part: sum(one.timings_ms.get(part, 0.0) for one in metrics) for part in parts},
    )
