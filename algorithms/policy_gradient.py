"""What all policy-gradient algorithms here share: their common knobs, the checks, and the way from a policy loss per
token to a `LossOutputs` (correction, OPSM, KL, aggregation, metrics)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from algorithms import functional as F
from relax_core.contracts.algorithm import (
    AdvantageInputs,
    AlgorithmKnobs,
    LossInputs,
    LossOutputs,
    Needs,
    StepTotals,
)

if TYPE_CHECKING:
    from torch import Tensor

KL_PLACEMENTS = ("loss", "reward")
OLD_LOGPROBS = ("rollout", "actor_fwd", "current")
CORRECTION_CHOICES = ("auto", "none", *F.CORRECTIONS)
LOW_QUANTILE, HIGH_QUANTILE = 0.01, 0.99


@dataclass(frozen=True)
class PolicyGradientKnobs(AlgorithmKnobs):
    """Values are documented in conf/algo."""

    name: str = ""
    group_size: int = 16
    aggregation: str = "token_mean"
    norm_length: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_placement: str = "loss"
    old_logprobs: str = "rollout"
    correction: str = "auto"
    correction_level: str = "token"
    correction_low: float = 0.0
    correction_high: float = 2.0
    opsm_threshold: float = 0.0


@dataclass(frozen=True)
class ClipKnobs(PolicyGradientKnobs):
    """Of algorithms with PPO's clip."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0


# -- what the spec asks ---------------------------------------------------------------------------------------------
def needs(knobs: PolicyGradientKnobs) -> Needs:
    """A reference only with a KL term; old log-probs from where the knob says."""
    return Needs(
        old_logprobs="actor_fwd" if knobs.old_logprobs == "actor_fwd" else "rollout", reference=knobs.kl_coef > 0
    )


def denominator(totals: StepTotals, knobs: PolicyGradientKnobs) -> float:
    return F.aggregate_denominator(totals=totals, aggregation=knobs.aggregation, norm_length=knobs.norm_length)


# -- checks ---------------------------------------------------------------------------------------------------------
def refuse(problems: list[str]) -> None:
    """Raises ValueError with one problem a line, where there is any."""
    if problems:
        raise ValueError("\n".join(problems))


def group_problems(knobs: PolicyGradientKnobs) -> list[str]:
    """What is wrong with the common knobs, one sentence each with key, value and fix."""
    problems = [
        *_choice("algo.aggregation", knobs.aggregation, F.AGGREGATIONS),
        *_choice("algo.kl_estimator", knobs.kl_estimator, F.KL_ESTIMATORS),
        *_choice("algo.kl_placement", knobs.kl_placement, KL_PLACEMENTS),
        *_choice("algo.old_logprobs", knobs.old_logprobs, OLD_LOGPROBS),
        *_choice("algo.correction", knobs.correction, CORRECTION_CHOICES),
        *_choice("algo.correction_level", knobs.correction_level, F.CORRECTION_LEVELS),
    ]
    if knobs.group_size < 2:
        problems.append(f"algo.group_size={knobs.group_size}: a group of one has no baseline. Use 2 or more.")
    if knobs.kl_coef < 0:
        problems.append(f"algo.kl_coef={knobs.kl_coef}: must not be negative. Use 0 for no KL term.")
    if knobs.kl_coef > 0 and knobs.kl_placement == "loss" and knobs.kl_estimator == "k1":
        problems.append(
            f"algo.kl_estimator=k1 with algo.kl_coef={knobs.kl_coef}: as a loss, k1 has zero expected gradient. "
            "Use k2 or k3, or algo.kl_placement=reward."
        )
    if (knobs.aggregation == "seq_mean_token_sum_norm") != (knobs.norm_length > 0):
        problems.append(
            f"algo.norm_length={knobs.norm_length} with algo.aggregation={knobs.aggregation}: seq_mean_token_sum_norm "
            "needs a length above 0 (for instance rollout.max_new_tokens), the others need 0."
        )
    return problems + _correction_problems(knobs)


