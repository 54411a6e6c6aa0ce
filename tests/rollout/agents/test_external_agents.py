"""Tests external agents, which Relax does not start: they open sessions over HTTP with a token and play episodes."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from relax_core.config.schema import AgentConfig
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.rollout.agent_processes.agent_tasks import AgentTask
from relax_core.rollout.agents.chat_messages import RequestRefused
from relax_core.rollout.agents.external_agents import (
    SESSIONS,
    ExternalAgents,
    sessions_token,
    write_address,
)
from tests.data.chat_templates import FAMILIES, write_folder
from tests.rollout.agents.agent_harness import AnsweringPool, Played, played

TOKEN = sessions_token("the run's token\n")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return PromptTokenizer(write_folder(tmp_path_factory.mktemp("m") / "model", FAMILIES["strips_thinking"]))


class Elsewhere:
    """Simulates an external agent that knows only the address and the token."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url, self._http = url, http

    async def post(self, path: str, body: Any = None, *, key: str = TOKEN) -> tuple[int, Any, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        data = body if isinstance(body, bytes) else None
        given = {"data": data} if data is not None else {"json": {} if body is None else body}
        async with self._http.post(f"{self._url}{path}", headers=headers, **given) as reply:
            return reply.status, await reply.json(), reply.headers

    async def open(self) -> dict[str, Any]:
        """Opens a session: retries until it gets a task. Checks Retry-After."""
        while True:
            status, reply, headers = await self.post(SESSIONS)
            if status == 200:
                return dict(reply)
            assert status == 429 and int(headers["Retry-After"]) >= 1, reply
            await asyncio.sleep(0.01)

    async def ask(self, given: dict[str, Any], text: str) -> int:
        body = {"messages": [{"role": "user", "content": text}]}
        status, _, _ = await self.post("/v1/chat/completions", body, key=given["api_key"])
        return status


def scene(tokenizer: PromptTokenizer, act: Any, *, idle_s: float = 60.0, **given: Any) -> Played:
    def runner(agent: AgentConfig) -> ExternalAgents:
        return ExternalAgents(token=TOKEN, idle_s=idle_s)

    async def beside(agent_harness: asyncio.Task[Any], pool: AnsweringPool, url: str) -> None:
        async with aiohttp.ClientSession() as http:
            await act(Elsewhere(url, http), agent_harness)

    return played(tokenizer, runner, at_url=beside, **given)


def test_an_agent_elsewhere_opens_rewards_and_ends_a_session(
    tokenizer: PromptTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    keys: list[str] = []

    async def act(agent: Elsewhere, agent_harness: asyncio.Task[Any]) -> None:
        given = await agent.open()
        keys.append(given["api_key"])
        assert given["task"] == {"prompt": "p", "answer": "a"} and not given["evaluation"]
        assert (given["uid"], given["attempt"]) == ("g00000003.0", 0)
        assert await agent.ask(given, "hello") == 200
        path = f"{SESSIONS}/{given['session']}"
        status, reply, _ = await agent.post(f"{path}/reward", {"reward": "much"})
        assert status == 400 and "give a finite number" in reply["error"]["message"]
        assert (await agent.post(f"{path}/reward", {"reward": 0.5, "metrics": {"n": 1}}))[0] == 200
        assert await agent.ask(given, "and on") == 200
        assert (await agent.post(f"{path}/end"))[:2] == (200, {"session": given["session"], "ended": True})
        await asyncio.wait([agent_harness])
        assert await agent.ask(given, "late") == 410
        assert (await agent.post(f"{path}/end"))[0] == (await agent.post(f"{path}/reward"))[0] == 410
        assert (await agent.post(SESSIONS))[0] == 429

    record = scene(tokenizer, act).one
    assert (record.ended, record.own_reward, record.info["n"], len(record.turns)) == ("env_done", 0.5, [1.0], 2)
    assert keys[0] not in caplog.text and TOKEN not in caplog.text


def test_only_the_token_opens_sessions(tokenizer: PromptTokenizer) -> None:
    """A session's key cannot open a session, and the token is not valid for a session's requests."""

    async def act(agent: Elsewhere, agent_harness: asyncio.Task[Any]) -> None:
        assert (await agent.post(SESSIONS, key="wrong"))[0] == (await agent.post(SESSIONS, key=""))[0] == 401
        given = await agent.open()
        assert (await agent.post(SESSIONS, key=given["api_key"]))[0] == 401
        assert (await agent.post("/v1/chat/completions", {"messages": []}, key=TOKEN))[0] == 401
        for path, status in ((f"{SESSIONS}/x/end", 410), (f"{SESSIONS}/x/y", 404), (f"{SESSIONS}/x/y/z", 404)):
            assert (await agent.post(path))[0] == status
        for body in (b"[]", b"{", b"\xff", b"[" * 100_000, b'{"reward": 1e999}'):
            assert (await agent.post(f"{SESSIONS}/{given['session']}/end", body))[0] == 400
        await agent.post(f"{SESSIONS}/{given['session']}/end", {"error": "no docker"})

    record = scene(tokenizer, act).one
    assert (record.ended, record.failed) == ("env_failed", "the agent says: no docker")


def test_an_agent_that_falls_silent_ends_its_attempt(tokenizer: PromptTokenizer) -> None:
    """The next attempt has a new key, and the old key gets 410."""

    async def act(agent: Elsewhere, agent_harness: asyncio.Task[Any]) -> None:
        first = await agent.open()
        assert await agent.ask(first, "hello") == 200
        second = await agent.open()
        assert second["attempt"] == 1 and second["uid"] == first["uid"]
        assert await agent.ask(first, "still there") == 410
        assert await agent.ask(second, "hello") == 200
        await agent.post(f"{SESSIONS}/{second['session']}/end", {"reward": 1})

    record = scene(tokenizer, act, idle_s=2.0, max_retries=1).one  # on a loaded machine a request may take a second
    assert (record.ended, record.own_reward, record.restarts) == ("env_done", 1.0, 1)
    record = scene(tokenizer, lambda agent, agent_harness: agent.open(), idle_s=0.1).one
    assert record.ended == "env_failed" and "for 0.1 s" in record.failed


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda strategy: st.lists(strategy),
    max_leaves=4,
)
BODIES = st.binary() | st.dictionaries(
    st.sampled_from(["reward", "metrics", "error", "uid"]) | st.text(),
    json_values | st.dictionaries(st.text(), json_values),
).map(lambda given: json.dumps(given).encode())


def fuzz(examples: int) -> None:
    """Sends random bodies to the three routes of a session. Each must be answered, or refused with a message."""

    async def opened() -> tuple[ExternalAgents, str, asyncio.Task[Any]]:
        agents = ExternalAgents(token=TOKEN, idle_s=60.0)
        task = AgentTask(uid="g0.0", attempt=0, row={}, key="k", base_url="http://x", evaluation=False)
        agent_harness = asyncio.create_task(agents.play(task))
        await asyncio.sleep(0)
        return agents, agents.answer(SESSIONS, b"")["session"], agent_harness

    with asyncio.Runner() as runner:
        agents, name, agent_harness = runner.run(opened())

        @settings(
            max_examples=examples, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
        )
        @given(st.sampled_from([SESSIONS, f"{SESSIONS}/{name}/reward", f"{SESSIONS}/x/end"]) | st.text(), BODIES)
        def answered(path: str, body: bytes) -> None:
            try:
                status, words = 200, agents.answer(path, body)["session"]
            except RequestRefused as error:
                status, words = error.status, str(error)
            assert (status, words) == (200, name) or (status in (400, 404, 410, 429) and words)

        answered()
        assert agents.answer(f"{SESSIONS}/{name}/end", b'{"reward": 2, "metrics": null, "error": null}')["ended"]
        assert runner.run(asyncio.wait_for(agent_harness, 60.0)).reward == 2.0


def test_any_body_is_answered_or_refused() -> None:
    fuzz(200)


@pytest.mark.soak
def test_ten_thousand_bodies_are_answered() -> None:
    fuzz(10_000)


def test_the_address_and_the_token_are_for_this_user_alone(tmp_path: Path) -> None:
    for rank, name in ((0, "endpoint"), (2, "endpoint-2"), (0, "endpoint")):
        file = write_address(tmp_path, rank=rank, base_url="http://127.0.0.1:8", token=TOKEN)
        assert file == tmp_path / name and file.read_text() == "http://127.0.0.1:8\n"
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert (tmp_path / "token").read_text() == f"{TOKEN}\n" and len(TOKEN) == 64
    assert sessions_token("the run's token") == TOKEN != sessions_token("another")
