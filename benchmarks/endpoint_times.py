"""Measures the endpoint of agents, for `benchmarks.agents` without ``--learn``.

The client is plain aiohttp in a process of its own (`benchmarks.endpoint_client`). "endpoint": 64 sessions of 8 turns
of at most 4 tokens over one embedded engine with a prefix cache, in turns with the same episodes of an environment in
this process, which also says "go on" behind each answer. "request CPU": the CPU time of this process for a request, of
which nothing but the endpoint takes any, because the answers come at once from a list: the requests behind the first of
sessions of 8 turns; also with three tools and a history of 8,000 tokens. "stream": from the engine's first token, as it
comes to this process, to the first delta in the client's; one request after the other.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from benchmarks.over_sampling import TIMEOUT_S, TOKEN
from benchmarks.tiny_model import engine_config
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.env import (
    Action,
    BaseInteractionEnv,
    EnvConfig,
    EnvSpec,
    EpisodeLimits,
    EpisodeStart,
    InteractionConfig,
    StepResult,
)
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.pool.engine_pool import EnginePool
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.rollout.agents.agent_session import AgentSession
from relax_core.rollout.agents.endpoint_app import EndpointApp
from relax_core.rollout.agents.endpoint_server import served
from relax_core.rollout.agents.session_prompts import SessionForm, tool_form
from relax_core.rollout.agents.session_table import SessionTable
from relax_core.rollout.episodes.episode_records import EpisodeRecord
from relax_core.rollout.episodes.episodes import EpisodePlayer
from relax_core.rollout.episodes.played_group import GroupStart
from relax_core.rollout.episodes.shared_requests import SharedRequests
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.tools.make_tiny import tiny_model_folder
from relax_core.tools.tiny_tokenizer import tiny_prompt_tokenizer
from tests.responses import response

SESSIONS, TURNS, TURN_TOKENS, CONTEXT = 64, 8, 4, 256
LONG_CONTEXT, HISTORY_TOKENS, REQUESTS = 1 << 15, 8000, 96
MORE = {"role": "user", "content": "go on"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Returns the product of two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
    for name in ("multiply", "multiply_again", "multiply_twice")
]


class GoOn(BaseInteractionEnv):
    """Says "go on" behind each of the first answers."""

    def __init__(self, start: EpisodeStart, config: InteractionConfig) -> None:
        self._start = start
        self._left = TURNS

    async def reset(self) -> str:
        """Returns the question."""
        return str(self._start.row["prompt"])

    async def step(self, action: Action) -> StepResult:
        """Counts the answer."""
        self._left -= 1
        return StepResult(observation=MORE["content"], reward=1.0, done=not self._left)


class AtOnce:
    """Is a pool whose answers come at once, each the same few tokens."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._ids = [*tokenizer.encode_text("it is 12"), tokenizer.stop_token_ids[0]]

    async def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, *, places: Sequence[int], on_tokens: Any = None
    ) -> AsyncIterator[tuple[int, list[Generated]]]:
        """Yields the answers."""
        for number, prompt in enumerate(prompts):
            yield number, [response(self._ids, versions=0, rid=prompt.rid, prompt=number, finish_reason="stop")]

    async def cancel(self, rids: Sequence[str]) -> None:
        """Does nothing."""


class FirstTokens(EnginePool):
    """Is an engine pool that notes when the first token of each request comes, by the monotonic clock."""

    first: list[float]

    async def generate(self, prompts: Sequence[PromptRequest], params: SamplingParams, **more: Any) -> Any:
        """Yields the answers, as `EnginePool.generate` does."""
        tell, seen = more.pop("on_tokens", None), set[int]()

        def on_tokens(number: int, sample: int, start: int, ids: Sequence[int]) -> None:
            if number not in seen:
                seen.add(number)
                self.first.append(time.monotonic())
            if tell is not None:
                tell(number, sample, start, ids)

        async for one in super().generate(prompts, params, on_tokens=on_tokens, **more):
            yield one


