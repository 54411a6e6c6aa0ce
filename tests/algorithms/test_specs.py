"""Tests settings, requirements, checks and hooks of built-in algorithms. tests/conformance tests the computations."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch

from algorithms import cispo, dapo, distill, grpo, gspo, sapo
from algorithms.policy_gradient import PolicyGradientConfig
from relax_core.contracts.algorithm import (
    AdvantageInputs,
    AlgorithmConfig,
    GroupTurns,
    LossInputs,
    TeacherRequirements,
    ValueInputs,
)
from relax_core.registry import find_algorithm, names

BUILT_IN = [name for name in names("algo") if issubclass(find_algorithm(name).config, PolicyGradientConfig)]
ACTOR_FWD = {"old_logprobs": "actor_fwd"}


def config_of(algorithm: str, **changes: Any) -> Any:
    """Returns an algorithm's settings. The length that conf/algo reads from rollout.max_new_tokens is set."""
    return find_algorithm(algorithm).config(**{"norm_length": 8.0} | changes)


def test_the_papers_own_ranges() -> None:
    assert (gspo.GspoConfig().clip_low, gspo.GspoConfig().clip_high) == (3e-4, 4e-4)
    assert (sapo.SapoConfig().tau_positive, sapo.SapoConfig().tau_negative) == (1.0, 1.05)
    assert (cispo.CispoConfig().clip_low, cispo.CispoConfig().clip_high) == (1.0, 4.0)
    assert (dapo.DapoConfig().clip_low, dapo.DapoConfig().clip_high) == (0.2, 0.28)


@pytest.mark.parametrize("algorithm", BUILT_IN)
def test_defaults_pass_and_need_no_other_role(algorithm: str) -> None:
    spec, config = find_algorithm(algorithm), config_of(algorithm)
    spec.check(config)
    requirements = spec.requirements(config)
    assert (requirements.old_logprobs, requirements.reference, requirements.entropy) == ("rollout", False, False)
    assert requirements.critic == (algorithm == "ppo") == (spec.value_loss is not None)
    more = spec.requirements(dataclasses.replace(config, old_logprobs="actor_fwd", kl_coef=0.1))
    assert (more.old_logprobs, more.reference) == ("actor_fwd", True)
    assert spec.requirements(dataclasses.replace(config, entropy_coef=0.01)).entropy


