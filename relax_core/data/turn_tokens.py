"""The tokens between an answer and the next one: what was sampled is never tokenised again.

The next prompt is the prompt before, the sampled tokens, what the chat template writes between an answer and the next
messages, their texts, and the template's opening of the next answer. What the template writes is read off a
conversation with marks in the place of the texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_core.data.tokenizer import PromptTokenizer

_MARK = "RelaxTextGoesHere{}Mark"  # a word without white space at its ends, which templates trim


class TurnTokens:
    """Makes the prompts of the later turns of conversations with one ``opening``."""

    def __init__(self, tokenizer: PromptTokenizer, opening: Sequence[Mapping[str, str]]) -> None:
        self._tokenizer = tokenizer
        self._opening = list(opening)
        self._pieces: dict[tuple[str, ...], list[list[int]]] = {}  # by the roles of the messages between two answers

    def next_prompt(
        self, prompt_ids: Sequence[int], sampled: Sequence[int], messages: Sequence[Mapping[str, str]]
    ) -> list[int]:
        """The token ids in front of the next answer. ``sampled``: the answer to ``prompt_ids``, its stop token included
        where one ended it. ``messages``: what follows it. Their texts are encoded without special tokens.

        Raises ValueError for messages that the chat template does not take, or shows without their text.
        """
        roles = tuple(message["role"] for message in messages)
        if roles not in self._pieces:
            self._pieces[roles] = self._read_off(roles)
        first, *others = self._pieces[roles]
        # The token that ended the answer is the first that the template writes behind it, or another end token.
        ended = sampled[-1] in self._tokenizer.stop_token_ids and first[:1] == [sampled[-1]]
        ids = [*prompt_ids, *sampled, *first[1 if ended else 0 :]]
        for message, behind in zip(messages, others, strict=True):
            ids += self._tokenizer.encode_plain(message["content"]) + behind
        return ids

    def _read_off(self, roles: Sequence[str]) -> list[list[int]]:
        """Token ids of what stands behind the answer, and behind each message."""
        marks = [_MARK.format(place) for place in range(len(roles) + 1)]
        turns = [{"role": role, "content": mark} for role, mark in zip(("assistant", *roles), marks, strict=True)]
        rest = self._tokenizer.render([*self._opening, *turns])
        pieces = []
        for role, mark in zip(("assistant", *roles), marks, strict=True):
            before, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise ValueError(
                    f"the chat template does not show the text of a message with the role {role!r} once, in its place. "
                    "An env with turns needs a template that does: give its messages another role, or use another "
                    "model."
                )
            pieces.append(before)
        return [self._tokenizer.encode_text(text) for text in [*pieces[1:], rest]]
