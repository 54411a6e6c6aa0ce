"""Tests edge cases and properties of the shared maths. tests/conformance compares it with golden vectors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from algorithms import functional as F
from relax_core.contracts.algorithm import StepTotals


def test_two_samples_by_hand() -> None:
    # mean 0.5, unbiased std sqrt(0.5): ±0.5 / 0.70710678 = ±0.70710678
    got = F.group_relative_advantages(rewards=torch.tensor([1.0, 0.0]), normalize_std=True, std_epsilon=0.0)
    assert got.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


@given(reward=st.floats(-1e3, 1e3, width=32), count=st.integers(2, 32))
@settings(deadline=None)  # the first call may wait for a busy machine
def test_equal_rewards_give_exactly_zero(reward: float, count: int) -> None:
    got = F.group_relative_advantages(rewards=torch.full((count,), reward), normalize_std=True, std_epsilon=1e-6)
    assert torch.equal(got, torch.zeros(count))


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="group of 1"):
        F.group_relative_advantages(rewards=torch.tensor([1.0]), normalize_std=True, std_epsilon=1e-6)


@given(log_ratio=st.floats(-5.0, 5.0), advantage=st.floats(0.1, 3.0))
@settings(deadline=None)  # the first call may wait for a busy machine
def test_the_clip_is_flat_beyond_its_range_in_the_direction_of_the_advantage(
    log_ratio: float, advantage: float
) -> None:
    ratio = math.exp(log_ratio)
    assume(min(abs(ratio - 1.3), abs(ratio - 0.8)) > 1e-3)
    good, bad = (_policy_gradient(log_ratio, value) for value in (advantage, -advantage))
    assert good == (0.0 if ratio > 1.3 else pytest.approx(-advantage * ratio, rel=1e-4))
    assert bad == (0.0 if ratio < 0.8 else pytest.approx(advantage * ratio, rel=1e-4))


def _policy_gradient(log_ratio: float, advantage: float) -> float:
    new = torch.tensor([-2.0 + log_ratio], requires_grad=True)
    policy = F.clipped_policy_loss(
        logprobs=new,
        old_logprobs=torch.tensor([-2.0]),
        advantages=torch.tensor([advantage]),
        loss_mask=torch.tensor([True]),
        clip_low=0.2,
        clip_high=0.3,
    )
    policy.per_token.sum().backward()
    assert new.grad is not None
    return float(new.grad)


@pytest.mark.parametrize(
    ("method", "level", "wanted", "outside"),
    # ρ = 1, e², e^-4 and a masked token. The samples [0, 1] and [2, 3] have the products e² and e^-4.
    [
        ("tis", "token", [1.0, 2.0, 0.1, 1.0], [False, True, True, False]),
        ("mis", "token", [1.0, 0.0, 0.0, 1.0], [False, True, True, False]),
        ("icepop", "token", [1.0, 0.0, 0.0, 1.0], [False, True, True, False]),
        ("tis", "sequence", [2.0, 2.0, 0.1, 1.0], [True, True, True, False]),
        ("mis", "sequence", [0.0, 0.0, 0.0, 1.0], [True, True, True, False]),
    ],
)
def test_correction_weights_by_hand(method: str, level: str, wanted: list[float], outside: list[bool]) -> None:
    weights, cut = F.correction_weights(
        old_logprobs=torch.tensor([-1.0, -1.0, -5.0, -1.0], requires_grad=True),
        rollout_logprobs=torch.tensor([-1.0, -3.0, -1.0, float("nan")]),
        loss_mask=torch.tensor([True, True, True, False]),
        sample_ids=torch.tensor([0, 0, 1, 1]),
        num_samples=2,
        method=method,
        level=level,
        low=0.1,
        high=2.0,
    )
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx(wanted)
    assert cut.tolist() == outside


@pytest.mark.parametrize("trained", [True, False])
def test_normalisation_without_spread_gives_zero(trained: bool) -> None:
    (got,) = F.normalize_over_step(
        advantages=[torch.full((3,), 0.1)], loss_masks=[torch.tensor([trained] * 3)], std_epsilon=1e-8
    )
    assert got.tolist() == [0.0, 0.0, 0.0]


def test_extreme_log_probs_stay_finite() -> None:
    new = torch.tensor([0.0, -1e4, -1e4], requires_grad=True)
    policy = F.clipped_policy_loss(
        logprobs=new,
        old_logprobs=torch.tensor([-1e4, 0.0, -1e4]),
        advantages=torch.tensor([-1.0, 1.0, 1.0]),
        loss_mask=torch.ones(3, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.2,
    )
    policy.per_token.sum().backward()
    assert new.grad is not None
    assert bool(torch.isfinite(policy.per_token).all())
    assert bool(torch.isfinite(new.grad).all())


TOTALS = StepTotals(tokens=5, samples=3, groups=1)


def test_a_step_without_tokens_has_a_denominator_above_0() -> None:
    nothing = StepTotals(tokens=0, samples=0, groups=0)
    for aggregation in F.AGGREGATIONS:
        assert F.aggregate_denominator(totals=nothing, aggregation=aggregation, norm_length=8.0) > 0


def test_unknown_choices_are_named() -> None:
    with pytest.raises(ValueError, match="'mean' is not one of token_mean"):
        F.aggregate_denominator(totals=TOTALS, aggregation="mean", norm_length=0.0)
    with pytest.raises(ValueError, match="'k4' is not one of k1"):
        F.kl_estimate(
            logprobs=torch.zeros(1), reference_logprobs=torch.zeros(1), loss_mask=torch.ones(1).bool(), estimator="k4"
        )


# -- the critic: GAE and its loss -------------------------------------------------------------------------------------
STATE = st.tuples(
    st.floats(-2.0, 2.0, width=32), st.floats(-2.0, 2.0, width=32), st.booleans()
)  # columns: reward, value, trained
SAMPLES = st.lists(st.lists(STATE, min_size=1, max_size=9), min_size=1, max_size=4)
DISCOUNT = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def _generalized(
    samples: list[list[tuple[float, float, bool]]], *, gamma: float, gae_lambda: float
) -> list[list[float]]:
    states = [state for sample in samples for state in sample]
    got = F.generalized_advantages(
        token_rewards=torch.tensor([reward for reward, _, _ in states]),
        values=torch.tensor([value for _, value, _ in states]),
        loss_mask=torch.tensor([trained for _, _, trained in states]),
        sample_ids=torch.tensor([place for place, sample in enumerate(samples) for _ in sample]),
        num_samples=len(samples),
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    assert got.dtype == torch.float32
    return [part.tolist() for part in got.split([len(sample) for sample in samples])]


@given(samples=SAMPLES, gamma=DISCOUNT, gae_lambda=DISCOUNT)
@settings(deadline=None)  # the first call may wait for a busy machine
def test_gae_is_its_recursion_over_trained_tokens(
    samples: list[list[tuple[float, float, bool]]], gamma: float, gae_lambda: float
) -> None:
    got = _generalized(samples, gamma=gamma, gae_lambda=gae_lambda)
    for sample, advantages in zip(samples, got, strict=True):
        following, value_after = 0.0, 0.0
        for place in reversed(range(len(sample))):
            reward, value, trained = sample[place]
            if not trained:
                assert advantages[place] == 0.0
                continue
            following = reward + gamma * value_after - value + gamma * gae_lambda * following
            value_after = value
            assert advantages[place] == pytest.approx(following, rel=1e-5, abs=1e-5)
