"""GRPO as a whole: golden vectors, finite differences, masks, splits and settings."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.grpo import SPEC, GrpoConfig
from relax_core.contracts.algorithm import AdvantageInputs, LossInputs, StepTotals
from tests.algorithms import reference
from tests.algorithms.reference import Token

CONFIG = GrpoConfig(clip_low=0.2, clip_high=0.28)
VARIANTS = [
    CONFIG,
    dataclasses.replace(CONFIG, aggregation="seq_mean_token_mean"),
    dataclasses.replace(CONFIG, aggregation="seq_mean_token_sum_norm", norm_length=8.0),
    dataclasses.replace(CONFIG, kl_coef=0.1),
    dataclasses.replace(CONFIG, kl_coef=0.1, kl_estimator="k2"),
    dataclasses.replace(CONFIG, old_logprobs="actor_fwd", correction_low=0.5, correction_high=1.5),
    dataclasses.replace(CONFIG, old_logprobs="actor_fwd", kl_coef=0.05, aggregation="seq_mean_token_mean"),
]
LOGPROB = st.floats(-3.0, -0.0078125, width=32)
TOKEN = st.builds(
    Token,
    sample=st.integers(0, 2),
    trained=st.booleans(),
    new=LOGPROB,
    old=LOGPROB,
    rollout=LOGPROB,
    reference=LOGPROB,
    advantage=st.floats(-2, 2, width=32),
)
TOKENS = st.lists(TOKEN, min_size=1, max_size=12).filter(lambda tokens: any(token.trained for token in tokens))


def _inputs(tokens: list[Token], *, dtype: torch.dtype = torch.float32) -> LossInputs:
    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in tokens], dtype=dtype)

    ids = torch.tensor([token.sample for token in tokens])
    return LossInputs(
        logprobs=column("new").requires_grad_(),
        old_logprobs=column("old"),
        rollout_logprobs=column("rollout"),
        reference_logprobs=column("reference"),
        advantages=column("advantage"),
        loss_mask=torch.tensor([token.trained for token in tokens]),
        sample_ids=ids,
        num_samples=3,
    )


def _totals(tokens: list[Token]) -> StepTotals:
    return StepTotals(
        tokens=sum(token.trained for token in tokens), samples=len({token.sample for token in tokens}), groups=1
    )


def _reference_loss(tokens: list[Token], config: GrpoConfig) -> float:
    tis = (config.correction_low, config.correction_high) if config.old_logprobs == "actor_fwd" else None
    losses = [
        reference.token_loss(
            token,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_coef=config.kl_coef,
            kl_estimator=config.kl_estimator,
            tis=tis,
        )
        for token in tokens
    ]
    return reference.mean_loss(tokens, losses, aggregation=config.aggregation, norm_length=config.norm_length)


@pytest.mark.parametrize("config", VARIANTS, ids=str)
@given(tokens=TOKENS)
@settings(max_examples=40, deadline=None)
def test_the_loss_equals_the_reference(config: GrpoConfig, tokens: list[Token]) -> None:
    got = SPEC.loss(_inputs(tokens), config).loss_sum.item() / SPEC.denominator(_totals(tokens), config)
    assert got == pytest.approx(_reference_loss(tokens, config), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("old_logprobs", ["rollout", "actor_fwd", "current"])
def test_opsm_measures_the_drift_from_what_the_engine_sampled_with(old_logprobs: str) -> None:
    """DeepSeek-V3.2, eq. 9: also where the old log-probs were recomputed and the weights have not moved since."""
    tokens = [
        Token(sample=0, trained=True, new=-1.0, old=-1.0, rollout=-0.9, reference=-1.0, advantage=-1.0),  # drifted
        Token(sample=1, trained=True, new=-1.0, old=-0.9, rollout=-1.0, reference=-1.0, advantage=-1.0),  # did not
        Token(sample=2, trained=True, new=-1.0, old=-1.0, rollout=-0.9, reference=-1.0, advantage=1.0),  # is good
    ]
    config = dataclasses.replace(CONFIG, old_logprobs=old_logprobs, opsm_threshold=1e-2, correction="none")
    SPEC.check(config)
    inputs = _inputs(tokens)
    if old_logprobs == "rollout":
        inputs = dataclasses.replace(inputs, old_logprobs=inputs.rollout_logprobs)
    outputs = SPEC.loss(inputs, config)
    assert outputs.per_token is not None
    assert (outputs.per_token == 0.0).tolist() == [True, False, False]
    cut, count = outputs.metric_sums["opsm_cut"]
    assert (float(cut), float(count)) == (1.0, 3.0)


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_the_gradient_equals_finite_differences(config: GrpoConfig) -> None:
    # ratios e^0.1, e^-0.1, e^0.6 (clipped), e^-0.6 (clipped), e^0.2, e^0.15: none within 0.01 of a clip's edge
    tokens = [
        Token(sample=0, trained=True, new=-0.9, old=-1.0, rollout=-1.1, reference=-0.7, advantage=1.3),
        Token(sample=0, trained=True, new=-1.1, old=-1.0, rollout=-1.0, reference=-0.5, advantage=1.3),
        Token(sample=1, trained=True, new=-0.4, old=-1.0, rollout=-0.9, reference=-1.0, advantage=0.8),
        Token(sample=1, trained=True, new=-1.6, old=-1.0, rollout=-0.5, reference=-1.2, advantage=-0.8),
        Token(sample=2, trained=False, new=-0.8, old=-1.0, rollout=-1.0, reference=-1.0, advantage=-0.5),
        Token(sample=2, trained=True, new=-0.85, old=-1.0, rollout=-1.3, reference=-1.4, advantage=-0.5),
    ]
    inputs = _inputs(tokens)
    SPEC.loss(inputs, config).loss_sum.backward()
    assert inputs.logprobs.grad is not None
    got = inputs.logprobs.grad / SPEC.denominator(_totals(tokens), config)
    step = 1e-6
    for place, token in enumerate(tokens):
        up, down = (
            _reference_loss(
                [*tokens[:place], dataclasses.replace(token, new=token.new + by), *tokens[place + 1 :]], config
            )
            for by in (step, -step)
        )
        assert got[place].item() == pytest.approx((up - down) / (2 * step), rel=1e-4, abs=1e-6)


@given(tokens=TOKENS, noise=st.sampled_from([float("nan"), float("inf"), float("-inf"), -7.0]))
@settings(deadline=None)  # the first call may wait for a busy machine
def test_masked_tokens_have_no_influence(tokens: list[Token], noise: float) -> None:
    config = dataclasses.replace(CONFIG, old_logprobs="actor_fwd", kl_coef=0.1, aggregation="seq_mean_token_mean")
    spoilt = [
        token
        if token.trained
        else dataclasses.replace(token, new=noise, old=noise, rollout=noise, reference=-noise, advantage=9.0)
        for token in tokens
    ]
    results: list[tuple[float, list[float], dict[str, Any]]] = []
    for version in (tokens, spoilt):
        inputs = _inputs(version)
        outputs = SPEC.loss(inputs, config)
        outputs.loss_sum.backward()
        assert inputs.logprobs.grad is not None
        metrics = {name: (total.item(), count.item()) for name, (total, count) in outputs.metric_sums.items()}
        results.append((outputs.loss_sum.item(), inputs.logprobs.grad.tolist(), metrics))
    assert results[0] == results[1]
    masked = [grad for grad, token in zip(results[1][1], spoilt, strict=True) if not token.trained]
    assert masked == [0.0] * len(masked)


@given(tokens=TOKENS, config=st.sampled_from(VARIANTS), data=st.data())
@settings(deadline=None)  # the first call may wait for a busy machine
def test_numerators_add_up_over_micro_batches_in_any_order(
    tokens: list[Token], config: GrpoConfig, data: st.DataObject
) -> None:
    whole = SPEC.loss(_inputs(tokens), config).loss_sum.item()
    samples = data.draw(st.permutations(sorted({token.sample for token in tokens})))
    parts = [[token for token in tokens if token.sample == sample] for sample in samples]
    split = sum(SPEC.loss(_inputs(part), config).loss_sum.item() for part in parts)
    assert split == pytest.approx(whole, rel=1e-4, abs=1e-4)


def test_metrics_by_hand() -> None:
    tokens = [
        Token(sample=0, trained=True, new=-1.0, old=-1.0, rollout=-1.0, reference=-1.0, advantage=1.0),
        Token(sample=0, trained=True, new=-0.5, old=-1.0, rollout=-1.0, reference=-1.0, advantage=1.0),
        Token(sample=1, trained=True, new=-1.5, old=-1.0, rollout=-1.0, reference=-1.0, advantage=-1.0),
        Token(sample=1, trained=False, new=-9.0, old=-1.0, rollout=-1.0, reference=-1.0, advantage=-1.0),
    ]
    sums = SPEC.loss(_inputs(tokens), CONFIG).metric_sums
    assert set(sums) == {
        *("ratio", "ratio_low", "ratio_high", "clip_low", "clip_high", "old_kl"),
        *("surprisal", "advantage", "advantage_size"),
    }
    assert all(count.item() == 3 for _, count in sums.values())
    # e^0 + e^0.5 + e^-0.5, and for the KL the same minus 3, as the log-ratios add up to 0
    assert sums["ratio"][0].item() == pytest.approx(3.2552519)
    assert sums["old_kl"][0].item() == pytest.approx(0.2552519, rel=1e-5)
    assert (sums["clip_low"][0].item(), sums["clip_high"][0].item()) == (1.0, 1.0)
    assert sums["ratio_low"][0].item() == pytest.approx(3 * 0.6065307)
    assert sums["ratio_high"][0].item() == pytest.approx(3 * 1.6487213)
    assert (sums["surprisal"][0].item(), sums["advantage"][0].item(), sums["advantage_size"][0].item()) == (3, 1, 3)
    more = SPEC.loss(_inputs(tokens), dataclasses.replace(CONFIG, old_logprobs="actor_fwd", kl_coef=0.1)).metric_sums
    assert set(more) == {*sums, "tis_weight", "tis_cut", "reference_kl"}


def test_advantages_reach_every_token_of_a_sample() -> None:
    got = SPEC.advantages(
        AdvantageInputs(
            rewards=torch.tensor([1.0, 0.0]),
            lengths=torch.tensor([1, 2]),
            loss_mask=torch.tensor([True, True, True]),
            sample_ids=torch.tensor([0, 1, 1]),
        ),
        GrpoConfig(normalize_std=False),
    )
    assert got.tolist() == [0.5, -0.5, -0.5]
    assert got.dtype == torch.float32


def test_needs_follow_the_config() -> None:
    assert SPEC.requirements(CONFIG).old_logprobs == "rollout"
    assert not SPEC.requirements(CONFIG).reference
    more = SPEC.requirements(GrpoConfig(old_logprobs="actor_fwd", kl_coef=0.01))
    assert more.old_logprobs == "actor_fwd"
    assert more.reference


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_sensible_config_pass(config: GrpoConfig) -> None:
    SPEC.check(config)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"group_size": 1}, "algo.group_size=1"),
        ({"clip_low": 0.0}, "algo.clip_low=0.0"),
        ({"clip_low": 1.5}, "algo.clip_low=1.5"),
        ({"clip_high": -0.1}, "algo.clip_high=-0.1"),
        ({"std_epsilon": 0.0}, "algo.std_epsilon=0.0"),
        ({"aggregation": "mean"}, "algo.aggregation=mean: no such choice"),
        ({"kl_estimator": "k4"}, "algo.kl_estimator=k4"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "zero expected gradient"),
        ({"kl_coef": -1.0}, "algo.kl_coef=-1.0"),
        ({"old_logprobs": "critic"}, "algo.old_logprobs=critic"),
        ({"opsm_threshold": -1.0}, "algo.opsm_threshold=-1.0"),
        ({"correction_low": 3.0}, "algo.correction_low=3.0"),
        ({"correction": "tis"}, "there is nothing to correct"),
        ({"correction": "icepop", "old_logprobs": "actor_fwd", "correction_level": "sequence"}, "IcePop is per token"),
        ({"correction": "pop"}, "algo.correction=pop: no such choice"),
        ({"correction_level": "group"}, "algo.correction_level=group: no such choice"),
        ({"kl_placement": "both"}, "algo.kl_placement=both: no such choice"),
        ({"dual_clip": 1.1}, "algo.dual_clip=1.1"),
        ({"aggregation": "seq_mean_token_sum_norm"}, "algo.norm_length=0.0"),
        ({"aggregation": "seq_mean_token_sum_norm", "norm_length": -8.0}, "algo.norm_length=-8.0"),
        ({"normalize_std": "True"}, "algo.normalize_std=True: no such choice. Use one of: group, batch, none."),
        ({"pass_k": 16}, "algo.pass_k=16 with algo.group_size=16: need 1 <= pass_k < group_size"),
        ({"pass_k": 0}, "algo.pass_k=0"),
        ({"pass_k": 4, "normalize_std": "batch"}, "algo.pass_k=4 with algo.normalize_std=batch"),
        ({"trust_region": "kl"}, "algo.trust_region=kl: no such choice. Use one of: ratio, probability,"),
        ({"trust_region": "probability", "clip_high": 1.0}, "no probability moves by 1"),
        ({"correction": "tis_normalized"}, "there is nothing to correct"),
        ({"correction": "tis_normalized", "old_logprobs": "current"}, "algo.correction=tis_normalized with algo.old_"),
        ({"correction": "icepop", "old_logprobs": "actor_fwd", "correction_level": "geometric"}, "=geometric: IcePop"),
        ({"rejection": {"mean_k3": [0, 1]}}, "algo.rejection.mean_k3=.*: no such rule. What exists: token_ratio,"),
        ({"rejection": {"seq_mean_k3": 0.01}}, "algo.rejection.seq_mean_k3=0.01: expected two numbers"),
        ({"rejection": {"seq_mean_k3": [0.01]}}, "expected two numbers, .low, high., with low < high"),
        ({"rejection": {"seq_mean_k3": [0, "x"]}}, "expected two numbers"),
        ({"rejection": {"seq_mean_k3": [0, float("nan")]}}, "expected two numbers"),
        ({"rejection": {"token_ratio": [2.0, 0.5]}}, "expected two numbers"),
        (
            {"rejection": {"seq_mean_ratio": [0, 0.5]}},
            "trainer and engine agree the value is 1, which must lie between",
        ),
        ({"rejection": {"token_k1": [0.1, 0.5]}}, "trainer and engine agree the value is 0"),
    ],
)
def test_wrong_config_are_named(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SPEC.check(dataclasses.replace(GrpoConfig(), **wrong))


def test_every_wrong_setting_is_listed_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        SPEC.check(GrpoConfig(group_size=1, clip_high=0.0, kl_coef=-1.0))
    assert len(str(caught.value).splitlines()) == 3


def test_checking_config_needs_no_torch() -> None:
    code = (
        "import sys; from algorithms.grpo import SPEC, GrpoConfig; SPEC.check(GrpoConfig()); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
