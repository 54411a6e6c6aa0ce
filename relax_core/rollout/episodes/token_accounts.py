"""Accounts for every token that the episodes of a group sampled: trained, or not trained for a reason."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_core.contracts.tree import TokenTree
from relax_core.rollout.episodes.tree_builder import PlayedEpisode

# not_chosen: the episode started again without them; orphan: no client of an endpoint got the answer; no_reward: their
# episode has none; dropped: their group is not trained, or it was given up before its end; masked: the loss mask leaves
# them out; stale: their weights are older than the window, or their episode ended because of that.
REASONS = ("not_chosen", "orphan", "no_reward", "dropped", "masked", "stale")
_OF_END = {"stale": "stale", "cancelled": "dropped"}  # of episodes without a reward; of all other ends, no_reward


def token_accounts(
    episodes: Sequence[PlayedEpisode], tree: TokenTree | None, *, oldest_version: int = 0
) -> dict[str, int]:
    """Returns how many tokens the episodes sampled, how many of them are trained, and the others by reason.

    ``tree`` is the group's datum, None if the group was dropped. Rows of weights older than ``oldest_version`` are not
    trained. The sum of all counts but "sampled" is "sampled".
    """
    counts = dict.fromkeys(("trained", *REASONS), 0)
    for episode in episodes:
        counts["not_chosen"] += episode.not_chosen
        counts["orphan"] += episode.orphan
        sampled = sum(len(turn.response.output_ids) for turn in episode.turns)
        if episode.reward is None:
            counts[_OF_END.get(episode.ended, "no_reward")] += sampled
        elif tree is None:
            counts["dropped"] += sampled
    if tree is not None:
        _, rows = tree.tokens
        assert len(np.unique(rows)) == len(rows), "each draw has rows of its own"
        stale = tree.versions[rows] < oldest_version
        mask = tree.loss_mask[rows]
        counts["trained"] = int((mask & ~stale).sum())
        counts["stale"] += int((mask & stale).sum())
        counts["masked"] = int((~mask).sum())
    counts["sampled"] = sum(counts.values())
    whole = sum(len(turn.response.output_ids) for one in episodes for turn in one.turns)
    assert counts["sampled"] == whole + counts["not_chosen"] + counts["orphan"], "a sampled token is in no account"
    return counts
