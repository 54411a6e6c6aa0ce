"""The shared maths against a plain-Python derivation, finite differences, and properties."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms import functional as F
from relax_core.contracts.algorithm import StepTotals
from tests.algorithms import reference

LOGPROB = st.floats(-6.0, 0.0)
REWARDS = st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=16)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("rewards", [[0, 1], [0, 1, 3, 3], [2, -1, 0, 0, 5]])
def test_pass_at_k_is_the_mean_over_subsets(rewards: list[int], k: int, normalize_std: bool) -> None:
    """By enumeration in fractions; with k = 1 a subset is one sample, and A = r - mean."""
    got = F.pass_at_k_advantages(
        rewards=torch.tensor(rewards).float(), k=k, normalize_std=normalize_std, std_epsilon=1e-6
    ).tolist()
    if len(rewards) <= k:
        assert got == [0.0] * len(rewards)
        return
    best = {one: Fraction(max(rewards[i] for i in one)) for one in itertools.combinations(range(len(rewards)), k)}
    mean = sum(best.values()) / len(best)
    of_sample = [[value for one, value in best.items() if i in one] for i in range(len(rewards))]
    wanted = [sum(own) / len(own) - mean for own in of_sample]
    std = float(sum((value - mean) ** 2 for value in best.values()) / len(best)) ** 0.5 + 1e-6
    assert got == pytest.approx([float(one) / (std if normalize_std else 1) for one in wanted], rel=1e-6, abs=1e-9)
    if k == 1 and not normalize_std:
        plain = F.group_relative_advantages(rewards=torch.tensor(rewards).float(), normalize_std=False, std_epsilon=0)
        assert got == plain.tolist()


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("rewards", [[1.0, 0.0], [0.3, 0.5, 1.0, 0.3], [5.0, -1.0, 2.5]])
def test_advantages_equal_the_reference(rewards: list[float], normalize_std: bool) -> None:
    got = F.group_relative_advantages(rewards=torch.tensor(rewards), normalize_std=normalize_std, std_epsilon=1e-6)
    wanted = reference.group_advantages(rewards, normalize_std=normalize_std, std_epsilon=1e-6)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_two_samples_by_hand() -> None:
    # mean 0.5, unbiased std sqrt(0.5): ±0.5 / 0.70710678 = ±0.70710678
    got = F.group_relative_advantages(rewards=torch.tensor([1.0, 0.0]), normalize_std=True, std_epsilon=0.0)
    assert got.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


@given(reward=st.floats(-1e3, 1e3, width=32), count=st.integers(2, 32))
@settings(deadline=None)  # the first call may wait for a busy machine
def test_equal_rewards_give_exactly_zero(reward: float, count: int) -> None:
    got = F.group_relative_advantages(rewards=torch.full((count,), reward), normalize_std=True, std_epsilon=1e-6)
    assert torch.equal(got, torch.zeros(count))


@given(eighths=st.lists(st.integers(-32, 32), min_size=2, max_size=16), shift=st.integers(-64, 64))
@settings(deadline=None)  # the first call may wait for a busy machine
def test_a_constant_added_to_all_rewards_changes_nothing(eighths: list[int], shift: int) -> None:
    rewards = torch.tensor(eighths) / 8  # eighths are exact, so the shift is too
    plain, shifted = (
        F.group_relative_advantages(rewards=values, normalize_std=True, std_epsilon=1e-6)
        for values in (rewards, rewards + shift / 8)
    )
    torch.testing.assert_close(shifted, plain, rtol=1e-5, atol=1e-6)


@given(rewards=REWARDS, data=st.data())
@settings(deadline=None)  # the first call may wait for a busy machine
def test_the_order_of_samples_does_not_matter(rewards: list[float], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rewards))))
    values = torch.tensor(rewards)
    plain = F.group_relative_advantages(rewards=values, normalize_std=True, std_epsilon=1e-6)
    permuted = F.group_relative_advantages(rewards=values[order], normalize_std=True, std_epsilon=1e-6)
    torch.testing.assert_close(permuted, plain[order], rtol=1e-5, atol=1e-6)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="group of 1"):
        F.group_relative_advantages(rewards=torch.tensor([1.0]), normalize_std=True, std_epsilon=1e-6)


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


@given(log_ratio=st.floats(math.log(1.3) + 1e-3, 5.0), advantage=st.floats(0.1, 3.0))
@settings(deadline=None)  # the first call may wait for a busy machine
def test_above_the_upper_clip_a_good_sample_has_no_gradient(log_ratio: float, advantage: float) -> None:
    assert _policy_gradient(log_ratio, advantage) == 0.0
    assert _policy_gradient(log_ratio, -advantage) == pytest.approx(advantage * math.exp(log_ratio), rel=1e-4)


@given(log_ratio=st.floats(-5.0, math.log(0.8) - 1e-3), advantage=st.floats(0.1, 3.0))
@settings(deadline=None)  # the first call may wait for a busy machine
def test_below_the_lower_clip_a_bad_sample_has_no_gradient(log_ratio: float, advantage: float) -> None:
    assert _policy_gradient(log_ratio, -advantage) == 0.0
    assert _policy_gradient(log_ratio, advantage) == pytest.approx(-advantage * math.exp(log_ratio), rel=1e-4)


@given(new=LOGPROB, old=LOGPROB)
@settings(deadline=None)  # the first call may wait for a busy machine
def test_k3_is_never_negative_and_all_estimators_equal_the_reference(new: float, old: float) -> None:
    x = new - old
    wanted = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) + x - 1}
    for estimator, value in wanted.items():
        got = F.kl_estimate(
            logprobs=torch.tensor([new]),
            reference_logprobs=torch.tensor([old]),
            loss_mask=torch.tensor([True]),
            estimator=estimator,
        )
        assert got.item() == pytest.approx(value, rel=1e-4, abs=1e-5)
        assert estimator != "k3" or got.item() >= -1e-7


@pytest.mark.parametrize(
    ("method", "level", "wanted", "outside"),
    # ρ = 1, e², e^-4 and a masked one; samples [0, 1] and [2, 3], whose products are e² and e^-4
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


def test_opsm_leaves_out_bad_samples_that_drifted() -> None:
    kept = F.kept_by_opsm(
        log_ratio=torch.tensor([-0.3, 0.1, -0.3, 0.1, 0.4, -0.2]),
        advantages=torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0]),
        loss_mask=torch.ones(6).bool(),
        sample_ids=torch.tensor([0, 0, 1, 1, 2, 2]),
        num_samples=3,
        threshold=1e-4,
    )
    assert kept.tolist() == [False, False, True, True, True, True]


def test_overlong_penalty_by_hand() -> None:
    got = F.overlong_penalty(lengths=torch.tensor([1, 12, 14, 16, 20]), max_length=16, buffer=4)
    assert got.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_sums_to_the_end_by_hand() -> None:
    got = F.sums_to_the_end(
        per_token=torch.tensor([1.0, 2.0, float("nan"), 4.0, 5.0]),
        loss_mask=torch.tensor([True, True, False, True, True]),
        sample_ids=torch.tensor([0, 0, 0, 1, 1]),
    )
    assert got.tolist() == [3.0, 2.0, 0.0, 9.0, 5.0]


def test_normalisation_is_over_the_whole_step() -> None:
    # trained: 1, 3, 5, 7: mean 4, population std sqrt(5)
    got = F.normalize_over_step(
        advantages=[torch.tensor([1.0, 3.0]), torch.tensor([5.0, 100.0, 7.0])],
        loss_masks=[torch.tensor([True, True]), torch.tensor([True, False, True])],
        std_epsilon=0.0,
    )
    root = math.sqrt(5)
    assert got[0].tolist() == pytest.approx([-3 / root, -1 / root])
    assert got[1].tolist()[::2] == pytest.approx([1 / root, 3 / root])
    assert all(values.dtype == torch.float32 for values in got)


@pytest.mark.parametrize("trained", [True, False])
def test_normalisation_without_spread_gives_zero(trained: bool) -> None:
    (got,) = F.normalize_over_step(
        advantages=[torch.full((3,), 0.1)], loss_masks=[torch.tensor([trained] * 3)], std_epsilon=1e-8
    )
    assert got.tolist() == [0.0, 0.0, 0.0]


def test_equal_rewards_are_dropped_until_the_limit() -> None:
    same, different = [0.1] * 3, [0.1, 0.1, 0.2]
    assert F.drop_all_equal(rewards=same, dropped_in_a_row=0, max_dropped=2) == "all_equal"
    assert F.drop_all_equal(rewards=same, dropped_in_a_row=2, max_dropped=2) is None
    assert F.drop_all_equal(rewards=different, dropped_in_a_row=0, max_dropped=2) is None


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


@pytest.mark.parametrize(
    ("aggregation", "numerator", "denominator"),
    # values 1 2 3 | 4 5 | (6), the last token masked: sums 6, 9 and 0; means 2, 4.5 and 0
    [
        ("token_mean", 15.0, 5.0),
        ("seq_mean_token_mean", 6.5, 3.0),
        ("seq_mean_token_sum_norm", 15.0, 24.0),
    ],
)
def test_aggregation_by_hand(aggregation: str, numerator: float, denominator: float) -> None:
    got = F.aggregate_sum(
        per_token=torch.tensor([1.0, 2, 3, 4, 5, 6]),
        loss_mask=torch.tensor([True] * 5 + [False]),
        sample_ids=torch.tensor([0, 0, 0, 1, 1, 2]),
        num_samples=3,
        aggregation=aggregation,
    )
    assert got.item() == pytest.approx(numerator)
    assert F.aggregate_denominator(totals=TOTALS, aggregation=aggregation, norm_length=8.0) == denominator


@pytest.mark.parametrize("aggregation", F.AGGREGATIONS)
def test_an_empty_mask_gives_zero_loss_and_gradient(aggregation: str) -> None:
    values = torch.tensor([1.0, float("nan")], requires_grad=True)
    total = F.aggregate_sum(
        per_token=values,
        loss_mask=torch.tensor([False, False]),
        sample_ids=torch.tensor([0, 1]),
        num_samples=2,
        aggregation=aggregation,
    )
    total.backward()
    assert values.grad is not None
    assert total.item() == 0.0
    assert values.grad.tolist() == [0.0, 0.0]
    nothing = StepTotals(tokens=0, samples=0, groups=0)
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
)  # reward, value, trained
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


@given(samples=SAMPLES, data=st.data())
@settings(deadline=None)  # the first call may wait for a busy machine
def test_gae_of_a_sample_does_not_know_the_others(
    samples: list[list[tuple[float, float, bool]]], data: st.DataObject
) -> None:
    whole = _generalized(samples, gamma=0.9, gae_lambda=0.8)
    order = data.draw(st.permutations(range(len(samples))))
    shuffled = _generalized([samples[place] for place in order], gamma=0.9, gae_lambda=0.8)
    for place, advantages in zip(order, shuffled, strict=True):
        assert advantages == whole[place]


def test_gae_at_its_ends_by_hand() -> None:
    sample = [(0.0, 0.5, True), (9.0, 9.0, False), (0.0, 0.25, True), (1.0, 0.75, True)]
    # lambda 1: what is still to come, less the value. lambda 0: the value's own error at each token.
    assert _generalized([sample], gamma=1.0, gae_lambda=1.0) == [[0.5, 0.0, 0.75, 0.25]]
    assert _generalized([sample], gamma=1.0, gae_lambda=0.0) == [[-0.25, 0.0, 0.5, 0.25]]


def test_the_reward_stands_at_the_last_trained_token() -> None:
    got = F.rewards_of_tokens(
        rewards=torch.tensor([1.0, 2.0, 3.0]),
        penalties=torch.tensor([0.5, 0.25, float("nan"), 0.125, float("inf")]),
        loss_mask=torch.tensor([True, True, False, True, False]),
        sample_ids=torch.tensor([0, 0, 0, 1, 2]),
    )
    assert got.tolist() == [-0.5, 0.75, 0.0, 1.875, 0.0]


def test_the_value_loss_takes_the_larger_error_by_hand() -> None:
    values = torch.tensor([0.5, 0.5, 0.1, 9.0], requires_grad=True)
    loss = F.clipped_value_loss(
        values=values,
        old_values=torch.tensor([0.0, 0.0, 0.0, 0.0]),
        returns=torch.tensor([1.0, -1.0, 1.0, float("nan")]),
        loss_mask=torch.tensor([True, True, True, False]),
        clip=0.2,
    )
    # The first runs towards its return faster than the clip allows, and is held; the second runs away, and is not.
    assert loss.per_token.tolist() == pytest.approx([0.5 * 0.8**2, 0.5 * 1.5**2, 0.5 * 0.9**2, 0.0])
    assert loss.cut.tolist() == [True, False, False, False]
    loss.per_token.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, 1.5, -0.9, 0.0])
