"""Cuts the texts of an observation that are longer than env.max_observation_tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relax_core.contracts.env import Message
from relax_core.data.tokenizer import PromptTokenizer

MOST_CHARACTERS_A_TOKEN = 16  # a text that is longer than this for each token allowed is not tokenised whole


def shortened_observation(
    messages: Sequence[Message], tokenizer: PromptTokenizer, *, limit: int
) -> tuple[list[Message], bool]:
    """Returns the messages with at most about ``limit`` tokens of text, and whether a text was cut.

    The longest texts are cut in their middle, where a mark says how many tokens are left out; the mark's own tokens
    come on top. The media of content parts do not count here.
    """
    window = limit * MOST_CHARACTERS_A_TOKEN
    texts = list(_texts(messages))
    read = [text if len(text) <= 2 * window else text[:window] + text[-window:] for text in texts]
    spans = [tokenizer.plain_spans(text) for text in read]
    lengths = [len(own) for own in spans]
    if sum(lengths) <= limit and all(len(text) <= 2 * window for text in texts):
        return list(messages), False
    most = _largest_cap(lengths, limit)
    shown = iter([_cut(*one, most=most, window=window) for one in zip(texts, spans, strict=True)])
    return [_with_texts(message, shown) for message in messages], True


def _largest_cap(lengths: Sequence[int], limit: int) -> int:
    """Returns the largest number of tokens that every text may have so that they have ``limit`` together."""
    left, cap = limit, 0
    for place, length in enumerate(sorted(lengths)):
        cap = max(1, left // (len(lengths) - place))
        if length > cap:
            break
        left -= length
        cap = max(cap, length)
    return cap


def _cut(text: str, spans: Sequence[tuple[int, int]], *, most: int, window: int) -> str:
    whole = len(text) <= 2 * window
    if len(spans) <= most and whole:
        return text
    kept = min(most, len(spans))
    head = (kept + 1) // 2
    tail = kept - head
    moved = 0 if whole else len(text) - 2 * window  # the spans are those of the text without its middle
    end = spans[head - 1][1]
    begin = spans[-tail][0] + moved if tail else len(text)
    left_out = f"{len(spans) - kept} tokens" if whole else f"{begin - end} characters"
    return f"{text[:end]}\n[... {left_out} left out ...]\n{text[begin:]}"


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content if part["type"] == "text")


def _with_texts(message: Mapping[str, Any], shown: Iterator[str]) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": next(shown)}
    parts = [{**part, "text": next(shown)} if part["type"] == "text" else part for part in content]
    return {**message, "content": parts}
