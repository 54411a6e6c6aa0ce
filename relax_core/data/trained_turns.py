"""Converts the assistant's messages of a conversation from a file to token ids that are trained.

The ids of a prompt are the ids that a rollout of the same messages would have, and an answer is the text that the chat
template writes after its generation prompt, up to the stop token. The prompt of a later answer continues the earlier
ids (`turn_tokens.py` does the same for sampled answers). If the template rewrites the earlier text, as templates do
that remove earlier thinking, the later prompt is rendered as a whole, and the caller's token tree forks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import msgspec

from relax_core.contracts.media import Media, MediaItem
from relax_core.data.chat_template import check_template_shows_tools
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.data.turn_tokens import TurnTokens

ASSISTANT = "assistant"
_THINK, _THOUGHT = "<think>", "</think>"
_ASKED = {"role": "user", "content": "1 + 1?"}

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class TrainedTurn:
    """Holds an answer of a conversation: the ids before it, its ids with the stop token, and the prompt's media."""

    prompt_ids: list[int]
    answer_ids: list[int]
    media: list[Media]


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """Holds an answer's rendered text before its stop token.

    ``ends`` says whether the template writes the stop token as a part of the answer.
    """

    text: str
    stop: int
    ends: bool


class ConversationTokens:
    """Converts conversations with the chat template of ``tokenizer``."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stops = {tokenizer.token_text(token): token for token in tokenizer.stop_token_ids}
        self._stop_before = cache(self._found_stop_before)

    def turns(
        self,
        messages: Messages,
        numbers: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        items: Sequence[MediaItem] = (),
        most_tokens: int | None = None,
    ) -> list[TrainedTurn]:
        """Returns the answers ``messages[number]`` for each of ``numbers`` (ascending, at least one).

        ``items`` are the encoded media of ``messages``, in order; media after the last answer are not read. Raises
        ValueError if the chat template refuses the conversation, or opens an answer with another text than it writes
        for this answer, or leaves out an answer or tools. Raises `TextTooLong` for a text that certainly has more than
        ``most_tokens`` tokens.
        """
        if (tools or any(message.get("tool_calls") for message in messages)) and not self._shows_tools:
            raise ValueError("the chat template leaves out tools, their calls or their results")
        found: list[TrainedTurn] = []
        base, answer = "", None
        for number in numbers:
            before = messages[:number]
            opened = self._tokenizer.short_enough(self._render(before, tools), most_tokens)
            shown = items[: _media_count(before)]
            if answer is not None and opened.startswith(base):
                prompt, media = self._continued(found[-1], answer, opened[len(base) :], shown)
            else:
                prompt, media = self._tokenizer.place_items(self._tokenizer.encode_shown(opened), shown)
            answer = self._answer(messages[: number + 1], opened, tools)
            if not answer.text.strip():
                raise ValueError(f"the chat template leaves out the text of message {number + 1}")
            self._tokenizer.short_enough(answer.text, most_tokens)
            base = opened + answer.text
            ids = [*self._answer_ids(opened, answer.text), answer.stop]
            found.append(TrainedTurn(prompt_ids=prompt, answer_ids=ids, media=media))
        return found

    @cached_property
    def _shows_tools(self) -> bool:
        try:
            check_template_shows_tools(self._tokenizer)
        except ValueError:
            return False
        return True

    def _render(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None, *, opens: bool = True) -> str:
        hidden = None if tools is None else [self._tokenizer.hidden(tool) for tool in tools]
        return self._tokenizer.render(messages, tools=hidden, opens_answer=opens, hides=True)

    def _answer(self, messages: Messages, opened: str, tools: Sequence[Mapping[str, Any]] | None) -> _Answer:
        """Returns the last message of ``messages`` as the text that follows ``opened``."""
        whole = self._render(messages, tools, opens=False)
        if whole.startswith(opened):
            text = whole[len(opened) :]
        elif (thought := self._with_thinking(messages[-1], opened, whole)) is not None:
            text = thought
        else:
            raise ValueError(
                f"the chat template opens an answer with {opened[-30:]!r}, and writes this answer without that text. "
                "Set data.chat_template_kwargs so that both agree; if the text begins thinking, give answers with "
                "<think>…</think>"
            )
        for start, end in self._tokenizer.special_spans(text):
            if (stop := self._stops.get(text[start:end])) is not None:
                return _Answer(text=text[:start], stop=stop, ends=True)
        return _Answer(
            text=text, stop=self._stop_before("tool" if messages[-1].get("tool_calls") else "user"), ends=False
        )

    def _with_thinking(self, message: Mapping[str, Any], opened: str, whole: str) -> str | None:
        """Returns an answer with its thinking, for a template that begins thinking and removes it from answers.

        DeepSeek-R1's template does so. Returns None for another template, and for an answer without thinking.
        """
        begin = opened.rstrip()
        content = self._tokenizer.hidden(message)["content"]
        if not begin.endswith(_THINK) or not isinstance(content, str) or _THOUGHT not in content:
            return None
        shown = content.rpartition(_THOUGHT)[2].strip()
        before, found, behind = whole.rpartition(shown) if shown else ("", "", "")
        if not found or before.strip() != begin.removesuffix(_THINK).strip():
            return None
        thought = content.strip().removeprefix(_THINK)
        return (thought.lstrip() if opened != begin else thought) + behind

    def _found_stop_before(self, role: str) -> int:
        return self._stops[TurnTokens(self._tokenizer, [_ASKED]).stop_before(role)]

    def _answer_ids(self, opened: str, text: str) -> list[int]:
        """Returns the ids of an answer after the generation prompt, which is tokenised separately in rollouts.

        The text after the last special token of ``opened`` is included if its ids stay the same, because some
        tokenizers mark the first word of a text.
        """
        spans = self._tokenizer.special_spans(opened)
        tail = opened[spans[-1][0] :] if spans else ""
        before, both = self._tokenizer.encode_shown(tail), self._tokenizer.encode_shown(tail + text)
        if both[: len(before)] == before:
            return both[len(before) :]
        return self._tokenizer.encode_shown(text)

    def _continued(
        self, last: TrainedTurn, answer: _Answer, behind: str, items: Sequence[MediaItem]
    ) -> tuple[list[int], list[Media]]:
        """Returns the prompt after the turn ``last``; ``behind`` is the text after the answer's text."""
        following = self._tokenizer.encode_shown(behind)
        # As in `TurnTokens.next_prompt`: the stop token is already there, and a template may write another end token
        # for earlier answers.
        if following and (following[0] == answer.stop or (answer.ends and self._tokenizer.is_special(following[0]))):
            following = following[1:]
        before = [*last.prompt_ids, *last.answer_ids]
        new, media = self._tokenizer.place_items(following, items[len(last.media) :])
        moved = [msgspec.structs.replace(m, start=m.start + len(before), end=m.end + len(before)) for m in media]
        return before + new, [*last.media, *moved]


def _media_count(messages: Messages) -> int:
    return sum(
        part["type"] != "text"
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
    )
