"""One made-up group through all functions of an algorithm."""

from __future__ import annotations

from typing import Any

from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec, LossInputs, StepTotals, ValueInputs

SAMPLES = 8  # of a group, at most
TOKENS = 3  # a sample


def try_algorithm(spec: AlgorithmSpec, config: Any) -> None:
    """Calls every function of ``spec`` with tensors as the contract describes them, on the CPU: rewards of which half
    are 0 and half are 1, log-probs near -1, all tokens trained. Raises what the functions raise, and `WrongResult`."""
    import torch

    requirements = spec.requirements(config)
    samples = min(SAMPLES, config.group_size)
    tokens = samples * TOKENS
    random = torch.Generator().manual_seed(0)

    def logprobs() -> torch.Tensor:
        return -1.0 + 0.1 * torch.rand(tokens, generator=random)

    top_k = 0 if requirements.teacher is None else requirements.teacher.top_k
    rollout = logprobs()
    group = AdvantageInputs(
        rewards=(torch.arange(samples) % 2).float(),
        lengths=torch.full((samples,), TOKENS),
        loss_mask=torch.ones(tokens, dtype=torch.bool),
        sample_ids=torch.repeat_interleave(torch.arange(samples), TOKENS),
        old_logprobs=rollout,
        rollout_logprobs=rollout,
        reference_logprobs=logprobs() if requirements.reference else None,
        teacher_logprobs=logprobs() if requirements.teacher is not None else None,
        values=torch.zeros(tokens) if requirements.critic else None,
    )
    advantages = spec.advantages(group, config)
    returns = advantages if spec.returns is None or not requirements.critic else spec.returns(group, advantages, config)
    if spec.normalize is not None and requirements.whole_step:
        advantages = spec.normalize([advantages], [group], config)[0]
    if spec.drop_group is not None:
        spec.drop_group(group.rewards.tolist(), 0, config)
    spec.denominator(StepTotals(tokens=tokens, samples=samples, groups=1), config)
    current = logprobs().requires_grad_()
    outputs = spec.loss(
        LossInputs(
            logprobs=current,
            old_logprobs=rollout,
            rollout_logprobs=rollout,
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
