"""Tests properties of KL placements, corrections, rejection rules, trust regions and advantages for any input."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from algorithms import functional as F
from algorithms.functional.baselines import LARGEST_OF_OTHERS
from relax_core.registry import find_algorithm
from tests.conformance import cases
from tests.conformance.reference import ALGORITHMS

EIGHTHS = st.lists(st.integers(-16, 16), min_size=3, max_size=9)
LOGITS = st.lists(st.floats(-2.0, 2.0, width=32), min_size=5, max_size=5)
LOGPROBS = st.lists(st.floats(-4.0, -0.0625, width=32), min_size=1, max_size=8)
ADVANTAGE = st.floats(-3.0, 3.0, width=32)
patient = settings(deadline=None)  # the first call may wait for a busy machine


# -- the KL as a loss -------------------------------------------------------------------------------------------------
def _expected_gradient(logits: Tensor, old: Tensor, reference: Tensor, **choice: str) -> tuple[float, list[float]]:
    """Returns mean loss and gradient over the complete vocabulary, weighted by the old policy's probabilities."""
    live = logits.clone().requires_grad_()
    loss = F.kl_loss(
        logprobs=live.log_softmax(-1),
        reference_logprobs=reference.log_softmax(-1),
        old_logprobs=old.log_softmax(-1),
        loss_mask=torch.ones(len(logits), dtype=torch.bool),
        **choice,
    )
    mean = (old.softmax(-1) * loss).sum()
    (gradient,) = torch.autograd.grad(mean, live)
    return float(mean.detach()), gradient.tolist()


def _whole_kl(logits: Tensor, reference: Tensor) -> tuple[float, list[float]]:
    live = logits.clone().requires_grad_()
    value = (live.softmax(-1) * (live.log_softmax(-1) - reference.log_softmax(-1))).sum()
    (gradient,) = torch.autograd.grad(value, live)
    return float(value.detach()), gradient.tolist()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@given(new=LOGITS, old=LOGITS, reference=LOGITS)
