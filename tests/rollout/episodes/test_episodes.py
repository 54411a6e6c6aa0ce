"""Tests episodes of several turns, with a real engine, real envs and the bus's state machine."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from envs.number_guess import NumberGuess, NumberGuessConfig
from relax_core.config.schema import EngineConfig
from relax_core.contracts.checked_plugins import checked_env
from relax_core.contracts.engine import Generated, PromptRequest
from relax_core.contracts.env import (
    Action,
    BaseInteractionEnv,
    EnvSpec,
    EpisodeStart,
    InteractionConfig,
    StepResult,
)
from relax_core.contracts.media import MediaError
from relax_core.contracts.plugin_results import WrongResult
from relax_core.contracts.reward import RewardInput, RewardOutput
from relax_core.contracts.tree import TokenTree, check_tree
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_process import EngineLaunch
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.registry import find_env, find_reward
from relax_core.rollout.prompt_tokens import sampling_seed
from relax_core.rollout.rewards.reward_failures import FEWEST_ROWS, RewardsFailed
from relax_core.rollout.rollout_loop import BadRows
from relax_core.tools.make_tiny import tiny_model_folder
from tests.contracts.engine.harness import TOKEN, Engine
from tests.rollout.rollout_loop_harness import GROUP_SIZE, STEP_GROUPS, ReplayBufferBus, renamed, sample, within
from tests.trees import path_of, tree_of

CONTEXT = 192
MIN_CACHED = 32  # the shortest prefix that an engine serves from its cache


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


@pytest.fixture(scope="module")
def engine_settings(launch: EngineLaunch) -> EngineConfig:
    return dataclasses.replace(launch.engine, context_length=CONTEXT, prefix_cache_tokens=64 * CONTEXT)


def env_of(kind: Callable[[EpisodeStart, Any], BaseInteractionEnv]) -> EnvSpec:
    return checked_env(EnvSpec(name="mine", summary="s", config=InteractionConfig, open=kind))


def play(engine: Engine, folder: Path, bus: ReplayBufferBus, env: EnvSpec, **given: Any) -> list[Any]:
    """Runs the loop until the bus closes. Returns the recorded metrics."""
    records: list[Any] = []

    async def scene() -> None:
        given.setdefault("reward", find_reward("env"))
        records.extend(await sample(engine, folder, bus, env=env, context=CONTEXT, **given))

    asyncio.run(within(scene()))
    return records


def path_ids(tree: TokenTree, place: int) -> list[int]:
    """Returns the token ids of an episode with one segment, from its root to its leaf."""
    rows = path_of(tree, tree.episodes[place].leaves[0])
    ids: list[int] = tree.token_ids[rows].tolist()
    return ids


class Echo(BaseInteractionEnv):
    """An env that repeats each response, ``turns`` times. Its methods are not async, so they run in threads."""

    turns = 2

    def __init__(self, start: EpisodeStart, config: InteractionConfig) -> None:
        self.start = start
        self.played = 0
        self.closed = False

    def reset(self) -> Any:
        return str(self.start.row["prompt"])

    def step(self, action: Action) -> StepResult:
        self.played += 1
        return StepResult(observation=f"you said {action.text}.", reward=0.25, done=self.played == self.turns)

    def close(self) -> None:
        self.closed = True


class CountingClient(EngineClient):
    """Records the number of prompts in each request."""

    sizes: list[int]

    async def generate(self, prompts: Sequence[PromptRequest], *given: Any, **more: Any) -> AsyncIterator[Generated]:
        self.sizes.append(len(prompts))
        async for response in super().generate(prompts, *given, **more):
            yield response


def test_groups_of_a_game_reach_the_bus_as_trees(engine: Engine, folder: Path) -> None:
    client = CountingClient(engine.process.url, TOKEN, request_timeout_s=60.0, control_timeout_s=30.0)
    client.sizes = []
    bus = ReplayBufferBus(steps=2, on_step=renamed(engine))
    records = play(engine, folder, bus, find_env("number_guess"), client=client)
    tokenizer = PromptTokenizer(folder)
    config = NumberGuessConfig()
    several, trees = 0, [tree_of(bus.rows[uid]) for uid in sorted(bus.rows)]
    assert len(trees) == 2 * STEP_GROUPS
    for tree in trees:
        check_tree(tree)
        assert len(tree.episodes) == GROUP_SIZE
        opening = tokenizer.encode([{"role": "user", "content": "guess a number from 1 to 7"}])
        for place, episode in enumerate(tree.episodes):
            ids = path_ids(tree, place)
            assert ids[: len(opening)] == opening and len(episode.leaves) == 1
            several += len(episode.turns) > 1
            assert len(episode.turns) <= config.max_turns and episode.reward == sum(
                turn.reward or 0.0 for turn in episode.turns
            )
            for before, after in zip(episode.turns, episode.turns[1:], strict=False):
                between = tokenizer.decode(tree.token_ids[before.end : after.start].tolist())
                assert between.startswith("\n<|im_start|>user\n")
                assert between.endswith("<|im_end|>\n<|im_start|>assistant\n")
                assert not tree.loss_mask[before.end : after.start].any()
            assert all(turn.began_s and turn.engine == "engine-0" for turn in episode.turns)
            assert all(tree.loss_mask[turn.start : turn.end].all() for turn in episode.turns)
            assert episode.ended in ("token_budget", "env_done")
            assert episode.turns[-1].finish == "stop" or episode.ended == "token_budget"
            stepped = episode.turns if episode.ended == "env_done" else episode.turns[:-1]
            assert all(turn.env_ms > 0.0 and turn.tools == [] for turn in stepped)
        # The tree contains the common rows once.
        assert (tree.end[: len(opening)] == tree.rows).all()
    assert several, "no episode had a second turn, so nothing was tested"
    assert client.sizes[0] == STEP_GROUPS * GROUP_SIZE, "turns that are ready at the same time share a request"
    assert sum(values["samples"] for _, _, values in records) == 2 * STEP_GROUPS * GROUP_SIZE
    assert sum(values["tokens"] for _, _, values in records) == sum(int(tree.lengths.sum()) for tree in trees)
    # The prompt of a turn is the path before its first token.
    asked = sum(
        len(path_of(tree, turn.start)) - 1 for tree in trees for episode in tree.episodes for turn in episode.turns
    )
    assert sum(values["prompt_tokens"] for _, _, values in records) == asked
    cached = sum(values["cached_share"] * values["prompt_tokens"] for _, _, values in records)
    later = [turn for tree in trees for episode in tree.episodes for turn in episode.turns[1:]]
    assert cached == pytest.approx(round(cached)) and cached >= MIN_CACHED * len(later)
    assert all(0.0 < values["queue_s"] <= values["engine_s"] for _, _, values in records)


def test_the_same_seed_plays_the_same_episodes_and_the_tree_is_the_conversation(engine: Engine, folder: Path) -> None:
    """The env runs in threads. The order of threads varies between runs."""
    tokenizer, seen = PromptTokenizer(folder), dict[str, RewardInput]()
    opened: list[Echo] = []

    def make(start: EpisodeStart, config: Any) -> Echo:
        opened.append(Echo(start, config))
        return opened[-1]

    def score(given: RewardInput, config: Any) -> RewardOutput:
        seen[given.uid] = given
        return RewardOutput(reward=sum(reward or 0.0 for reward in given.turn_rewards))

    reward = dataclasses.replace(find_reward("reverse_digits"), score=score)
    played = []
    for _ in range(2):
        bus = ReplayBufferBus(steps=1)
        play(engine, folder, bus, env_of(make), reward=reward)
        played.append({uid: tree_of(row) for uid, row in bus.rows.items()})
    assert played[0].keys() == played[1].keys() and len(played[0]) == STEP_GROUPS
    compared = 0
    for uid, tree in played[0].items():
        assert tree.token_ids.tobytes() == played[1][uid].token_ids.tobytes()
        for place, episode in enumerate(tree.episodes):
            given = seen[episode.uid]
            assert (
                len(given.turns) == len(given.turn_rewards) == len(episode.turns) and given.response == given.turns[-1]
            )
            assert given.ended == episode.ended and given.messages[0]["content"] == given.row["prompt"]
            assert [m["content"] for m in given.messages if m["role"] == "assistant"] == list(given.turns)
            sampled = [tree.token_ids[turn.start : turn.end - 1].tolist() for turn in episode.turns]
            if episode.ended == "env_done" and sampled == [tokenizer.encode_plain(text) for text in given.turns]:
                whole = tokenizer.encode(given.messages)  # the complete conversation by the template
                ids = path_ids(tree, place)
                assert whole[: len(ids)] == ids
                compared += 1
    ended = {episode.ended for tree in played[0].values() for episode in tree.episodes}
    assert "env_done" in ended and compared, ended
    assert all(env.closed for env in opened) and len(opened) == 2 * STEP_GROUPS * GROUP_SIZE
    seeds = {(env.start.group_seed, env.start.episode_seed) for env in opened}
    assert len(seeds) == STEP_GROUPS * GROUP_SIZE and len({group for group, _ in seeds}) == STEP_GROUPS


@pytest.mark.parametrize(("given", "ended"), [({"max_new_tokens": 1}, "token_budget"), ({}, "context_full")])
def test_an_episode_that_is_cut_is_scored_as_it_stands(
    engine: Engine, folder: Path, given: Mapping[str, int], ended: str
) -> None:
    class Wordy(Echo):
        turns = 9

        def step(self, action: Action) -> StepResult:
            return dataclasses.replace(super().step(action), observation="9" * CONTEXT)

    bus = ReplayBufferBus(steps=1)
    play(engine, folder, bus, env_of(Wordy), **given)
    episodes = [episode for row in bus.rows.values() for episode in tree_of(row).episodes]
    assert ended in {episode.ended for episode in episodes}
    assert {episode.reward for episode in episodes if episode.ended == "token_budget" and len(episode.turns) == 1} <= {
        0.0
    }
    assert {episode.reward for episode in episodes if episode.ended == "context_full"} <= {0.25}


def test_the_most_turns_are_played(engine: Engine, folder: Path) -> None:
    class Endless(Echo):
        turns = 99

        def step(self, action: Action) -> StepResult:
            return dataclasses.replace(super().step(action), observation="go on")

    bus = ReplayBufferBus(steps=1)
    play(engine, folder, bus, env_of(Endless), env_config=InteractionConfig(name="mine", max_turns=2))
    episodes = [episode for row in bus.rows.values() for episode in tree_of(row).episodes]
    assert {(episode.ended, len(episode.turns)) for episode in episodes if episode.ended != "token_budget"} == {
        ("max_turns", 2)
    }


@pytest.mark.parametrize("where", ["open", "reset", "step"])
def test_an_env_that_raises_ends_its_episode_without_a_reward(engine: Engine, folder: Path, where: str) -> None:
    class Broken(Echo):
        def fails(self, here: str) -> None:
            if here == where and self.start.row["prompt"] == "rev 101":
                raise OSError("the game server is gone")

        def __init__(self, start: EpisodeStart, config: Any) -> None:
            super().__init__(start, config)
            self.fails("open")

        def reset(self) -> Any:
            self.fails("reset")
            return super().reset()

        def step(self, action: Action) -> StepResult:
            self.fails("step")
            return super().step(action)

    bus = ReplayBufferBus(steps=1)
    play(engine, folder, bus, env_of(Broken))
    assert sorted(bus.rows) == ["g00000000", "g00000002", "g00000003"]
    assert bus.core.progress().ledger.dropped == {"reward_failed": GROUP_SIZE}


def test_bad_media_of_a_turn_are_dropped_by_their_reason_and_are_no_failure_of_the_reward(
    engine: Engine, folder: Path
) -> None:
    """One sample of a group and all samples of another group have a truncated file. The ledger counts both rows."""

    class Shows(Echo):
        def step(self, action: Action) -> StepResult:
            alone = self.start.row["prompt"] == "rev 100" and self.start.episode_seed == second[0]
            if self.start.row["prompt"] == "rev 102" or alone:
                raise MediaError("image", "truncated", "a.png: it is cut.")
            return super().step(action)

    second = [sampling_seed(0, index=0, purpose="env/1")]
    told: list[Any] = []
    bad_rows = BadRows(rows=1000, most=0.5, report=told.append)
    bus = ReplayBufferBus(steps=1)
    records = play(engine, folder, bus, env_of(Shows), bad_rows=bad_rows)
    dropped = bus.core.progress().ledger.dropped
    assert dropped == {"bad_media:truncated": 2 * GROUP_SIZE}, "one sample of two gives no advantage"
    assert bad_rows.media_reasons == {"truncated": 2}
    assert sorted(bad_row["row"] for bad_row in told[-1]) == ["0", "2"]
    assert told[-1][0]["text"].endswith("env mine: turn 1: a.png: it is cut.")
    assert max(values["reward_failed"] for _, _, values in records) == 0.0

    class OnlyBad(Echo):
        def reset(self) -> Any:
            raise MediaError("image", "missing_file", f"{self.start.row['prompt']}.png is not there.")

    # More rows than the loop admits at once, so the replacement rows also have bad images.
    in_a_row = BadRows(rows=1000, most=1.0, report=told.append, most_in_a_row=3 * STEP_GROUPS)
    with pytest.raises(
        ValueError, match=r"9 data rows in a row .* The first: rows.jsonl, line \d: env mine: reset: rev 10"
    ):
        play(engine, folder, ReplayBufferBus(steps=1), env_of(OnlyBad), bad_rows=in_a_row)


def test_an_env_that_fails_for_all_ends_the_run_with_the_first_cause(engine: Engine, folder: Path) -> None:
    class Broken(Echo):
        def reset(self) -> Any:
            raise OSError("the game server is gone")

    with pytest.raises(
        RewardsFailed, match=rf"newest {FEWEST_ROWS} data rows .*env mine: reset: .*game server is gone"
    ):
        play(engine, folder, ReplayBufferBus(steps=1), env_of(Broken))
    with pytest.raises(RewardsFailed, match=r"no answer of 3 groups in a row .*The first: .*game server is gone"):
        play(engine, folder, ReplayBufferBus(steps=1), env_of(Broken), max_failed_groups=3)


def test_a_step_that_hangs_ends_its_episode_and_no_other(engine: Engine, folder: Path) -> None:
    go_on, hung, closed = threading.Event(), threading.Event(), threading.Event()

    class Hangs(Echo):
        def step(self, action: Action) -> StepResult:
            if self.start.row["prompt"] == "rev 101":
                hung.set()
                go_on.wait()
            return super().step(action)

        def close(self) -> None:
            if self.start.row["prompt"] == "rev 101" and self.played:
                assert go_on.is_set(), "no call overlaps with another"
                closed.set()

    bus = ReplayBufferBus(steps=1)
    try:
        play(engine, folder, bus, env_of(Hangs), env_config=InteractionConfig(name="mine", step_timeout_s=0.5))
        assert hung.is_set() and sorted(bus.rows) == ["g00000000", "g00000002", "g00000003"]
        assert not closed.is_set()
    finally:
        go_on.set()
    assert closed.wait(60.0), "the env is closed when its call has ended"


def test_openings_that_differ_within_a_group_end_the_run_with_both(engine: Engine, folder: Path) -> None:
    class Clock(Echo):
        def reset(self) -> Any:
            return f"seed {self.start.episode_seed}"

    with pytest.raises(
        ValueError,
        match=r"env mine: rows\.jsonl, line 1: .* open differently\. g00000000\.0: .*seed \d+.*"
        r"g00000000\.1: .*seed \d+.* start\.group_seed",
    ):
        play(engine, folder, ReplayBufferBus(steps=1), env_of(Clock))


def test_a_wrong_result_ends_the_run_with_env_uid_row_and_turn(engine: Engine, folder: Path) -> None:
    def gives(step: StepResult) -> EnvSpec:
        class Wrong(Echo):
            def step(self, action: Action) -> StepResult:
                return step

        return env_of(Wrong)

    picture = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    for step, told in (
        (StepResult(observation=picture), "Wanted: text, or a list of parts"),
        (StepResult(observation=3), "format_observation returned 3 of type int"),
        (StepResult(reward="nan"), "step returned reward='nan' of type str. Wanted: a finite number"),  # type: ignore[arg-type]
    ):
        where = r"episode g0000000\d\.\d \(rows.jsonl, line \d\), turn 1: env mine .*"
        with pytest.raises(WrongResult, match=where + told):
            play(engine, folder, ReplayBufferBus(steps=1), gives(step))


def test_an_opening_that_leaves_no_room_is_left_out(engine: Engine, folder: Path) -> None:
    bus = ReplayBufferBus(steps=1)
    play(engine, folder, bus, env_of(Echo), prompts={1: "9" * CONTEXT})
    assert sorted(bus.rows) == ["g00000000", "g00000002", "g00000003"]


def test_number_guess_answers() -> None:
    async def scene() -> None:
        start = EpisodeStart(row={}, group_seed=3, episode_seed=0)
        games = [NumberGuess(start, NumberGuessConfig()) for _ in range(7)]
        steps = [await game.step(Action(text=f"is it {place + 1}?", stopped=True)) for place, game in enumerate(games)]
        (found,) = [place for place, step in enumerate(steps) if step.reward == 1.0]
        assert all(step.done == (place == found) for place, step in enumerate(steps))
        assert [step.observation for step in steps] == ["higher"] * found + [None] + ["lower"] * (6 - found)
        assert (await games[found - 1].step(Action(text="hm", stopped=True))).observation == "no number"
        assert (await games[found - 1].step(Action(text="0", stopped=True))).done

    asyncio.run(scene())


def test_a_group_that_the_bus_has_ended_gives_its_envs_up(engine: Engine, folder: Path) -> None:
    """With over-sampling, the first step continues without the group of a hanging env."""
    ends: list[str] = []

    class Waits(Echo):
        async def step(self, action: Action) -> StepResult:  # type: ignore[override]
            if self.start.row["prompt"] == "rev 101":
                try:
                    await asyncio.Event().wait()
                finally:
                    ends.append("step")
            return super().step(action)

        async def close(self) -> None:  # type: ignore[override]
            if self.start.row["prompt"] == "rev 101":
                ends.append("close")

    bus = ReplayBufferBus(steps=2, spare_groups=1, surplus="drop", on_step=renamed(engine))
    config = InteractionConfig(name="mine", step_timeout_s=600)
    records = play(engine, folder, bus, env_of(Waits), max_aborts=0, env_config=config)
    assert "step" not in ends or records[-1][2]["tokens/dropped"] > 0, "its sampled tokens are counted"
    assert "g00000001" not in bus.rows and ends[-GROUP_SIZE:] == ["close"] * GROUP_SIZE
    assert set(ends[:-GROUP_SIZE]) <= {"step"}
    counts = bus.core.progress().ledger
    assert (counts.trained, counts.open, counts.lost) == (2 * STEP_GROUPS * GROUP_SIZE, 0, 0)
    assert set(counts.dropped) == {"over_sampled"}
