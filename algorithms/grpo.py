"""GRPO (arXiv 2402.03300): advantages relative to the group, PPO's clip, no critic.

``normalize_std=false`` with ``aggregation=seq_mean_token_sum_norm`` is Dr. GRPO (arXiv 2503.20783); ``clip_high=0.28``
with ``aggregation=token_mean`` is DAPO's loss (arXiv 2503.14476).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from algorithms import functional as F
from relax_core.contracts.algorithm import (
    AdvantageInputs,
    AlgorithmKnobs,
    AlgorithmSpec,
    LossInputs,
    LossOutputs,
    Needs,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GrpoKnobs(AlgorithmKnobs):
    """Every choice that implementations of GRPO make differently, by name. Values are documented in conf/algo."""

    name: str = "grpo"
    group_size: int = 16
    clip_low: float = 0.2
    clip_high: float = 0.2
    normalize_std: bool = True
    std_epsilon: float = 1e-6
    aggregation: str = "token_mean"
    norm_length: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    old_logprobs: str = "rollout"
    tis_low: float = 0.0
    tis_high: float = 2.0


def needs(knobs: GrpoKnobs) -> Needs:
    """A reference only with a KL term; old log-probs from where the knob says."""
    return Needs(
        old_logprobs="actor_fwd" if knobs.old_logprobs == "actor_fwd" else "rollout", reference=knobs.kl_coef > 0
    )


def check(knobs: GrpoKnobs) -> None:
    """Raises ValueError that lists every knob that makes no sense, with its fix."""
    problems = [
        *_choice("algo.aggregation", knobs.aggregation, F.AGGREGATIONS),
        *_choice("algo.kl_estimator", knobs.kl_estimator, F.KL_ESTIMATORS),
        *_choice("algo.old_logprobs", knobs.old_logprobs, ("rollout", "actor_fwd")),
    ]
    if knobs.group_size < 2:
        problems.append(f"algo.group_size={knobs.group_size}: a group of one has no baseline. Use 2 or more.")
    if not 0 < knobs.clip_low <= 1:
        problems.append(f"algo.clip_low={knobs.clip_low}: must lie in (0, 1]. GRPO uses 0.2.")
    if knobs.clip_high <= 0:
        problems.append(f"algo.clip_high={knobs.clip_high}: must be above 0. GRPO uses 0.2, DAPO 0.28.")
    if knobs.std_epsilon <= 0:
        problems.append(f"algo.std_epsilon={knobs.std_epsilon}: must be above 0. Use 1e-6.")
    if knobs.kl_coef < 0:
        problems.append(f"algo.kl_coef={knobs.kl_coef}: must not be negative. Use 0 for no KL term.")
    if knobs.kl_coef > 0 and knobs.kl_estimator == "k1":
        problems.append(
            f"algo.kl_estimator=k1 with algo.kl_coef={knobs.kl_coef}: as a loss, k1 has zero expected gradient. "
            "Use k2 or k3."
        )
    if not 0 <= knobs.tis_low < knobs.tis_high:
        problems.append(
            f"algo.tis_low={knobs.tis_low}, algo.tis_high={knobs.tis_high}: need 0 <= tis_low < tis_high. Use 0 and 2."
        )
    if (knobs.aggregation == "seq_mean_token_sum_norm") != (knobs.norm_length > 0):
        problems.append(
            f"algo.norm_length={knobs.norm_length} with algo.aggregation={knobs.aggregation}: seq_mean_token_sum_norm "
            "needs a length above 0 (for instance rollout.max_new_tokens), the others need 0."
        )
    if problems:
        raise ValueError("\n".join(problems))


def _choice(key: str, value: str, allowed: tuple[str, ...]) -> list[str]:
    return [] if value in allowed else [f"{key}={value}: no such choice. Use one of: {', '.join(allowed)}."]


def advantages(inputs: AdvantageInputs, knobs: GrpoKnobs) -> Tensor:
    """``[tokens]`` float32: every token of a sample carries the sample's advantage."""
    of_samples = F.group_relative_advantages(
        rewards=inputs.rewards, normalize_std=knobs.normalize_std, std_epsilon=knobs.std_epsilon
    )
    return of_samples[inputs.sample_ids]


def loss(inputs: LossInputs, knobs: GrpoKnobs) -> LossOutputs:
    """The clipped surrogate, weighted by TIS where old log-probs are recomputed, plus the KL term where it is on."""
    policy = F.clipped_policy_loss(
        logprobs=inputs.logprobs,
        old_logprobs=inputs.old_logprobs,
        advantages=inputs.advantages,
        loss_mask=inputs.loss_mask,
        clip_low=knobs.clip_low,
        clip_high=knobs.clip_high,
    )
    per_token = policy.per_token
    extra: dict[str, Tensor] = {}
    if knobs.old_logprobs == "actor_fwd":
        extra["tis_weight"] = F.truncated_importance_weights(
            old_logprobs=inputs.old_logprobs,
            rollout_logprobs=inputs.rollout_logprobs,
            loss_mask=inputs.loss_mask,
            low=knobs.tis_low,
            high=knobs.tis_high,
        )
        per_token = per_token * extra["tis_weight"]
    if knobs.kl_coef > 0:
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
        metric_sums=_metric_sums(policy, inputs, knobs, extra=extra),
    )


def _metric_sums(
    policy: F.PolicyLoss, inputs: LossInputs, knobs: GrpoKnobs, *, extra: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Means over trained tokens. ``clip_low``, ``clip_high``: share of tokens whose gradient the clip cut off.
    ``old_kl``: k3 of the old policy against the new one."""
    import torch  # here, because the knobs are checked in processes that have no torch

    ratio, log_ratio = policy.ratio.detach(), policy.log_ratio.detach()
    per_token = {
        "ratio": ratio,
        "clip_low": (ratio < 1.0 - knobs.clip_low) & (inputs.advantages < 0),
        "clip_high": (ratio > 1.0 + knobs.clip_high) & (inputs.advantages > 0),
        "old_kl": log_ratio.expm1() - log_ratio,
        **{name: values.detach() for name, values in extra.items()},
    }
    mask = inputs.loss_mask.to(torch.float32)
    sums = torch.stack([values.to(torch.float32) for values in per_token.values()]) @ mask
    count = mask.sum()
    return {name: (value, count) for name, value in zip(per_token, sums.unbind(), strict=True)}


SPEC = AlgorithmSpec(
    name="grpo",
    summary="advantages relative to the group, PPO clip, no critic",
    knobs=GrpoKnobs,
    needs=needs,
    check=check,
    advantages=advantages,
    loss=loss,
    denominator=lambda totals, knobs: F.aggregate_denominator(
        totals=totals, aggregation=knobs.aggregation, norm_length=knobs.norm_length
    ),
)
