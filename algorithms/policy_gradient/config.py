"""The settings that policy-gradient algorithms share, and the requirements and denominator that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from algorithms import functional as F
from relax_core.contracts.algorithm import AlgorithmConfig, Requirements, StepTotals


@dataclass(frozen=True)
class PolicyGradientConfig(AlgorithmConfig):
    """Holds the settings of all policy-gradient algorithms. conf/algo documents the values."""

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
    rejection: dict[str, Any] = field(default_factory=dict)  # rule → [low, high]
    opsm_threshold: float = 0.0
    entropy_coef: float = 0.0


@dataclass(frozen=True)
class CreditConfig(PolicyGradientConfig):
    """Holds the settings of algorithms that compare the episodes and, with ``credit`` "gigpo", the turns of a group."""

    credit: str = "episode"
    gigpo_weight: float = 1.0
    gigpo_gamma: float = 0.95


@dataclass(frozen=True)
class DeviationConfig(CreditConfig):
    """Holds the settings of algorithms that may divide advantages by a standard deviation of rewards."""

    normalize_std: str = "group"
    std_epsilon: ClassVar[float] = 1e-6


@dataclass(frozen=True)
class GroupConfig(DeviationConfig):
    """Holds the settings of algorithms with the group's mean as baseline."""

    pass_k: int = 1


@dataclass(frozen=True)
class ClipConfig(PolicyGradientConfig):
    """Holds the settings of algorithms with PPO's clip."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0


@dataclass(frozen=True)
class TokenClipConfig(ClipConfig):
    """Holds the settings of algorithms that clip a ratio per token."""

    trust_region: str = "ratio"


def requirements(
    config: PolicyGradientConfig, *, whole_step: bool = False, turns: bool = False, state_keys: bool = False
) -> Requirements:
    """Returns the inputs that an algorithm with these settings needs, in addition to ``turns`` and ``state_keys``.

    The algorithm needs a reference if ``kl_coef`` is above 0, and the entropy if ``entropy_coef`` is above 0. It needs
    all groups of a step at once if ``whole_step`` is True, or if weights are divided by their mean over the step. Every
    token contributes to the loss if the loss has a KL term or an entropy bonus.
    """
    normalizes_weights = config.correction == "tis_normalized"
    return Requirements(
        old_logprobs="actor_fwd" if config.old_logprobs == "actor_fwd" else "rollout",
        reference=config.kl_coef > 0,
        entropy=config.entropy_coef > 0,
        whole_step=whole_step or normalizes_weights,
        rollout_logprobs=normalizes_weights,
        turns=turns,
        state_keys=state_keys,
        every_token=config.entropy_coef > 0 or (config.kl_coef > 0 and config.kl_placement != "reward"),
    )


def credit_requirements(config: CreditConfig, *, whole_step: bool = False) -> Requirements:
    """Returns `requirements`. ``credit`` "gigpo" also needs the turns and their start states."""
    by_state = config.credit == "gigpo"
    return requirements(config, whole_step=whole_step, turns=by_state, state_keys=by_state)


def group_requirements(config: DeviationConfig) -> Requirements:
    """Returns `credit_requirements`. ``normalize_std`` "batch" also needs the rewards of the whole step."""
    return credit_requirements(config, whole_step=config.normalize_std == "batch")


def denominator(totals: StepTotals, config: PolicyGradientConfig) -> float:
    """Returns the denominator of a step's loss, in the unit of ``config.aggregation``."""
    return F.aggregate_denominator(totals=totals, aggregation=config.aggregation, norm_length=config.norm_length)