@pytest.mark.parametrize("algorithm", BUILT_IN)
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"kl_coef": 0.1, "kl_placement": "loss", "kl_estimator": "k1"}, "zero expected gradient"),
        ({"correction": "tis"}, "algo.correction=tis with algo.old_logprobs=rollout"),
        ({"norm_length": 0.0, "aggregation": "seq_mean_token_sum_norm"}, "algo.norm_length=0.0"),
        ({"kl_coef": 0.1, "kl_placement": "loss_times_kl"}, "algo.kl_placement=loss_times_kl: there is no such choice"),
        ({"rejection": {"seq_mean_k3": [0.0]}}, "algo.rejection.seq_mean_k3=.0.0.: expected two numbers"),
        ({"correction": "tis_normalized"}, "algo.correction=tis_normalized with algo.old_logprobs=rollout"),
        ({"old_logprobs": "current", "mini_batches": 2, "epochs": 1}, "algo.mini_batches=2, algo.epochs=1: each"),
        ({"old_logprobs": "current", "mini_batches": 1, "epochs": 3}, "algo.mini_batches=1, algo.epochs=3: each"),
        ({"entropy_coef": -0.1}, "algo.entropy_coef=-0.1: must not be negative"),
    ],
)
def test_impossible_combinations_are_refused(algorithm: str, wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        find_algorithm(algorithm).check(config_of(algorithm, **wrong))


@pytest.mark.parametrize("algorithm", BUILT_IN)
def test_a_group_of_one_needs_a_critic_a_teacher_or_a_baseline_of_the_step(algorithm: str) -> None:
    spec, config = find_algorithm(algorithm), config_of(algorithm, group_size=1)
    if algorithm == "reinforce_pp":  # the plain form uses the step's mean as baseline
        spec.check(dataclasses.replace(config, group_baseline=False))
    if spec.requirements(config).critic or spec.requirements(config).teacher is not None:
        spec.check(config)
        return
    with pytest.raises(ValueError, match=r"algo\.group_size=1: a group of one"):
        spec.check(config)


OF_GRPO: list[tuple[dict[str, Any], str]] = [
    ({"group_size": 1}, "algo.group_size=1"),
    ({"clip_low": 0.0}, "algo.clip_low=0.0"),
    ({"clip_low": 1.5}, "algo.clip_low=1.5"),
    ({"clip_high": -0.1}, "algo.clip_high=-0.1"),
    ({"aggregation": "mean"}, "algo.aggregation=mean: there is no such choice"),
    ({"kl_estimator": "k4"}, "algo.kl_estimator=k4"),
    ({"kl_coef": -1.0}, "algo.kl_coef=-1.0"),
    ({"old_logprobs": "critic"}, "algo.old_logprobs=critic"),
    ({"opsm_threshold": -1.0}, "algo.opsm_threshold=-1.0"),
    ({"correction_low": 3.0}, "algo.correction_low=3.0"),
    ({"correction": "pop"}, "algo.correction=pop: there is no such choice"),
    ({"correction": "icepop", **ACTOR_FWD, "correction_level": "sequence"}, "IcePop is per token"),
    ({"correction": "icepop", **ACTOR_FWD, "correction_level": "geometric"}, "=geometric: IcePop"),
    ({"correction": "tis_normalized", "old_logprobs": "current"}, "algo.correction=tis_normalized with algo.old_"),
    ({"correction_level": "group"}, "algo.correction_level=group: there is no such choice"),
    ({"kl_placement": "both"}, "algo.kl_placement=both: there is no such choice"),
    ({"dual_clip": 1.1}, "algo.dual_clip=1.1"),
    ({"aggregation": "seq_mean_token_sum_norm", "norm_length": -8.0}, "algo.norm_length=-8.0"),
    ({"normalize_std": "True"}, "algo.normalize_std=True: there is no such choice. Use one of: group, batch, none."),
    ({"pass_k": 16}, "algo.pass_k=16 with algo.group_size=16: need 1 <= pass_k < group_size"),
    ({"pass_k": 0}, "algo.pass_k=0"),
    ({"pass_k": 4, "normalize_std": "batch"}, "algo.pass_k=4 with algo.normalize_std=batch"),
    ({"trust_region": "kl"}, "algo.trust_region=kl: there is no such choice. Use one of: ratio, probability,"),
    ({"trust_region": "probability", "clip_high": 1.0}, "no probability changes by 1"),
    ({"rejection": {"mean_k3": [0, 1]}}, "there is no such rule. The rules are: token_ratio,"),
    ({"rejection": {"seq_mean_k3": 0.01}}, "algo.rejection.seq_mean_k3=0.01: expected two numbers"),
    ({"rejection": {"seq_mean_k3": [0, "x"]}}, "expected two numbers"),
    ({"rejection": {"seq_mean_k3": [0, float("nan")]}}, "expected two numbers"),
    ({"rejection": {"token_ratio": [2.0, 0.5]}}, "expected two numbers"),
    ({"rejection": {"seq_mean_ratio": [0, 0.5]}}, "the value is 1 if trainer and engine agree, and must lie between"),
    ({"rejection": {"token_k1": [0.1, 0.5]}}, "the value is 0 if trainer and engine agree"),
]
OF_DISTILL: list[tuple[dict[str, Any], str]] = [
    ({"form": "full"}, "algo.form=full: there is no such choice. Use one of: pure, advantage, topk_forward,"),
    ({"served_by": "cloud"}, "algo.served_by=cloud: there is no such choice. Use one of: forward, engine."),
    ({"teacher_coef": 0.0}, "algo.teacher_coef=0.0: must be above 0. Use 1."),
    ({"form": "advantage", "group_size": 1}, "algo.group_size=1: a group of one"),
    ({"top_k": 0}, "algo.top_k=0: must be above 0. Use 16."),
    ({"form": "topk_jsd", "mix": 1.0}, "algo.mix=1.0: must lie between 0 and 1. 0.5 is usual."),
    (
        {"form": "topk_jsd", "kl_coef": 0.1, "kl_placement": "reward"},
        "algo.kl_placement=reward with algo.form=topk_jsd: it uses no reward. Use algo.kl_placement=loss.",
    ),
    ({"form": "topk_jsd", "opsm_threshold": 1e-4}, "algo.opsm_threshold=0.0001 with algo.form=topk_jsd"),
    ({"teachers": {"default": None}}, "algo.teachers names no teacher. Use algo.teachers.default="),
    ({"teachers": {"a": "/a", "b": "/b"}}, "algo.teachers names a, b: with several teachers, algo.teacher_key must"),
]


@pytest.mark.parametrize(
    ("algorithm", "wrong", "text"),
    [
        *(("grpo", wrong, text) for wrong, text in OF_GRPO),
        *(("distill", wrong, text) for wrong, text in OF_DISTILL),
        ("grpo", {"credit": "turn"}, "algo.credit=turn"),
        ("grpo", {"credit": "gigpo", "pass_k": 2}, "algo.credit=gigpo with algo.pass_k=2"),
        ("grpo", {"gigpo_weight": 0.0}, "algo.gigpo_weight=0.0: must be above 0"),
        ("dr_grpo", {"gigpo_gamma": 1.1}, "algo.gigpo_gamma=1.1: must lie in (0, 1]"),
        ("rloo", {"credit": ""}, "algo.credit="),
        ("reinforce_pp", {"credit": "gigpo", "group_baseline": False}, "Use algo.group_baseline=true"),
        ("distill", {"credit": "gigpo"}, "algo.credit=gigpo with algo.form=pure"),
        ("sapo", {"tau_positive": 0.0}, "algo.tau_positive=0.0: must be above 0. Use 1."),
        ("sapo", {"tau_negative": -1.0}, "algo.tau_negative=-1.0: must be above 0. Use 1.05."),
        ("gspo", {"clip_low": 0.0}, "GSPO uses 3e-4 and 4e-4"),
        ("cispo", {"clip_low": 1.5}, "algo.clip_low=1.5"),
        ("cispo", {"clip_high": 0.0}, "algo.clip_high=0.0: must be above 0. Use 4."),
        ("dapo", {"overlong_length": 10}, "algo.overlong_buffer=0"),
        ("dapo", {"overlong_length": 10, "overlong_buffer": 10}, "0 < overlong_buffer < overlong_length"),
        ("dapo", {"max_dropped_in_a_row": -1}, "algo.max_dropped_in_a_row=-1"),
        ("reinforce_pp", {"gamma": 0.0}, "algo.gamma=0.0: must lie in (0, 1]"),
        ("rloo", {"dual_clip": 1.0}, "algo.dual_clip=1.0"),
        ("rloo", {"normalize_std": "other"}, "Use one of: none, group, others, batch."),
        ("rloo", {"normalize_std": "others", "group_size": 2}, "one other sample has no standard deviation"),
        (
            "cispo",
            {"trust_region": "probability"},
            "algo.trust_region=probability: there is no such choice. Use one of: none, ratio.",
        ),
        ("distill", {"normalize_std": "batch"}, "algo.normalize_std=batch: it would divide the teacher's part too"),
        ("distill", {"form": "topk_jsd", "correction": "tis_normalized", "old_logprobs": "actor_fwd"}, "no advantages"),
        ("ppo", {"gae_alpha": -0.1}, "algo.gae_alpha=-0.1: must not be negative"),
        ("ppo", {"gae_lambda": 1.1}, "algo.gae_lambda=1.1: must lie in [0, 1]"),
        ("ppo", {"gamma": -0.1}, "algo.gamma=-0.1: must lie in [0, 1]"),
        ("ppo", {"value_clip": -0.2}, "algo.value_clip=-0.2: must not be negative"),
        ("ppo", {"clip_high": 0.0}, "PPO uses 0.2 and 0.2"),
    ],
)
def test_own_config_are_checked(algorithm: str, wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        find_algorithm(algorithm).check(config_of(algorithm, **wrong))
    assert text in str(caught.value)


def test_every_wrong_setting_is_listed_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        grpo.SPEC.check(grpo.GrpoConfig(group_size=1, clip_high=0.0, kl_coef=-1.0))
    assert len(str(caught.value).splitlines()) == 3


def test_checking_settings_needs_no_torch() -> None:
    code = (
        "import sys; from algorithms.grpo import SPEC, GrpoConfig; SPEC.check(GrpoConfig()); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_distillation_asks_for_top_k_tokens_only_where_the_form_is_about_them() -> None:
    teachers = {"default": None, "math": "/m"}
    requirements = distill.SPEC.requirements(
        distill.DistillConfig(teachers=teachers, teacher_key="source", served_by="engine")
    )
    assert requirements.teacher == TeacherRequirements(models={"math": "/m"}, key="source", top_k=0, served_by="engine")
    for form in ("topk_forward", "topk_jsd"):
        of_form = distill.SPEC.requirements(distill.DistillConfig(form=form, top_k=7)).teacher
        assert of_form is not None and of_form.top_k == 7


def grpo_inputs(*, new: list[float], old: list[float], rollout: list[float], advantages: list[float]) -> LossInputs:
    """Returns one token per sample. The reference log-probs equal the old log-probs."""
    return LossInputs(
        logprobs=torch.tensor(new),
        old_logprobs=torch.tensor(old),
        rollout_logprobs=torch.tensor(rollout),
        reference_logprobs=torch.tensor(old),
        advantages=torch.tensor(advantages),
        loss_mask=torch.tensor([logprob > -9.0 for logprob in new]),
        sample_ids=torch.arange(len(new)),
        num_samples=len(new),
    )


@pytest.mark.parametrize("old_logprobs", ["rollout", "actor_fwd", "current"])
def test_opsm_measures_the_drift_from_what_the_engine_sampled_with(old_logprobs: str) -> None:
    """DeepSeek-V3.2, eq. 9. Sample 1 drifted, sample 2 did not drift, and sample 3 has a positive advantage."""
    config = grpo.GrpoConfig(old_logprobs=old_logprobs, opsm_threshold=1e-2, correction="none")
    grpo.SPEC.check(config)
    rollout = [-0.9, -1.0, -0.9]
    old = rollout if old_logprobs == "rollout" else [-1.0, -0.9, -1.0]
    inputs = grpo_inputs(new=[-1.0] * 3, old=old, rollout=rollout, advantages=[-1.0, -1.0, 1.0])
    outputs = grpo.SPEC.loss(inputs, config)
    assert outputs.per_token is not None
    assert (outputs.per_token == 0.0).tolist() == [True, False, False]
    cut, count = outputs.metric_sums["opsm_cut"]
    assert (float(cut), float(count)) == (1.0, 3.0)


def test_metrics_of_grpo_by_hand() -> None:
    same = [-1.0] * 4
    inputs = grpo_inputs(new=[-1.0, -0.5, -1.5, -9.0], old=same, rollout=same, advantages=[1.0, 1.0, -1.0, -1.0])
    config = grpo.GrpoConfig(clip_low=0.2, clip_high=0.28)
    sums = grpo.SPEC.loss(inputs, config).metric_sums
    assert all(count.item() == 3 for _, count in sums.values())
    # e^0 + e^0.5 + e^-0.5. For the KL the sum minus 3, because the log-ratios add up to 0.
    wanted = {"ratio": 3.2552519, "old_kl": 0.2552519, "clip_low": 1.0, "clip_high": 1.0}
    wanted |= {"ratio_low": 3 * 0.6065307, "ratio_high": 3 * 1.6487213}
    wanted |= {"surprisal": 3.0, "advantage": 1.0, "advantage_size": 3.0}
    assert {name: total.item() for name, (total, _) in sums.items()} == pytest.approx(wanted, rel=1e-5)
    more = grpo.SPEC.loss(inputs, dataclasses.replace(config, old_logprobs="actor_fwd", kl_coef=0.1)).metric_sums
    assert set(more) == {*sums, "tis_weight", "tis_cut", "reference_kl"}


class Reads:
    """Wraps settings and records which settings are read."""

    def __init__(self, config: Any, read: set[str]) -> None:
        self._config, self._read = config, read

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return getattr(self._config, name)


@pytest.mark.parametrize("algorithm", BUILT_IN)
def test_every_setting_is_read(algorithm: str) -> None:
    """The computing functions read every setting, with every option enabled."""
    spec, read = find_algorithm(algorithm), set[str]()
    fields = {field.name for field in dataclasses.fields(spec.config)}
    base = {"kl_coef": 0.1, "kl_estimator": "k3", "old_logprobs": "actor_fwd", "opsm_threshold": 1e-4}
    base |= {"entropy_coef": 0.1, "rejection": {"token_k3": [0, 1]}}
    base |= {name: value for name, value in (("overlong_length", 4), ("overlong_buffer", 2)) if name in fields}
    tokens = torch.full((4,), -1.0)
    mask, ids = torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    forms = [{"form": form} for form in distill.FORMS] if algorithm == "distill" else [{}]
    forms += [{"pass_k": 2}] if "pass_k" in fields else []
    forms += [{"gamma": 0.9}] if algorithm == "reinforce_pp" else []
    form = {"form": "advantage"} if "form" in fields else {}
    forms += [{"credit": "gigpo", **form}] if "credit" in fields else []
    for placement, form in itertools.product(("loss", "reward"), forms):
        config: Any = Reads(config_of(algorithm, **base, **form, kl_placement=placement), read)
        spec.requirements(config)
        loss_inputs = LossInputs(
            logprobs=tokens.clone().requires_grad_(),
            old_logprobs=tokens,
            rollout_logprobs=tokens,
            advantages=tokens,
            loss_mask=mask,
            sample_ids=ids,
            num_samples=2,
            reference_logprobs=tokens,
            entropy=tokens,
            teacher_logprobs=tokens,
            teacher_top_logprobs=tokens[:, None],
            top_logprobs=tokens[:, None],
        )
        spec.loss(loss_inputs, config)
        advantage_inputs = AdvantageInputs(
            rewards=torch.tensor([0.0, 1.0]),
            lengths=torch.tensor([2, 2]),
            loss_mask=mask,
            sample_ids=ids,
            old_logprobs=tokens,
            reference_logprobs=tokens,
            rollout_logprobs=tokens,
            values=tokens,
            teacher_logprobs=tokens,
            turns=GroupTurns(
                of_tokens=ids,
                samples=torch.tensor([0, 1]),
                rewards=torch.tensor([0.0, 1.0], dtype=torch.float64),
                state_keys=["s", "s"],
            ),
        )
        values = spec.advantages(advantage_inputs, config)
        if spec.normalize is not None:
            spec.normalize([values], [advantage_inputs], config)
        if spec.drop_group is not None:
            spec.drop_group([0.0, 1.0], 0, config)
        if spec.value_loss is not None:
            value_inputs = ValueInputs(
                values=tokens, old_values=tokens, returns=tokens, loss_mask=mask, sample_ids=ids, num_samples=2
            )
            spec.value_loss(value_inputs, config)
    # The roles read the common settings of algorithms, tested in tests/config and tests/train/test_updates.py. The
    # denominator reads norm_length, which divides a sample's sum.
    of_all = {field.name for field in dataclasses.fields(AlgorithmConfig)}
    assert fields - read == {*of_all, "norm_length"}


def test_dapo_drops_groups_that_teach_nothing() -> None:
    assert dapo.SPEC.drop_group is not None
    config = dapo.DapoConfig(max_dropped_in_a_row=3)
    assert dapo.SPEC.drop_group([0.3, 0.3], 2, config) == "all_equal"
    assert dapo.SPEC.drop_group([0.3, 0.3], 3, config) is None
    assert dapo.SPEC.drop_group([0.3, 0.4], 0, config) is None
