"""Tests ends and restarts of episodes of several turns, with a real engine and the bus's state machine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.schema import EngineConfig
from relax_core.contracts.env import Action, BaseInteractionEnv, EpisodeStart, InteractionConfig, StepResult
from relax_core.contracts.tree import check_tree
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_process import EngineLaunch
from relax_core.tools.make_tiny import tiny_model_folder
from tests.contracts.engine.harness import Engine
from tests.rollout.episodes.test_episodes import CONTEXT, Echo, env_of, play
from tests.rollout.rollout_loop_harness import GROUP_SIZE, ReplayBufferBus
from tests.trees import path_of, tree_of


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


@pytest.fixture(scope="module")
def engine_settings(launch: EngineLaunch) -> EngineConfig:
    return dataclasses.replace(launch.engine, context_length=CONTEXT)


def test_an_episode_starts_again_after_a_failure(engine: Engine, folder: Path) -> None:
    """One of three groups fails once in its second turn, and one group fails at every attempt."""
    attempts: dict[str, list[int]] = defaultdict(list)
    closed: list[str] = []
    seeds: set[tuple[str, int, int]] = set()

    class Odd(Echo):
        def __init__(self, start: EpisodeStart, config: Any) -> None:
            super().__init__(start, config)
            self.prompt = str(start.row["prompt"])
            attempts[self.prompt].append(start.attempt)
            seeds.add((self.prompt, start.group_seed, start.episode_seed))
            assert start.limits is not None and start.limits.context_tokens == CONTEXT

        async def step(self, action: Action) -> StepResult:  # type: ignore[override]
            if self.prompt == "rev 100" and self.start.attempt == 0 and self.played == 1:
                raise OSError("the game server is gone")
            if self.prompt == "rev 102":
                raise OSError("there is no game server")
            return super().step(action)

        async def close(self) -> None:  # type: ignore[override]
            closed.append(self.prompt)

    bus = ReplayBufferBus(steps=1)
    records = play(engine, folder, bus, env_of(Odd), max_new_tokens=64)
    assert sorted(bus.rows) == ["g00000000", "g00000001", "g00000003"]
    assert sorted(attempts["rev 100"]) == [0] * GROUP_SIZE + [1] * GROUP_SIZE
    assert sorted(attempts["rev 102"]) == [0] * GROUP_SIZE + [1] * GROUP_SIZE
    assert len(closed) == sum(map(len, attempts.values())), "each env is closed once"
    assert len(seeds) == len(attempts) * GROUP_SIZE, "a restart has the seeds of the first attempt"
    assert bus.core.progress().ledger.dropped == {"reward_failed": GROUP_SIZE}
    # The accounts include tokens sampled before the restart, and tokens of episodes without a reward.
    counts = max((values for _, _, values in records), key=lambda values: values["tokens/sampled"])
    assert counts["tokens/not_chosen"] > 0 and counts["tokens/no_reward"] > 0
    trees = [tree_of(row) for row in bus.rows.values()]
    assert counts["tokens/trained"] == sum(int(tree.loss_mask.sum()) for tree in trees)


def test_an_episode_that_takes_too_long_ends_and_does_not_start_again(engine: Engine, folder: Path) -> None:
    """The player cancels the running call. On a loaded machine, other episodes may time out, too."""
    attempts: list[int] = []
    cancelled: list[bool] = []

    class Hangs(Echo):
        async def step(self, action: Action) -> StepResult:  # type: ignore[override]
            if self.start.row["prompt"] == "rev 101":
                attempts.append(self.start.attempt)
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.append(True)
            return super().step(action)

    bus = ReplayBufferBus(steps=1)
    config = InteractionConfig(name="mine", episode_timeout_s=5.0)
    records = play(engine, folder, bus, env_of(Hangs), env_config=config, max_new_tokens=64)
    assert attempts == [0] * GROUP_SIZE and len(cancelled) == GROUP_SIZE
    assert "g00000001" not in bus.rows
    assert any(values.get("ended/episode_timeout") for _, _, values in records)


def test_a_rewritten_history_forks_the_tree_and_each_token_is_trained_once(engine: Engine, folder: Path) -> None:
    summary = [{"role": "user", "content": "rev 12"}]

    class Forgets(Echo):
        turns = 3

        def step(self, action: Action) -> StepResult:
            step = super().step(action)
            return dataclasses.replace(step, context_edit=summary) if self.played == 2 else step

    bus = ReplayBufferBus(steps=1)
    play(engine, folder, bus, env_of(Forgets), max_new_tokens=64)
    forked = 0
    rewritten = PromptTokenizer(folder).encode(summary)
    for tree in map(tree_of, bus.rows.values()):
        check_tree(tree)
        for place, episode in enumerate(tree.episodes):
            of_episode, rows = tree.tokens
            own = rows[of_episode == place].tolist()
            sampled = [row for turn in episode.turns for row in range(turn.start, turn.end)]
            assert sorted(own) == sorted(sampled) and len(set(own)) == len(own)
            assert tree.loss_mask[own].all()
            if len(episode.turns) == 3:
                forked += 1
                assert len(episode.leaves) == 2
                last = path_of(tree, episode.leaves[-1])
                before = [row for row in last if row < episode.turns[2].start]
                assert tree.token_ids[before].tolist() == rewritten
                # The other segment ends at the last token of the second turn.
                assert episode.leaves[0] == episode.turns[1].end - 1
    assert forked, "no episode had a third turn, so nothing was tested"


@pytest.mark.parametrize("on_turn_cut", ["end", "continue"])
def test_budgets_of_tokens(engine: Engine, folder: Path, on_turn_cut: str) -> None:
    """With one token per turn, only an empty response ends with the stop token."""
    cut: list[bool] = []

    class Listens(Echo):
        turns = 9

        def step(self, action: Action) -> StepResult:
            cut.append(not action.stopped)
            return super().step(action)

    config = InteractionConfig(name="mine", max_turn_tokens=1, on_turn_cut=on_turn_cut)
    bus = ReplayBufferBus(steps=1)
    play(engine, folder, bus, env_of(Listens), env_config=config, max_new_tokens=3)
    episodes = [episode for row in bus.rows.values() for episode in tree_of(row).episodes]
    assert all(turn.end - turn.start == 1 for episode in episodes for turn in episode.turns)
    if on_turn_cut == "end":
        assert not any(cut) and "turn_cut" in {episode.ended for episode in episodes}
    else:
        assert any(cut) and {(episode.ended, len(episode.turns)) for episode in episodes} == {("token_budget", 3)}


def test_a_long_observation_is_cut(engine: Engine, folder: Path) -> None:
    """The observations have 500 tokens in one group, and a megabyte in the other groups."""
    shown: list[int] = []

    class Wordy(Echo):
        def step(self, action: Action) -> StepResult:
            length = 500 if self.start.row["prompt"] == "rev 100" else 2**20
            return dataclasses.replace(super().step(action), observation="9" * length)

    bus = ReplayBufferBus(steps=1)
    config = InteractionConfig(name="mine", max_observation_tokens=20)
    records = play(engine, folder, bus, env_of(Wordy), env_config=config)
    nine = PromptTokenizer(folder).encode_plain("9")
    for tree in map(tree_of, bus.rows.values()):
        for episode in tree.episodes:
            for before, after in zip(episode.turns, episode.turns[1:], strict=False):
                shown.append(tree.token_ids[before.end : after.start].tolist().count(nine[0]))
    assert shown and set(shown) == {20}
    assert records[-1][2]["cut_observations"] > 0


def test_numbers_of_the_env_are_metrics(engine: Engine, folder: Path) -> None:
    class Counts(Echo):
        def step(self, action: Action) -> StepResult:
            return dataclasses.replace(super().step(action), info={"asked": 2, "word": "x"}, state_key="s")

    bus = ReplayBufferBus(steps=1)
    (record,) = play(engine, folder, bus, env_of(Counts))
    assert record[2]["env/asked"] == 2.0 and "env/word" not in record[2]
    ends = {name: share for name, share in record[2].items() if name.startswith("ended/")}
    assert sum(ends.values()) == pytest.approx(1.0) and "ended/env_done" in ends
    turns = [turn for row in bus.rows.values() for episode in tree_of(row).episodes for turn in episode.turns]
    assert {turn.state_key for turn in turns} == {"s", None}
    assert all(turn.state_key == "s" or turn.finish == "length" for turn in turns), "the env sees no cut response"


def test_a_new_start_that_opens_differently_ends_the_run(engine: Engine, folder: Path) -> None:
    class Drifts(Echo):
        def reset(self) -> Any:
            return f"start {self.start.attempt}"

        def step(self, action: Action) -> StepResult:
            raise OSError("gone")

    kind: Callable[[EpisodeStart, Any], BaseInteractionEnv] = Drifts
    with pytest.raises(ValueError, match=r"open differently\..*start 0.*start 1"):
        play(engine, folder, ReplayBufferBus(steps=1), env_of(kind))
