"""Tests for each template that later turns have the same tokens as transformers' complete conversation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relax_core.data.tokenizer import PromptTokenizer
from relax_core.data.turn_tokens import TurnTokens
from relax_core.tools.tiny_text import write_tiny_tokenizer
from tests.data.chat_templates import FAMILIES, Family, write_folder

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
OPENING = [{"role": "user", "content": "add 1"}]
IDS = ("abcdefgh0", "abcdefgh1")
# Texts with white space at the ends, quotes, non-ASCII letters, and line breaks at borders that a token could span.
ODD = '\n "7"\nü \n'


def calling(family: Family, count: int) -> dict[str, Any]:
    """Returns an answer with this number of calls, in a client's format."""
    arguments: Any = '{"a": 1}' if family.text else {"a": 1}
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}} for call_id in IDS
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls[:count]}


def results(*texts: str) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "name": "add", "tool_call_id": call_id, "content": text}
        for call_id, text in zip(IDS, texts, strict=False)
    ]


Whole = Callable[..., str]


@pytest.fixture(scope="module")
def rendering(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], tuple[PromptTokenizer, Whole]]:
    from transformers import AutoTokenizer

    def make(family: Family) -> tuple[PromptTokenizer, Whole]:
        folder = write_folder(tmp_path_factory.mktemp("template") / "model", family)
        theirs = AutoTokenizer.from_pretrained(folder)

        def whole(messages: list[dict[str, Any]], tools: Any = None) -> str:
            text = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
            assert isinstance(text, str)
            return text

        return PromptTokenizer(folder), whole

    return make


def cases(family: Family) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    answer = {"role": "assistant", "content": "I say 3."}
    found = [(answer, [{"role": "user", "content": text}]) for text in ("higher", ODD)]
    if family.tools:
        found += [(calling(family, 1), results(text)) for text in ("7", ODD)]
    if family.tools and not family.one_call:
        found.append((calling(family, 2), results("7", ODD)))
    return found


def sampled_part(whole: str, opened: str, family: Family) -> str:
    """Returns the sampled part of an answer: from its beginning to the first token that stops a response."""
    assert whole.startswith(opened)
    behind = whole[len(opened) :]
    ends = [behind.find(stop) + len(stop) for stop in family.stops if stop in behind]
    return behind[: min(ends)]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "other_end"])
def test_turns_equal_the_whole_conversation_where_the_template_only_appends(name: str, rendering: Any) -> None:
    family = FAMILIES[name]
    tokenizer, whole_of = rendering(family)
    tools = [TOOL] if family.tools else None
    turns = TurnTokens(tokenizer, OPENING, tools=tools)
    opened = whole_of(OPENING, tools)
    for answer, observed in cases(family):
        whole = whole_of([*OPENING, answer, *observed], tools)
        sampled = tokenizer.encode_text(sampled_part(whole, opened, family))
        expected = tokenizer.encode_text(whole)
        for _ in range(2):  # the second time, the format of calls is known
            prompt, _media = turns.next_prompt(tokenizer.encode_text(opened), sampled, observed)
            assert tokenizer.decode(prompt) == whole
            assert prompt == expected


def test_several_results_of_a_template_with_one_call_an_answer_follow_each_other(rendering: Any) -> None:
    family = FAMILIES["drops_content"]
    tokenizer, whole_of = rendering(family)
    opened, whole = whole_of(OPENING), whole_of([*OPENING, calling(family, 1), *results("7", "8")])
    sampled = tokenizer.encode_text(sampled_part(whole, opened, family))
    prompt, _ = TurnTokens(tokenizer, OPENING).next_prompt(tokenizer.encode_text(opened), sampled, results("7", "8"))
    assert tokenizer.decode(prompt) == whole


def test_the_end_that_was_sampled_stands_for_the_end_of_the_history(rendering: Any) -> None:
    """gpt-oss samples <|return|> and writes <|end|> in a history. One of the two tokens is enough."""
    family = FAMILIES["other_end"]
    tokenizer, whole_of = rendering(family)
    turns = TurnTokens(tokenizer, OPENING, tools=[TOOL])
    opened = whole_of(OPENING, [TOOL])
    sampled = tokenizer.encode_text("<|message|>I say 3.<|return|>")
    prompt, _ = turns.next_prompt(tokenizer.encode_text(opened), sampled, [{"role": "user", "content": "higher"}])
    whole = whole_of(
        [*OPENING, {"role": "assistant", "content": "I say 3."}, {"role": "user", "content": "higher"}], [TOOL]
    )
    assert tokenizer.decode(prompt) == whole.replace("I say 3.<|end|>", "I say 3.<|return|>")
    called = whole_of([*OPENING, calling(family, 1), *results(ODD)], [TOOL])
    prompt, _ = turns.next_prompt(
        tokenizer.encode_text(opened), tokenizer.encode_text(sampled_part(called, opened, family)), results(ODD)
    )
    assert tokenizer.decode(prompt) == called


