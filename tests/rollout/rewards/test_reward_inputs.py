"""Tests the text in a reward's input: the sampled tokens without the stop token, but with a stop string."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from tokenizers import Tokenizer

from relax_core.contracts.engine import PromptRequest
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.rollout.episodes.episode_records import one_turn_episodes
from relax_core.tools.tiny_text import write_tiny_tokenizer
from tests.responses import response


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(made)
    return made


@pytest.mark.parametrize(
    ("text", "finish", "seen", "stop_string"),
    [
        ("54321<|im_end|>", "stop", "54321", ""),
        ("543.end", "stop", "543.end", ".end"),
        ("54.\nend", "stop", "54.\nend", ".\n"),
        ("54321", "length", "54321", ""),
        ("5.end 3", "length", "5.end 3", ""),
    ],
)
def test_the_stop_token_is_no_part_of_the_answer_and_the_stop_string_is(
    folder: Path, text: str, finish: Literal["stop", "length"], seen: str, stop_string: str
) -> None:
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    generated = response(ids, versions=0, finish_reason=finish)
    request = PromptRequest(rid="r", input_ids=[1], sampling_seed=0)
    (episode,) = one_turn_episodes("g0", request, [generated], tokenizer=PromptTokenizer(folder), stop=[".end", ".\n"])
    found = episode.reward_input({"prompt": "?", "answer": "54321"}, "row 1")
    assert (found.response, found.stopped, found.stop_string) == (seen, finish == "stop", stop_string)
    assert found.before_stop == seen.partition(stop_string or "<none>")[0]
