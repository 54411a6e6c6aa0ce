"""Tests conversations over HTTP with OpenAI's Responses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relax_core.data.tokenizer import PromptTokenizer
from tests.data.chat_templates import FAMILIES, write_folder
from tests.rollout.agents.endpoint_harness import ScriptedPool, Served, serve

PATH = "/v1/responses"
ASK = {"role": "user", "content": [{"type": "input_text", "text": "12*7 ?"}]}
TOOL = {"type": "function", "name": "calc", "description": "Computes.", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "calc", "arguments": {"e":  "12*7"}}\n</tool_call>'
THOUGHT = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}"
BODY = {"instructions": "be brief", "tools": [TOOL], "model": "m"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return PromptTokenizer(write_folder(tmp_path_factory.mktemp("m") / "model", FAMILIES["strips_thinking"]))


async def streamed(served: Served, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the response of a stream. Checks the events against the response."""
    async with served.http.post(
        f"{served.url}{PATH}", json={**body, "stream": True}, headers=served.headers()
    ) as reply:
        assert reply.status == 200
        text = (await reply.read()).decode()
    events = []
    for lines in filter(None, text.split("\n\n")):
        name, data = lines.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    whole: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    assert done == whole["output"] and added == [item["id"] for item in done]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "".join(said(item) for item in whole["output"])
    return whole


def said(item: dict[str, Any]) -> str:
    return "".join(part["text"] for part in item["content"]) if item["type"] == "message" else ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_a_tool_conversation_is_one_segment(tokenizer: PromptTokenizer, stream: bool, named: bool) -> None:
    pool = ScriptedPool(tokenizer, THOUGHT, CALL, "It is 84.")

    async def scene(served: Served) -> None:
        given: list[Any] = [ASK]
        previous: dict[str, str] = {}
        for number in range(3):
            body = {**BODY, "input": given, **previous}
            if stream:
                reply = await streamed(served, body)
            else:
                status, reply = await served.post(body, PATH)
                assert status == 200, reply
            assert reply["usage"]["output_tokens"] == len(pool.given[number]) and reply["status"] == "completed"
            output = reply["output"]
            if number == 2:
                assert [said(item) for item in output] == ["It is 84."]
                break
            kinds = [["reasoning", "message", "function_call"], ["function_call"]]
            assert [item["type"] for item in output] == kinds[number]
            assert json.loads(output[-1]["arguments"]) == {"e": "12*7"}
            result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "84"}
            if named:
                given, previous = [result], {"previous_response_id": reply["id"]}
            else:
                given = [*given, *output, result]
        assert len(served.tree().episodes[0].leaves) == 1 and served.session.counts["foreign"] == 0
        opening = tokenizer.decode(pool.requests[2].input_ids)
        assert opening.count("be brief") == 1 and opening.count("12*7 ?") == 1

    serve(tokenizer, scene, pool)


def test_an_answer_that_was_cut_is_incomplete(tokenizer: PromptTokenizer) -> None:
    async def scene(served: Served) -> None:
        _, reply = await served.post({"input": "hi", "max_output_tokens": 3}, PATH)
        assert reply["status"] == "incomplete" and said(reply["output"][0]) == "abc"
        assert reply["incomplete_details"] == {"reason": "max_output_tokens"}

    serve(tokenizer, scene, ScriptedPool(tokenizer, "abcdef"))


def test_what_cannot_be_read_is_refused_in_words(tokenizer: PromptTokenizer) -> None:
    output = {"type": "function_call_output", "call_id": "z", "output": "1"}
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}

    async def scene(served: Served) -> None:
        for body, words in (
            ({"input": [output]}, "the id 'z', which no earlier call"),
            ({"input": "a", "previous_response_id": "resp_x_0"}, "no answer of this session"),
            ({"input": [image]}, "a part of type 'input_image'"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "an item of type 'item_reference'"),
            ({"input": [{"role": "king", "content": "x"}]}, "role='king'"),
            ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.type='json_schema'"),
            ({"input": "a", "tools": [{"type": "web_search"}]}, "one of type 'web_search'"),
            ({"input": "a", "background": True}, "background: an answer is given"),
            ({}, "missing required field `input`"),
        ):
            status, reply = await served.post(body, PATH)
            assert status == 400 and words in reply["error"]["message"], reply

    serve(tokenizer, scene, ScriptedPool(tokenizer))
