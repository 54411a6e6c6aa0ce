"""On-policy distillation: the student samples, a teacher says of every token how likely it finds it.

The forms ``pure`` and ``advantage`` put d = log π_S - log π_T of the sampled tokens into the advantage (MiniLLM, arXiv
2306.08543); ``topk_…`` differentiate a divergence over the teacher's top-k tokens at the student's own positions
(GKD, arXiv 2306.13649). Why d itself is no loss: `algorithms.functional.teacher_log_ratio`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

from algorithms import functional as F
from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import (
    AdvantageInputs,
    AlgorithmSpec,
    LossInputs,
    LossOutputs,
    Requirements,
    TeacherRequirements,
)

if TYPE_CHECKING:
    from torch import Tensor

TOP_K = {f"topk_{name}": name for name in F.TOP_K_DIVERGENCES}
FORMS = ("pure", "advantage", *TOP_K)
SERVED_BY = ("forward", "engine")


@dataclass(frozen=True)
class DistillConfig(P.GroupConfig, P.TokenClipConfig):
    """Values are documented in conf/algo."""

    name: str = "distill"
    form: str = "pure"
    teachers: dict[str, str | None] = field(default_factory=lambda: {"default": "tiny_qwen3_teacher"})
    teacher_key: str = ""
    served_by: str = "forward"
    teacher_coef: float = 1.0
    top_k: int = 16
    mix: float = 0.5


def requirements(config: DistillConfig) -> Requirements:
    """A teacher; its top-k tokens only where the form is about them."""
    teacher = TeacherRequirements(
        models={name: model for name, model in config.teachers.items() if model is not None},
        key=config.teacher_key,
        top_k=config.top_k if config.form in TOP_K else 0,
        served_by=cast(Literal["forward", "engine"], config.served_by),
    )
    return dataclasses.replace(P.requirements(config), teacher=teacher)


def check(config: DistillConfig) -> None:
    """Raises ValueError that lists every setting that makes no sense, with its fix."""
    problems = P.common_problems(config) + P.deviation_problems(config, F.DEVIATIONS)
    if config.form == "advantage":
        problems = P.group_problems(config)
    problems += P.token_clip_problems(config, usual="0.2 and 0.2 are usual.")
    for key, value, allowed in (("form", config.form, FORMS), ("served_by", config.served_by, SERVED_BY)):
        if value not in allowed:
            problems.append(f"algo.{key}={value}: no such choice. Use one of: {', '.join(allowed)}.")
    problems += P.above_zero(config, teacher_coef=1.0, top_k=16)
    if config.normalize_std == "batch":
        problems.append("algo.normalize_std=batch: the teacher's part would be divided too. Use group or none.")
    if config.form in TOP_K:
        problems += _top_k_problems(config)
    teachers = [name for name, model in config.teachers.items() if model is not None]
    if not teachers:
        problems.append("algo.teachers names no teacher. Use algo.teachers.default=<a Hugging Face folder>.")
    if len(teachers) > 1 and not config.teacher_key:
        problems.append(
            f"algo.teachers names {', '.join(teachers)}: with several, algo.teacher_key must name the data column that "
            "chooses a prompt's teacher. Or leave one: algo.teachers.default=null takes that one out."
        )
    P.refuse(problems)


def _top_k_problems(config: DistillConfig) -> list[str]:
    problems = []
    if not 0.0 < config.mix < 1.0:
        problems.append(f"algo.mix={config.mix}: must lie between 0 and 1. 0.5 is usual.")
    if config.kl_coef > 0 and config.kl_placement == "reward":
        problems.append(f"algo.kl_placement=reward with algo.form={config.form}: it has no reward. Use loss.")
    if config.opsm_threshold > 0:
        problems.append(
            f"algo.opsm_threshold={config.opsm_threshold} with algo.form={config.form}: nothing is bad. Use 0."
        )
    if config.correction == "tis_normalized":
        problems.append(f"algo.correction=tis_normalized with algo.form={config.form}: it has no advantages. Use tis.")
    return problems


def advantages(inputs: AdvantageInputs, config: DistillConfig) -> Tensor:
    """``[tokens]`` float32. "pure": -λ d_t, rewards unused. "advantage": the group's, less λ d_t. ``topk_…``: 0.

    A KL to the reference that belongs into the reward is taken off too: of "pure" each token's own.
    """
    if config.form in TOP_K:
        return inputs.loss_mask.float() * 0.0
    assert inputs.old_logprobs is not None and inputs.teacher_logprobs is not None, "requirements() asked for a teacher"
    taught = -config.teacher_coef * F.teacher_log_ratio(
        logprobs=inputs.old_logprobs, teacher_logprobs=inputs.teacher_logprobs, loss_mask=inputs.loss_mask
    )
    if config.form == "pure":
        penalties = P.token_penalties(inputs, config)
        return taught if penalties is None else taught - penalties
    return P.group_advantages(inputs, config) + taught


def loss(inputs: LossInputs, config: DistillConfig) -> LossOutputs:
    """PPO's clip on those advantages; of the ``topk_…`` forms λ times the divergence, whatever the ratio."""
    assert inputs.teacher_logprobs is not None, "requirements() asked for a teacher"
    policy = F.clipped_policy_loss(
        logprobs=inputs.logprobs,
        old_logprobs=P.old_logprobs(inputs, config),
        advantages=inputs.advantages,
        loss_mask=inputs.loss_mask,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        trust_region=config.trust_region,
    )
    told = {
        "teacher_kl": F.teacher_log_ratio(
            logprobs=inputs.logprobs, teacher_logprobs=inputs.teacher_logprobs, loss_mask=inputs.loss_mask
        )
    }
    if config.form in TOP_K:
        assert inputs.top_logprobs is not None and inputs.teacher_top_logprobs is not None, (
            "requirements() asked for top_k"
        )
        divergence = F.top_k_divergence(
            top_logprobs=inputs.top_logprobs,
            teacher_top_logprobs=inputs.teacher_top_logprobs,
            loss_mask=inputs.loss_mask,
            divergence=TOP_K[config.form],
            mix=config.mix,
        )
        never = inputs.loss_mask & False
        policy = policy._replace(per_token=config.teacher_coef * divergence, cut_low=never, cut_high=never)
        told["teacher_divergence"] = divergence.detach()
    outputs = P.outputs(policy, inputs, config)
    count = inputs.loss_mask.sum()
    sums = {name: (values.masked_fill(~inputs.loss_mask, 0.0).sum(), count) for name, values in told.items()}
    return dataclasses.replace(outputs, metric_sums={**outputs.metric_sums, **sums})


SPEC = AlgorithmSpec(
    name="distill",
    summary="on-policy distillation from one or several teachers",
    config=DistillConfig,
    requirements=requirements,
    check=check,
    advantages=advantages,
    loss=loss,
    denominator=P.denominator,
    normalize=P.normalize_weights,
)