class Client:
    """Is the process of the client."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.endpoint_client"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    async def done(self, **job: Any) -> Any:
        """Returns what a job took."""
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.to_thread(self._ask, job)

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(TIMEOUT_S)
        self._process.stdout.close()


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """Holds an endpoint with open sessions: its URL, their keys and records."""

    url: str
    keys: Sequence[str]
    records: Sequence[EpisodeRecord]


Scene = Callable[[Sessions], Awaitable[None]]


async def with_sessions(
    tokenizer: PromptTokenizer, pool: Any, scene: Scene, *, count: int, turn_tokens: int, context: int, number: int = 0
) -> None:
    """Opens sessions behind a served endpoint and runs ``scene`` with them."""
    tools, refused = tool_form(tokenizer, parser="hermes", as_text=False)
    env = EnvSpec(name="none", summary="s", config=EnvConfig, messages=lambda row, config: [])
    sampling = SamplingParams(n=1, max_new_tokens=context, stop_token_ids=tokenizer.stop_token_ids)
    form = SessionForm(
        prompts=PromptMaker(env=env, env_config=None, tokenizer=tokenizer, max_prompt_tokens=context),
        requests=SharedRequests(pool, sampling),
        tools=tools,
        tools_refused=refused,
        limits=EpisodeLimits(turns=10 * REQUESTS, sampled_tokens=context, context_tokens=context),
        sampling={"temperature": 1.0},
        max_turn_tokens=turn_tokens,
    )
    table = SessionTable(most=count)
    app = EndpointApp(table, tokenizer, model="policy", most_body_bytes=1 << 24)
    records = [EpisodeRecord(uid=f"g{number:08}.{place}") for place in range(count)]

    def request_of(uid: str, place: int, turn: int, ids: list[int], most: int) -> PromptRequest:
        return PromptRequest(
            rid=f"{uid}.{turn}", input_ids=ids, sampling_seed=10**6 * number + 1000 * place + turn, max_new_tokens=most
        )

    async with asyncio.TaskGroup() as tasks, served(app) as url:
        sessions = [
            AgentSession(form, record, request_of=partial(request_of, record.uid, place), tie=place, tasks=tasks)
            for place, record in enumerate(records)
        ]
        await scene(Sessions(url=url, keys=[table.open(one) for one in sessions], records=records))
        for one in sessions:
            one.end()


@contextmanager
def engine(scratch: Path, folder: Path) -> Any:
    """Gives the URL of an embedded engine with a prefix cache."""
    (scratch / "token").write_text(TOKEN)
    settings = replace(engine_config(), context_length=CONTEXT, prefix_cache_tokens=SESSIONS * CONTEXT)
    process = EngineProcess.start(
        EngineLaunch(
            model_folder=folder,
            engine=settings,
            dtype="float32",
            token_file=scratch / "token",
            log_file=scratch / "engine.log",
            load_weights=True,
            stop_strings=True,
        )
    )
    try:
        yield process.url
    finally:
        process.stop(timeout_s=5.0)


def pool_of(client: EngineClient) -> FirstTokens:
    """Returns a pool of one engine."""

    async def client_for(number: int, anew: bool) -> EngineClient:
        return client

    pool = FirstTokens(1, client_for, timeout_s=TIMEOUT_S)
    pool.first = []
    return pool


def question(number: int, index: int, *, way: int = 0) -> str:
    """Returns the question of episode ``index`` of a round; no two rounds or ways have one in common."""
    return f"rev {(2 * number + way) * SESSIONS + index:06}"


async def episodes_in_process(pool: Any, tokenizer: PromptTokenizer, *, number: int) -> float:
    """Returns the seconds that the episodes take with the environment in this process."""
    config = InteractionConfig(name="go_on", max_turns=TURNS, max_turn_tokens=TURN_TOKENS, on_turn_cut="continue")
    env = EnvSpec(name="go_on", summary="says go on", config=InteractionConfig, open=GoOn)
    sampled = TURNS * TURN_TOKENS
    prompts = PromptMaker(env=env, env_config=config, tokenizer=tokenizer, max_prompt_tokens=CONTEXT - sampled)
    sampling = SamplingParams(n=1, max_new_tokens=sampled, stop_token_ids=tokenizer.stop_token_ids)
    player = EpisodePlayer(env=env, env_config=config, prompts=prompts, pool=pool, sampling=sampling, seed=number)
    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for index in range(SESSIONS):
            start = GroupStart(
                index=index,
                attempt=0,
                row={"prompt": question(number, index), "answer": ""},
                where="",
                rid=f"p{number}.{index}",
                min_version=0,
            )
            tasks.create_task(player.play(start, tasks))
    return time.monotonic() - began


async def episodes_through_endpoint(pool: Any, tokenizer: PromptTokenizer, client: Client, *, number: int) -> float:
    """Returns the seconds that the same episodes take through the endpoint."""
    seconds = []

    async def scene(own: Sessions) -> None:
        openings = [[{"role": "user", "content": question(number, index, way=1)}] for index in range(SESSIONS)]
        job = {"url": own.url, "keys": own.keys, "openings": openings, "turns": TURNS, "more": MORE}
        found = await client.done(body={"max_tokens": TURN_TOKENS}, **job)
        seconds.append(found["seconds"])
        assert all(len(record.turns) == TURNS for record in own.records)

    await with_sessions(tokenizer, pool, scene, count=SESSIONS, turn_tokens=TURN_TOKENS, context=CONTEXT, number=number)
    return float(seconds[0])


def endpoint(client: Client, *, rounds: int) -> tuple[float, float]:
    """Prints episodes/s and prefilled tokens through the endpoint over those in process; returns both ratios."""
    folder = tiny_model_folder("tiny_qwen3", task="reverse_digits")
    tokenizer = PromptTokenizer(folder)
    seconds: dict[str, list[float]] = {"process": [], "endpoint": []}
    tokens: dict[str, list[float]] = {"process": [], "endpoint": []}

    async def play(url: str) -> None:
        asked = EngineClient(url, TOKEN, request_timeout_s=TIMEOUT_S, control_timeout_s=TIMEOUT_S)
        pool = pool_of(asked)
        for number in range(rounds + 1):
            for way in seconds:
                before = (await asyncio.to_thread(asked.loads))["prefill_tokens"]
                if way == "process":
                    took = await episodes_in_process(pool, tokenizer, number=number)
                else:
                    took = await episodes_through_endpoint(pool, tokenizer, client, number=number)
                if number:  # the first round warms up
                    seconds[way].append(took)
                    tokens[way].append((await asyncio.to_thread(asked.loads))["prefill_tokens"] - before)
        await asked.aclose()

    with tempfile.TemporaryDirectory(prefix="relax-endpoint-") as temporary, engine(Path(temporary), folder) as url:
        asyncio.run(play(url))
    speed = [own / its for own, its in zip(seconds["process"], seconds["endpoint"], strict=True)]
    prefill = [its / own for own, its in zip(tokens["process"], tokens["endpoint"], strict=True)]
    rates = {way: SESSIONS / fmean(own) for way, own in seconds.items()}
    print(
        f"  {rates['endpoint']:.1f} episodes/s through the endpoint, {rates['process']:.1f} in process; ratio "
        f"{median(speed):.2f} ({', '.join(f'{one:.2f}' for one in speed)})",
        flush=True,
    )
    print(
        f"  {fmean(tokens['endpoint']):,.0f} prefilled tokens through the endpoint, {fmean(tokens['process']):,.0f} in "
        f"process; ratio {median(prefill):.3f}",
        flush=True,
    )
    return median(speed), median(prefill)


def request_cpu(client: Client, *, rounds: int) -> tuple[float, float]:
    """Prints and returns the endpoint's CPU milliseconds for a request: a plain one, and one with tools and history."""
    tokenizer = tiny_prompt_tokenizer(tools=True)
    sessions = REQUESTS // TURNS
    line = "the product of two numbers " * 4
    history = [{"role": "user" if place % 2 else "assistant", "content": line} for place in range(1, 1000)]
    width = len(tokenizer.encode(history[:2])) / 2
    history = history[: 2 * round(HISTORY_TOKENS / width / 2) + 1]
    ways = {
        "plain": ([{"role": "user", "content": "7 times 8"}], {}),
        "with tools and 8k tokens": (history, {"tools": TOOLS}),
    }
    figures = []
    for name, (opening, body) in ways.items():
        costs: list[float] = []

        async def scene(own: Sessions, opening: Any = opening, body: Any = body, costs: list[float] = costs) -> None:
            job = {"url": own.url, "keys": own.keys, "more": MORE, "body": body}
            begun = await client.done(turns=1, openings=[opening] * sessions, **job)
            began = time.process_time()
            await client.done(turns=TURNS - 1, openings=begun["histories"], **job)
            costs.append(1e3 * (time.process_time() - began) / sessions / (TURNS - 1))

        for _ in range(rounds):
            asyncio.run(
                with_sessions(tokenizer, AtOnce(tokenizer), scene, count=sessions, turn_tokens=64, context=LONG_CONTEXT)
            )
        figures.append(median(costs))
        print(f"  {name}: {figures[-1]:.2f} ms ({', '.join(f'{one:.2f}' for one in costs)})", flush=True)
    return figures[0], figures[1]


