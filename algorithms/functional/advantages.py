"""Computes token rewards, GAE and normalisation over a train step. Statistics are float64, results float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def overlong_penalty(*, lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Returns DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), ``[samples]`` float32 in [-1, 0].

    ``lengths`` ``[samples]`` int64 counts response tokens. The punishment is 0 up to ``max_length - buffer`` tokens,
    falls linearly to -1 at ``max_length`` tokens, and is -1 for longer responses. The caller adds it to the rewards.
    """
    return ((max_length - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0).float()


def reward_to_go(*, per_token: Tensor, loss_mask: Tensor, sample_ids: Tensor) -> Tensor:
    """Returns, for each token, the sum of ``per_token`` from this token to the end of its sample, ``[tokens]`` float32.

    The sum includes the token itself. Masked tokens add 0. The tokens of a sample must be adjacent and in order.
    """
    values = per_token.masked_fill(~loss_mask, 0.0).double()
    before = values.cumsum(0) - values  # sum over all earlier tokens of all samples
    num_samples = int(sample_ids.max()) + 1 if sample_ids.numel() else 0
    totals = values.new_zeros(num_samples).index_add(0, sample_ids, values)
    starts = totals.cumsum(0) - totals
    return (totals[sample_ids] - (before - starts[sample_ids])).float()


def generalized_advantages(
    *,
    token_rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    sample_ids: Tensor,
    num_samples: int,
    gamma: float,
    gae_lambda: float | Tensor,
) -> Tensor:
    """Returns the advantages of generalised advantage estimation (GAE, arXiv 1506.02438, eq. 16), ``[tokens]`` float32.

    δ_t = r_t + γ V_{t+1} - V_t and A_t = δ_t + γ λ A_{t+1}, with V = A = 0 after a sample's end. t + 1 is the sample's
    next trained token. Masked tokens are skipped, because the policy did not choose them, and have advantage 0.

    ``token_rewards`` and ``values`` are ``[tokens]`` float. A token's value is the value of the state before the token.
    ``gae_lambda`` is λ: one number, or one number per sample, ``[samples]``. ``gamma`` is γ.
    """
    import torch  # imported here, because settings are checked in processes that have no torch

    trained = loss_mask.nonzero()[:, 0]
    samples = sample_ids[trained]
    counts = torch.bincount(samples, minlength=num_samples)
    positions = torch.arange(trained.numel()) - (counts.cumsum(0) - counts)[samples]
    # The grid has one row per sample: the trained tokens, then zeros. The last column is after the longest sample.
    longest = int(counts.max()) if trained.numel() else 0
    grid = torch.zeros(2, num_samples, longest + 1, dtype=torch.float64)
    grid[0, samples, positions], grid[1, samples, positions] = token_rewards[trained].double(), values[trained].double()
    advantages = grid[0] - grid[1] + gamma * torch.nn.functional.pad(grid[1, :, 1:], (0, 1))
    # The loop sums the geometric series by doubling: after round k, each entry contains 2^k terms.
    reach, decay = 1, gamma * (gae_lambda if isinstance(gae_lambda, float | int) else gae_lambda.double()[:, None])
    while reach <= longest:
        advantages[:, :-reach] += decay * advantages[:, reach:]
        reach, decay = 2 * reach, decay * decay
    result = values.new_zeros(values.shape).float()
    result[trained] = advantages[samples, positions].float()
    return result


def discounted_rewards(
    *, token_rewards: Tensor, loss_mask: Tensor, sample_ids: Tensor, num_samples: int, gamma: float
) -> Tensor:
    """Returns the discounted sums of rewards Σ_k γ^k r_{t+k} over a sample's trained tokens, ``[tokens]`` float32.

    ``token_rewards`` is ``[tokens]`` float and ``gamma`` is γ. Masked tokens are skipped and get 0.
    """
    return generalized_advantages(
        token_rewards=token_rewards,
        values=token_rewards.new_zeros(token_rewards.shape),
        loss_mask=loss_mask,
        sample_ids=sample_ids,
        num_samples=num_samples,
        gamma=gamma,
        gae_lambda=1.0,
    )


def length_adaptive_lambda(*, loss_mask: Tensor, sample_ids: Tensor, num_samples: int, alpha: float) -> Tensor:
    """Returns λ = 1 - 1 / (α l) of VAPO's length-adaptive GAE (arXiv 2504.05118), ``[samples]`` float64.

    l is the number of the sample's trained tokens, and ``alpha`` is α. So the sum of GAE's weights, Σ λ^t = 1 / (1 -
    λ), is α l. λ is 0 if α l is below 1.
    """
    lengths = loss_mask.new_zeros(num_samples).double().index_add(0, sample_ids, loss_mask.double())
    return 1.0 - 1.0 / (alpha * lengths).clamp(min=1.0)


def token_rewards(*, rewards: Tensor, penalties: Tensor | None, loss_mask: Tensor, sample_ids: Tensor) -> Tensor:
    """Returns each sample's reward at its last trained token (else 0) minus ``penalties``, ``[tokens]`` float32.

    ``rewards`` is ``[samples]``, and ``penalties`` is ``[tokens]`` or None. The reward of a sample without trained
    tokens is ignored. The tokens of a sample must be adjacent and in order.
    """
    result = rewards.new_zeros(sample_ids.shape).float()
    trained = loss_mask.nonzero()[:, 0]
    samples = sample_ids[trained]
    last = samples != samples.roll(-1)
    last[-1:] = True
    result[trained[last]] = rewards[samples[last]].float()
    return result if penalties is None else result - penalties.masked_fill(~loss_mask, 0.0)


def normalize_over_step(
    *, advantages: Sequence[Tensor], loss_masks: Sequence[Tensor], std_epsilon: float
) -> list[Tensor]:
    """Returns (A - mean) / (std + ε) over all trained tokens of all groups (REINFORCE++, arXiv 2501.03262).

    ``advantages`` and the result have one float ``[tokens]`` tensor per group; the result is float32. The std is the
    population std, and ``std_epsilon`` is ε. The result is exactly 0 if all advantages are equal or no token is
    trained.
    """
    import torch  # imported here, because settings are checked in processes that have no torch

    trained = torch.cat([values[mask] for values, mask in zip(advantages, loss_masks, strict=True)]).double()
    if trained.numel() == 0 or bool((trained == trained[0]).all()):
        return [values.new_zeros(values.shape).float() for values in advantages]
    mean, std = trained.mean(), trained.std(correction=0)
    return [((values.double() - mean) / (std + std_epsilon)).float() for values in advantages]


def drop_all_equal(*, rewards: Sequence[float], dropped_in_a_row: int, max_dropped: int) -> str | None:
    """Returns "all_equal" if all rewards of a group are equal, else None (DAPO's dynamic sampling, arXiv 2503.14476).

    A group of equal rewards has no gradient, so the caller drops it. The rewards are compared, not their std, because
    the float std of equal rewards may differ from 0. After ``max_dropped`` consecutive drops the next group is kept. So
    a run makes progress even if its policy solves every prompt.
    """
    equal = all(reward == rewards[0] for reward in rewards)
    return "all_equal" if equal and dropped_in_a_row < max_dropped else None