def _correction_problems(knobs: PolicyGradientKnobs) -> list[str]:
    problems = []
    low, high = knobs.correction_low, knobs.correction_high
    if not 0 <= low < high:
        problems.append(
            f"algo.correction_low={low}, algo.correction_high={high}: need 0 <= correction_low < correction_high. "
            "TIS uses 0 and 2, IcePop 0.5 and 5."
        )
    if knobs.correction in F.CORRECTIONS and knobs.old_logprobs == "rollout":
        problems.append(
            f"algo.correction={knobs.correction} with algo.old_logprobs=rollout: the engine's own log-probs are the "
            "old ones, so there is nothing to correct. Use algo.old_logprobs=actor_fwd, or algo.correction=none."
        )
    if knobs.correction == "icepop" and knobs.correction_level == "sequence":
        problems.append("algo.correction=icepop with algo.correction_level=sequence: IcePop is per token. Use mis.")
    if knobs.opsm_threshold < 0:
        problems.append(f"algo.opsm_threshold={knobs.opsm_threshold}: must not be negative. 0 is off, 1e-4 is usual.")
    if knobs.opsm_threshold > 0 and knobs.old_logprobs == "current":
        problems.append(
            f"algo.opsm_threshold={knobs.opsm_threshold} with algo.old_logprobs=current: the ratio is always 1, so "
            "OPSM never acts. Use algo.old_logprobs=rollout or actor_fwd."
        )
    return problems


def above_zero(knobs: PolicyGradientKnobs, **usual: float) -> list[str]:
    """Of knobs that must be above 0, by name with the value that is usual."""
    return [
        f"algo.{key}={getattr(knobs, key)}: must be above 0. Use {value:g}."
        for key, value in usual.items()
        if getattr(knobs, key) <= 0
    ]


def clip_problems(knobs: ClipKnobs, *, usual: str) -> list[str]:
    """``usual``: the values that the algorithm's paper has, in words."""
    problems = []
    if not 0 < knobs.clip_low <= 1:
        problems.append(f"algo.clip_low={knobs.clip_low}: must lie in (0, 1]. {usual}")
    if knobs.clip_high <= 0:
        problems.append(f"algo.clip_high={knobs.clip_high}: must be above 0. {usual}")
    if knobs.dual_clip != 0 and knobs.dual_clip <= 1 + knobs.clip_high:
        problems.append(
            f"algo.dual_clip={knobs.dual_clip}: must be above 1 + algo.clip_high={1 + knobs.clip_high:g}. "
            "3 is usual, 0 is off."
        )
    return problems


def _choice(key: str, value: str, allowed: tuple[str, ...]) -> list[str]:
    return [] if value in allowed else [f"{key}={value}: no such choice. Use one of: {', '.join(allowed)}."]


# -- rewards with the KL in them ------------------------------------------------------------------------------------
def token_penalties(inputs: AdvantageInputs, knobs: PolicyGradientKnobs) -> Tensor | None:
    """``[tokens]`` kl_coef × KL of the policy that sampled against the reference, where it belongs into the reward."""
    if knobs.kl_coef == 0 or knobs.kl_placement == "loss":
        return None
    assert inputs.old_logprobs is not None and inputs.reference_logprobs is not None, "needs() asked for a reference"
    return knobs.kl_coef * F.kl_estimate(
        logprobs=inputs.old_logprobs,
        reference_logprobs=inputs.reference_logprobs,
        loss_mask=inputs.loss_mask,
        estimator=knobs.kl_estimator,
    )


def penalized_rewards(inputs: AdvantageInputs, knobs: PolicyGradientKnobs) -> Tensor:
    """``[samples]`` rewards, less each sample's summed KL penalty where ``kl_placement`` is "reward"."""
    penalties = token_penalties(inputs, knobs)
    if penalties is None:
        return inputs.rewards
    return inputs.rewards - F.sum_of_samples(
        per_token=penalties,
        loss_mask=inputs.loss_mask,
        sample_ids=inputs.sample_ids,
        num_samples=inputs.rewards.numel(),
    )


# -- from the policy loss to the outputs ----------------------------------------------------------------------------
def old_logprobs(inputs: LossInputs, knobs: PolicyGradientKnobs) -> Tensor:
    """``[tokens]`` log-probs of the proximal policy, the denominator of the ratio."""
    return inputs.logprobs.detach() if knobs.old_logprobs == "current" else inputs.old_logprobs