def stream(client: Client, *, rounds: int) -> float:
    """Prints and returns the median milliseconds from the engine's first token to the client's first delta."""
    folder = tiny_model_folder("tiny_qwen3", task="reverse_digits")
    tokenizer = PromptTokenizer(folder)
    delays: list[float] = []

    async def play(url: str) -> None:
        asked = EngineClient(url, TOKEN, request_timeout_s=TIMEOUT_S, control_timeout_s=TIMEOUT_S)
        pool = pool_of(asked)

        async def scene(own: Sessions) -> None:
            for number in range(10 * rounds + 1):
                pool.first.clear()
                opening = [{"role": "user", "content": question(number, 0)}]
                job = {"url": own.url, "keys": own.keys, "openings": [opening], "turns": 1, "more": MORE}
                found = await client.done(body={"stream": True, "max_tokens": 16}, **job)
                if number and found["first"]:
                    delays.append(1e3 * (found["first"][0] - pool.first[0]))

        await with_sessions(tokenizer, pool, scene, count=1, turn_tokens=16, context=CONTEXT)
        await asked.aclose()

    with tempfile.TemporaryDirectory(prefix="relax-endpoint-") as temporary, engine(Path(temporary), folder) as url:
        asyncio.run(play(url))
    largest = quantiles(delays, n=100, method="inclusive")[98]
    print(f"  {median(delays):+.1f} ms in the median of {len(delays)} answers, p99 {largest:+.1f} ms", flush=True)
    return median(delays)
