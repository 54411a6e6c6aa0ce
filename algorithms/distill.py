"""On-policy distillation: the student samples, a teacher says of every token how likely it finds it.

The forms ``pure`` and ``advantage`` put d = log π_S - log π_T of the sampled tokens into the advantage (MiniLLM, arXiv
2306.08543); ``topk_…`` differentiate a divergence over the teacher's likeliest tokens at the student's own positions
(GKD, arXiv 2306.13649). Why d itself is no loss: `algorithms.functional.teacher_log_ratio`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

from algorithms import functional as F
from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec, LossInputs, LossOutputs, Needs, TeacherNeeds

if TYPE_CHECKING:
    from torch import Tensor

TOP_K = {f"topk_{name}": name for name in F.TOP_K_DIVERGENCES}
FORMS = ("pure", "advantage", *TOP_K)
SERVED_BY = ("forward", "engine")


@dataclass(frozen=True)
class DistillKnobs(P.GroupKnobs, P.TokenClipKnobs):
    """Values are documented in conf/algo."""

    name: str = "distill"
    form: str = "pure"
    teachers: dict[str, str | None] = field(default_factory=lambda: {"default": "tiny_qwen3_teacher"})
    teacher_key: str = ""
    served_by: str = "forward"
    teacher_coef: float = 1.0
    top_k: int = 16
    mix: float = 0.5


def needs(knobs: DistillKnobs) -> Needs:
    """A teacher; its likeliest tokens only where the form is about them."""
    teacher = TeacherNeeds(
        models={name: model for name, model in knobs.teachers.items() if model is not None},
        key=knobs.teacher_key,
        top_k=knobs.top_k if knobs.form in TOP_K else 0,
        served_by=cast(Literal["forward", "engine"], knobs.served_by),
    )
    return dataclasses.replace(P.needs(knobs), teacher=teacher)


def check(knobs: DistillKnobs) -> None:
    """Raises ValueError that lists every knob that makes no sense, with its fix."""
    problems = P.common_problems(knobs) + P.deviation_problems(knobs, F.DEVIATIONS)
    if knobs.form == "advantage":
        problems = P.group_problems(knobs)
    problems += P.token_clip_problems(knobs, usual="0.2 and 0.2 are usual.")
    for key, value, allowed in (("form", knobs.form, FORMS), ("served_by", knobs.served_by, SERVED_BY)):
        if value not in allowed:
            problems.append(f"algo.{key}={value}: no such choice. Use one of: {', '.join(allowed)}.")
    problems += P.above_zero(knobs, teacher_coef=1.0, top_k=16)
    if knobs.normalize_std == "batch":
        problems.append("algo.normalize_std=batch: the teacher's part would be divided too. Use group or none.")
    if knobs.form in TOP_K:
        problems += _top_k_problems(knobs)
    teachers = [name for name, model in knobs.teachers.items() if model is not None]
    if not teachers:
        problems.append("algo.teachers names no teacher. Use algo.teachers.default=<a Hugging Face folder>.")
    if len(teachers) > 1 and not knobs.teacher_key:
        problems.append(
            f"algo.teachers names {', '.join(teachers)}: with several, algo.teacher_key must name the data column that "
            "chooses a prompt's teacher. Or leave one: algo.teachers.default=null takes that one out."
        )
    P.refuse(problems)


def _top_k_problems(knobs: DistillKnobs) -> list[str]:
    problems = []
    if not 0.0 < knobs.mix < 1.0:
        problems.append(f"algo.mix={knobs.mix}: must lie between 0 and 1. 0.5 is usual.")
    if knobs.kl_coef > 0 and knobs.kl_placement == "reward":
        problems.append(f"algo.kl_placement=reward with algo.form={knobs.form}: it has no reward. Use loss.")
    if knobs.opsm_threshold > 0:
        problems.append(
            f"algo.opsm_threshold={knobs.opsm_threshold} with algo.form={knobs.form}: nothing is bad. Use 0."
        )
    if knobs.correction == "tis_normalized":
        problems.append(f"algo.correction=tis_normalized with algo.form={knobs.form}: it has no advantages. Use tis.")
    return problems


def advantages(inputs: AdvantageInputs, knobs: DistillKnobs) -> Tensor:
    """``[tokens]`` float32. "pure": -λ d_t, rewards unused. "advantage": the group's, less λ d_t. ``topk_…``: 0.

    A KL to the reference that belongs into the reward is taken off too: of "pure" each token's own.
    """
    if knobs.form in TOP_K:
        return inputs.loss_mask.float() * 0.0
    assert inputs.old_logprobs is not None and inputs.teacher_logprobs is not None, "needs() asked for a teacher"
    taught = -knobs.teacher_coef * F.teacher_log_ratio(
        logprobs=inputs.old_logprobs, teacher_logprobs=inputs.teacher_logprobs, loss_mask=inputs.loss_mask
    )
    if knobs.form == "pure":
        penalties = P.token_penalties(inputs, knobs)
        return taught if penalties is None else taught - penalties
    return P.group_advantages(inputs, knobs) + taught


def loss(inputs: LossInputs, knobs: DistillKnobs) -> LossOutputs:
    """PPO's clip on those advantages; of the ``topk_…`` forms λ times the divergence, whatever the ratio."""
    assert inputs.teacher_logprobs is not None, "needs() asked for a teacher"
    policy = F.clipped_policy_loss(
        logprobs=inputs.logprobs,
        old_logprobs=P.old_logprobs(inputs, knobs),
        advantages=inputs.advantages,
        loss_mask=inputs.loss_mask,
        clip_low=knobs.clip_low,
        clip_high=knobs.clip_high,
        dual_clip=knobs.dual_clip,
        trust_region=knobs.trust_region,
    )
    told = {
        "teacher_kl": F.teacher_log_ratio(
            logprobs=inputs.logprobs, teacher_logprobs=inputs.teacher_logprobs, loss_mask=inputs.loss_mask
        )
    }
    if knobs.form in TOP_K:
        assert inputs.top_logprobs is not None and inputs.teacher_top_logprobs is not None, "needs() asked for top_k"
        divergence = F.top_k_divergence(
            top_logprobs=inputs.top_logprobs,
            teacher_top_logprobs=inputs.teacher_top_logprobs,
            loss_mask=inputs.loss_mask,
            divergence=TOP_K[knobs.form],
            mix=knobs.mix,
        )
        never = inputs.loss_mask & False
        policy = policy._replace(per_token=knobs.teacher_coef * divergence, cut_low=never, cut_high=never)
        told["teacher_divergence"] = divergence.detach()
    outputs = P.outputs(policy, inputs, knobs)
    count = inputs.loss_mask.sum()
    sums = {name: (values.masked_fill(~inputs.loss_mask, 0.0).sum(), count) for name, values in told.items()}
    return dataclasses.replace(outputs, metric_sums={**outputs.metric_sums, **sums})


SPEC = AlgorithmSpec(
    name="distill",
    summary="on-policy distillation from one or several teachers",
    knobs=DistillKnobs,
    needs=needs,
    check=check,
    advantages=advantages,
    loss=loss,
    denominator=P.denominator,
    normalize=P.normalize_weights,
)
