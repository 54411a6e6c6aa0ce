"""Compares the losses of algorithms on data rows, and their gradients, with formulas derived by hand in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from algorithms import dpo, sft
from relax_core.contracts.algorithm import LossInputs, StepTotals

PAIRS = 5


@dataclass(frozen=True)
class Batch:
    """Holds random tokens of ``PAIRS`` pairs. ``logprobs`` are the policy's, float64; masked tokens are NaN there."""

    logprobs: np.ndarray
    reference: np.ndarray
    mask: np.ndarray
    samples: np.ndarray

    def inputs(self) -> LossInputs:
        zeros = torch.zeros(len(self.mask), dtype=torch.float64)
        return LossInputs(
            logprobs=torch.tensor(self.logprobs, requires_grad=True),
            old_logprobs=zeros,
            rollout_logprobs=zeros,
            advantages=zeros + 1.0,
            loss_mask=torch.tensor(self.mask),
            sample_ids=torch.tensor(self.samples),
            num_samples=2 * PAIRS,
            reference_logprobs=torch.tensor(self.reference),
            group_ids=torch.tensor(np.repeat(np.arange(PAIRS), 2)),
        )

    def of_sample(self, number: int) -> np.ndarray:
        """Returns the positions of a sample's trained tokens."""
        return np.flatnonzero((self.samples == number) & self.mask)


def batch(seed: int) -> Batch:
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 9, 2 * PAIRS)
    samples = np.repeat(np.arange(2 * PAIRS), lengths)
    mask = random.random(len(samples)) < 0.8
    mask[np.cumsum(lengths) - 1] = True  # each sample has a trained token
    logprobs, reference = -3 * random.random((2, len(samples)))
    return Batch(np.where(mask, logprobs, np.nan), reference, mask, samples)


def sigmoid(x: float) -> float:
    return float(1.0 / (1.0 + np.exp(-x)))


def expected_pair(h: float, *, loss: str, beta: float, smoothing: float) -> tuple[float, float]:
    """Returns a pair's loss and its derivative by the margin h."""
    right, wrong = -np.log(sigmoid(beta * h)), -np.log(sigmoid(-beta * h))
    d_right, d_wrong = -beta * sigmoid(-beta * h), beta * sigmoid(beta * h)
    if loss == "sigmoid":
        return (1 - smoothing) * right + smoothing * wrong, (1 - smoothing) * d_right + smoothing * d_wrong
    if loss == "robust":
        scale = 1 - 2 * smoothing
        return (
            ((1 - smoothing) * right - smoothing * wrong) / scale,
            ((1 - smoothing) * d_right - smoothing * d_wrong) / scale,
        )
    if loss == "hinge":
        return max(0.0, 1 - beta * h), -beta if beta * h < 1 else 0.0
    return (h - 1 / (2 * beta)) ** 2, 2 * (h - 1 / (2 * beta))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"label_smoothing": 0.2},
        {"loss": "robust", "label_smoothing": 0.1},
        {"loss": "hinge", "beta": 0.5},
        {"loss": "ipo"},
        {"length_normalized": True, "beta": 2.0},
        {"sft_coef": 0.7},
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_dpo_is_the_published_loss_and_gradient(settings: dict[str, Any], seed: int) -> None:
    config = dpo.DpoConfig(**settings)
    dpo.check(config)
    made = batch(seed)
    expected, gradient = 0.0, np.zeros(len(made.mask))
    margins, right = [], 0
    mean = config.length_normalized or config.loss == "ipo"
    for pair in range(PAIRS):
        chosen, rejected = made.of_sample(2 * pair), made.of_sample(2 * pair + 1)
        ratios = made.logprobs - made.reference
        weights = (1 / len(chosen), 1 / len(rejected)) if mean else (1.0, 1.0)
        h = float(weights[0] * ratios[chosen].sum() - weights[1] * ratios[rejected].sum())
        loss, slope = expected_pair(h, loss=config.loss, beta=config.beta, smoothing=config.label_smoothing)
        expected += loss - config.sft_coef * float(made.logprobs[chosen].mean())
        gradient[chosen] += slope * weights[0] - config.sft_coef / len(chosen)
        gradient[rejected] -= slope * weights[1]
        margins.append(config.beta * h)
        right += h > 0
    inputs = made.inputs()
    outputs = dpo.loss(inputs, config)
    outputs.loss_sum.backward()
    assert inputs.logprobs.grad is not None
    assert float(outputs.loss_sum) == pytest.approx(expected, abs=1e-9)
    np.testing.assert_allclose(inputs.logprobs.grad.numpy(), gradient, atol=1e-9)
    means = {name: float(total / count) for name, (total, count) in outputs.metric_sums.items()}
    assert means["preference_accuracy"] == pytest.approx(right / PAIRS)
    assert means["preference_margin"] == pytest.approx(np.mean(margins))
    assert means["chosen_reward"] - means["rejected_reward"] == pytest.approx(np.mean(margins))
    assert dpo.denominator(StepTotals(tokens=90, samples=10, groups=5), config) == 5


@pytest.mark.parametrize("weight", ["none", "dft"])
def test_sft_is_the_mean_negative_logprob(weight: str) -> None:
    """With dft each token has its probability as a weight, and the weight has no gradient."""
    config, made = sft.SftConfig(token_weight=weight), batch(3)
    sft.check(config)
    inputs = made.inputs()
    outputs = sft.loss(inputs, config)
    outputs.loss_sum.backward()
    weights = np.exp(made.logprobs) if weight == "dft" else np.ones(len(made.mask))
    assert float(outputs.loss_sum) == pytest.approx(-(weights * made.logprobs)[made.mask].sum(), abs=1e-9)
    assert inputs.logprobs.grad is not None
    np.testing.assert_allclose(inputs.logprobs.grad.numpy(), np.where(made.mask, -weights, 0.0), atol=1e-12)
    total, count = outputs.metric_sums["surprisal"]
    assert float(total / count) == pytest.approx(-made.logprobs[made.mask].mean())
    assert sft.denominator(StepTotals(tokens=90, samples=10, groups=5), config) == 90


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (sft.SftConfig(group_size=2), "algo.group_size=2"),
        (sft.SftConfig(routing_replay=True), "algo.routing_replay=true"),
        (sft.SftConfig(token_weight="half"), "algo.token_weight=half"),
        (dpo.DpoConfig(group_size=4), "algo.group_size=4"),
        (dpo.DpoConfig(beta=0.0), "algo.beta=0.0"),
        (dpo.DpoConfig(loss="mse"), "algo.loss=mse"),
        (dpo.DpoConfig(label_smoothing=0.5), "algo.label_smoothing=0.5"),
        (dpo.DpoConfig(loss="ipo", label_smoothing=0.1), "algo.loss=ipo"),
        (dpo.DpoConfig(loss="robust"), "algo.loss=robust"),
        (dpo.DpoConfig(sft_coef=-1.0), "algo.sft_coef=-1.0"),
    ],
)
def test_impossible_settings_are_refused(config: Any, text: str) -> None:
    check = sft.check if isinstance(config, sft.SftConfig) else dpo.check
    with pytest.raises(ValueError, match=text):
        check(config)
