"""Tests the adapter with a server of the real package openenv, in a separate environment."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from envs import openenv
from envs.openenv import OpenEnvConfig, OpenEnvEpisode, check, tools
from relax_core.contracts.env import Action, EpisodeStart, StepResult
from relax_core.contracts.tool_calls import ToolCall
from tests.agents_env.environments import AGENTS
from tests.integration.live_run import run_to_end
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0  # the package takes seconds to import, more on a loaded machine


@contextmanager
def served(*, sessions: int) -> Iterator[str]:
    port = free_port()
    command = [AGENTS, ROOT / "examples/openenv/guess_server.py", f"--port={port}", f"--sessions={sessions}"]
    with subprocess.Popen(command) as server:
        try:
            until = time.monotonic() + START_S
            while time.monotonic() < until and server.poll() is None:
                with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/schema", timeout=5):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Runs a server with one session. So the test detects an episode that does not release its session."""
    with served(sessions=1) as address:
        yield address


def played(scene: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(START_S):
            await scene()

    asyncio.run(bounded())


def episode(config: OpenEnvConfig, *, seed: int = 1, **row: Any) -> OpenEnvEpisode:
    return OpenEnvEpisode(EpisodeStart(row=row, group_seed=seed, episode_seed=2), config)


async def guess(env: OpenEnvEpisode, number: Any) -> StepResult:
    return await env.step(
        Action(text="", stopped=True, tool_calls=(ToolCall(name="act", arguments={"number": number}),))
    )


@pytest.mark.agents
def test_an_episode_is_a_session_that_is_played_to_its_end_and_given_back(url: str) -> None:
    config = OpenEnvConfig(url=url, observation_field="text")
    (tool,) = tools({}, config)
    assert tool["function"]["name"] == "act" and tool["function"]["description"] == "A guess."
    assert set(tool["function"]["parameters"]["properties"]) == {"number"}

    async def won(seed: int) -> list[str]:
        env, told = episode(config, seed=seed), []
        try:
            assert await env.reset() == "Guess a number from 1 to 9."
            for number in range(1, 10):
                step = await guess(env, number)
                (message,) = step.observation
                told.append(message["content"])
                if step.done:
                    assert step.reward == 1.0 and told[-1] == "right"
                    return told
                assert step.reward == 0.0
        finally:
            await env.close()
        raise AssertionError(told)

    async def scene() -> None:
        rounds = [await won(seed) for seed in (1, 1, 2, 3, 4)]  # the server has one session
        assert (
            rounds[0] == rounds[1] and len({len(round_played) for round_played in rounds}) > 1
        )  # the seed of the group

    played(scene)


@pytest.mark.agents
def test_mistakes_of_the_model_are_read_and_failures_of_the_environment_fail_the_episode(url: str) -> None:
    async def scene() -> None:
        config = OpenEnvConfig(url=url, reset={"highest": 3}, row_fields=["highest"])
        env = episode(config, highest=5)
        try:
            assert json.loads(await env.reset())["text"] == "Guess a number from 1 to 5."
            (wrong,) = (await guess(env, "many")).observation
            assert "The action cannot be read" in wrong["content"] and "number" in wrong["content"]
            assert (await env.step(Action(text="2", stopped=True))).observation.startswith("Call the tool act")
            with pytest.raises(RuntimeError, match="the game is broken"):
                await guess(env, -1)
        finally:
            await env.close()
        as_text = episode(OpenEnvConfig(url=url, text_field="number", observation_field="text", tool_parser="none"))
        try:
            await as_text.reset()
            assert (await as_text.step(Action(text="9", content="9", stopped=True))).observation in ("lower", "right")
        finally:
            await as_text.close()
        second_episode = episode(OpenEnvConfig(url=url, observation_field="board"))
        try:
            with pytest.raises(
                RuntimeError, match=r"env\.observation_field=board: an observation of this server has text"
            ):
                await second_episode.reset()
        finally:
            await second_episode.close()

    played(scene)


@pytest.mark.agents
def test_a_server_without_a_free_session_is_asked_until_it_has_one(url: str) -> None:
    async def scene() -> None:
        first, second = (episode(OpenEnvConfig(url=url)) for _ in range(2))
        late = episode(OpenEnvConfig(url=url, step_timeout_s=0.5))
        await first.reset()
        try:
            with pytest.raises(RuntimeError, match=r"opens no session.*CAPACITY_REACHED"):
                await late.reset()
            waiting = asyncio.create_task(second.reset())
            await asyncio.sleep(0.3)
            assert not waiting.done()
            await first.close()
            assert "Guess" in await waiting
        finally:
            for session in (first, second, late):
                await session.close()

    played(scene)


class Relay:
    """A byte relay that can stop forwarding, like a network that silently loses a connection."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self.silent = asyncio.Event()

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(1 << 16):
            if not self.silent.is_set():
                writer.write(part)
        writer.close()


@pytest.mark.agents
def test_a_half_open_connection_is_found_and_its_session_given_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        relay = Relay(url)
        monkeypatch.setattr(openenv, "HEARTBEAT_S", 1.0)
        config = OpenEnvConfig(url=await relay.open())
        env = episode(config)
        await env.reset()
        relay.silent.set()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="is lost"):
            await guess(env, 1)
        assert time.monotonic() - began < 10
        await env.close()
        after = episode(OpenEnvConfig(url=url))  # the server's only session is free again
        assert "Guess" in await after.reset()
        await after.close()

    played(scene)


@pytest.mark.agents
def test_a_step_that_is_cancelled_closes_its_connection(url: str) -> None:
    async def scene() -> None:
        env = episode(OpenEnvConfig(url=url))
        await env.reset()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await guess(env, 30)  # the server takes 3 s
        began = time.monotonic()
        await env.close()
        assert time.monotonic() - began < 5
        after = episode(OpenEnvConfig(url=url))
        assert "Guess" in await after.reset()
        await after.close()

    played(scene)


def test_a_server_that_does_not_answer_is_told() -> None:
    async def scene() -> None:
        env = episode(OpenEnvConfig(url=f"http://127.0.0.1:{free_port()}"))
        with pytest.raises(RuntimeError, match="does not answer"):
            await env.reset()
        await env.close()

    played(scene)
    with pytest.raises(ValueError, match="gives no schema of an action"):
        tools({}, OpenEnvConfig(url=f"http://127.0.0.1:{free_port()}"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OpenEnvConfig(), r"env\.url=: write the address"),
        (OpenEnvConfig(url="ws://a"), r"env\.url=ws://a: write the address"),
    ],
)
def test_settings_without_sense_are_refused(config: OpenEnvConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(config)


@pytest.mark.agents
@pytest.mark.integration
def test_a_run_trains_on_the_games_of_a_server(tmp_path: Path) -> None:
    """After the warm start of number_guess, the model answers with numbers. The numbers are the env's actions."""
    with served(sessions=64) as address:
        run = run_to_end(
            tmp_path / "run",
            "env=openenv",
            f"env.url={address}",
            "env.text_field=number",
            "env.observation_field=text",
            "env.reset.highest=7",
            "env.max_turns=3",
            "env.max_observation_tokens=64",
            "env.tool_parser=none",
            "data=seeds",
            "reward=env",
            "model.task=number_guess",
            "algo.group_size=8",
            "rollout.prompts_per_step=4",
            "rollout.max_new_tokens=12",
            "run.steps=3",
            "run.save_every=0",
            "run.export_hf=false",
            "eval.every=0",
        )
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    assert run.summary["ledger"]["trained"] == 3 * 4 * 8
    assert run.summary["logprob_gap"]["max"] <= 2e-5
    rewards = [values["reward"] for values in run.steps()]
    assert 0.0 < sum(rewards) / len(rewards) < 1.0, "some but not all games are won"
    assert run.summary["episodes"]["turns"] > 1.0
