"""Tests on random groups that every sampled token is trained, or counted with the reason why it is not trained."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from relax_core.contracts.bus import Group
from relax_core.contracts.reward import RewardOutput
from relax_core.rollout.episodes.episode_records import EpisodeRecord, PlayedTurn
from relax_core.rollout.episodes.group_assembly import complete_group, token_accounts
from tests.responses import response as make_response
from tests.trees import tree_of

GROUPS, EPISODES, OLDEST = 250, 4, 3


def random_episode(draw: np.random.Generator, place: int) -> EpisodeRecord:
    """Returns an episode of up to four turns with several weight versions. Some turns rewrite the history."""
    turns: list[PlayedTurn] = []
    prompt = [1, 2, 3]
    for _ in range(draw.integers(1, 5)):
        versions = sorted(draw.integers(2, 6, size=draw.integers(1, 6)).tolist())
        answer = make_response(draw.integers(7, 9, size=len(versions)).tolist(), versions=versions)
        turns.append(PlayedTurn(prompt_ids=prompt, response=answer))
        prompt = [*prompt, *answer.output_ids.tolist(), 5]
        if draw.random() < 0.3:  # the env keeps a summary or a part of the history
            prompt = [1, 2, 4] if draw.random() < 0.5 else [*prompt[: draw.integers(1, len(prompt))], 6]
    failed = draw.random() < 0.2
    lost = str(draw.choice(["env_failed", "step_timeout", "episode_timeout", "straggler", "stale", "cancelled"]))
    ended = lost if failed else str(draw.choice(["env_done", "turn_cut", "token_budget", "context_full"]))
    return EpisodeRecord(
        uid=f"g00000012.{place}",
        turns=[] if failed and draw.random() < 0.3 else turns,
        output=RewardOutput(reward=None if failed else float(draw.random())),
        ended=ended,  # type: ignore[arg-type]
        not_chosen=int(draw.integers(0, 9)) if draw.random() < 0.2 else 0,
    )


@pytest.mark.parametrize("masks", [{}, {"mask_off_policy": True}, {"mask_truncated": True}])
def test_the_accounts_of_a_thousand_episodes_add_up(masks: dict[str, Any]) -> None:
    draw = np.random.default_rng(5)
    seen: Counter[str] = Counter()
    for _ in range(GROUPS):
        episodes = [random_episode(draw, place) for place in range(EPISODES)]
        refuse = (lambda rewards: "filtered") if draw.random() < 0.1 else None
        done = complete_group(index=12, episodes=episodes, refuse=refuse, **masks)  # type: ignore[arg-type]
        tree = tree_of(done) if isinstance(done, Group) else None
        counts = token_accounts(episodes, tree, oldest_version=OLDEST)
        sampled = [turn.response for episode in episodes for turn in episode.turns]
        # The expected counts come from the responses and the group's end, without the tree.
        assert counts["sampled"] == sum(len(response.output_ids) for response in sampled) + sum(
            e.not_chosen for e in episodes
        )
        assert counts["sampled"] == sum(value for name, value in counts.items() if name != "sampled")
        if tree is not None and not masks:
            rewarded = [turn.response for episode in episodes if episode.reward is not None for turn in episode.turns]
            versions = np.concatenate([response.versions for response in rewarded])
            assert counts["trained"] == int((versions >= OLDEST).sum())
            ended_stale = [turn.response for episode in episodes if episode.ended == "stale" for turn in episode.turns]
            old = int((versions < OLDEST).sum()) + sum(len(response.output_ids) for response in ended_stale)
            assert counts["stale"] == old and counts["masked"] == 0
        seen.update(counts)
    wanted = {"trained", "not_chosen", "no_reward", "dropped", "stale"} | ({"masked"} if masks else set())
    assert all(seen[name] for name in wanted), seen
