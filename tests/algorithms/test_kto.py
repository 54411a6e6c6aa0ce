"""Compares KTO's loss, its gradient and its KL estimate with equations of arXiv 2402.01306 on random samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms import kto
from relax_core.contracts.algorithm import AdvantageInputs, LossInputs, StepTotals


@dataclass(frozen=True)
class Row:
    """Holds log-probs of a labelled response and of the untrained response after the same prompt, each ``[2, tokens]``.

    The first line is of the policy, the second of the reference. ``mask`` is the loss mask of the labelled response.
    """

    label: bool
    own: Tensor
    other: Tensor
    mask: Tensor

    def group(self) -> AdvantageInputs:
        both = torch.cat([self.own, self.other], dim=1)
        lengths = torch.tensor([self.own.shape[1], self.other.shape[1]])
        return AdvantageInputs(
            rewards=torch.tensor([float(self.label), 0.0]),
            lengths=lengths,
            loss_mask=torch.cat([self.mask, torch.zeros(int(lengths[1]), dtype=torch.bool)]),
            sample_ids=torch.repeat_interleave(torch.arange(2), lengths),
            old_logprobs=both[0],
            rollout_logprobs=None,
            reference_logprobs=both[1],
        )


def rows(seed: int, *, count: int = 7, shift: float = 0.0) -> list[Row]:
    """Makes rows; a positive ``shift`` makes the KL estimate positive."""
    random, made = np.random.default_rng(seed), []
    for _ in range(count):
        own, other = (torch.tensor(-3 * random.random((2, int(random.integers(1, 9))))) for _ in range(2))
        other[0] += shift
        mask = torch.tensor(random.random(own.shape[1]) < 0.8)
        mask[-1] = True
        made.append(Row(bool(random.random() < 0.6), own, other, mask))
    return made


def trained(made: list[Row], config: kto.KtoConfig, *, split: list[list[int]]) -> tuple[float, list[Tensor], Any]:
    """Returns the loss, the gradient at each row's own tokens, and the metrics. ``split`` has micro-batches."""
    groups = [row.group() for row in made]
    advantages = kto.normalize([kto.advantages(group, config) for group in groups], groups, config)
    loss, gradients, metrics = 0.0, [torch.empty(0)] * len(made), dict[str, list[float]]()
    for numbers in split:
        own = [groups[number] for number in numbers]
        masks = torch.cat([group.loss_mask for group in own])
        policy = torch.cat([group.old_logprobs for group in own if group.old_logprobs is not None])
        policy = policy.masked_fill(~masks, float("nan")).requires_grad_()
        inputs = LossInputs(
            logprobs=policy,
            old_logprobs=policy.detach(),
            rollout_logprobs=torch.zeros_like(policy),
            advantages=torch.cat([advantages[number] for number in numbers]),
            loss_mask=masks,
            sample_ids=torch.cat([group.sample_ids + 2 * place for place, group in enumerate(own)]),
            num_samples=2 * len(own),
            reference_logprobs=torch.cat([g.reference_logprobs for g in own if g.reference_logprobs is not None]),
            group_ids=torch.repeat_interleave(torch.arange(len(own)), 2),
        )
        outputs = kto.loss(inputs, config)
        outputs.loss_sum.backward()
        assert policy.grad is not None
        loss += float(outputs.loss_sum.detach())
        parts = policy.grad.split([len(group.sample_ids) for group in own])
        for number, part in zip(numbers, parts, strict=True):
            size = made[number].own.shape[1]
            assert not part[size:].any(), "the untrained response has no gradient"
            gradients[number] = part[:size]
        for name, pair in outputs.metric_sums.items():
            sums = metrics.setdefault(name, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + float(pair[0]), sums[1] + float(pair[1])
    return loss, gradients, {name: total / count for name, (total, count) in metrics.items() if count}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("shift", [0.4, -2.0])
@pytest.mark.parametrize(
    "settings", [{}, {"beta": 0.7}, {"beta": 1.5, "desirable_weight": 0.4, "undesirable_weight": 2.5}]
)
def test_the_loss_and_its_gradient_are_those_of_the_paper(settings: dict[str, Any], shift: float, seed: int) -> None:
    """L = mean of λ_y - v(x, y); v = λ_D σ(β(r - z)) or λ_U σ(β(z - r)); z is a constant for the gradient."""
    config, made = kto.KtoConfig(**settings), rows(seed, shift=shift)
    kto.check(config)
    own = [row.own.clone().requires_grad_() for row in made]
    z = max(0.0, sum(float((row.other[0] - row.other[1]).sum()) for row in made) / len(made))
    assert (z > 0) == (shift > 0), "both branches of the maximum are tested"
    values = []
    for row, logprobs in zip(made, own, strict=True):
        r = ((logprobs[0] - logprobs[1]) * row.mask).sum()
        weight = config.desirable_weight if row.label else config.undesirable_weight
        odds = torch.exp(-config.beta * ((r - z) if row.label else (z - r)))
        values.append(weight - weight / (1.0 + odds))
    expected = torch.stack(values).sum() / len(made)
    expected.backward()
    loss, gradients, metrics = trained(made, config, split=[list(range(len(made)))])
    count = kto.denominator(StepTotals(tokens=99, samples=2 * len(made), groups=len(made)), config)
    assert count == len(made)
    assert loss / count == pytest.approx(float(expected.detach()), abs=1e-6)
    for gradient, wanted in zip(gradients, own, strict=True):
        assert wanted.grad is not None
        torch.testing.assert_close(gradient / count, wanted.grad[0], rtol=0, atol=1e-6)
    assert metrics["kl"] == pytest.approx(z, abs=1e-6)
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for row in made:
        rewards[row.label].append(config.beta * float(((row.own[0] - row.own[1]) * row.mask).sum()))
    for name, label in (("chosen_reward", True), ("rejected_reward", False)):
        assert (name in metrics) == bool(rewards[label])
        if rewards[label]:
            assert metrics[name] == pytest.approx(np.mean(rewards[label]), abs=1e-9)


def test_the_loss_does_not_depend_on_the_micro_batches() -> None:
    config, made = kto.KtoConfig(beta=1.0), rows(5, shift=0.4)
    whole = trained(made, config, split=[list(range(7))])
    for split in ([[number] for number in range(7)], [[4, 1, 6], [0], [5, 2, 3]]):
        loss, gradients, metrics = trained(made, config, split=split)
        assert loss == pytest.approx(whole[0], abs=1e-12)
        assert metrics == pytest.approx(whole[2], abs=1e-12)
        for gradient, expected in zip(gradients, whole[1], strict=True):
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_a_group_without_trained_tokens_changes_nothing() -> None:
    config, made = kto.KtoConfig(beta=1.0), rows(6, shift=0.4)
    masked = Row(made[0].label, made[0].own, made[0].other, torch.zeros_like(made[0].mask))
    loss, gradients, metrics = trained([masked, *made[1:]], config, split=[list(range(7))])
    rest, others, kept = trained(made, config, split=[list(range(1, 7))])
    assert loss == pytest.approx(rest, abs=1e-12) and metrics == pytest.approx(kept, abs=1e-12)
    assert not gradients[0].any()
    for gradient, expected in zip(gradients[1:], others[1:], strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"group_size": 1}, "algo.group_size=1"),
        ({"routing_replay": True}, "algo.routing_replay=true"),
        ({"beta": 0.0}, "algo.beta=0.0"),
        ({"desirable_weight": 0.0}, "algo.desirable_weight=0.0"),
        ({"undesirable_weight": -1.0}, "algo.undesirable_weight=-1.0"),
        ({"mini_batches": 2}, "algo.mini_batches=2"),
        ({"epochs": 2}, "algo.epochs=2"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        kto.check(kto.KtoConfig(**settings))
