"""Shared helpers of the pool's tests: real engines, with clients that record requests and responses."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.engines.protocol.generate_messages import StreamEnd
from tests.contracts.engine.harness import TOKEN, Engine

SHORT = SamplingParams(n=3, max_new_tokens=4)
DEADLINE_S = 120.0


class TracedClient(EngineClient):
    """An engine client that records requests and responses."""

    def __init__(self, engine: Engine, number: int, directory: Directory) -> None:
        super().__init__(engine.process.url, TOKEN, request_timeout_s=60.0, control_timeout_s=30.0)
        self._number, self._directory = number, directory

    async def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, **options: Any
    ) -> AsyncIterator[Generated]:
        self._directory.calls.append(self._number)
        self._directory.requests += [(self._number, prompt) for prompt in prompts]
        async for response in super().generate(prompts, params, **options):
            self._directory.came += [(self._number, response)]
            yield response


class Directory:
    """Provides the pool with clients, and records requests and responses.

    ``calls`` lists the engine of each generate call. ``requests`` and ``came`` hold (engine, prompt) and (engine,
    response). The pool's repeated request for an engine's address calls ``replace``.
    """

    def __init__(self, *engines: Engine, replace: Callable[[int], Engine] | None = None) -> None:
        self.engines = list(engines)
        self.asked: list[tuple[int, bool]] = []
        self.calls: list[int] = []
        self.requests: list[tuple[int, PromptRequest]] = []
        self.came: list[tuple[int, Generated]] = []
        self._replace = replace
        self._clients: list[EngineClient] = []

    async def client_for(self, engine: int, on_policy: bool) -> EngineClient:
        self.asked.append((engine, on_policy))
        if on_policy and self._replace is not None:
            self.engines[engine] = await asyncio.to_thread(self._replace, engine)
            self._replace = None
        client = TracedClient(self.engines[engine], engine, self)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # the pool's tasks that watch the engines
        for client in self._clients:
            await client.aclose()


class Flawed:
    """Provides the pool with engines. ``flaws`` replaces the generate call of some engines."""

    def __init__(self, directory: Directory, flaws: dict[int, Callable[[PromptRequest], Generated]]) -> None:
        self._directory, self._flaws = directory, flaws
        self.met: Counter[int] = Counter()

    async def client_for(self, engine: int, on_policy: bool) -> EngineClient:
        client = await self._directory.client_for(engine, on_policy)
        if engine in self._flaws:

            async def flawed(prompts: Sequence[PromptRequest], *args: Any, **options: Any) -> AsyncIterator[Generated]:
                self.met[engine] += 1
                for prompt in prompts:
                    yield self._flaws[engine](prompt)

            client.generate = flawed  # type: ignore[method-assign]
        return client


def generate(
    directory: Directory,
    prompts: list[PromptRequest],
    params: SamplingParams,
    *,
    timeout_s: float = 60.0,
    on_done: Callable[[int], None] = lambda index: None,
    ends: list[StreamEnd] | None = None,
) -> list[tuple[int, list[Generated]]]:
    async def collect() -> list[tuple[int, list[Generated]]]:
        pool = EnginePool(len(directory.engines), directory.client_for, timeout_s=timeout_s)
        found = []
        try:
            async for index, responses in pool.generate(
                prompts, params, places=range(len(prompts)), on_end=None if ends is None else ends.append
            ):
                found.append((index, responses))
                on_done(index)
        finally:
            await directory.close()
        return found

    return asyncio.run(collect())


async def list_groups(groups: AsyncIterator[tuple[int, list[Generated]]]) -> list[tuple[int, list[Generated]]]:
    return [group async for group in groups]


async def collect_groups(groups: AsyncIterator[tuple[int, list[Generated]]]) -> dict[int, list[Generated]]:
    return dict(await list_groups(groups))


def tokens(found: list[tuple[int, list[Generated]]]) -> dict[int, list[list[int]]]:
    return {
        index: [response.output_ids.tolist() for response in sorted(responses, key=lambda response: response.sample)]
        for index, responses in found
    }


def continued(directory: Directory) -> int:
    return sum(prompt.generated > 0 for _, prompt in directory.requests)


def kill(engine: Engine) -> None:
    os.kill(engine.process.pid, signal.SIGKILL)


def decode_a_little(engine: Engine) -> None:
    """Lets a paused slow engine decode some steps, and pauses it again. Then its samples are partly generated."""
    engine.client.resume()
    engine.client.pause("in_place")


def decodes(engine: Engine) -> Callable[[], bool]:
    """Returns a condition for `until`. It decodes a few steps, and is True when all samples have some more tokens."""
    done = engine.client.loads()["generated_tokens"]

    def some_more() -> bool:
        decode_a_little(engine)
        return bool(engine.client.loads()["generated_tokens"] >= done + 50)

    return some_more


async def until(what: str, true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)
