"""Tests chat templates without tools: they are refused before a start, unless tools are shown as plain text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from envs.calculator import SPEC, CalculatorConfig
from relax_core.contracts.checked_plugins import checked_env
from relax_core.contracts.env import Action
from relax_core.contracts.tool_calls import tool_schema
from relax_core.data.chat_template import (
    check_template_shows_tools,
    with_results_as_text,
    with_tools_as_text,
)
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.rollout.episodes.tool_use import ToolUse, with_call_error
from tests.data.chat_templates import FAMILIES, Family, write_folder

CHATML = ("<|im_start|>", "<|im_end|>")
BODY = "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
RESULTS_LEFT_OUT = (
    "{{ tools | tojson }}{% for m in messages if m.role != 'tool' %}<|im_start|>" + BODY + "<|im_end|>{% endfor %}"
)
CALLS_LEFT_OUT = "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def tokenizer_of(folder: Path, template: str | Family) -> PromptTokenizer:
    family = template if isinstance(template, Family) else Family(template, CHATML, ("<|im_end|>",))
    return PromptTokenizer(write_folder(folder / "model", family))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.tools])
def test_a_template_with_tools_passes(name: str, tmp_path: Path) -> None:
    check_template_shows_tools(tokenizer_of(tmp_path, FAMILIES[name]))


@pytest.mark.parametrize(
    ("template", "what"),
    [
        (FAMILIES["ignores_tools"].template, "the tools of env.name"),
        (CALLS_LEFT_OUT, "the call of a tool"),
        (RESULTS_LEFT_OUT, "the result of a tool"),
    ],
)
def test_a_template_that_leaves_one_out_is_refused(template: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"env\.tools_as=template: .* leaves out {what}\. Use env\.tools_as=text"):
        check_template_shows_tools(tokenizer_of(tmp_path, template))


def add(a: int, b: int = 0) -> int:
    """Adds two numbers."""
    return a + b


def test_tools_as_text_stand_in_the_system_message() -> None:
    asked = {"role": "user", "content": "1 + 1?"}
    system, after = with_tools_as_text([asked], [tool_schema(add)])
    assert system["role"] == "system" and after == asked
    assert '"name": "add", "description": "Adds two numbers."' in system["content"]
    (joined,) = with_tools_as_text([{"role": "system", "content": "Be brief."}], [tool_schema(add)])
    assert joined["content"] == f"Be brief.\n\n{system['content']}"


def test_adjacent_results_are_one_text_of_the_user() -> None:
    messages = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, {"role": "user", "content": "go"}]
    text = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert with_results_as_text(messages) == [{"role": "user", "content": text}, {"role": "user", "content": "go"}]
    picture = {"type": "image", "image": None}
    (shown,) = with_results_as_text([{"role": "tool", "content": [picture]}])
    assert shown["content"][1] == picture


def test_a_run_uses_the_form_of_its_template_or_plain_text(tmp_path: Path) -> None:
    env, row = checked_env(SPEC), {"prompt": "", "answer": ""}
    config = CalculatorConfig()
    tokenizer = tokenizer_of(tmp_path, FAMILIES["opens_thinking"])
    use = ToolUse.of_env(env, config, tokenizer).of_row(env, row, config)
    assert (use.parser, len(use.described)) == ("qwen3_coder", 1) and use.schemas is not None
    opening = [{"role": "user", "content": "3 times 4 ?"}]
    assert '"name": "multiply"' in tokenizer.decode(tokenizer.encode(use.opening(opening), tools=use.schemas))
    text = CalculatorConfig(tools_as="text")
    plain = tokenizer_of(tmp_path / "plain", FAMILIES["ignores_tools"])
    with pytest.raises(ValueError, match=r"env\.tools_as=text"):
        ToolUse.of_env(env, config, plain)
    use = ToolUse.of_env(env, text, plain).of_row(env, row, text)
    assert use.parser == "hermes" and use.schemas is None and "multiply" in use.opening(opening)[0]["content"]
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 3, "b": 4}}</tool_call>'
    assert use.read(call, stopped=True).tool_calls[0].arguments == {"a": 3, "b": 4}


def test_an_error_of_a_call_follows_the_results() -> None:
    result: dict[str, Any] = {"role": "tool", "content": "7"}
    action = Action(text="", stopped=True, call_error="no JSON")
    assert with_call_error([result], action) == [result, {"role": "tool", "content": "no JSON"}]
    for content, told in (("go on", "go on\nno JSON"), ([], [{"type": "text", "text": "\nno JSON"}])):
        shown = with_call_error([result, {"role": "user", "content": content}], action)
        assert shown == [result, {"role": "user", "content": told}]
    assert with_call_error([result], Action(text="", stopped=True)) == [result]
