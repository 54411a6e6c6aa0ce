"""Serves the endpoint in tests: real server, sessions and templates, and engines with scripted responses."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.env import EnvConfig, EnvSpec, EpisodeLimits
from relax_core.contracts.reward import RewardOutput
from relax_core.contracts.tree import TokenTree
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.rollout.agents.agent_session import AgentSession, SessionForm, SessionTable, tool_form
from relax_core.rollout.agents.endpoint_app import EndpointApp, served
from relax_core.rollout.episodes.episode_records import EpisodeRecord
from relax_core.rollout.episodes.group_assembly import build_tree, token_accounts
from relax_core.rollout.episodes.shared_requests import SharedRequests
from relax_core.rollout.prompt_tokens import PromptMaker
from tests.responses import response

SAMPLING = SamplingParams(n=1, max_new_tokens=4096)
LONG_S = 60.0  # a timeout for tests that hang
CONTEXT = 4096
ENV = EnvSpec(name="none", summary="s", config=EnvConfig, messages=lambda row, config: [])


@dataclass(frozen=True, kw_only=True)
class Say:
    """Defines a scripted response: text, finish reason ("given up": no response), and an event that delays it."""

    text: str
    finish: str = "stop"
    hold: asyncio.Event | None = None


class ScriptedPool:
    """Returns the scripted responses in the order of the requests, token by token."""

    def __init__(self, tokenizer: PromptTokenizer, *says: Say | str) -> None:
        self._tokenizer = tokenizer
        self._says = deque(Say(text=say) if isinstance(say, str) else say for say in says)
        self.requests: list[PromptRequest] = []
        self.given: list[list[int]] = []
        self.stops: list[list[str]] = []
        self.cancelled: list[str] = []

    async def generate(
        self,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        *,
        places: Sequence[int],
        on_tokens: Any = None,
    ) -> AsyncIterator[tuple[int, list[Generated]]]:
        for number, prompt in enumerate(prompts):
            say = self._says.popleft()
            self.requests.append(prompt)
            self.stops.append(params.stop)
            if say.finish != "given up":
                yield number, [await self._answer(number, prompt, say, on_tokens, stop=params.stop)]

    async def _answer(
        self, number: int, prompt: PromptRequest, say: Say, on_tokens: Any, *, stop: Sequence[str]
    ) -> Generated:
        ids = self._tokenizer.encode_text(say.text)
        if say.finish == "stop" and not say.text.endswith(tuple(stop)):
            ids = [*ids, self._tokenizer.stop_token_ids[0]]
        if prompt.max_new_tokens is not None and len(ids) > prompt.max_new_tokens:
            ids, say = ids[: prompt.max_new_tokens], Say(text=say.text, finish="length", hold=say.hold)
        self.given.append(ids)
        for place, token in enumerate(ids):
            if on_tokens is not None and place < len(ids) - 1:
                on_tokens(number, 0, place, [token])
                await asyncio.sleep(0.001)
            if place == len(ids) // 2:
                await asyncio.sleep(0)
                if say.hold is not None:
                    await say.hold.wait()
        whole = response(ids, versions=0, rid=prompt.rid, prompt=number, finish_reason=say.finish)  # type: ignore[arg-type]
        return msgspec.structs.replace(whole, prompt_tokens=len(prompt.input_ids), cached_tokens=7)

    async def cancel(self, rids: Sequence[str]) -> None:
        self.cancelled += rids


@dataclass(kw_only=True)
class Served:
    """Holds one open session of a served endpoint."""

    url: str
    key: str
    session: AgentSession
    record: EpisodeRecord
    pool: Any
    table: SessionTable
    http: aiohttp.ClientSession
    ended: list[str] = field(default_factory=list)

    def headers(self, **more: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}", **more}

    async def post(self, body: Any, path: str = "/v1/chat/completions", **more: str) -> tuple[int, Any]:
        async with self.http.post(f"{self.url}{path}", json=body, headers=self.headers(**more)) as reply:
            return reply.status, await reply.json()

    async def said(self, messages: Sequence[Any], **more: Any) -> dict[str, Any]:
        """Sends these messages and returns the message of the answer."""
        status, reply = await self.post({"messages": list(messages), **more})
        assert status == 200, reply
        message: dict[str, Any] = reply["choices"][0]["message"]
        return message

    def tree(self) -> TokenTree:
        """Ends the session and returns the tree of its episode. Checks that every token is in exactly one account."""
        self.session.end("env_done")
        episode = self.record
        episode.output = RewardOutput(reward=1.0)
        tree = build_tree("g0", [episode])
        counts = token_accounts([episode], tree)
        assert counts["sampled"] == sum(map(len, self.pool.given)) and counts["trained"] == int(tree.loss_mask.sum())
        assert counts["trained"] + counts["orphan"] == counts["sampled"]
        return tree


Scene = Callable[[Served], Awaitable[None]]


def serve(
    tokenizer: PromptTokenizer,
    scene: Scene,
    pool: Any,
    *,
    limits: EpisodeLimits | None = None,
    max_sessions: int = 4,
    max_body_bytes: int = 1 << 20,
    tools_as_text: bool = False,
    sampling: SamplingParams = SAMPLING,
    long_s: float = LONG_S,
    context: int = CONTEXT,
    around: Callable[[EndpointApp], Any] = lambda app: app,
    **form: Any,
) -> None:
    """Opens a session of a served endpoint and runs ``scene`` with this session.

    ``around`` may wrap the endpoint's application.
    """

    async def run() -> None:
        tools, tools_refused = tool_form(tokenizer, as_text=tools_as_text)
        own = SessionForm(
            prompts=PromptMaker(env=ENV, env_config=None, tokenizer=tokenizer, max_prompt_tokens=context),
            requests=SharedRequests(pool, sampling),
            tools=tools,
            tools_refused=tools_refused,
            limits=limits or EpisodeLimits(turns=100, sampled_tokens=4096, context_tokens=context),
            sampling={"temperature": 1.0},
            **form,
        )
        table = SessionTable(most=max_sessions)
        app = EndpointApp(table, tokenizer, model="policy", max_body_bytes=max_body_bytes)
        record = EpisodeRecord(uid="g00000000.0")
        ended: list[str] = []

        def request_of(number: int, ids: list[int], most: int) -> PromptRequest:
            return PromptRequest(rid=f"r.{number}", input_ids=ids, sampling_seed=number, max_new_tokens=most)

        async with asyncio.TaskGroup() as tasks, served(around(app)) as url, aiohttp.ClientSession() as http:
            session = AgentSession(
                own, record, request_of=request_of, tie=0, tasks=tasks, on_end=lambda rids: ended.append("end")
            )
            key = table.open(session)
            await scene(
                Served(
                    url=url,
                    key=key,
                    session=session,
                    record=record,
                    pool=pool,
                    table=table,
                    http=http,
                    ended=ended,
                )
            )
            session.end()

    async def bounded() -> None:
        async with asyncio.timeout(long_s):
            await run()

    asyncio.run(bounded())


async def until(true: Callable[[], object]) -> None:
    """Waits in the event loop until a condition holds."""
    while not true():
        await asyncio.sleep(0.005)
