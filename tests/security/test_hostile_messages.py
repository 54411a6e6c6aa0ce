"""Tests that no chat message of an agent blocks or ends the rollout, through the endpoint and its HTTP server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from relax_core.contracts.untrusted_values import MAX_DEPTH
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.data.turn_tokens import TurnTokens
from relax_core.rollout.agents.endpoint_app import MAX_BODY_BYTES
from tests.data.chat_templates import FAMILIES, write_folder
from tests.rollout.agents.endpoint_harness import ScriptedPool, Served, serve

LARGE = 15_000_000  # characters
BLOCKED_S = 3.0  # 0.3 s on an idle machine; other tests use the cores, and the heartbeat timeout is longer
ASK = {"role": "user", "content": "12*7?"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return PromptTokenizer(write_folder(tmp_path_factory.mktemp("m") / "model", FAMILIES["strips_thinking"]))


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value}
    return value


def call(arguments: str) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": arguments}}


def called(arguments: str, result: str = "84") -> list[dict[str, Any]]:
    return [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "calc", "description": "d", "parameters": parameters}}


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


BODIES: dict[str, tuple[Callable[[], Any], int]] = {
    "message of 15 MB": (lambda: said("12*7? " * (LARGE // 6)), 400),
    "message of 15 MB without a space": (lambda: said("x" * LARGE), 400),
    "message of 15 MB of spaces": (lambda: said(" " * LARGE), 400),
    "message of 15 MB in parts": (
        lambda: {"messages": [{"role": "user", "content": [{"type": "text", "text": "ab "}] * 300_000}]},
        400,
    ),
    "message of 200 KB": (lambda: said("12*7? " * 33_000), 400),
    "four thousand messages": (lambda: {"messages": [{"role": "user", "content": "12*7? " * 5}] * 4000}, 400),
    "thinking of 15 MB": (
        lambda: {"messages": [ASK, {"role": "assistant", "content": "a", "reasoning_content": "x" * LARGE}, ASK]},
        400,
    ),
    "arguments of 15 MB": (lambda: {"messages": called(json.dumps({"e": "x" * LARGE}))}, 400),
    "result of 15 MB": (lambda: {"messages": called("{}", "x " * (LARGE // 2))}, 400),
    "tool of 15 MB": (lambda: {"messages": [ASK], "tools": [tool({"type": "object", "x": "y" * LARGE})]}, 400),
    "deep tool": (lambda: {"messages": [ASK], "tools": [tool(nested(900))]}, 400),
    "very deep tool": (lambda: b'{"messages":[{"role":"user","content":"a"}],"tools":' + b"[" * 1_000_000, 400),
    "deep body": (lambda: b"[" * 5_000_000, 400),
    "deep arguments": (lambda: {"messages": called('{"a":' * 300 + "1" + "}" * 300)}, 200),
    "very deep arguments": (lambda: {"messages": called("[" * 5000)}, 400),
    "half of a pair in arguments": (lambda: {"messages": called('{"e": "\\ud800"}')}, 200),
    "half of a pair": (lambda: b'{"messages":[{"role":"user","content":"\\ud800"}]}', 400),
    "mark of an answer": (lambda: said("RelaxTextGoesHereAnswerMark RelaxTextGoesHere0Mark"), 200),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_request_neither_blocks_nor_ends_the_rollout(case: str, tokenizer: PromptTokenizer) -> None:
    make, wanted = BODIES[case]
    body = make()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    gaps = [0.0]

    async def beat() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            gaps[0] = max(gaps[0], time.monotonic() - before)

    async def scene(served: Served) -> None:
        beating = asyncio.create_task(beat())
        headers = served.headers(**{"Content-Type": "application/json"})
        url = f"{served.url}/v1/chat/completions"
        async with served.http.post(url, data=content, headers=headers) as reply:
            status, told = reply.status, await reply.text()
        assert status == wanted, told[:500]
        if "15 MB" in case or "KB" in case:
            assert "context_length_exceeded" in told and len(told) < 1000
        assert (await served.said([ASK]))["content"] == "It is 84.", "the session continues"
        beating.cancel()

    says = ["It is 84."] * (2 if wanted == 200 else 1)
    serve(tokenizer, scene, ScriptedPool(tokenizer, *says), max_body_bytes=MAX_BODY_BYTES)
    assert gaps[0] < BLOCKED_S


def test_requests_of_a_session_are_served_in_their_order(tokenizer: PromptTokenizer) -> None:
    pool = ScriptedPool(tokenizer, "first", "second")

    async def scene(served: Served) -> None:
        large = [{"role": "user", "content": "12 " * 30_000}]
        first = asyncio.create_task(served.said(large))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(served.said([ASK]))
        assert [(await one_of)["content"] for one_of in (first, second)] == ["first", "second"]

    serve(tokenizer, scene, pool, context=100_000)


def test_a_message_with_the_mark_of_an_answer_is_a_turn_like_any_other(tokenizer: PromptTokenizer) -> None:
    opening = [{"role": "user", "content": "RelaxTextGoesHereAnswerMark"}]
    between = TurnTokens(tokenizer, opening)
    prompt = tokenizer.encode(opening)
    sampled = [*tokenizer.encode_plain("ok"), tokenizer.stop_token_ids[0]]
    message = {"role": "user", "content": "again RelaxTextGoesHereAnswerMark RelaxTextGoesHere0Mark"}
    ids, _ = between.next_prompt(prompt, sampled, [message])
    assert message["content"] in tokenizer.decode(ids)


def test_the_depth_of_a_request_is_that_of_all_json() -> None:
    assert MAX_DEPTH < 200, "each level uses stack frames, and the interpreter's limit is 1000"
