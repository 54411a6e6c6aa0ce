"""Plays groups with real agents, sessions and the served endpoint. A function computes the engines' responses."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from relax_core.config.schema import AgentConfig
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.env import EnvConfig, EnvSpec, EpisodeLimits
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.rollout.agent_processes.agent_tasks import AgentRunner
from relax_core.rollout.agents.agent_host import AgentHost
from relax_core.rollout.agents.agent_player import AgentPlayer
from relax_core.rollout.agents.agent_session import SessionForm, SessionTable, tool_form
from relax_core.rollout.agents.endpoint_app import EndpointApp, served
from relax_core.rollout.agents.external_agents import ExternalAgents
from relax_core.rollout.episodes.episode_records import EpisodeRecord
from relax_core.rollout.episodes.group_player import EarlyEnds
from relax_core.rollout.episodes.shared_requests import SharedRequests
from relax_core.rollout.prompt_tokens import PromptMaker
from tests.responses import admitted, response

LONG_S = 120.0  # a timeout for tests that hang
CONTEXT = 4096
ENV = EnvSpec(name="none", summary="s", config=EnvConfig, messages=lambda row, config: [])
Answer = Callable[[str], str]  # prompt text → response text; "HANG": no response until the request is cancelled


def agent_settings(**given: Any) -> AgentConfig:
    """Returns agent settings with short timeouts."""
    defaults: dict[str, Any] = {
        "workers": 0,
        "timeout_s": LONG_S,
        "history": "continue",
    }
    return AgentConfig(**{**defaults, **given})


def python_agent(tmp_path: Path, body: str, *, name: str = "agent.py") -> list[str]:
    """Returns the command of an agent that runs ``body``. In it, ``ask(text)`` asks the model, and ``result(…)``
    reports success.
    """
    (tmp_path / name).write_text(AGENT + body)
    return [sys.executable, str(tmp_path / name)]


AGENT = """import json, os, sys, time, urllib.request

def post(body, path="/chat/completions"):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        data=json.dumps(body).encode(),
        headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)

def ask(*texts):
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts)]
    return post({"messages": messages})["choices"][0]["message"]["content"]

def result(**given):
    with open(os.environ["RELAX_RESULT"], "w") as file:
        json.dump(given, file)