@patient
def test_the_kl_times_the_ratio_is_the_kl_in_value_and_gradient_also_off_policy(
    estimator: str, new: list[float], old: list[float], reference: list[float]
) -> None:
    logits, sampled, target = (torch.tensor(logprobs, dtype=torch.float64) for logprobs in (new, old, reference))
    got = _expected_gradient(logits, sampled, target, estimator=estimator, placement="loss_times_ratio")
    value, gradient = _whole_kl(logits, target)
    assert got[0] == pytest.approx(value, abs=1e-9)
    assert got[1] == pytest.approx(gradient, abs=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_clamped", "abs"])
@given(new=LOGITS, reference=LOGITS)
@patient
def test_the_gradient_of_k2_under_any_value_is_that_of_the_kl_on_policy(
    estimator: str, new: list[float], reference: list[float]
) -> None:
    logits, target = torch.tensor(new, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)
    got = _expected_gradient(logits, logits, target, estimator=estimator, placement="loss_k2_gradient")
    plain = _expected_gradient(logits, logits, target, estimator=estimator, placement="loss")
    assert got[0] == pytest.approx(plain[0], abs=1e-12)
    assert got[1] == pytest.approx(_whole_kl(logits, target)[1], abs=1e-9)


def test_plain_k3_has_another_gradient() -> None:
    """The KL placements loss_times_ratio and loss_k2_gradient exist for this reason."""
    logits, target = torch.tensor([1.0, 0.0, -1.0, 0.5, 0.2]), torch.tensor([-1.0, 0.3, 1.0, 0.0, 0.1])
    got = _expected_gradient(logits, logits, target, estimator="k3", placement="loss")[1]
    assert got != pytest.approx(_whole_kl(logits, target)[1], rel=0.1)


@given(x=st.floats(-30.0, 30.0, width=32))
@patient
def test_the_clamped_k3_is_k3_up_to_ten_and_flat_beyond(x: float) -> None:
    k3 = math.exp(-max(x, -20.0)) + max(min(x, 20.0), -20.0) - 1
    assume(abs(k3 - 10.0) > 1e-3)
    logprobs = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    settled = {"reference_logprobs": torch.zeros(1).double(), "loss_mask": torch.ones(1).bool()}
    got = F.kl_estimate(logprobs=logprobs, **settled, estimator="k3_clamped")
    (gradient,) = torch.autograd.grad(got.sum(), logprobs)
    assert got.item() == pytest.approx(min(k3, 10.0), rel=1e-6, abs=1e-9) and got.item() >= 0.0
    assert gradient.item() == pytest.approx(0.0 if k3 > 10.0 else 1 - math.exp(-x), rel=1e-6, abs=1e-9)


# -- corrections and rejection ----------------------------------------------------------------------------------------
@given(values=LOGPROBS)
@patient
def test_where_trainer_and_engine_agree_nothing_is_rejected_and_every_weight_is_1(values: list[float]) -> None:
    logprobs = torch.tensor(values)
    shape: dict[str, Any] = {
        "rollout_logprobs": logprobs,
        "loss_mask": torch.ones(len(values), dtype=torch.bool),
        "sample_ids": torch.zeros(len(values), dtype=torch.int64),
        "num_samples": 1,
    }
    rules = {rule: [0.99, 1.01] if rule.endswith("_ratio") else [-1e-6, 1e-6] for rule in F.REJECTION_RULES}
    assert F.rejection_mask(logprobs=logprobs, **shape, rules=rules).all()
    for level in F.CORRECTION_LEVELS:
        weights, outside = F.correction_weights(
            old_logprobs=logprobs, **shape, method="tis", level=level, low=0.5, high=2.0
        )
        assert weights.tolist() == [1.0] * len(values) and not outside.any()


@pytest.mark.parametrize("rule", F.REJECTION_RULES)
def test_a_rule_by_hand(rule: str) -> None:
    """Two samples of two tokens and a masked token: ρ = 2 and 1/2 in the first sample, 1 and 1.25 in the second."""
    ratios = torch.tensor([2.0, 0.5, 1.0, 1.25, float("nan")])
    engine = torch.tensor([0.25, 0.5, 0.5, 0.4, 0.1])
    reduction, _, statistic = rule.rpartition("_")
    logs = ratios[:4].log()
    values = {
        "ratio": ratios[:4],
        "k1": -logs,
        "k2": logs**2 / 2,
        "k3": ratios[:4] - 1 - logs,
        "difference": (ratios[:4] - 1) * engine[:4],
    }[statistic]
    if reduction in ("seq_sum", "seq_mean"):
        pairs = values.view(2, 2)
        of_samples = pairs.prod(1) if statistic == "ratio" else pairs.sum(1)
        if reduction == "seq_mean":
            of_samples = of_samples.sqrt() if statistic == "ratio" else of_samples / 2
        values = of_samples.repeat_interleave(2)
    for low in sorted({round(value - 1e-3, 6) for value in values.tolist()}):
        for high in sorted({round(value + 1e-3, 6) for value in values.tolist()}):
            inside = (values >= low) & (values <= high)
            if reduction == "seq_any":
                inside = inside.view(2, 2).all(1).repeat_interleave(2)
            kept = F.rejection_mask(
                logprobs=(ratios * engine).log(),
                rollout_logprobs=engine.log(),
                loss_mask=torch.tensor([True] * 4 + [False]),
                sample_ids=torch.tensor([0, 0, 1, 1, 1]),
                num_samples=2,
                rules={rule: [low, high]},
            )
            assert kept.tolist() == [*inside.tolist(), True], (low, high)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_policy_loss_is_proportional_to_its_advantages(algorithm: str) -> None:
    """So dividing the advantages by a step's mean weight divides the weights of any algorithm."""
    spec = find_algorithm(algorithm)
    for case in cases.read(algorithm)["loss"]:
        config = dataclasses.replace(cases.config_of(algorithm, case), kl_coef=0.0, entropy_coef=0.0)
        once = cases.loss_inputs(case["samples"], config=config, dtype=torch.float64)
        twice = dataclasses.replace(once, advantages=once.advantages * 2.5)
        losses = [float(spec.loss(inputs, config).loss_sum.detach()) for inputs in (once, twice)]
        assert losses[1] == pytest.approx(2.5 * losses[0], rel=1e-9, abs=1e-12)


@given(
    values=st.lists(st.floats(-2.0, 2.0, width=32), min_size=1, max_size=6),
    level=st.sampled_from(["token", "sequence"]),
)
@patient
def test_divided_by_their_mean_the_weights_have_mean_1(values: list[float], level: str) -> None:
    count = len(values)
    mask, ids = torch.ones(count, dtype=torch.bool), torch.arange(count) // 2
    shape = {"loss_mask": mask, "sample_ids": ids, "num_samples": int(ids.max()) + 1}
    weights, _ = F.correction_weights(
        old_logprobs=torch.tensor(values) - 3.0,
        rollout_logprobs=torch.full((count,), -3.0),
        **shape,
        method="tis_normalized",
        level=level,
        low=0.1,
        high=3.0,
    )
    average = [F.weights_to_average(weights=weights, **shape, level=level)]
    (advantages,) = F.divide_by_mean_weight(advantages=[torch.ones(count)], weights=average)
    counted = F.weights_to_average(weights=weights * advantages, **shape, level=level)
    assert float(counted.mean()) == pytest.approx(1.0, rel=1e-6)


# -- trust regions ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("trust_region", F.TRUST_REGIONS)
@given(old=st.floats(-4.0, -0.0625), advantage=ADVANTAGE)
@patient
def test_on_policy_every_trust_region_is_reinforce(trust_region: str, old: float, advantage: float) -> None:
    logprobs = torch.tensor([old], dtype=torch.float64, requires_grad=True)
    loss = F.clipped_policy_loss(
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        advantages=torch.tensor([advantage]).double(),
        loss_mask=torch.tensor([True]),
        clip_low=0.1,
        clip_high=0.1,
        trust_region=trust_region,
    )
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), logprobs)
    assert gradient.item() == pytest.approx(-advantage, rel=1e-9, abs=1e-12)
    assert not (loss.cut_low | loss.cut_high).any()


