"""Tries an algorithm: one made-up group goes through all its functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_core.contracts.algorithm import (
    AdvantageInputs,
    AlgorithmSpec,
    GroupTurns,
    LossInputs,
    Requirements,
    StepTotals,
    ValueInputs,
)

if TYPE_CHECKING:
    from torch import Generator, Tensor
SAMPLES = 8  # the largest number of samples in the group
TOKENS = 3  # tokens per sample
TOKENS = 3  # a sample


def try_algorithm(spec: AlgorithmSpec, config: Any) -> None:
    """Calls every function of ``spec`` with tensors as the contract describes them, on the CPU.

    Half of the rewards are 0 and half are 1, log-probs are near -1, and all tokens are trained. Raises what the
    functions raise, and `WrongResult`.
    """
    import torch

    requirements = spec.requirements(config)
    samples = min(SAMPLES, config.group_size)
    random = torch.Generator().manual_seed(0)
    group = _made_up_group(requirements, samples, random)
    tokens = samples * TOKENS
    advantages = spec.advantages(group, config)
    returns = advantages if spec.returns is None or not requirements.critic else spec.returns(group, advantages, config)
    if spec.normalize is not None and requirements.whole_step:
        advantages = spec.normalize([advantages], [group], config)[0]
    if spec.drop_group is not None:
        spec.drop_group(group.rewards.tolist(), 0, config)
    spec.denominator(StepTotals(tokens=tokens, samples=samples, groups=1), config)
    top_k = 0 if requirements.teacher is None else requirements.teacher.top_k
    old_logprobs = group.old_logprobs
    assert old_logprobs is not None
    outputs = spec.loss(
        LossInputs(
            logprobs=_logprobs(tokens, random).requires_grad_(),
            old_logprobs=old_logprobs,
            rollout_logprobs=old_logprobs,
            advantages=advantages,
            loss_mask=group.loss_mask,
            sample_ids=group.sample_ids,
            num_samples=samples,
            reference_logprobs=group.reference_logprobs,
            teacher_logprobs=group.teacher_logprobs,
            entropy=torch.ones(tokens, requires_grad=True) if requirements.entropy else None,
            teacher_top_logprobs=torch.full((tokens, top_k), -2.0) if top_k else None,
            top_logprobs=torch.full((tokens, top_k), -2.0, requires_grad=True) if top_k else None,
        ),
        config,
    )
    outputs.loss_sum.backward()
    if requirements.critic and spec.value_loss is not None:
        values = torch.zeros(tokens, requires_grad=True)
        spec.value_loss(
            ValueInputs(
                values=values,
                old_values=torch.zeros(tokens),
                returns=returns,
                loss_mask=group.loss_mask,
                sample_ids=group.sample_ids,
                num_samples=samples,
            ),
            config,
        ).loss_sum.backward()


def _made_up_group(requirements: Requirements, samples: int, random: Generator) -> AdvantageInputs:
    import torch

    tokens = samples * TOKENS
    rollout = _logprobs(tokens, random)
    return AdvantageInputs(
        rewards=(torch.arange(samples) % 2).float(),
        lengths=torch.full((samples,), TOKENS),
        loss_mask=torch.ones(tokens, dtype=torch.bool),
        sample_ids=torch.repeat_interleave(torch.arange(samples), TOKENS),
        old_logprobs=rollout,
        rollout_logprobs=rollout,
        reference_logprobs=_logprobs(tokens, random) if requirements.reference else None,
        teacher_logprobs=_logprobs(tokens, random) if requirements.teacher is not None else None,
        values=torch.zeros(tokens) if requirements.critic else None,
        turns=_made_up_turns(samples) if requirements.sees_turns else None,
    )


def _made_up_turns(samples: int) -> GroupTurns:
    """Returns two turns for each sample, of one and of two tokens; all first turns begin in the same state."""
    import torch

    turns = torch.arange(2 * samples)
    return GroupTurns(
        of_tokens=turns.repeat_interleave(torch.tensor([1, TOKENS - 1]).repeat(samples)),
        samples=turns // 2,
        rewards=(turns % 2 * (turns // 2 % 2)).double(),
        state_keys=[f"{turn // 2} later" if turn % 2 else "first" for turn in turns.tolist()],
    )


def _logprobs(tokens: int, random: Generator) -> Tensor:
    import torch

    return -1.0 + 0.1 * torch.rand(tokens, generator=random)
