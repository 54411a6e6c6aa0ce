"""Builds the prompts of later turns from token ids, so that sampled tokens are never tokenised again.

The next prompt is the prompt before, the sampled tokens, the text that the chat template writes between an answer and
the next messages, the texts of these messages, and the template's opening of the next answer. To find out what the
template writes, the module renders a conversation with marks instead of the texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_core.data.tokenizer import PromptTokenizer

_MARK = "RelaxTextGoesHere{}Mark"  # has no white space at its ends, because templates trim it


class TurnTokens:
    """Builds the prompts of the later turns of conversations with one ``opening``."""

    def __init__(self, tokenizer: PromptTokenizer, opening: Sequence[Mapping[str, str]]) -> None:
        self._tokenizer = tokenizer
        self._opening = list(opening)
        self._pieces: dict[
            tuple[str, ...], list[list[int]]
        ] = {}  # the key has the roles of the messages between two answers

    def next_prompt(
        self, prompt_ids: Sequence[int], sampled: Sequence[int], messages: Sequence[Mapping[str, str]]
    ) -> list[int]:
        """Returns the token ids before the next answer.

        ``sampled`` is the answer to ``prompt_ids``, with its stop token if one ended it. ``messages`` follow it; their
        texts are encoded without special tokens. Raises ValueError for messages that the chat template does not accept,
        or renders without their text.
        """
        roles = tuple(message["role"] for message in messages)
        if roles not in self._pieces:
            self._pieces[roles] = self._template_pieces(roles)
        first, *others = self._pieces[roles]
        # The template may write the answer's end token itself. If it does, that token is not added a second time.
        ended = sampled[-1] in self._tokenizer.stop_token_ids and first[:1] == [sampled[-1]]
        ids = [*prompt_ids, *sampled, *first[1 if ended else 0 :]]
        for message, after in zip(messages, others, strict=True):
            ids += self._tokenizer.encode_plain(message["content"]) + after
        return ids

    def _template_pieces(self, roles: Sequence[str]) -> list[list[int]]:
        """Returns the token ids that the template writes after the answer, and after each message."""
        marks = [_MARK.format(number) for number in range(len(roles) + 1)]
        turns = [{"role": role, "content": mark} for role, mark in zip(("assistant", *roles), marks, strict=True)]
        rest = self._tokenizer.render([*self._opening, *turns])
        pieces = []
        for role, mark in zip(("assistant", *roles), marks, strict=True):
            before, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise ValueError(
                    f"the chat template does not show the text of a message with the role {role!r} exactly once. "
                    "An env with turns needs a template that does: give its messages another role, or use another "
                    "model."
                )
            pieces.append(before)
        return [self._tokenizer.encode_text(text) for text in [*pieces[1:], rest]]