@given(new=st.floats(-4.0, -0.0625), old=st.floats(-4.0, -0.0625), advantage=ADVANTAGE)
@patient
def test_a_probability_that_moved_too_far_is_not_moved_on(new: float, old: float, advantage: float) -> None:
    moved = math.exp(new) - math.exp(old)
    assume(abs(abs(moved) - 0.1) > 1e-6 and advantage != 0)
    gradients = {}
    for trust_region in ("probability", "probability_both"):
        logprobs = torch.tensor([new], dtype=torch.float64, requires_grad=True)
        loss = F.clipped_policy_loss(
            logprobs=logprobs,
            old_logprobs=torch.tensor([old]).double(),
            advantages=torch.tensor([advantage]).double(),
            loss_mask=torch.tensor([True]),
            clip_low=0.1,
            clip_high=0.1,
            trust_region=trust_region,
        )
        gradients[trust_region] = torch.autograd.grad(loss.per_token.sum(), logprobs)[0].item()
    whole = pytest.approx(-advantage * math.exp(new - old), rel=1e-6)
    assert gradients["probability"] == (0.0 if moved * math.copysign(1.0, advantage) > 0.1 else whole)
    assert gradients["probability_both"] == (0.0 if abs(moved) > 0.1 else whole)


# -- advantages -------------------------------------------------------------------------------------------------------
@given(right=st.integers(1, 7), wrong=st.integers(1, 7), k=st.integers(1, 6))
@patient
def test_pass_at_k_is_the_papers_closed_form_for_right_and_wrong_answers(right: int, wrong: int, k: int) -> None:
    """Arxiv 2508.10751: mean and std of the subsets' rewards, and the advantages of right and of wrong answers."""
    count = right + wrong
    assume(k < count)
    mean = 1 - math.comb(wrong, k) / math.comb(count, k)
    deviation = math.sqrt(mean * (1 - mean))
    got = F.pass_at_k_advantages(
        rewards=torch.tensor([1.0] * right + [0.0] * wrong), k=k, normalize_std=True, std_epsilon=1e-6
    )
    of_wrong = 1 - math.comb(wrong - 1, k - 1) / math.comb(count - 1, k - 1)
    wanted = [(value - mean) / (deviation + 1e-6) for value in [1.0] * right + [of_wrong] * wrong]
    assert got.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@given(eighths=EIGHTHS, k=st.integers(1, 4), shift=st.integers(-16, 16), data=st.data())
@patient
def test_pass_at_k_adds_up_to_zero_and_knows_neither_order_nor_shift(
    eighths: list[int], k: int, shift: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(eighths))))
    rewards = torch.tensor(eighths) / 8
    plain = F.pass_at_k_advantages(rewards=rewards, k=k, normalize_std=True, std_epsilon=1e-6)
    moved = F.pass_at_k_advantages(rewards=(rewards + shift / 8)[order], k=k, normalize_std=True, std_epsilon=1e-6)
    assert float(plain.sum()) == pytest.approx(0.0, abs=1e-4)
    torch.testing.assert_close(moved, plain[order], rtol=1e-4, atol=1e-5)
    if len(set(eighths)) == 1 or len(eighths) <= k:
        assert not plain.any()


@given(eighths=EIGHTHS, place=st.integers(0, 8), by=st.integers(1, 8))
@patient
def test_a_reward_has_no_say_in_the_deviation_of_the_others(eighths: list[int], place: int, by: int) -> None:
    place %= len(eighths)
    other_eighths = torch.tensor([eighth for i, eighth in enumerate(eighths) if i != place]).double() / 8
    raised = [eighth + by if i == place else eighth for i, eighth in enumerate(eighths)]
    low, high = (
        float(
            F.leave_one_out_advantages(rewards=torch.tensor(rewards) / 8, deviation="others", std_epsilon=1e-6)[place]
        )
        for rewards in (eighths, raised)
    )
    assume(len(set(eighths)) > 1 and len(set(raised)) > 1)
    scale = float(other_eighths.std(correction=1)) + 1e-6 if len(set(other_eighths.tolist())) > 1 else 1.0
    bound = LARGEST_OF_OTHERS if len(set(other_eighths.tolist())) > 1 else math.inf
    wanted = [
        min(max((rewards[place] / 8 - float(other_eighths.mean())) / scale, -bound), bound)
        for rewards in (eighths, raised)
    ]
    assert [low, high] == pytest.approx(wanted, rel=1e-4, abs=1e-4) and high >= low


