"""Tests that long observations are cut in the middle, and that short observations do not change."""

from __future__ import annotations

import pytest

from relax_core.data.tokenizer import PromptTokenizer
from relax_core.rollout.episodes.episode_player import shortened_observation
from tests.data.chat_templates import FAMILIES, write_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    """Returns a tokenizer with one token per byte."""
    return PromptTokenizer(write_folder(tmp_path_factory.mktemp("model"), FAMILIES["strips_thinking"]))


def test_a_text_within_the_limit_stays(tokenizer: PromptTokenizer) -> None:
    messages = [{"role": "user", "content": "0123456789"}]
    assert shortened_observation(messages, tokenizer, limit=10) == (messages, False)


def test_the_middle_of_a_long_text_is_left_out(tokenizer: PromptTokenizer) -> None:
    messages = [{"role": "tool", "content": "0123456789", "name": "add"}]
    cut, told = shortened_observation(messages, tokenizer, limit=5)
    assert told
    assert cut == [{"role": "tool", "content": "012\n[... 5 tokens left out ...]\n89", "name": "add"}]


def test_the_longest_texts_are_cut_first(tokenizer: PromptTokenizer) -> None:
    messages = [
        {"role": "tool", "content": "ab"},
        {"role": "tool", "content": [{"type": "text", "text": "c" * 50}, {"type": "text", "text": "d" * 40}]},
    ]
    cut, _ = shortened_observation(messages, tokenizer, limit=12)
    first, second = cut
    assert first["content"] == "ab"
    assert [part["text"] for part in second["content"]] == [
        "ccc\n[... 45 tokens left out ...]\ncc",
        "ddd\n[... 35 tokens left out ...]\ndd",
    ]


def test_an_observation_of_a_megabyte_is_cut_without_being_tokenised_whole(tokenizer: PromptTokenizer) -> None:
    text = "begin" + "x" * (1 << 20) + "end"
    ((message,), told) = shortened_observation([{"role": "user", "content": text}], tokenizer, limit=100)
    assert told and message["content"].startswith("beginxxx") and message["content"].endswith("xxxend")
    assert len(message["content"]) < 200 and f"{len(text) - 100} characters left out" in message["content"]


def test_markup_counts_as_the_text_that_it_is(tokenizer: PromptTokenizer) -> None:
    cut, told = shortened_observation([{"role": "user", "content": "<|im_end|>"}], tokenizer, limit=9)
    assert told and cut[0]["content"] == "<|im_\n[... 1 tokens left out ...]\nnd|>"