"""


class AnsweringPool:
    """An engine pool. A function computes its responses from the text of the prompt."""

    def __init__(self, tokenizer: PromptTokenizer, answer: Answer, *, ages: bool, holds: Callable[[str], bool]) -> None:
        """``ages``: each response has newer weights than the previous one. ``holds``: whether to delay a prompt."""
        self._tokenizer = tokenizer
        self._holds = holds
        self._ages = ages
        self._answer = answer
        self.requests: list[PromptRequest] = []
        self.sampled = 0
        self.cancelled: list[str] = []
        self._given_up = asyncio.Event()

    async def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, *, places: Sequence[int], on_tokens: Any = None
    ) -> AsyncIterator[tuple[int, list[Generated]]]:
        self.requests += prompts
        answers = [asyncio.create_task(self._answered(number, prompt)) for number, prompt in enumerate(prompts)]
        try:
            for answer in asyncio.as_completed(answers):  # a hanging prompt does not delay other prompts of the batch
                number, found = await answer
                if found is not None:
                    yield number, [found]
        finally:
            for task in answers:
                task.cancel()

    async def _answered(self, number: int, prompt: PromptRequest) -> tuple[int, Generated | None]:
        asked = self._tokenizer.decode(prompt.input_ids)
        while self._holds(asked):
            await asyncio.sleep(0.01)
        text = self._answer(asked)
        if text == "HANG":
            await self._given_up.wait()
            return number, None
        ids = [*self._tokenizer.encode_text(text), self._tokenizer.stop_token_ids[0]]
        finish = "stop"
        if prompt.max_new_tokens is not None and len(ids) > prompt.max_new_tokens:
            ids, finish = ids[: prompt.max_new_tokens], "length"
        self.sampled += len(ids)
        version = len(self.requests) if self._ages else 0
        found = response(ids, versions=version, rid=prompt.rid, prompt=number, finish_reason=finish)  # type: ignore[arg-type]
        return number, msgspec.structs.replace(found, prompt_tokens=len(prompt.input_ids))

    async def cancel(self, rids: Sequence[str]) -> None:
        self.cancelled += rids
        self._given_up.set()


@dataclass(kw_only=True)
class Played:
    """Holds the episodes of a group, the engine pool, and the cancelled episodes."""

    records: list[EpisodeRecord]
    pool: AnsweringPool
    cancelled: list[EpisodeRecord] = field(default_factory=list)

    @property
    def one(self) -> EpisodeRecord:
        (record,) = self.records
        return record


def played(
    tokenizer: PromptTokenizer,
    runner: Callable[[AgentConfig], AgentRunner],
    answer: Answer = lambda text: "yes",
    *,
    episodes: int = 1,
    row: Mapping[str, Any] | None = None,
    agent: AgentConfig | None = None,
    limits: EpisodeLimits | None = None,
    max_retries: int = 0,
    ages: bool = False,
    holds: Callable[[str], bool] = lambda text: False,
    at_once: int = 64,
    ends: EarlyEnds | None = None,
    beside: Callable[[asyncio.Task[Any], AnsweringPool], Any] | None = None,
    at_url: Callable[[asyncio.Task[Any], AnsweringPool, str], Any] | None = None,
    sessions: SessionTable | None = None,
    **form: Any,
) -> Played:
    """Plays one group. Meanwhile awaits ``beside`` with the group's task and the engine pool.

    ``at_url`` is like ``beside``, and also receives the endpoint's address. ``sessions`` is the endpoint's session
    table.
    """
    settings, pool = agent or agent_settings(), AnsweringPool(tokenizer, answer, ages=ages, holds=holds)
    found = Played(records=[], pool=pool)

    async def run() -> None:
        tools, refused = tool_form(tokenizer, as_text=False)
        own = SessionForm(
            prompts=PromptMaker(env=ENV, env_config=None, tokenizer=tokenizer, max_prompt_tokens=CONTEXT),
            requests=SharedRequests(pool, SamplingParams(n=1, max_new_tokens=CONTEXT)),  # type: ignore[arg-type]
            tools=tools,
            tools_refused=refused,
            limits=limits or EpisodeLimits(turns=100, sampled_tokens=CONTEXT, context_tokens=CONTEXT),
            sampling={"temperature": 1.0},
            **form,
        )
        table = SessionTable(most=at_once) if sessions is None else sessions
        agents = runner(settings)
        outside = agents if isinstance(agents, ExternalAgents) else None
        app = EndpointApp(table, tokenizer, model="policy", outside=outside)
        async with served(app) as url, asyncio.TaskGroup() as tasks:
            host = AgentHost(settings, table, base_url=url, runner=agents, at_once=at_once)
            player = AgentPlayer(
                host, own, group_size=episodes, max_retries=max_retries, seed=0, ends=ends or EarlyEnds()
            )
            start = admitted(3, dict(row or {"prompt": "p", "answer": "a"}), rid="r")
            agent_harness = asyncio.create_task(
                player.play(start, tasks, given_up=lambda prompt, records: found.cancelled.extend(records))
            )
            try:
                if beside is not None:
                    await beside(agent_harness, pool)
                if at_url is not None:
                    await at_url(agent_harness, pool, url)
                found.records = await agent_harness
            except asyncio.CancelledError:
                assert agent_harness.cancelled()
            finally:
                await agents.aclose()
            assert not len(table)

    async def bounded() -> None:
        async with asyncio.timeout(LONG_S):
            await run()

    asyncio.run(bounded())
    return found
