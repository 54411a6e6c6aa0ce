"""Tests that DPO neither counts nor trains a pair without trained tokens (mode.on_stale=mask)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from algorithms import dpo
from relax_core.contracts.algorithm import LossInputs, LossOutputs


def outputs_of(lengths: list[int], *, masked_pairs: list[int], settings: dict[str, Any]) -> tuple[LossOutputs, Any]:
    """Returns the loss of random pairs and the gradient of the log-probs."""
    samples = np.repeat(np.arange(len(lengths)), lengths)
    # The first pairs have the same values in every call.
    values = np.concatenate([np.random.default_rng(n).random((2, size)) for n, size in enumerate(lengths)], axis=1)
    logprobs = torch.tensor(-3 * values[0], requires_grad=True)
    zeros = torch.zeros(len(samples), dtype=torch.float64)
    outputs = dpo.loss(
        LossInputs(
            logprobs=logprobs,
            old_logprobs=zeros,
            rollout_logprobs=zeros,
            advantages=zeros + 1.0,
            loss_mask=torch.tensor(~np.isin(samples // 2, masked_pairs)),
            sample_ids=torch.tensor(samples),
            num_samples=len(lengths),
            reference_logprobs=torch.tensor(-3 * values[1]),
        ),
        dpo.DpoConfig(**settings),
    )
    outputs.loss_sum.backward()
    assert logprobs.grad is not None
    return outputs, logprobs.grad


@pytest.mark.parametrize("settings", [{}, {"loss": "hinge"}, {"loss": "ipo"}, {"sft_coef": 0.5}])
def test_a_pair_without_trained_tokens_changes_nothing(settings: dict[str, Any]) -> None:
    expected, gradient = outputs_of([4, 2, 3, 5], masked_pairs=[], settings=settings)
    outputs, own = outputs_of([4, 2, 3, 5, 6, 1], masked_pairs=[2], settings=settings)
    assert float(outputs.loss_sum.detach()) == pytest.approx(float(expected.loss_sum.detach()), abs=1e-12)
    torch.testing.assert_close(own, torch.cat([gradient, torch.zeros(7, dtype=torch.float64)]), rtol=0, atol=1e-12)
    for name, (total, count) in outputs.metric_sums.items():
        assert float(count) == 2
        assert float(total) == pytest.approx(float(expected.metric_sums[name][0]), abs=1e-12), name
