"""Tests the token accounts of a run with many kinds of failure: each sampled token is in exactly one account."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.schema import EngineConfig
from relax_core.contracts.engine import Generated, PromptRequest
from relax_core.contracts.env import Action, BaseInteractionEnv, EpisodeStart, InteractionConfig, StepResult
from relax_core.contracts.tree import TokenTree
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.engine_process import EngineLaunch
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.registry import find_reward
from relax_core.rollout.episodes.episode_player import EpisodePlayer
from relax_core.rollout.episodes.group_player import EarlyEnds
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.tools.make_tiny import tiny_model_folder
from tests.contracts.engine.harness import TOKEN, Engine
from tests.rollout.episodes.test_episodes import CONTEXT, env_of
from tests.rollout.rollout_loop_harness import LONG_S, Recorded, ReplayBufferBus, build_loop, renamed, run_to_end

GROUPS, EPISODES = 5, 4
SEEN = ("trained", "not_chosen", "no_reward", "dropped", "stale")


class CountedClient(EngineClient):
    """A client that counts the received tokens of each request, including parts of aborted responses."""

    tokens: Counter[str]
    whole: set[str]  # requests with a complete response

    async def generate(self, prompts: Sequence[PromptRequest], *given: Any, **more: Any) -> AsyncIterator[Generated]:
        async for response in super().generate(prompts, *given, **more):
            self.tokens[response.rid] += len(response.output_ids)
            if response.finish_reason in ("stop", "length"):
                self.whole.add(response.rid)
            yield response


class CancellingPool(EnginePool):
    """An engine pool that records the ids of cancelled requests."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.given_up: set[str] = set()

    async def cancel(self, rids: Any) -> None:
        chosen = list(rids)
        self.given_up.update(chosen)
        await super().cancel(chosen)


class DropBus(ReplayBufferBus):
    """A bus that records the reason of each group that the rollout drops before the last step is complete.

    From weight version ``stale_at`` on, an episode that began with the previous version is too old.
    """

    def __init__(self, *, stale_at: int, **given: Any) -> None:
        super().__init__(**given)
        self.stale_at = stale_at
        self.lost: dict[str, str] = {}
        self.player: EpisodePlayer | None = None

    async def drop(self, group_uid: str, *, reason: str, timeout_s: float) -> None:
        if not self.core.finished():
            self.lost[group_uid] = reason
        await super().drop(group_uid, reason=reason, timeout_s=timeout_s)


class Accounts(Counter[str]):
    """Sums the accounts of groups that end before the last step is complete. Later groups are cancelled anyway."""

    def __init__(self, bus: ReplayBufferBus) -> None:
        self.bus = bus
        super().__init__()

    def update(self, counts: Any = (), /, **more: int) -> None:
        if not self.bus.core.finished():
            super().update(counts, **more)


@dataclass(kw_only=True)
class Played:
    """Holds the results of a run: accounts, client (sampled tokens), engine pool, trained trees, ends of episodes."""

    accounts: Accounts
    client: CountedClient
    pool: CancellingPool
    trees: list[TokenTree]
    ends: set[str]


def misfortunes(bus: DropBus) -> Callable[[EpisodeStart, Any], BaseInteractionEnv]:
    """Returns an env. Some groups and some single episodes fail, hang, are slow or rewrite their history.

    One group with the version before ``bus.stale_at`` continues until the newer weights have sampled tokens.
    """
    spared: dict[int, int] = {}  # for each group, the seed of the episode that does not fail
    outlasting: set[int] = set()

    async def outlast(index: int) -> None:
        assert bus.player is not None
        versions = [group.admission.min_version for group in bus.core.groups.values() if group.admission.index == index]
        # Only a group of the previous version may wait, because no earlier step needs this group.
        if versions == [bus.stale_at - 1] and outlasting <= {index}:
            outlasting.add(index)
            while bus.player._too_old._newest < bus.stale_at:
                await asyncio.sleep(0.005)

    of_groups = {7: "hang", 17: "slow", 27: "fail", 37: "fail but one"}
    of_episodes = ["fail once"] * 6 + ["hang"] * 5 + ["forget"] * 15 + [""] * 74

    class Mixed(BaseInteractionEnv):
        def __init__(self, start: EpisodeStart, config: Any) -> None:
            index = int(str(start.row["prompt"]).removeprefix("rev ")) - 100
            self.draw = random.Random(start.episode_seed)
            self.fate = of_groups.get(index % 40) or self.draw.choice(of_episodes)
            if self.fate == "fail but one":
                self.fate = "" if spared.setdefault(index, start.episode_seed) == start.episode_seed else "fail"
            self.start, self.index, self.played = start, index, 0

        async def reset(self) -> Any:
            return str(self.start.row["prompt"])

        async def step(self, action: Action) -> StepResult:
            self.played += 1
            if self.played == 1 and not self.fate:
                await outlast(self.index)
            if self.fate == "fail" or (self.fate == "fail once" and self.played == 2 and not self.start.attempt):
                raise OSError("the game server is gone")
            if self.fate == "hang" and self.played == 2:
                await asyncio.Event().wait()
            if self.fate == "slow":
                await asyncio.sleep(2.6)
            edit = [{"role": "user", "content": "rev 12"}] if self.fate == "forget" and self.played == 2 else None
            done = self.played == 4
            return StepResult(observation="on", reward=self.draw.random(), done=done, context_edit=edit)

        async def format_observation(self, observation: Any) -> Any:
            if self.fate == "slow" and self.played:  # with the wait in `step`, the episode exceeds its time limit
                await asyncio.sleep(2.6)
            return super().format_observation(observation)

    return Mixed


