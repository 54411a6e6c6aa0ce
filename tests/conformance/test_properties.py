"""Tests properties of the algorithms for any input. test_vectors.py tests the golden vectors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algorithms import functional as F
from algorithms import reinforce_pp
from relax_core.contracts.algorithm import AdvantageInputs
from relax_core.registry import find_algorithm
from tests.conformance.reference import ALGORITHMS

LOGPROB = st.floats(-6.0, 0.0, width=32)
ADVANTAGE = st.floats(-3.0, 3.0, width=32)
EIGHTHS = st.lists(st.integers(-32, 32), min_size=2, max_size=16)
patient = settings(deadline=None)  # the first call may wait for a busy machine


def _group(rewards: Tensor) -> AdvantageInputs:
    """Returns a group of samples with one token each."""
    count = len(rewards)
    return AdvantageInputs(
        rewards=rewards,
        lengths=torch.ones(count, dtype=torch.int64),
        loss_mask=torch.ones(count, dtype=torch.bool),
        sample_ids=torch.arange(count),
    )


def _of_group(algorithm: str, rewards: Tensor) -> Tensor:
    spec = find_algorithm(algorithm)
    return spec.advantages(_group(rewards), spec.config())  # type: ignore[call-arg]


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "ppo"])  # the critic is PPO's baseline
@given(eighths=EIGHTHS, shift=st.integers(-64, 64))
@patient
def test_a_constant_added_to_all_rewards_changes_nothing(algorithm: str, eighths: list[int], shift: int) -> None:
    rewards = torch.tensor(eighths) / 8  # eighths are exact, so the shift is exact, too
    torch.testing.assert_close(
        _of_group(algorithm, rewards + shift / 8), _of_group(algorithm, rewards), rtol=1e-5, atol=2e-6
    )


@given(eighths=EIGHTHS)
@patient
def test_rloo_is_grpo_without_std_scaled(eighths: list[int]) -> None:
    rewards, count = torch.tensor(eighths) / 8, len(eighths)
    centred = F.group_relative_advantages(rewards=rewards, normalize_std=False, std_epsilon=0.0)
    got = F.leave_one_out_advantages(rewards=rewards)
    torch.testing.assert_close(got, centred * count / (count - 1), rtol=1e-5, atol=1e-6)


@given(groups=st.lists(EIGHTHS, min_size=1, max_size=4))
@patient
def test_reinforce_pp_has_mean_0_and_std_1_over_the_step(groups: list[list[int]]) -> None:
    inputs = [_group(torch.tensor(group) / 8) for group in groups]
    values = [_of_group("reinforce_pp", group_input.rewards) for group_input in inputs]
    got = torch.cat(reinforce_pp.normalize(values, inputs, reinforce_pp.ReinforcePpConfig()))
    assert float(got.mean()) == pytest.approx(0.0, abs=1e-5)
    varied = any(len(set(group)) > 1 for group in groups)
    assert float(got.std(correction=0)) == pytest.approx(1.0 if varied else 0.0, abs=1e-4)


def _gradient(loss: F.PolicyLoss, logprobs: Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), logprobs)
    values: list[float] = gradient.tolist()
    return values


def _sapo(log_ratio: float, advantage: float, *, tau: float) -> float:
    new = torch.tensor([log_ratio - 1.0], requires_grad=True)
    loss = F.sapo_policy_loss(
        logprobs=new,
        old_logprobs=torch.tensor([-1.0]),
        advantages=torch.tensor([advantage]),
        loss_mask=torch.tensor([True]),
        tau_positive=tau,
        tau_negative=tau,
    )
    return _gradient(loss, new)[0]


@given(advantage=ADVANTAGE, tau=st.floats(0.1, 10.0))
@patient
def test_sapos_gradient_at_ratio_1_is_that_of_reinforce(advantage: float, tau: float) -> None:
    assert _sapo(0.0, advantage, tau=tau) == pytest.approx(-advantage, rel=1e-5, abs=1e-6)


@given(log_ratio=st.floats(-2.0, 2.0), tau=st.floats(0.5, 4.0))
@patient
def test_sapos_weight_is_symmetric_in_the_ratio_not_in_its_log(log_ratio: float, tau: float) -> None:
    """D loss / d log π = -r · 4p(1 - p) · A, and 4p(1 - p) is the same at 1 + x and at 1 - x."""
    ratio = math.exp(log_ratio)
    p = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert _sapo(log_ratio, 1.0, tau=tau) == pytest.approx(-ratio * 4 * p * (1 - p), rel=1e-3, abs=2e-5)
    mirrored = 2.0 - ratio
    if mirrored > 0.05:
        weight = _sapo(math.log(mirrored), 1.0, tau=tau) / mirrored
        assert weight == pytest.approx(_sapo(log_ratio, 1.0, tau=tau) / ratio, rel=1e-3, abs=2e-5)


@given(new=LOGPROB, old=LOGPROB, advantage=ADVANTAGE)
@patient
def test_cispo_never_takes_a_tokens_gradient_away(new: float, old: float, advantage: float) -> None:
    logprobs = torch.tensor([new], requires_grad=True)
    loss = F.cispo_policy_loss(
        logprobs=logprobs,
        old_logprobs=torch.tensor([old]),
        advantages=torch.tensor([advantage]),
        loss_mask=torch.tensor([True]),
        clip_low=1.0,
        clip_high=4.0,
    )
    wanted = -min(math.exp(new - old), 5.0) * advantage
    assert _gradient(loss, logprobs)[0] == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@given(pairs=st.lists(st.tuples(LOGPROB, LOGPROB, ADVANTAGE), min_size=1, max_size=6))
@patient
def test_gspo_is_grpo_for_responses_of_one_token(pairs: list[tuple[float, float, float]]) -> None:
    new, old, advantages = (torch.tensor(column) for column in zip(*pairs, strict=True))
    mask, count = torch.ones(len(pairs), dtype=torch.bool), len(pairs)
    results = []
    for use_gspo in (True, False):
        logprobs = new.clone().requires_grad_()
        shared = {"logprobs": logprobs, "old_logprobs": old, "advantages": advantages, "loss_mask": mask}
        clip = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
        loss = (
            F.gspo_policy_loss(**shared, sample_ids=torch.arange(count), num_samples=count, **clip)
            if use_gspo
            else F.clipped_policy_loss(**shared, **clip)
        )
        results.append((loss.per_token.tolist(), _gradient(loss, logprobs)))
    for got, wanted in zip(*results, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@given(log_ratio=st.floats(-5.0, 5.0), advantage=st.floats(0.1, 3.0), dual=st.floats(1.5, 5.0))
@patient
def test_dual_clip_bounds_the_loss_of_bad_samples_alone(log_ratio: float, advantage: float, dual: float) -> None:
    def loss(a: float, dual_clip: float) -> float:
        policy = F.clipped_policy_loss(
            logprobs=torch.tensor([log_ratio - 6.0]),
            old_logprobs=torch.tensor([-6.0]),
            advantages=torch.tensor([a]),
            loss_mask=torch.tensor([True]),
            clip_low=0.2,
            clip_high=0.2,
            dual_clip=dual_clip,
        )
        return float(policy.per_token)

    assert loss(advantage, dual) == loss(advantage, 0.0)
    assert loss(-advantage, dual) == pytest.approx(min(loss(-advantage, 0.0), dual * advantage), rel=1e-6)
