"""Computes rewards, returns and advantages of turns, for credit assignment within an episode.

The shape ``[turns]`` has one entry per turn of a group: sample by sample, in the order of the turns
(`relax_core.contracts.algorithm.GroupTurns`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from relax_core.contracts.tree import reward_array

if TYPE_CHECKING:
    from torch import Tensor


def token_turn_rewards(
    *,
    turn_rewards: Tensor,
    turn_samples: Tensor,
    turn_ids: Tensor,
    penalties: Tensor | None,
    loss_mask: Tensor,
    sample_ids: Tensor,
) -> Tensor:
    """Returns the rewards of turns as rewards of tokens, minus ``penalties``: ``[tokens]`` float32.

    A turn's reward is at the turn's last trained token; other tokens get 0. ``turn_rewards`` is ``[turns]`` float64.
    ``turn_samples`` is ``[turns]`` int64: the sample of each turn. ``turn_ids`` is ``[tokens]`` int64, ascending: the
    turn of each token. If a turn has no trained token, its reward goes to the last earlier trained token of the sample.
    Without such a token the reward is ignored, because no trained token led to it.
    """
    import torch  # imported here, because settings are checked in processes that have no torch

    result = turn_rewards.new_zeros(sample_ids.shape)
    trained = loss_mask.nonzero()[:, 0]
    if trained.numel():
        turns = torch.arange(turn_rewards.numel())
        last = torch.searchsorted(turn_ids[trained].contiguous(), turns, right=True) - 1
        places = trained[last.clamp(min=0)]
        led_here = (last >= 0) & (sample_ids[places] == turn_samples)
        result.index_add_(0, places[led_here], turn_rewards[led_here])
    result = result.float()
    return result if penalties is None else result - penalties.masked_fill(~loss_mask, 0.0)


def turn_returns(*, turn_rewards: Tensor, turn_samples: Tensor, gamma: float) -> Tensor:
    """Returns, for each turn t, Σ_k γ^(k - t) r_k over the turns k >= t of its sample, ``[turns]`` float64.

    ``turn_rewards`` is ``[turns]`` float64, ``turn_samples`` is ``[turns]`` int64, and ``gamma`` is γ, the discount per
    turn.
    """
    returns, later, sample = turn_rewards.clone(), 0.0, -1
    for turn in reversed(range(turn_rewards.numel())):
        own = int(turn_samples[turn])
        later = float(turn_rewards[turn]) + (gamma * later if own == sample else 0.0)
        returns[turn], sample = later, own
    return returns


def anchor_advantages(
    *, returns: Tensor, state_keys: Sequence[str | None], relative: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns the step-level advantages of GiGPO (arXiv 2505.10978, eq. 7), ``[turns]`` float32.

    An anchor group consists of all turns of a group that begin in the same state, across episodes. ``relative`` maps
    the ``returns`` of an anchor group to advantages. It is the function that maps a group's episode rewards to
    advantages. The returns are rounded by `relax_core.contracts.tree.reward_array`. A turn gets 0 if its state is
    unknown or no other turn begins in it.
    """
    import torch  # imported here, because settings are checked in processes that have no torch

    result = returns.new_zeros(returns.shape).float()
    anchors: dict[str, list[int]] = {}
    for turn, key in enumerate(state_keys):
        if key is not None:
            anchors.setdefault(key, []).append(turn)
    for turns in anchors.values():
        if len(turns) > 1:
            result[turns] = relative(torch.from_numpy(reward_array(returns[turns].tolist())))
    return result
