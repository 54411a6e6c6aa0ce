"""GSPO (arXiv 2507.18071): one ratio a sequence, the length-normalised one, clipped in a very narrow range.

Its log-ratio is a mean over tokens, so it is far smaller than a token's: with PPO's 0.2 the clip would never act.
"""

from __future__ import annotations

from dataclasses import dataclass

from algorithms import functional as F
from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AlgorithmSpec, LossInputs, LossOutputs


@dataclass(frozen=True)
class GspoKnobs(P.GroupKnobs, P.ClipKnobs):
    """Values are documented in conf/algo."""

    name: str = "gspo"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    aggregation: str = "seq_mean_token_mean"


def check(knobs: GspoKnobs) -> None:
    """Raises ValueError that lists every knob that makes no sense, with its fix."""
    P.refuse(P.group_problems(knobs) + P.clip_problems(knobs, usual="GSPO uses 3e-4 and 4e-4."))


def loss(inputs: LossInputs, knobs: GspoKnobs) -> LossOutputs:
    """The clipped surrogate of the sequence ratio."""
    policy = F.gspo_policy_loss(
        logprobs=inputs.logprobs,
        old_logprobs=P.old_logprobs(inputs, knobs),
        advantages=inputs.advantages,
        loss_mask=inputs.loss_mask,
        sample_ids=inputs.sample_ids,
        num_samples=inputs.num_samples,
        clip_low=knobs.clip_low,
        clip_high=knobs.clip_high,
        dual_clip=knobs.dual_clip,
    )
    return P.outputs(policy, inputs, knobs)


SPEC = AlgorithmSpec(
    name="gspo",
    summary="one length-normalised ratio a sequence, clipped at 3e-4 / 4e-4",
    knobs=GspoKnobs,
    needs=P.group_needs,
    check=check,
    advantages=P.group_advantages,
    loss=loss,
    denominator=P.denominator,
    normalize=P.normalize_group,
)
