"""Tests that a sampled text is split into thinking, content and tool calls for the client, complete or streamed."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.contracts.tool_calls import ToolSchema
from relax_core.data.tool_parsers import PARSERS
from relax_core.rollout.agents.answer_reading import AnswerForm, StreamedReply, read_reply
from relax_core.rollout.episodes.episode_records import stopped_by

TOOLS: list[ToolSchema] = [
    {
        "type": "function",
        "function": {"name": "calc", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
    }
]
HERMES = AnswerForm(opened=False, parser="hermes", tools=TOOLS)
PLAIN = AnswerForm(opened=False, parser="none", tools=())
CALL = '<tool_call>\n{"name": "calc", "arguments": {"a": 1}}\n</tool_call>'


def form(*, opened: bool = False, parser: str = "none", tools: bool = False, stop: tuple[str, ...] = ()) -> AnswerForm:
    return AnswerForm(opened=opened, parser=parser, tools=TOOLS if tools else (), stop=stop)


@pytest.mark.parametrize(
    ("text", "of", "reasoning", "content", "calls"),
    [
        ("<think>\nhm\n</think>\n\nIt is 84.", PLAIN, "hm", "It is 84.", 0),
        ("hm</think>It is 84.", PLAIN, "", "hm</think>It is 84.", 0),  # no <think> tag
        ("hm\n</think>\nIt is 84.", form(opened=True), "hm", "It is 84.", 0),
        ("<think>cut", PLAIN, "cut", "", 0),
        ("cut", form(opened=True), "cut", "", 0),
        (f"Let me see.\n{CALL}", HERMES, "", "Let me see.", 1),
        (f"<think>a {CALL}</think>{CALL}{CALL}", HERMES, f"a {CALL}", "", 2),
        ("<tool_call>{broken", HERMES, "", "<tool_call>{broken", 0),
        (CALL, PLAIN, "", CALL, 0),  # no tools were sent
        ("code</code>\n more", form(stop=("</code>",)), "", "code", 0),
    ],
)
def test_a_text_is_thinking_content_and_calls(
    text: str, of: AnswerForm, reasoning: str, content: str, calls: int
) -> None:
    reply = read_reply(text, of, number=7)
    assert (reply.reasoning, reply.content, len(reply.calls)) == (reasoning, content, calls)
    for number, call in enumerate(reply.calls):
        assert (call.name, json.loads(call.arguments), call.id) == ("calc", {"a": 1}, f"c00007{number:03d}")


def test_the_string_that_stopped_an_answer_is_the_first_one() -> None:
    assert stopped_by("a b c", ("c", "b")) == "b"
    assert stopped_by("a b c", ("d",)) is None
    reply = read_reply("code</code> x", form(stop=("</code>",)), number=0)
    assert (reply.content, reply.full) == ("code", "code</code> x")


@pytest.mark.parametrize("stop", ["</tool_call>", "call>", "}\n</tool_call>"])
def test_a_call_that_a_stop_string_ends_is_a_call(stop: str) -> None:
    text = f"Let me see.\n{CALL}"
    reply = read_reply(text, form(parser="hermes", tools=True, stop=(stop,)), number=0)
    assert [json.loads(call.arguments) for call in reply.calls] == [{"a": 1}]
    assert reply.content == reply.full == "Let me see."


def test_a_stop_string_behind_a_call_is_no_content() -> None:
    reply = read_reply(f"{CALL}\nObservation:", form(parser="hermes", tools=True, stop=("\nObservation:",)), number=0)
    assert (len(reply.calls), reply.content) == (1, "")


def test_a_broken_call_is_content_beside_the_call_that_is_made() -> None:
    reply = read_reply(f"a {CALL}<tool_call>{{bad}}</tool_call>", HERMES, number=0)
    assert (len(reply.calls), reply.content) == (1, "a <tool_call>{bad}</tool_call>")


def test_an_untyped_value_gets_the_type_of_the_request_s_tool() -> None:
    text = "<tool_call><function=calc><parameter=a>75001</parameter></function></tool_call>"
    (call,) = read_reply(text, form(parser="qwen3_coder", tools=True), number=0).calls
    assert json.loads(call.arguments) == {"a": "75001"}


fragments = st.sampled_from(
    ["<think>", "</think>", "<think", "<tool_call>", "</tool_call>", "<tool", CALL, "[TOOL_CALLS]", "\n", " ", "STOP",
     "ST", '{"name": "calc", "arguments": {}}', "[calc(a=1)]", "<|python_tag|>", "a", "ü", "\ufffd"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.lists(fragments, max_size=8).map("".join),
    st.sampled_from(sorted(PARSERS)),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(), ("STOP",), ("a", "STOP")]),
    st.data(),
)
def test_the_pieces_of_a_growing_text_are_the_reply(
    text: str, parser: str, tools: bool, opened: bool, stop: tuple[str, ...], data: st.DataObject
) -> None:
    of = form(opened=opened, parser=parser, tools=tools, stop=stop)
    reply = read_reply(text, of, number=0)
    streamed = StreamedReply(of)
    told: dict[str, str] = defaultdict(str)
    at = 0
    while at < len(text):
        at += data.draw(st.integers(1, 5))
        for kind, piece in streamed.grown(text[:at]):
            told[kind] += piece
    for kind, piece in streamed.ended(reply):
        told[kind] += piece
    assert (told["reasoning"], told["content"]) == (reply.reasoning, reply.content)


def test_text_is_told_before_the_answer_ends() -> None:
    streamed = StreamedReply(HERMES)
    assert streamed.grown("<think") == []
    assert streamed.grown("<think>one") == [("reasoning", "one")]
    assert streamed.grown("<think>one two</th") == [("reasoning", " two")]
    assert streamed.grown("<think>one two</think>\nLet me") == [("content", "Let me")]
    assert streamed.grown("<think>one two</think>\nLet me see <tool") == [("content", " see")]
