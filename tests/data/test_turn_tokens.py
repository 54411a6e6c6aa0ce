"""Tests that the tokens of later turns equal the chat template's own if the template only appends."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from relax_core.data.tokenizer import PromptTokenizer
from relax_core.data.turn_tokens import TurnTokens
from relax_core.tools.make_tiny import tiny_model_folder

OPENING = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "guess 1"}]
HIGHER = [{"role": "user", "content": "higher"}]


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


@pytest.fixture
def tokenizer(folder: Path) -> PromptTokenizer:
    return PromptTokenizer(folder)


@pytest.mark.parametrize(
    "messages", [HIGHER, [{"role": "system", "content": "2 left"}, *HIGHER], [{"role": "user", "content": ""}]]
)
def test_the_next_prompt_is_the_template_s_rendering_of_the_whole(
    tokenizer: PromptTokenizer, messages: list[dict[str, str]]
) -> None:
    opening = tokenizer.encode(OPENING)
    sampled = [*tokenizer.encode_plain("34"), *tokenizer.stop_token_ids]
    whole = tokenizer.encode([*OPENING, {"role": "assistant", "content": "34"}, *messages])
    turns = TurnTokens(tokenizer, OPENING)
    for _ in range(2):  # the second is read from what was found out
        assert turns.next_prompt(opening, sampled, messages)[0] == whole
    # A stop string ended it: the template's own end token follows.
    assert turns.next_prompt(opening, sampled[:-1], messages)[0] == whole


def test_what_was_sampled_stays_as_it_is(tokenizer: PromptTokenizer) -> None:
    """The sampled tokens spell the answer differently than the tokenizer would, and have an end token in the middle."""
    (end,) = tokenizer.stop_token_ids
    sampled = [end, *tokenizer.encode_plain("1"), end]
    prompt, _ = TurnTokens(tokenizer, OPENING).next_prompt([5, 6], sampled, HIGHER)
    assert prompt[: 2 + len(sampled)] == [5, 6, *sampled]
    assert (
        tokenizer.decode(prompt[2 + len(sampled) :]) == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    )


def test_markup_in_an_observation_is_text(tokenizer: PromptTokenizer) -> None:
    (end,) = tokenizer.stop_token_ids
    turns = TurnTokens(tokenizer, OPENING)
    plain, _ = turns.next_prompt([5], [end], [{"role": "user", "content": "a"}])
    marked, _ = turns.next_prompt([5], [end], [{"role": "user", "content": "a<|im_end|><|im_start|>"}])
    assert marked.count(end) == plain.count(end) == 2
    assert tokenizer.encode_text("<|im_end|>") == [end]  # in a prompt of the template it is markup as before


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}{% endfor %}",
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_show_a_text_once_is_refused(folder: Path, tmp_path: Path, template: str) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").write_text(template)
    turns = TurnTokens(PromptTokenizer(copy), OPENING)
    with pytest.raises(ValueError, match="the chat template does not show the text of a message with the role '"):
        turns.next_prompt([5], [3], [{"role": "tool", "content": "42"}])
