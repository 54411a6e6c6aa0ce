"""Tests conversations over HTTP with Anthropic's Messages, and malformed bodies on each route."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from relax_core.contracts.env import EpisodeLimits
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.rollout.agents.endpoint_app import API_PROTOCOLS
from tests.data.chat_templates import FAMILIES, write_folder
from tests.rollout.agents.endpoint_harness import CONTEXT, ScriptedPool, Served, serve

PATH = "/v1/messages"
ASK = {"role": "user", "content": "12*7 ?"}
TOOL = {"name": "calc", "description": "Computes.", "input_schema": {"type": "object", "properties": {}}}
THOUGHT = (
    "<think>\nhm\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "calc", "arguments": {"e":  "12*7", "x": 1.0, "n": null}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return PromptTokenizer(write_folder(tmp_path_factory.mktemp("m") / "model", FAMILIES["strips_thinking"]))


async def streamed(served: Served, body: dict[str, Any]) -> dict[str, Any]:
    """Assembles the message from a stream's events, like Anthropic's client."""
    async with served.http.post(
        f"{served.url}{PATH}", json={**body, "stream": True}, headers=served.headers()
    ) as reply:
        assert reply.status == 200
        text = (await reply.read()).decode()
    message: dict[str, Any] = {}
    blocks: dict[int, dict[str, Any]] = {}
    partial: dict[int, str] = defaultdict(str)
    names = []
    for lines in filter(None, text.split("\n\n")):
        name, data = lines.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        names.append(event["type"])
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks[event["index"]] = event["content_block"]
            case "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    partial[event["index"]] += delta["partial_json"]
                else:
                    key = delta["type"].removesuffix("_delta")
                    block[key] += delta[key]
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    assert names[-1] == "message_stop" and names.count("content_block_start") == names.count("content_block_stop")
    for index, text in partial.items():
        blocks[index]["input"] = json.loads(text)
    return {**message, "content": list(blocks.values())}


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_conversation_is_one_segment(tokenizer: PromptTokenizer, stream: bool) -> None:
    pool = ScriptedPool(tokenizer, THOUGHT, THOUGHT, "It is 84.")

    async def scene(served: Served) -> None:
        messages: list[Any] = [ASK]
        body = {"model": "m", "max_tokens": 400, "system": [{"type": "text", "text": "be brief"}], "tools": [TOOL]}
        for number in range(3):
            if stream:
                reply = await streamed(served, {**body, "messages": messages})
            else:
                status, reply = await served.post({**body, "messages": messages}, PATH)
                assert status == 200, reply
            assert reply["usage"]["output_tokens"] == len(pool.given[number])
            assert reply["usage"]["cache_read_input_tokens"] == 7
            if number == 2:
                assert reply["content"] == [{"type": "text", "text": "It is 84."}]
                assert (reply["stop_reason"], reply["stop_sequence"]) == ("end_turn", None)
                break
            thinking, text, call = reply["content"]
            assert (thinking["thinking"], text["text"], call["name"]) == ("hm", "Let me see.", "calc")
            assert call["input"] == {"e": "12*7", "x": 1.0, "n": None} and reply["stop_reason"] == "tool_use"
            results = [{"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "84"}]}]
            messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": results}]
        assert len(served.tree().episodes[0].leaves) == 1 and served.session.counts["foreign"] == 0

    serve(tokenizer, scene, pool)


def test_stops_and_limits_have_their_reasons(tokenizer: PromptTokenizer) -> None:
    pool = ScriptedPool(tokenizer, "one STOP", "abcdefgh")

    async def scene(served: Served) -> None:
        _, reply = await served.post({"messages": [ASK], "max_tokens": 99, "stop_sequences": ["STOP"]}, PATH)
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "STOP")
        assert reply["content"] == [{"type": "text", "text": "one "}]
        _, reply = await served.post({"messages": [{"role": "user", "content": "b"}], "max_tokens": 3}, PATH)
        assert (reply["stop_reason"], reply["content"][0]["text"]) == ("max_tokens", "abc")

    serve(tokenizer, scene, pool)


def test_refusals_have_anthropic_s_shape(tokenizer: PromptTokenizer) -> None:
    async def scene(served: Served) -> None:
        image = {"type": "image", "source": {"type": "base64", "data": ""}}
        search = {"name": "s", "type": "web_search_20250305"}
        result = {"type": "tool_result", "tool_use_id": "z", "content": 5}
        for body, words in (
            ({"messages": [ASK]}, "missing required field `max_tokens`"),
            ({"messages": [{"role": "user", "content": [image]}], "max_tokens": 5}, "a block of type 'image'"),
            ({"messages": [ASK], "max_tokens": 5, "tools": [search]}, "has the type 'web_search_20250305'"),
            ({"messages": [ASK], "max_tokens": 5, "mcp_servers": [{}]}, "mcp_servers: tools run in the agent"),
            ({"messages": [{"role": "user", "content": [result]}], "max_tokens": 5}, "the result of a tool"),
        ):
            status, reply = await served.post(body, PATH)
            assert status == 400 and reply["type"] == "error", reply
            assert reply["error"]["type"] == "invalid_request_error" and words in reply["error"]["message"], reply
        async with served.http.post(f"{served.url}{PATH}", json={}, headers={"x-api-key": "wrong"}) as reply:
            assert reply.status == 401 and (await reply.json())["error"]["type"] == "authentication_error"

    serve(tokenizer, scene, ScriptedPool(tokenizer))


# -- malformed bodies -------------------------------------------------------------------------------------------------
words = st.sampled_from(["user", "assistant", "tool", "system", "text", "tool_result", "calc", "", "\ud800", "a\x00b"])
leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | words | st.text(max_size=5)
keys = st.sampled_from(
    ["role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id", "tool_call_id", "stop",
     "max_tokens", "stream", "tools", "messages", "input", "tool_use_id", "n", "model", "system", "output", "call_id",
     "input_schema", "parameters"]
)  # fmt: skip
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)
messages = st.lists(
    st.fixed_dictionaries({"role": words, "content": values}, optional={"tool_calls": values, "tool_call_id": values}),
    max_size=4,
)
bodies = st.fixed_dictionaries(
    {"messages": messages | values, "input": messages | values, "max_tokens": st.just(5) | values},
    optional={"tools": values, "stop": values, "system": values, "stream": values, "tool_choice": values, "n": values},
)


def fuzz(tokenizer: PromptTokenizer, examples: int) -> str:
    """Sends random bodies to each route. Returns the key of the session."""
    sent: list[bytes] = []

    @settings(max_examples=examples, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(bodies | values)
    def collect(body: Any) -> None:
        sent.append(json.dumps(body).encode())

    collect()
    keys: list[str] = []

    async def scene(served: Served) -> None:
        keys.append(served.key)
        statuses: dict[int, int] = defaultdict(int)
        for body in sent:
            for path in API_PROTOCOLS:
                async with served.http.post(f"{served.url}{path}", data=body, headers=served.headers()) as reply:
                    statuses[reply.status] += 1
                    assert reply.status in (200, 400), (body, await reply.text())
                    if reply.status == 400:
                        assert (await reply.json())["error"]["message"], body
        assert statuses[400] > len(sent)
        await served.said([ASK])

    limits = EpisodeLimits(turns=10**6, sampled_tokens=10**9, context_tokens=CONTEXT)
    serve(
        tokenizer,
        scene,
        ScriptedPool(tokenizer, *["ok"] * (2 + examples * len(API_PROTOCOLS))),
        limits=limits,
        long_s=1800.0,
    )
    return keys[0]


def test_any_body_is_answered_in_the_protocol_s_shape(
    tokenizer: PromptTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = fuzz(tokenizer, 300)
    assert not [record for record in caplog.records if key in record.getMessage()]


@pytest.mark.soak
def test_ten_thousand_bodies_are_answered(tokenizer: PromptTokenizer) -> None:
    fuzz(tokenizer, 10_000)


def test_a_half_sent_body_disturbs_nobody(tokenizer: PromptTokenizer) -> None:
    pool = ScriptedPool(tokenizer, "one")

    async def scene(served: Served) -> None:
        host, port = served.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nx-api-key: {served.key}\r\nContent-Length: 100\r\n\r\n{{"
        writer.write(head.encode())
        await writer.drain()
        await served.said([ASK])
        writer.close()
        assert served.session.counts["requests"] == 1

    serve(tokenizer, scene, pool)
