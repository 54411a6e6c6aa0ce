"""Tests that tool calls rendered by a template are parsed, and that no model text raises."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_core.contracts.tool_calls import ToolCall, ToolSchema
from relax_core.data.tool_parsers import PARSERS, read_action, tool_parser
from tests.data.chat_templates import FAMILIES

quick = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True).filter(
    lambda name: name not in {"as", "in", "is", "if", "or", "and", "not", "def", "for", "try", "del", "pass", "from"}
)
# Values contain no marks of the formats, because the formats cannot quote marks.
TEXTS = st.text(st.characters(exclude_characters="<>[]", exclude_categories=("Cs", "Cc")), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**50), 2**50) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3)
Written = Sequence[tuple[str, Mapping[str, Any]]]


def hermes(calls: Written) -> str:
    inner = (json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls)
    return "I look.\n" + "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in inner)


def qwen3_coder(calls: Written) -> str:
    def parameters(given: Mapping[str, Any]) -> str:
        return "".join(f"<parameter={key}>\n{json.dumps(value)}\n</parameter>\n" for key, value in given.items())

    return "\n".join(
        f"<tool_call>\n<function={name}>\n{parameters(given)}</function>\n</tool_call>" for name, given in calls
    )


def llama3_json(calls: Written) -> str:
    name, given = calls[0]
    return f'{{"name": "{name}", "parameters": {json.dumps(given)}}}'


def pythonic(calls: Written) -> str:
    def call(name: str, given: Mapping[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"

    return f"[{', '.join(call(*arguments) for arguments in calls)}]"


def mistral(calls: Written) -> str:
    listed = [{"name": name, "arguments": given, "id": "abcdefghi"} for name, given in calls]
    return f"[TOOL_CALLS] {json.dumps(listed)}"


def mistral_13(calls: Written) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]abcdefghi[ARGS]{json.dumps(given)}" for name, given in calls)


FORMS: list[tuple[str, Callable[[Written], str]]] = [
    *(("hermes", hermes), ("llama3_json", llama3_json), ("pythonic", pythonic)),
    *(("mistral", mistral), ("mistral", mistral_13)),
]


@pytest.mark.parametrize(("parser", "write"), FORMS)
@quick
@given(calls=CALLS)
def test_a_call_that_was_written_is_read(parser: str, write: Callable[[Written], str], calls: Written) -> None:
    action = read_action(f"<think>\nhm\n</think>\n\n{write(calls)}", stopped=True, parser=parser)
    wanted = list(calls[:1] if parser == "llama3_json" else calls)
    assert [(call.name, call.arguments) for call in action.tool_calls] == [
        (name, dict(arguments)) for name, arguments in wanted
    ]
    assert action.thinking == "hm" and not action.parse_error
    assert action.content == ("I look." if write is hermes else "")


@quick
@given(calls=CALLS)
def test_the_xml_form_reads_values_but_a_text_stays_a_text(calls: Written) -> None:
    """The format has no types. JSON that is not a string is parsed, everything else is text."""
    action = read_action(qwen3_coder(calls), stopped=True, parser="qwen3_coder")
    assert not action.parse_error
    for call, (name, wanted) in zip(action.tool_calls, calls, strict=True):
        assert call.name == name and call.arguments.keys() == wanted.keys()
        for key, value in wanted.items():
            assert call.arguments[key] == (json.dumps(value) if isinstance(value, str) else value)


def tool(name: str, **properties: Any) -> list[ToolSchema]:
    named = {"Text": {"type": "string"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "boolean"}]}}
    parameters = {"type": "object", "properties": properties, "$defs": named}
    return [{"type": "function", "function": {"name": name, "parameters": parameters}}]


TEXT, WHOLE, NUMBER, TRUTH = ({"type": name} for name in ("string", "integer", "number", "boolean"))


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        (
            TEXT,
            {text: text for text in ("75001", "true", "null", "1.10", '{"a": 1}', "[1]", '"quoted"', "None", " x ")},
        ),
        ({"$ref": "#/$defs/Text"}, {"75001": "75001"}),
        ({"enum": ["1", "2"]}, {"1": "1"}),
        ({"const": "1"}, {"1": "1"}),
        (WHOLE, {"3": 3, "3.0": 3, "3.5": 3.5, "three": "three", "true": True, "9007199254740993": 9007199254740993}),
        (NUMBER, {"1.10": 1.1, "3": 3, "3.0": 3.0, "NaN": "NaN"}),
        (TRUTH, {"True": True, "FALSE": False, " true ": True, "5": 5, "yes": "yes"}),
        ({"$ref": "#/$defs/Loop"}, {"True": True}),
        ({"anyOf": [TEXT, {"type": "null"}]}, {"null": None, "75001": "75001", "None": "None"}),
        ({"type": ["integer", "null"]}, {"None": None, "null": None, "5": 5}),
        ({"type": "object"}, {'{"a": "1"}': {"a": "1"}, "{'a': 1}": "{'a': 1}"}),
        ({"type": "array"}, {"[1, true]": [1, True]}),
        ({}, {"75001": 75001, "a": "a"}),  # without a type: JSON that is not a string is parsed
        ({"type": 5, "anyOf": 3, "enum": None, "$ref": []}, {"5": 5}),
    ],
)
def test_an_untyped_value_gets_the_type_that_the_schema_names(schema: Any, texts: Mapping[str, Any]) -> None:
    for text, wanted in texts.items():
        written = f"<tool_call><function=f><parameter=a>{text}</parameter></function></tool_call>"
        (call,) = read_action(written, stopped=True, parser="qwen3_coder", tools=tool("f", a=schema)).tool_calls
        assert call.arguments == {"a": wanted} and type(call.arguments["a"]) is type(wanted)


@pytest.mark.parametrize("parameters", [None, [], {"properties": None}, {"properties": {"a": None}}])
def test_a_tool_with_a_schema_of_any_form_is_called(parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = "<tool_call><function=f><parameter=a>5</parameter></function></tool_call>"
    assert read_action(text, stopped=True, parser="qwen3_coder", tools=tools).tool_calls[0].arguments == {"a": 5}


@pytest.mark.parametrize(
    "written",
    [
        '{"name": "f", "arguments": "{\\"a\\": \\"75001\\"}"}',
        '{"name": "f", "parameters": {"a": "75001"}}',
        '{"type": "function", "name": "f", "arguments": {"a": "75001"}}',
    ],
)
@pytest.mark.parametrize(
    ("parser", "around"),
    [("hermes", "<tool_call>{}</tool_call>"), ("llama3_json", "{}"), ("mistral", "[TOOL_CALLS][{}]")],
)
def test_arguments_are_read_under_both_keys_and_as_json_text(parser: str, around: str, written: str) -> None:
    action = read_action(around.replace("{}", written), stopped=True, parser=parser)
    assert action.tool_calls == (ToolCall(name="f", arguments={"a": "75001"}),), action.parse_error


GOOD = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
CODER = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"


@pytest.mark.parametrize(
    ("parser", "text", "message"),
    [
        ("hermes", f'{GOOD}<tool_call>{{"name": "f", "arguments": {{bad}}}}</tool_call>', "is not JSON"),
        ("hermes", f"<tool_call>{{bad}}</tool_call>{GOOD}", "is not JSON"),
        ("hermes", f"<tool_call>{{cut{GOOD}", "is not JSON"),
        ("hermes", f'{GOOD}<tool_call>{{"name": "f"', "does not end with"),
        ("hermes", f'{GOOD}<tool_call>{{"name": "g"}}</tool_call>', "There is no tool 'g'"),
        ("qwen3_coder", f"{CODER}<tool_call>f(1)</tool_call>", "<function=NAME>"),
        ("qwen3_coder", f"<tool_call><function=f>a=1</function></tool_call>{CODER}", "<parameter=KEY>"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"arguments": {}}]', "has no name"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{bad}[TOOL_CALLS]f[ARGS]{"a": 1}', "is not JSON"),
        ("pythonic", "[f(a=1), f(2)]", "all arguments by name"),
        ("pythonic", "[f(a=1), f(a=open('x'))]", "is not a constant"),
        ("pythonic", "[f(a=1), 3]", "name(key=value)"),
    ],
)
def test_a_broken_call_leaves_the_others(parser: str, text: str, message: str) -> None:
    action = read_action(text, stopped=True, parser=parser, tools=tool("f", a=WHOLE))
    assert action.tool_calls == (ToolCall(name="f", arguments={"a": 1}),)
    assert message in action.call_error and not action.parse_error


@pytest.mark.parametrize(
    "text",
    [
        *("[(1, 2), (3, 4)]", "[Paris](http://x.org) is the town", '{"answer": 5}', "{1, 2, 3}", '{"name": "Paris"}'),
        *("[f(x) = x^2]", "[sqrt(2), 3]", "[see (a) and (b)]", "[x for x in f()]", '{"a": {"name": "f"}}', "[1, (2"),
        *('{"name": 5, "parameters": {}}', "{x | f(x)}", "[]", "[()]", "{}"),
    ],
)
@pytest.mark.parametrize("parser", ["llama3_json", "pythonic"])
def test_a_plain_answer_is_no_call(parser: str, text: str) -> None:
    action = read_action(text, stopped=True, parser=parser, tools=tool("f", a=WHOLE))
    assert (action.content, action.tool_calls, action.parse_error) == (text, (), "")


MARKS = (
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<think>"),
    *("</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "f"', '"arguments": ', "{}", "}", "[f(", ")]"),
    *("a=1", "**a", "1e999", "NaN", "[" * 90, "(" * 300, "9" * 5000, "\x00", "\\", "'", '"'),
)


@pytest.mark.parametrize("parser", PARSERS)
@quick
@given(text=st.lists(st.sampled_from(MARKS) | st.text(max_size=5), max_size=10).map("".join))
def test_no_text_raises_and_all_arguments_are_json(parser: str, text: str) -> None:
    action = read_action(text, stopped=False, parser=parser)
    assert action.text == text and not action.stopped
    assert not (action.tool_calls and action.parse_error) and not (action.call_error and not action.tool_calls)
    for call in action.tool_calls:
        assert call.name and isinstance(msgspec.json.encode(call.arguments), bytes)


@pytest.mark.parametrize(
    ("parser", "text", "message"),
    [
        ("hermes", '<tool_call>{"name": "f"}', "does not end with </tool_call>"),
        ("hermes", '<tool_call>{"name": }</tool_call>', "is not JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "the tool call f are [1], not an object"),
        ("hermes", "<tool_call>[1]</tool_call>", "object with name and arguments, not [1]"),
        ("hermes", "<tool_call>{}</tool_call>", "has no name"),
        ("qwen3_coder", "<tool_call>\nf(1)\n</tool_call>", "<function=NAME>"),
        ("qwen3_coder", "<tool_call><function=f>x=1</function></tool_call>", "<parameter=KEY>"),
        ("llama3_json", '{"name": "f", "parameters": {', "is not JSON"),
        ("pythonic", "[f(1)]", "all arguments by name"),
        ("pythonic", "[f(a=open('x'))]", "argument a of a tool call is not a constant"),
        ("pythonic", "[f(a=1", "is not Python"),
        ("hermes", '<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>', "has the key 'args'"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "parameters": {"a": 1}}</tool_call>', "has both"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "a=1"}</tool_call>', "is not JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>', "not an object"),
        ("llama3_json", '<|python_tag|>{"answer": 5}', "has no name"),
        ("pythonic", "[f(a=1e999)]", "which JSON does not hold"),
        ("mistral", '[TOOL_CALLS] {"name": "f"}', "has no [ARGS]"),
        ("mistral", "[TOOL_CALLS] []", "has no call"),
    ],
)
def test_a_broken_call_is_told_and_the_text_stays(parser: str, text: str, message: str) -> None:
    action = read_action(text, stopped=True, parser=parser)
    assert message in action.parse_error and not action.tool_calls and action.content == text


@pytest.mark.parametrize("text", ["3 + 4 = 7", "a list: [1, 2]", "{braces", ""])
@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "pythonic", "mistral", "none"])
def test_an_answer_without_a_call_is_content(parser: str, text: str) -> None:
    action = read_action(text, stopped=True, parser=parser)
    assert (action.content, action.tool_calls, action.parse_error) == (text, (), "")


def test_thinking_is_apart_and_a_call_in_it_is_none() -> None:
    """The opening tag may be in the prompt. A call in the thinking is ignored."""
    call = '<tool_call>{"name": "f"}</tool_call>'
    action = read_action(f"maybe {call}\n</think>\n\nno", stopped=True, parser="hermes")
    assert (action.thinking, action.content, action.tool_calls) == (f"maybe {call}", "no", ())


def test_a_tool_that_the_env_lacks_is_told_and_its_name_is_plain_text() -> None:
    text = '<tool_call>{"name": "rm -rf /; $(x)"}</tool_call>'
    action = read_action(text, stopped=True, parser="hermes", tools=tool("add"))
    assert action.tool_calls == (ToolCall(name="rm -rf /; $(x)", arguments={}),)
    assert action.parse_error == "There is no tool 'rm -rf /; $(x)'. The tools are: add."


@pytest.mark.parametrize(
    ("name", "parser"),
    [("strips_thinking", "hermes"), ("opens_thinking", "qwen3_coder"), ("drops_content", "llama3_json"),
     ("nine_letters", "mistral")],
)  # fmt: skip
def test_the_template_tells_the_parser(name: str, parser: str) -> None:
    assert tool_parser("auto", template=FAMILIES[name].template) == parser


def test_what_cannot_be_found_out_is_refused_with_the_names() -> None:
    for name in ("role_marks", "ignores_tools"):
        with pytest.raises(ValueError, match=r"env\.tool_parser=auto: .* hermes, qwen3_coder, .*env\.tools_as=text"):
            tool_parser("auto", template=FAMILIES[name].template)
    with pytest.raises(ValueError, match=r"env\.tool_parser=xml: there is no such parser"):
        tool_parser("xml", template="")
