"""Tests the endpoint with a real engine: a conversation has exactly the engine's tokens, streamed or not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relax_core.contracts.env import EpisodeLimits
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.engine_process import EngineLaunch
from relax_core.tools.make_tiny import tiny_model_folder
from tests.contracts.engine.conftest import launch, model_folder, start_engine
from tests.contracts.engine.harness import Engine
from tests.rollout.agents.endpoint_harness import SAMPLING, Served, serve

__all__ = ["launch", "model_folder", "start_engine"]
CONTEXT = 256


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


@pytest.fixture
def engine(start_engine: Callable[..., Engine], launch: EngineLaunch, folder: Path) -> Engine:
    settings = dataclasses.replace(launch.engine, context_length=CONTEXT, prefix_cache_tokens=16 * CONTEXT)
    return start_engine(model_folder=folder, engine=dataclasses.replace(settings), stop_strings=True)


def test_a_conversation_with_a_real_engine_streams_its_tokens(engine: Engine, folder: Path) -> None:
    tokenizer, client = PromptTokenizer(folder), engine.new_client()

    async def client_for(number: int, anew: bool) -> Any:
        return client

    pool = EnginePool(1, client_for, timeout_s=60.0)
    sampling = msgspec.structs.replace(SAMPLING, max_new_tokens=64, stop_token_ids=tokenizer.stop_token_ids)

    async def scene(served: Served) -> None:
        messages: list[Any] = [{"role": "user", "content": "rev 123"}]
        for number in range(3):
            body = {"messages": messages, "max_tokens": 24, "return_token_ids": True, "stream": bool(number)}
            if not body["stream"]:
                _, reply = await served.post(body)
                message, ids = reply["choices"][0]["message"], reply["choices"][0]["token_ids"]
            else:
                message, ids = await streamed(served, body)
            turn = served.record.turns[number]
            assert ids == turn.response.output_ids.tolist()
            shown = ids[:-1] if turn.response.finish_reason == "stop" else ids
            assert message["content"] == tokenizer.decode(shown)
            messages = [*messages, message, {"role": "user", "content": "rev 45"}]
        assert served.record.turns[2].response.cached_tokens > 0
        _, reply = await served.post({"messages": [{"role": "user", "content": "rev 9"}], "stop": ["0", "1", "2"]})
        assert not set("012") & set(reply["choices"][0]["message"]["content"])
        served.session.end("env_done")
        assert len(served.record.turns) == 4 and served.session.counts["segments"] == 2
        await client.aclose()

    limits = EpisodeLimits(turns=10, sampled_tokens=200, context_tokens=CONTEXT)
    serve(tokenizer, scene, pool, sampling=sampling, limits=limits)


async def streamed(served: Served, body: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Returns the message and the tokens of a streamed answer."""
    async with served.http.post(f"{served.url}/v1/chat/completions", json=body, headers=served.headers()) as reply:
        text = (await reply.read()).decode()
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    ids: list[int] = next(chunk["choices"][0]["token_ids"] for chunk in chunks if "token_ids" in chunk["choices"][0])
    assert sum(map(bool, pieces)) > 1 or len(ids) < 4
    return {"role": "assistant", "content": "".join(pieces)}, ids
