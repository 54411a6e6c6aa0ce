"""Tests real clients with a real engine. The builtin model calls a tool in some of its answers."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relax_core.contracts.env import EpisodeLimits
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.engine_process import EngineLaunch
from relax_core.tools.make_tiny import tiny_model_folder
from tests.agents_env.test_clients import ANSWER_S, Client
from tests.contracts.engine.conftest import launch, model_folder, start_engine
from tests.contracts.engine.harness import Engine
from tests.rollout.agents.endpoint_harness import SAMPLING, Served, serve

pytestmark = pytest.mark.agents
__all__ = ["launch", "model_folder", "start_engine"]
CONTEXT = 1024


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model_folder("tiny_qwen3_tools", task="calculator")


@pytest.fixture
def engine(start_engine: Callable[..., Engine], launch: EngineLaunch, folder: Path) -> Engine:
    settings = dataclasses.replace(launch.engine, context_length=CONTEXT, prefix_cache_tokens=16 * CONTEXT)
    return start_engine(model_folder=folder, engine=settings, stop_strings=True)


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_a_client_goes_on_from_the_tokens_of_a_real_engine(engine: Engine, folder: Path, name: str) -> None:
    tokenizer, served_by = PromptTokenizer(folder), engine.new_client()
    client = Client(name)

    async def client_for(number: int, anew: bool) -> Any:
        return served_by

    async def scene(served: Served) -> None:
        said = await asyncio.to_thread(client.converse, "engine", served.url, served.key)
        assert said.get("answer", "None") != "None", said
        begun = int(said["answer"])  # the first turn with a call; each earlier answer is a separate conversation
        served.session.end("env_done")
        turns = served.record.turns[begun - 1 :]
        assert len(turns) == 4 and turns[0].tools and served.record.orphan == 0
        assert served.session.counts["segments"] == begun and served.session.counts["foreign"] == 0
        for before, after in pairwise(turns):
            sampled = before.response.output_ids.tolist()
            assert after.prompt_ids[: len(before.prompt_ids) + len(sampled)] == [*before.prompt_ids, *sampled]
        assert turns[-1].response.cached_tokens > 0

    async def whole(served: Served) -> None:
        try:
            await scene(served)
        finally:
            await served_by.aclose()

    pool = EnginePool(1, client_for, timeout_s=60.0)
    sampling = msgspec.structs.replace(SAMPLING, max_new_tokens=32, stop_token_ids=tokenizer.stop_token_ids)
    limits = EpisodeLimits(turns=50, sampled_tokens=1600, context_tokens=CONTEXT)
    try:
        serve(tokenizer, whole, pool, sampling=sampling, limits=limits, context=CONTEXT, long_s=2 * ANSWER_S)
    finally:
        client.close()
