"""On-policy distillation: the student samples, and a teacher computes the log-prob of every sampled token.

The forms ``pure`` and ``advantage`` use d = log π_S - log π_T of the sampled tokens in the advantage (MiniLLM, arXiv
2306.08543). The forms ``topk_…`` use a divergence over the teacher's top-k tokens as the loss, at the positions that
the student sampled (GKD, arXiv 2306.13649). `algorithms.functional.teacher_log_ratio` explains why d cannot be a loss.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
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
BUILTIN_TEACHER = {"default": "tiny_qwen3_teacher"}
SERVED_BY = ("forward", "engine")


@dataclass(frozen=True)
class DistillConfig(P.GroupConfig, P.TokenClipConfig):
    """Holds the settings of distillation. conf/algo documents the values."""

    name: str = "distill"
    form: str = "pure"
    teachers: dict[str, str | None] | None = None  # None means BUILTIN_TEACHER
    teacher_key: str = ""
    served_by: str = "forward"
    teacher_coef: float = 1.0
    top_k: int = 16
    mix: float = 0.5


def requirements(config: DistillConfig) -> Requirements:
    """Returns the requirements, with the teachers. Only the forms ``topk_…`` need the teachers' top-k tokens."""
    teacher = TeacherRequirements(
        models=_teachers(config),
        key=config.teacher_key,
        top_k=config.top_k if config.form in TOP_K else 0,
        served_by=cast(Literal["forward", "engine"], config.served_by),
    )
    return dataclasses.replace(P.credit_requirements(config), teacher=teacher, every_token=True)


def _teachers(config: DistillConfig) -> dict[str, str]:
    """Returns teacher name → folder or built-in model. Leaves out teachers with the value null."""
    teachers = BUILTIN_TEACHER if config.teachers is None else config.teachers
    return {name: model for name, model in teachers.items() if model is not None}


def check(config: DistillConfig) -> None:
    """Raises ValueError with all invalid settings and their fixes."""
    problems = P.common_problems(config) + P.deviation_problems(config, F.DEVIATIONS)
    if config.form == "advantage":
        problems = P.group_problems(config)
    elif config.credit != "episode":
        problems.append(f"algo.credit={config.credit} with algo.form={config.form}: use episode, or form=advantage.")
    problems += P.token_clip_problems(config, usual="0.2 and 0.2 are usual.")
    problems += P.choice_problems("algo.form", config.form, FORMS)
    problems += P.choice_problems("algo.served_by", config.served_by, SERVED_BY)
    problems += P.not_positive_problems(config, teacher_coef=1.0, top_k=16)
    if config.normalize_std == "batch":
        problems.append("algo.normalize_std=batch: it would divide the teacher's part too. Use group or none.")
    if config.form in TOP_K:
        problems += _top_k_problems(config)
    teachers = _teachers(config)
    if not teachers:
        problems.append("algo.teachers names no teacher. Use algo.teachers.default=<a Hugging Face folder>.")
    if len(teachers) > 1 and not config.teacher_key:
        problems.append(
            f"algo.teachers names {', '.join(teachers)}: with several teachers, algo.teacher_key must name the data "
            "column that chooses a prompt's teacher. Or name one teacher only."
        )
    P.refuse(problems)


def _top_k_problems(config: DistillConfig) -> list[str]:
    problems = []
    if not 0.0 < config.mix < 1.0:
        problems.append(f"algo.mix={config.mix}: must lie between 0 and 1. 0.5 is usual.")
    if config.kl_coef > 0 and config.kl_placement == "reward":
        problems.append(
            f"algo.kl_placement=reward with algo.form={config.form}: it uses no reward. Use algo.kl_placement=loss."
        )
    if config.opsm_threshold > 0:
        problems.append(
            f"algo.opsm_threshold={config.opsm_threshold} with algo.form={config.form}: this form has no negative "
            "advantages that OPSM could mask. Use 0."
        )
    if config.correction == "tis_normalized":
        problems.append(
            f"algo.correction=tis_normalized with algo.form={config.form}: this form has no advantages. Use tis."
        )
    return problems


def advantages(inputs: AdvantageInputs, config: DistillConfig) -> Tensor:
    """Returns the advantages, ``[tokens]`` float32, with d_t = log π_S - log π_T and λ = ``teacher_coef``.

    "pure" has -λ d_t and ignores the rewards. "advantage" has the group-relative advantage minus λ d_t. ``topk_…`` has
    0. For ``kl_placement`` "reward", the KL to the reference is subtracted, too; "pure" subtracts it token by token.
    """
    if config.form in TOP_K:
        return inputs.loss_mask.float() * 0.0
    assert inputs.old_logprobs is not None and inputs.teacher_logprobs is not None, "requirements() requests a teacher"
    of_teacher = -config.teacher_coef * F.teacher_log_ratio(
        logprobs=inputs.old_logprobs, teacher_logprobs=inputs.teacher_logprobs, loss_mask=inputs.loss_mask
    )
    if config.form == "pure":
        penalties = P.token_penalties(inputs, config)
        return of_teacher if penalties is None else of_teacher - penalties
    return P.group_advantages(inputs, config) + of_teacher


def loss(inputs: LossInputs, config: DistillConfig) -> LossOutputs:
    """Returns PPO's clipped loss. For the forms ``topk_…``, returns λ times the divergence, without a clip."""
    assert inputs.teacher_logprobs is not None, "requirements() requests a teacher"
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
    metrics = {
        "teacher_kl": F.teacher_log_ratio(
            logprobs=inputs.logprobs, teacher_logprobs=inputs.teacher_logprobs, loss_mask=inputs.loss_mask
        )
    }
    if config.form in TOP_K:
        assert inputs.top_logprobs is not None and inputs.teacher_top_logprobs is not None, (
            "requirements() requests top_k"
        )
        divergence = F.top_k_divergence(
            top_logprobs=inputs.top_logprobs,
            teacher_top_logprobs=inputs.teacher_top_logprobs,
            loss_mask=inputs.loss_mask,
            divergence=TOP_K[config.form],
            mix=config.mix,
        )
        no_token = inputs.loss_mask & False
        policy = policy._replace(per_token=config.teacher_coef * divergence, cut_low=no_token, cut_high=no_token)
        metrics["teacher_divergence"] = divergence.detach()
    outputs = P.outputs(policy, inputs, config)
    count = inputs.loss_mask.sum()
    sums = {name: (values.masked_fill(~inputs.loss_mask, 0.0).sum(), count) for name, values in metrics.items()}
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