def test_a_mark_of_another_role_than_the_next_stays(rendering: Any) -> None:
    """GLM stops at the mark of the role that it expects. This sampled mark stays, and the right mark follows."""
    tokenizer, _ = rendering(FAMILIES["role_marks"])
    prompt, _ = TurnTokens(tokenizer, OPENING).next_prompt(
        [], tokenizer.encode_text("\n3<|observation|>"), [{"role": "user", "content": "higher"}]
    )
    assert tokenizer.decode(prompt) == "\n3<|observation|><|user|>\nhigher<|assistant|>"


def test_thinking_that_the_template_takes_out_stays(rendering: Any) -> None:
    tokenizer, whole_of = rendering(FAMILIES["strips_thinking"])
    answer = "<think>\n2 < 3\n</think>\n\nI say 3."
    observed = [{"role": "user", "content": "higher"}]
    sampled = tokenizer.encode_text(f"{answer}<|im_end|>")
    opened = whole_of(OPENING)
    prompt, _ = TurnTokens(tokenizer, OPENING).next_prompt(tokenizer.encode_text(opened), sampled, observed)
    whole = whole_of([*OPENING, {"role": "assistant", "content": answer}, *observed])
    assert "think" not in whole and tokenizer.decode(prompt) == whole.replace("I say 3.", answer)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_markup_in_an_observation_ends_nothing(name: str, rendering: Any) -> None:
    family = FAMILIES[name]
    tokenizer, _ = rendering(family)
    markup = "".join(family.special)
    turns = TurnTokens(tokenizer, OPENING)
    for role in ("user", "tool") if family.tools else ("user",):
        plain, _ = turns.next_prompt(
            [], tokenizer.encode_text(f"3{family.stops[-1]}"), [{"role": role, "content": "x"}]
        )
        marked, _ = turns.next_prompt(
            [], tokenizer.encode_text(f"3{family.stops[-1]}"), [{"role": role, "content": f"x{markup}"}]
        )
        special = [token for token in plain if tokenizer.is_special(token)]
        assert [token for token in marked if tokenizer.is_special(token)] == special
        assert markup in tokenizer.decode(marked)


TWICE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("family", [FAMILIES["ignores_tools"], Family(TWICE, ("<end>",), ("<end>",))])
def test_a_template_that_does_not_show_a_result_once_is_refused(family: Family, rendering: Any) -> None:
    tokenizer, _ = rendering(family)
    with pytest.raises(ValueError, match=r"does not show .* role '\w+' exactly once.*env\.tools_as=text"):
        TurnTokens(tokenizer, OPENING).next_prompt([], [1, tokenizer.stop_token_ids[0]], results("7"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(folder)
    return PromptTokenizer(folder)


SHORT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "guess 1"}]
HIGHER = {"role": "user", "content": "higher"}


@pytest.mark.parametrize(
    "messages", [[HIGHER], [{"role": "system", "content": "2 left"}, HIGHER], [{"role": "user", "content": ""}]]
)
def test_an_answer_that_a_stop_string_ended_gets_the_templates_end(
    tiny: PromptTokenizer, messages: list[dict[str, str]]
) -> None:
    opening, turns = tiny.encode(SHORT), TurnTokens(tiny, SHORT)
    whole = tiny.encode([*SHORT, {"role": "assistant", "content": "34"}, *messages])
    for end in (tiny.stop_token_ids, []):
        assert turns.next_prompt(opening, [*tiny.encode_plain("34"), *end], messages)[0] == whole


def test_sampled_tokens_stay_as_they_are(tiny: PromptTokenizer) -> None:
    """The sampled tokens differ from the tokenizer's tokens of the same answer, and have an end token in the middle."""
    (end,) = tiny.stop_token_ids
    sampled = [end, *tiny.encode_plain("1"), end]
    prompt, _ = TurnTokens(tiny, SHORT).next_prompt([5, 6], sampled, [HIGHER])
    assert prompt[: 2 + len(sampled)] == [5, 6, *sampled]
    assert tiny.decode(prompt[2 + len(sampled) :]) == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
