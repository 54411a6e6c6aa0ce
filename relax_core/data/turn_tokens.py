"""Builds the prompts of later turns from token ids, so that sampled tokens are never tokenised again.

The next prompt is the prompt before, the sampled tokens, the text that the chat template writes between an answer and
the next messages, the texts of these messages, and the template's opening of the next answer. To find out what the
template writes, the module renders a conversation with marks instead of the texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from relax_core.contracts.media import Media, MediaItem
from relax_core.data.tokenizer import PromptTokenizer

_MARK = "RelaxTextGoesHere{}Mark"  # has no white space at its ends, because templates trim it


class TurnTokens:
    """Builds the prompts of the later turns of conversations with one ``opening``."""

    def __init__(self, tokenizer: PromptTokenizer, opening: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._opening = list(opening)
        self._pieces: dict[
            tuple[Any, ...], list[list[int]]
        ] = {}  # the key has the roles and the kinds of parts of the messages between two answers

    def next_prompt(
        self,
        prompt_ids: Sequence[int],
        sampled: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        items: Sequence[MediaItem] = (),
    ) -> tuple[list[int], list[Media]]:
        """Returns the token ids before the next answer, and where the new ``items`` stand in them.

        ``sampled`` is the answer to ``prompt_ids``, with its stop token if one ended it. ``messages`` follow it; their
        texts are encoded without special tokens, and ``items`` are their media in order. Raises ValueError
        for messages that the chat template does not accept, or renders without their text or their items.
        """
        shape = tuple((message["role"], _kinds(message)) for message in messages)
        if shape not in self._pieces:
            self._pieces[shape] = self._template_pieces(messages)
        first, *others = self._pieces[shape]
        # The template may write the answer's end token itself. If it does, that token is not added a second time.
        ended = sampled[-1] in self._tokenizer.stop_token_ids and first[:1] == [sampled[-1]]
        new = list(first[1 if ended else 0 :])
        for text, after in zip(_texts(messages), others, strict=True):
            new += self._tokenizer.encode_plain(text) + after
        before = [*prompt_ids, *sampled]
        new, media = self._tokenizer.place_items(new, items)
        moved = [msgspec.structs.replace(m, start=m.start + len(before), end=m.end + len(before)) for m in media]
        return before + new, moved

    def _template_pieces(self, messages: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Returns the token ids that the template writes after the answer, and after each text of the messages."""
        turns: list[dict[str, Any]] = [{"role": "assistant", "content": _MARK.format(0)}]
        roles = ["assistant"]
        for message in messages:
            content: Any = message["content"]
            if isinstance(content, str):
                content = _MARK.format(len(roles))
                roles.append(message["role"])
            else:
                marked = []
                for part in content:
                    if part["type"] == "text":
                        part = {"type": "text", "text": _MARK.format(len(roles))}
                        roles.append(message["role"])
                    marked.append(part)
                content = marked
            turns.append({"role": message["role"], "content": content})
        rest = self._tokenizer.render([*self._opening, *turns])
        pieces = []
        for number, role in enumerate(roles):
            mark = _MARK.format(number)
            before, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise ValueError(
                    f"the chat template does not show the text of a message with the role {role!r} exactly once. "
                    "An env with turns needs a template that does: give its messages another role, or use another "
                    "model."
                )
            pieces.append(before)
        return [self._tokenizer.encode_text(text) for text in [*pieces[1:], rest]]


def _kinds(message: Mapping[str, Any]) -> tuple[str, ...] | None:
    content = message["content"]
    return None if isinstance(content, str) else tuple(part["type"] for part in content)


def _texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    texts: list[str] = []
    for message in messages:
        content = message["content"]
        texts += [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
    return texts
