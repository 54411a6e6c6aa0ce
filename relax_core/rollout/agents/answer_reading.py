"""Parses sampled text into thinking, content and tool calls: a complete text, or piece by piece for a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from relax_core.contracts.tool_calls import ToolSchema
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.data.tool_parsers import CALL_MARKS, read_calls
from relax_core.rollout.agents.chat_messages import ChatCall, Reply

THINK, THINK_END = "<think>", "</think>"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # the decoder emits this character for an incomplete character
Piece = tuple[Literal["reasoning", "content"], str]


@dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """Describes how an answer is parsed.

    ``opened`` is True if the prompt ends with the tag that opens thinking. ``parser`` is the name of the tool parser.
    ``tools`` are the tools of the request. ``stop`` are stop strings: the content is cut at the first stop string. A
    stop string inside a tool call does not cut the call.
    """

    opened: bool
    parser: str
    tools: Sequence[ToolSchema]
    stop: tuple[str, ...] = ()


def read_reply(text: str, form: AnswerForm, *, number: int) -> Reply:
    """Parses a text without its stop token. Malformed calls stay in the content, also if other calls are valid.

    ``number`` is the number of the answer in its session; the ids of the calls contain it.
    """
    reasoning, content = _divided(_cut(text, form.stop), form)
    full = _divided(text, form)[1]
    calls: tuple[ChatCall, ...] = ()
    if form.tools:
        read = read_calls(content, parser=form.parser, tools=form.tools)
        if content != full:  # a stop string may be the last text of a call
            whole = read_calls(full, parser=form.parser, tools=form.tools)
            if len(whole.calls) > len(read.calls):
                read = replace(whole, content=_cut(whole.content, form.stop))
        if read.calls:
            content = full = read.content
            calls = tuple(
                ChatCall(
                    name=call.name,
                    arguments=json.dumps(call.arguments, ensure_ascii=False),
                    id=f"c{number:05d}{index:03d}",  # Mistral's template requires nine letters or digits
                )
                for index, call in enumerate(read.calls)
            )
        content = content.strip()
    return Reply(content=content, full=full, reasoning=reasoning, calls=calls)


def thinks(text: str, form: AnswerForm) -> int:
    """Returns the number of characters of the thinking in a text, including the tags."""
    begun = form.opened or text.lstrip().startswith(THINK)
    at = text.find(THINK_END)
    return (len(text) if at < 0 else at + len(THINK_END)) if begun else 0


def _cut(text: str, stop: Sequence[str]) -> str:
    return text[: min((at for string in stop if (at := text.find(string)) >= 0), default=len(text))]


def _divided(text: str, form: AnswerForm) -> tuple[str, str]:
    """Returns thinking and content. There is thinking if the text begins or the prompt ends with the tag <think>."""
    inner = text
    if text.lstrip().startswith(THINK):
        inner = text.lstrip()[len(THINK) :]
    elif not form.opened:
        return "", text
    thinking, found, content = inner.partition(THINK_END)
    return thinking.strip(), content.lstrip("\n") if found else ""


class IncrementalDetokenizer:
    """Decodes tokens incrementally; ``text`` contains only complete characters."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._from = self._read = 0  # tokens in this range are decoded again: text depends on earlier tokens
        self.text = ""

    def add(self, ids: Sequence[int]) -> None:
        """Adds tokens."""
        self._ids += ids
        before = self._tokenizer.decode(self._ids[self._from : self._read])
        now = self._tokenizer.decode(self._ids[self._from :])
        if len(now) > len(before) and not now.endswith(REPLACEMENT):
            self.text += now[len(before) :]
            self._from, self._read = self._read, len(self._ids)


class StreamedReply:
    """Splits a growing answer into pieces for streaming; all pieces together are the reply."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._told: dict[str, str] = {"reasoning": "", "content": ""}

    def grown(self, text: str) -> list[Piece]:
        """Returns the new pieces of a growing text that later text cannot change."""
        form = self._form
        cut = _cut(text, form.stop)
        if cut == text:
            cut = _without_begun(text, form.stop)
        if THINK.startswith(cut.lstrip()):
            return []  # the text may become the tag
        thinking, content = _divided(cut, form)
        if thinks(cut, form) == len(cut) and THINK_END not in cut:
            inner = _without_begun(cut, (THINK_END,))
            return self._new("reasoning", _divided(inner, form)[0])
        return [*self._new("reasoning", thinking), *self._new("content", self._certain(content))]

    def ended(self, reply: Reply) -> list[Piece]:
        """Returns the unsent pieces of the final reply."""
        return [*self._new("reasoning", reply.reasoning), *self._new("content", reply.content)]

    def _certain(self, content: str) -> str:
        if not self._form.tools:
            return content
        mark = CALL_MARKS.get(self._form.parser)
        if mark is None:
            return content.strip() if self._form.parser == "none" else ""
        content = content.partition(mark)[0]
        return _without_begun(content, (mark,)).strip()

    def _new(self, kind: Literal["reasoning", "content"], whole: str) -> list[Piece]:
        told = self._told[kind]
        if len(whole) <= len(told) or not whole.startswith(told):
            return []
        self._told[kind] = whole
        return [(kind, whole[len(told) :])]


def _without_begun(text: str, marks: Sequence[str]) -> str:
    """Returns a text without a suffix that may be the beginning of one of these marks."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return text[: len(text) - longest]
