"""Computes `LossOutputs` from the policy loss per token.

The steps are: correction, rejection, off-policy sequence masking (OPSM), KL, entropy bonus, sum and metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from algorithms import functional as F
from algorithms.policy_gradient.config import PolicyGradientConfig, TokenClipConfig
from relax_core.contracts.algorithm import LossInputs, LossOutputs

if TYPE_CHECKING:
    from torch import Tensor

LOW_QUANTILE, HIGH_QUANTILE = 0.01, 0.99


def old_logprobs(inputs: LossInputs, config: PolicyGradientConfig) -> Tensor:
    """Returns the log-probs of the proximal policy (the ratio's denominator), ``[tokens]``."""
    return inputs.logprobs.detach() if config.old_logprobs == "current" else inputs.old_logprobs


def clipped_loss(inputs: LossInputs, config: TokenClipConfig) -> LossOutputs:
    """Returns PPO's clipped loss per token, or the trust region's masked loss, with the terms that `outputs` adds."""
    policy = F.clipped_policy_loss(
        logprobs=inputs.logprobs,
        old_logprobs=old_logprobs(inputs, config),
        advantages=inputs.advantages,
        loss_mask=inputs.loss_mask,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        trust_region=config.trust_region,
    )
    return outputs(policy, inputs, config)


def outputs(policy: F.PolicyLoss, inputs: LossInputs, config: PolicyGradientConfig) -> LossOutputs:
    """Returns the step's loss with all its terms, and its metrics.

    The correction's weights multiply the policy loss. Rejection and OPSM set the policy loss of rejected tokens to 0.
    The KL term is added and the entropy bonus subtracted.
    """
    extra: dict[str, Tensor] = {}
    per_token = _corrected(policy.per_token, inputs, config, extra=extra)
    if config.kl_coef > 0 and config.kl_placement != "reward":
        assert inputs.reference_logprobs is not None, "requirements() requests a reference"
        extra["reference_kl"] = F.kl_loss(
            logprobs=inputs.logprobs,
            reference_logprobs=inputs.reference_logprobs,
            old_logprobs=old_logprobs(inputs, config),
            loss_mask=inputs.loss_mask,
            estimator=config.kl_estimator,
            placement=config.kl_placement,
        )
        per_token = per_token + config.kl_coef * extra["reference_kl"]
    if config.entropy_coef > 0:
        assert inputs.entropy is not None, "requirements() requests the entropy"
        extra["entropy"] = inputs.entropy
        per_token = per_token - config.entropy_coef * inputs.entropy
    return LossOutputs(
        loss_sum=F.aggregate_sum(
            per_token=per_token,
            loss_mask=inputs.loss_mask,
            sample_ids=inputs.sample_ids,
            num_samples=inputs.num_samples,
            aggregation=config.aggregation,
        ),
        per_token=per_token.detach(),
        metric_sums=metric_sums(policy, inputs, extra=extra),
    )


def _corrected(
    per_token: Tensor, inputs: LossInputs, config: PolicyGradientConfig, *, extra: dict[str, Tensor]
) -> Tensor:
    """Returns the policy loss after correction, rejection and OPSM. Adds their metrics to ``extra``."""
    method = correction_method(config)
    if method != "none":
        extra["tis_weight"], extra["tis_cut"] = F.correction_weights(
            old_logprobs=old_logprobs(inputs, config),
            rollout_logprobs=inputs.rollout_logprobs,
            loss_mask=inputs.loss_mask,
            sample_ids=inputs.sample_ids,
            num_samples=inputs.num_samples,
            method=method,
            level=config.correction_level,
            low=config.correction_low,
            high=config.correction_high,
        )
        per_token = per_token * extra["tis_weight"]
    if config.rejection:
        # The trainer's log-probs come from the role actor_fwd if the run has it, else from the step's forward pass.
        trainer = inputs.old_logprobs if config.old_logprobs == "actor_fwd" else inputs.logprobs.detach()
        kept = F.rejection_mask(
            logprobs=trainer,
            rollout_logprobs=inputs.rollout_logprobs,
            loss_mask=inputs.loss_mask,
            sample_ids=inputs.sample_ids,
            num_samples=inputs.num_samples,
            rules=config.rejection,
        )
        per_token, extra["rejected"] = per_token.masked_fill(~kept, 0.0), ~kept
    if config.opsm_threshold > 0:
        kept = F.opsm_mask(
            log_ratio=F.masked_log_ratio(inputs.logprobs, inputs.rollout_logprobs, inputs.loss_mask),
            advantages=inputs.advantages,
            loss_mask=inputs.loss_mask,
            sample_ids=inputs.sample_ids,
            num_samples=inputs.num_samples,
            threshold=config.opsm_threshold,
        )
        per_token, extra["opsm_cut"] = per_token * kept, ~kept
    return per_token


def correction_method(config: PolicyGradientConfig) -> str:
    """Returns the correction's method. "auto" is TIS if the trainer computed the old log-probs, else no correction."""
    if config.correction != "auto":
        return config.correction
    return "none" if config.old_logprobs == "rollout" else "tis"


def metric_sums(
    policy: F.PolicyLoss, inputs: LossInputs, *, extra: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns each metric as (sum, count) over the trained tokens. docs/algorithms.md explains the metrics.

    All algorithms have the same metrics. ``ratio_low`` and ``ratio_high`` are the 1 % and 99 % quantiles of the ratio
    in a micro-batch. Their count is the number of tokens, which weights the mean over micro-batches by tokens.
    """
    import torch  # imported here, because settings are checked in processes that have no torch

    ratio, log_ratio = policy.ratio.detach(), policy.log_ratio.detach()
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
    trained = inputs.of_trained(torch.stack([values.to(torch.float32) for values in per_token.values()]))
    count = trained.new_tensor(float(trained.shape[1]))
    sums = {name: (value, count) for name, value in zip(per_token, trained.sum(dim=1).unbind(), strict=True)}
    if trained.shape[1]:
        ordered = trained[0].sort().values
        for name, share in (("ratio_low", LOW_QUANTILE), ("ratio_high", HIGH_QUANTILE)):
            sums[name] = (ordered[round(share * (len(ordered) - 1))] * count, count)
    return sums