async def run_all(engine: Engine, folder: Path, bus: DropBus) -> Played:
    client = CountedClient(engine.process.url, TOKEN, request_timeout_s=60.0, control_timeout_s=30.0)
    client.tokens, client.whole = Counter(), set()

    async def client_for(number: int, refresh: bool) -> Any:
        return client

    pool = CancellingPool(1, client_for, timeout_s=60.0)
    trees: list[TokenTree] = []
    records: list[Recorded] = []

    def keep(tree: TokenTree) -> dict[str, Any]:
        if not bus.core.finished():
            trees.append(tree)
        return {}

    reward = find_reward("env")
    config = reward.config(name=reward.name, timeout_s=LONG_S, max_failed=1.0)
    with RewardPool(reward, config, workers=1, concurrency=8) as rewards:
        loop = build_loop(
            folder,
            bus,
            pool,
            rewards,
            records,
            env=env_of(misfortunes(bus)),
            env_config=InteractionConfig(
                name="mine", max_turn_tokens=6, on_turn_cut="continue", step_timeout_s=4.0, episode_timeout_s=5.0
            ),
            context=CONTEXT,
            max_new_tokens=18,
            max_aborts=2,
            max_failed_groups=GROUPS * bus.core.settings.total_steps,
            mask_off_policy=True,
            advantages=keep,
            ends=EarlyEnds(quorum=0.75, max_lag=1),
        )
        assert isinstance(loop._player, EpisodePlayer)
        bus.player = loop._player
        loop._sampled_tokens = accounts = Accounts(bus)
        await run_to_end(loop, (), client, alone=True)
    ends = {name.removeprefix("ended/") for _, _, values in records for name in values if name.startswith("ended/")}
    return Played(accounts=accounts, client=client, pool=pool, trees=trees, ends=ends)


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


@pytest.fixture(scope="module")
def engine_settings(launch: EngineLaunch) -> EngineConfig:
    return dataclasses.replace(launch.engine, context_length=CONTEXT)


@pytest.mark.parametrize("steps", [10, pytest.param(50, marks=pytest.mark.soak)])
def test_each_token_of_all_episodes_is_in_one_account(engine: Engine, folder: Path, steps: int) -> None:
    """Counts the tokens that arrive from the engine, and the trained tokens in the trees on the bus. A run of 50 steps
    has 1,000 episodes. Some episodes outlast a step, so tokens of older weights are masked. With 10 steps, all other
    accounts and all ends occur.
    """

    def on_step(version: int) -> None:
        renamed(engine)(version)
        if version == bus.stale_at:
            assert bus.player is not None
            bus.player._too_old._max_lag = 0

    settings = {"groups_per_step": GROUPS, "group_size": EPISODES, "max_staleness": 1}
    bus = DropBus(stale_at=steps * 4 // 5, steps=steps, on_step=on_step, **settings)
    played: list[Played] = []

    async def scene() -> None:
        played.append(await run_all(engine, folder, bus))

    asyncio.run(asyncio.wait_for(scene(), 3 * LONG_S))
    (play,) = played
    ended = {tree.group_uid for tree in play.trees} | bus.lost.keys()
    assert len(ended) * EPISODES >= steps * GROUPS * EPISODES
    # The client does not read the running response of a cancelled episode.
    read = {
        tuple(rid.split(".")): play.client.tokens[rid]
        for rid in play.client.whole - play.pool.given_up
        if rid.partition("-")[0] in ended
    }
    counts = play.accounts
    assert counts["sampled"] == sum(read.values()) == sum(n for name, n in counts.items() if name != "sampled")
    trained = sum(int(tree.loss_mask.sum()) for tree in play.trees)
    sampled_rows = sum(int((tree.versions >= 0).sum()) for tree in play.trees)
    assert counts["trained"] == trained and counts["masked"] == sampled_rows - trained
    # After a restart, a request's id ends with the attempt's number. Tokens of earlier attempts are not trained.
    anew = {parts[:2] for parts in read if len(parts) == 4}
    before = sum(tokens for parts, tokens in read.items() if parts[:2] in anew and len(parts) == 3)
    assert counts["not_chosen"] >= before
    assert all(counts[name] for name in SEEN) and (counts["masked"] or steps < 50), counts
    wanted = {"env_done", "token_budget", "env_failed", "step_timeout", "episode_timeout", "straggler", "stale"}
    assert wanted <= play.ends
    assert "reward_failed" in bus.lost.values(), "groups with too few rewards are dropped"
    assert any(len(episode.leaves) > 1 for tree in play.trees for episode in tree.episodes), "histories are rewritten"
    assert len(play.client.tokens) > len(play.client.whole) and bus.core.progress().ledger.lost == 0