@pytest.mark.parametrize("apart", [1e-9, 1e-7, 1e-4, 1e-2])
def test_nearly_equal_other_rewards_are_no_scale(apart: float) -> None:
    rewards = torch.tensor([0.0, 1.0, 1.0 + apart, 1.0 - apart], dtype=torch.float64)
    got = F.leave_one_out_advantages(rewards=rewards, deviation="others", std_epsilon=1e-6)
    assert -LARGEST_OF_OTHERS <= float(got[0]) <= -1.0 and bool((got[1:] > 0).all())
    assert float(got.abs().max()) <= LARGEST_OF_OTHERS


@given(groups=st.lists(EIGHTHS, min_size=2, max_size=4), scale=st.sampled_from([0.25, 2.0, 16.0]))
@patient
def test_the_deviation_of_the_step_takes_the_rewards_scale_away(groups: list[list[int]], scale: float) -> None:
    assume(any(len(set(group)) > 1 for group in groups))

    def advantages(factor: float) -> Tensor:
        rewards = [torch.tensor(group) / 8 * factor for group in groups]
        centred = [
            F.group_relative_advantages(rewards=reward, normalize_std=False, std_epsilon=0.0) for reward in rewards
        ]
        return torch.cat(F.divide_by_step_deviation(advantages=centred, rewards=rewards, std_epsilon=0.0))

    torch.testing.assert_close(advantages(scale), advantages(1.0), rtol=1e-5, atol=1e-6)


TOKENS = st.lists(st.tuples(st.floats(-2.0, 2.0, width=32), st.booleans()), min_size=1, max_size=8)


@given(samples=st.lists(TOKENS, min_size=1, max_size=4))
@patient
def test_with_a_discount_of_1_what_is_to_come_is_a_plain_sum(samples: list[list[tuple[float, bool]]]) -> None:
    values = torch.tensor([value for sample in samples for value, _ in sample])
    mask = torch.tensor([trained for sample in samples for _, trained in sample])
    ids = torch.tensor([place for place, sample in enumerate(samples) for _ in sample])
    got = F.discounted_rewards(
        token_rewards=values, loss_mask=mask, sample_ids=ids, num_samples=len(samples), gamma=1.0
    )
    wanted = F.reward_to_go(per_token=values, loss_mask=mask, sample_ids=ids)
    torch.testing.assert_close(got[mask], wanted[mask], rtol=1e-5, atol=1e-5)


@given(samples=st.lists(TOKENS, min_size=1, max_size=4), alpha=st.sampled_from([0.05, 0.5, 2.0]))
@patient
def test_length_adaptive_gae_is_gae_with_each_samples_own_lambda(
    samples: list[list[tuple[float, bool]]], alpha: float
) -> None:
    def advantages(part: list[list[tuple[float, bool]]], gae_lambda: float | Tensor | None) -> Tensor:
        values = torch.tensor([value for sample in part for value, _ in sample])
        shape = {
            "loss_mask": torch.tensor([trained for sample in part for _, trained in sample]),
            "sample_ids": torch.tensor([place for place, sample in enumerate(part) for _ in sample]),
            "num_samples": len(part),
        }
        if gae_lambda is None:
            gae_lambda = F.length_adaptive_lambda(**shape, alpha=alpha)
        return F.generalized_advantages(
            token_rewards=values, values=values.flip(0), **shape, gamma=0.9, gae_lambda=gae_lambda
        )

    together = advantages(samples, None).split([len(sample) for sample in samples])
    values = torch.tensor([value for sample in samples for value, _ in sample]).flip(0)
    start = 0
    for sample, got in zip(samples, together, strict=True):
        length = sum(trained for _, trained in sample)
        own = max(0.0, 1.0 - 1.0 / (alpha * length)) if length else 0.0
        wanted = F.generalized_advantages(
            token_rewards=torch.tensor([value for value, _ in sample]),
            values=values[start : start + len(sample)],
            loss_mask=torch.tensor([trained for _, trained in sample]),
            sample_ids=torch.zeros(len(sample), dtype=torch.int64),
            num_samples=1,
            gamma=0.9,
            gae_lambda=own,
        )
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        start += len(sample)
