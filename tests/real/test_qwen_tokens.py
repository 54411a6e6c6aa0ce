"""Tests prompt rendering and tool calls with Qwen's 151,643 merges, from the package qwen-agent.

The template is made for tests. Like Qwen3's template, it removes the thinking of earlier answers.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts.tool_calls import ToolSchema
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.data.turn_tokens import TurnTokens
from relax_core.rollout.agents.answer_reading import AnswerForm, read_reply
from tests.data.chat_templates import STRIPS_THINKING
from tests.real.prompts import CONVERSATIONS

pytestmark = pytest.mark.real

MERGES = 151_643
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# Qwen2's tokenizer.json splits text in this way before the merges.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
ARGUMENTS = {"city": "Österreich, 京都 🙂", "days": 12345}
CALL = f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': ARGUMENTS}, ensure_ascii=False)}\n</tool_call>"
OPENING = [{"role": "user", "content": "Wie wird das Wetter in 京都?"}]


def merged(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes]:
    """Returns the two tokens that merge into this token: the parts of its bytes that remain after earlier merges."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [(ranks.get(parts[at] + parts[at + 1], MERGES), at) for at in range(len(parts) - 1)]
        rank, at = min(pairs)
        assert rank < ranks[token], token
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spec = importlib.util.find_spec("qwen_agent")
    assert spec is not None and spec.origin is not None, "make real-env installs qwen-agent"
    ranks: dict[bytes, int] = {}
    for line in (Path(spec.origin).parent / "utils" / "qwen.tiktoken").read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    assert len(ranks) == MERGES
    letter = bytes_to_unicode()

    def written(token: bytes) -> str:
        return "".join(letter[byte] for byte in token)

    merges = [tuple(map(written, merged(ranks, token))) for token in ranks if len(token) > 1]
    core = Tokenizer(models.BPE(vocab={written(token): rank for token, rank in ranks.items()}, merges=merges))
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    path: Path = tmp_path_factory.mktemp("qwen")
    core.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": STRIPS_THINKING,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [MERGES, MERGES + 2]}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def ours(folder: Path) -> PromptTokenizer:
    return PromptTokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def rendered(theirs: Any, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
    text = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    ids: list[int] = theirs.encode(text, add_special_tokens=False)
    return ids


def test_prompts_have_the_ids_that_transformers_gives_them(ours: PromptTokenizer, theirs: Any) -> None:
    assert ours.encode_text("Hello world 12") == [9707, 1879, 220, 16, 17]  # published ids of Qwen2.5 and Qwen3
    for conversation in CONVERSATIONS:
        messages = [dict(message) for message in conversation]
        if not any("<|im_" in message["content"] for message in messages):  # only Relax treats markup as text
            assert ours.encode(messages) == rendered(theirs, messages)


def test_a_call_of_a_tool_is_read_from_sampled_ids(ours: PromptTokenizer) -> None:
    ids = ours.encode_text(f"<think>\nhm\n</think>\n{CALL}")
    assert ids.count(MERGES + 3) == ids.count(MERGES + 4) == 1  # <tool_call> is a single token
    reply = read_reply(ours.decode(ids), AnswerForm(opened=False, parser="hermes", tools=[TOOL]), number=0)
    (call,) = reply.calls
    assert (reply.reasoning, call.name, json.loads(call.arguments)) == ("hm", "weather", ARGUMENTS)


def test_sampled_tokens_stay_and_the_result_follows_as_in_transformers(ours: PromptTokenizer, theirs: Any) -> None:
    """A model may sample other tokens for a text than its tokenizer uses: here each character separately."""
    opened = ours.encode(OPENING, tools=[TOOL])
    assert opened == rendered(theirs, OPENING, [TOOL])
    text = CALL.removeprefix("<tool_call>").removesuffix("</tool_call>")
    letters = [token for letter in text for token in ours.encode_text(letter)]
    sampled = [MERGES + 3, *letters, MERGES + 4, MERGES + 2]
    assert len(letters) > len(ours.encode_text(text)) and ours.decode(letters) == text
    observed = [{"role": "tool", "name": "weather", "tool_call_id": "a", "content": '{"°C": [3, -1]}\n'}]
    prompt, _ = TurnTokens(ours, OPENING, tools=[TOOL]).next_prompt(opened, sampled, observed)
    assert prompt[: len(opened) + len(sampled)] == [*opened, *sampled]
    function = {"name": "weather", "arguments": ARGUMENTS}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    whole = rendered(theirs, [*OPENING, answer, *observed], [TOOL])
    behind = prompt[len(opened) + len(sampled) :]
    assert len(behind) > 10 and whole[-len(behind) :] == behind
