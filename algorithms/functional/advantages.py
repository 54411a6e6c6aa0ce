"""Rewards of tokens, GAE, normalisation over a step. Statistics in float64, results in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def overlong_penalty(*, lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): ``[samples]`` float32 in -1..0, added to rewards.

    ``lengths`` ``[samples]`` int64, response tokens. 0 up to ``max_length - buffer``, then falling linearly to -1 at
    ``max_length`` and beyond.
    """
    return ((max_length - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0).float()


def sums_to_the_end(*, per_token: Tensor, loss_mask: Tensor, sample_ids: Tensor) -> Tensor:
    """``[tokens]``: for each token the sum of ``per_token`` from it to its sample's end, itself included.

    Tokens of a sample lie side by side, in order. Masked tokens count 0.
    """
    values = per_token.masked_fill(~loss_mask, 0.0).double()
    before = values.cumsum(0) - values  # over all samples, without the token itself
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
    """GAE (Schulman et al. 2016, arXiv 1506.02438, eq. 16): ``[tokens]`` float32 advantages.

    δ_t = r_t + gamma · V_{t+1} - V_t and A_t = δ_t + gamma · gae_lambda · A_{t+1}; beyond a sample's end V and A are 0.
    ``values`` ``[tokens]``: of the state in front of each token. t + 1 is the sample's next TRAINED token: masked ones
    are stepped over, as no decision of the policy's, and have advantage 0. ``gae_lambda``: one number, or one a sample,
    ``[samples]``.
    """
    import torch  # here, because the settings are checked in processes that have no torch

    trained = loss_mask.nonzero()[:, 0]
    samples = sample_ids[trained]
    counts = torch.bincount(samples, minlength=num_samples)
    place = torch.arange(trained.numel()) - (counts.cumsum(0) - counts)[samples]
    # One line a sample, trained tokens only, zeros after its end; the last column is the state after the longest one.
    longest = int(counts.max()) if trained.numel() else 0
    grid = torch.zeros(2, num_samples, longest + 1, dtype=torch.float64)
    grid[0, samples, place], grid[1, samples, place] = token_rewards[trained].double(), values[trained].double()
    advantages = grid[0] - grid[1] + gamma * torch.nn.functional.pad(grid[1, :, 1:], (0, 1))
    # The sum of a geometric tail by doubling: after round k each entry holds its own and the next 2^k - 1 terms.
    reach, decay = 1, gamma * (gae_lambda if isinstance(gae_lambda, float | int) else gae_lambda.double()[:, None])
    while reach <= longest:
        advantages[:, :-reach] += decay * advantages[:, reach:]
        reach, decay = 2 * reach, decay * decay
    result = values.new_zeros(values.shape).float()
    result[trained] = advantages[samples, place].float()
    return result


def discounted_rewards(
    *, token_rewards: Tensor, loss_mask: Tensor, sample_ids: Tensor, num_samples: int, gamma: float
) -> Tensor:
    """``[tokens]`` float32: Σ gamma^k r_{t+k} over the sample's trained tokens from each trained token on."""
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
    """VAPO's length-adaptive GAE (arXiv 2504.05118): λ = 1 - 1 / (alpha · l) of a sample with l trained tokens.

    ``[samples]`` float64. The weights of GAE's terms, Σ λ^t = 1 / (1 - λ), then add up to alpha · l. Where alpha · l is
    below 1, λ is 0.
    """
    lengths = loss_mask.new_zeros(num_samples).double().index_add(0, sample_ids, loss_mask.double())
    return 1.0 - 1.0 / (alpha * lengths).clamp(min=1.0)


def rewards_of_tokens(*, rewards: Tensor, penalties: Tensor | None, loss_mask: Tensor, sample_ids: Tensor) -> Tensor:
    """``[tokens]``: each sample's reward at its last trained token, less ``penalties`` ``[tokens]`` if there are any.

    A sample without a trained token has no reward. Tokens of a sample lie side by side, in order.
    """
    result = rewards.new_zeros(sample_ids.shape)
    trained = loss_mask.nonzero()[:, 0]
    samples = sample_ids[trained]
    last = samples != samples.roll(-1)
    last[-1:] = True
    result[trained[last]] = rewards[samples[last]]
    return result if penalties is None else result - penalties.masked_fill(~loss_mask, 0.0)


def normalize_over_step(
    *, advantages: Sequence[Tensor], loss_masks: Sequence[Tensor], std_epsilon: float
) -> list[Tensor]:
    """REINFORCE++ (arXiv 2501.03262): (A - mean) / (std + std_epsilon) over all trained tokens of all groups.

    One ``[tokens]`` tensor a group, in and out, float32; the std is that of the population. Equal advantages give
    exactly 0, and so does a step without one trained token.
    """
    import torch  # here, because the settings are checked in processes that have no torch

    trained = torch.cat([values[mask] for values, mask in zip(advantages, loss_masks, strict=True)]).double()
    if trained.numel() == 0 or bool((trained == trained[0]).all()):
        return [values.new_zeros(values.shape).float() for values in advantages]
    mean, std = trained.mean(), trained.std(correction=0)
    return [((values.double() - mean) / (std + std_epsilon)).float() for values in advantages]


def drop_all_equal(*, rewards: Sequence[float], dropped_in_a_row: int, max_dropped: int) -> str | None:
    """DAPO's dynamic sampling (arXiv 2503.14476): "all_equal" for a group that teaches nothing, None for one to keep.

    Rewards are compared as they are: a float std of equal rewards need not be 0. After ``max_dropped`` groups in a row
    the next is kept whatever it is, so that a policy that has learnt everything does not sample for ever.
    """
    equal = all(reward == rewards[0] for reward in rewards)
    return "all_equal" if equal and dropped_in_a_row < max_dropped else None