def clipped_loss(inputs: LossInputs, knobs: ClipKnobs) -> LossOutputs:
    """PPO's clip per token, with everything that `outputs` adds."""
    policy = F.clipped_policy_loss(
        logprobs=inputs.logprobs,
        old_logprobs=old_logprobs(inputs, knobs),
        advantages=inputs.advantages,
        loss_mask=inputs.loss_mask,
        clip_low=knobs.clip_low,
        clip_high=knobs.clip_high,
        dual_clip=knobs.dual_clip,
    )
    return outputs(policy, inputs, knobs)


def outputs(policy: F.PolicyLoss, inputs: LossInputs, knobs: PolicyGradientKnobs) -> LossOutputs:
    """The policy loss, weighted by the correction, without what OPSM leaves out, plus the KL term; its metrics."""
    per_token = policy.per_token
    extra: dict[str, Tensor] = {}
    method = _correction(knobs)
    if method != "none":
        extra["tis_weight"], extra["tis_cut"] = F.correction_weights(
            old_logprobs=old_logprobs(inputs, knobs),
            rollout_logprobs=inputs.rollout_logprobs,
            loss_mask=inputs.loss_mask,
            sample_ids=inputs.sample_ids,
            num_samples=inputs.num_samples,
            method=method,
            level=knobs.correction_level,
            low=knobs.correction_low,
            high=knobs.correction_high,
        )
        per_token = per_token * extra["tis_weight"]
    if knobs.opsm_threshold > 0:
        kept = F.kept_by_opsm(
            log_ratio=F.masked_log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.loss_mask),
            advantages=inputs.advantages,
            loss_mask=inputs.loss_mask,
            sample_ids=inputs.sample_ids,
            num_samples=inputs.num_samples,
            threshold=knobs.opsm_threshold,
        )
        per_token, extra["opsm_cut"] = per_token * kept, ~kept
    if knobs.kl_coef > 0 and knobs.kl_placement == "loss":
        assert inputs.reference_logprobs is not None, "needs() asked for a reference"
        extra["reference_kl"] = F.kl_estimate(
            logprobs=inputs.logprobs,
            reference_logprobs=inputs.reference_logprobs,
            loss_mask=inputs.loss_mask,
            estimator=knobs.kl_estimator,
        )
        per_token = per_token + knobs.kl_coef * extra["reference_kl"]
    return LossOutputs(
        loss_sum=F.aggregate_sum(
            per_token=per_token,
            loss_mask=inputs.loss_mask,
            sample_ids=inputs.sample_ids,
            num_samples=inputs.num_samples,
            aggregation=knobs.aggregation,
        ),
        per_token=per_token.detach(),
        metric_sums=metric_sums(policy, inputs, extra=extra),
    )


def _correction(knobs: PolicyGradientKnobs) -> str:
    """ "auto" is TIS wherever the trainer computed the old log-probs, and none where they are the engine's own."""
    if knobs.correction != "auto":
        return knobs.correction
    return "none" if knobs.old_logprobs == "rollout" else "tis"


def metric_sums(
    policy: F.PolicyLoss, inputs: LossInputs, *, extra: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """One scheme for all algorithms, means over trained tokens; docs/algorithms.md explains each.

    ``ratio_low``, ``ratio_high``: 1 % and 99 % quantile of each micro-batch, averaged over its tokens.
    """
    import torch  # here, because the knobs are checked in processes that have no torch

    ratio, log_ratio, mask = policy.ratio.detach(), policy.log_ratio.detach(), inputs.loss_mask
    per_token = {
        "ratio": ratio,
        "clip_low": policy.cut_low,
        "clip_high": policy.cut_high,
        "old_kl": log_ratio.expm1() - log_ratio,
        "surprisal": -inputs.logprobs.detach(),
        "advantage": inputs.advantages,
        "advantage_size": inputs.advantages.abs(),
        **{name: values.detach() for name, values in extra.items()},
    }
    rows = torch.stack([values.to(torch.float32) for values in per_token.values()])[:, mask]
    count = rows.new_tensor(float(rows.shape[1]))
    sums = {name: (value, count) for name, value in zip(per_token, rows.sum(dim=1).unbind(), strict=True)}
    if rows.shape[1]:
        ordered = rows[0].sort().values
        for name, share in (("ratio_low", LOW_QUANTILE), ("ratio_high", HIGH_QUANTILE)):
            sums[name] = (ordered[round(share * (len(ordered) - 1))] * count, count)
    return sums
