"""From a data row to the token ids of its prompt: conversation, chat template, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_core.config.schema import Overlong
from relax_core.contracts.data import TOO_LONG, BadRow, DataRow
from relax_core.contracts.env import EnvSpec, Message
from relax_core.data.tokenizer import PromptTokenizer


class PromptMaker:
    """``max_prompt_tokens``: what the context leaves beside the response; ``overlong``: what becomes of longer ones."""

    def __init__(
        self,
        *,
        env: EnvSpec,
        env_config: Any,
        tokenizer: PromptTokenizer,
        max_prompt_tokens: int,
        overlong: Overlong = Overlong.drop,
    ) -> None:
        self.tokenizer = tokenizer
        self._env = env
        self._config = env_config
        self.max_prompt_tokens = max_prompt_tokens
        self._overlong = overlong

    def tokens(self, row: DataRow, *, where: str) -> list[int]:
        """The prompt's token ids. ``where``: the row's file and line, with which an error begins.

        Raises `BadRow` as `text` does, and for a prompt that leaves no room for the response and is to be dropped;
        ValueError for such a one where ``overlong`` is error.
        """
        return self.opening(self._messages(row, where=where), where=where)

    def opening(self, messages: Sequence[Message], *, where: str) -> list[int]:
        """The token ids of a conversation that opens an episode. Raises as `tokens` does."""
        ids = self._encode(messages, where=where)
        if len(ids) <= self.max_prompt_tokens:
            return ids
        text = (
            f"{where}: its prompt has {len(ids)} tokens, but engine.context_length leaves room for "
            f"{self.max_prompt_tokens} beside rollout.max_new_tokens."
        )
        if self._overlong is Overlong.error:
            raise ValueError(
                f"{text} Raise engine.context_length, or use data.overlong=drop, which leaves such rows out."
            )
        if self._overlong is Overlong.drop:
            raise BadRow(TOO_LONG, text)
        cut = self._cut(messages, excess=len(ids) - self.max_prompt_tokens, where=where)
        if cut is None:
            raise BadRow(TOO_LONG, f"{text} Without its longest message it is too long, too.")
        return cut

    def text(self, row: DataRow, *, where: str) -> str:
        """The whole prompt as the chat template writes it, however long. Raises `BadRow` for a row from which the env
        or the template makes no prompt."""
        return self._render(self._messages(row, where=where), where=where)

    def _messages(self, row: DataRow, *, where: str) -> Sequence[Message]:
        assert self._env.messages is not None, "the episodes of an env with turns open themselves"
        try:
            return self._env.messages(row, self._config)
        except Exception as error:  # an env is a plug-in and raises what it likes
            text = f"{where}: the env gives no conversation for it: {type(error).__name__}: {error}"
            raise BadRow.because("env", text) from error

    def _render(self, messages: Sequence[Mapping[str, str]], *, where: str) -> str:
        try:
            return self.tokenizer.render(messages)
        except ValueError as error:
            raise BadRow.because("template", f"{where}: {error}") from error

    def _encode(self, messages: Sequence[Mapping[str, str]], *, where: str) -> list[int]:
        return self.tokenizer.encode_text(self._render(messages, where=where))

    def _cut(self, messages: Sequence[Message], *, excess: int, where: str) -> list[int] | None:
        """The token ids with a part of the longest message's text left out, so that they just fit; the template's own
        tokens stay. None where that message is not long enough."""
        place = max(range(len(messages)), key=lambda one: len(messages[one]["content"]))
        text = messages[place]["content"]
        spans = self.tokenizer.spans(text)
        kept = len(spans) - excess
        while kept > 0:
            shorter = dict(messages[place]) | {"content": shortened(text, spans, kept=kept, how=self._overlong)}
            ids = self._encode([*messages[:place], shorter, *messages[place + 1 :]], where=where)
            if len(ids) <= self.max_prompt_tokens:
                return ids
            kept -= len(ids) - self.max_prompt_tokens
        return None


def shortened(text: str, spans: Sequence[tuple[int, int]], *, kept: int, how: Overlong) -> str:
    """``text`` with ``kept`` of its tokens: its end (truncate_left), or half of them at its start and half at its end
    (truncate_middle). ``spans``: where each token begins and ends in it."""
    head = (kept + 1) // 2 if how is Overlong.truncate_middle else 0
    tail = kept - head
    front = text[: spans[head - 1][1]] if head else ""
    return front + (text[spans[-tail][0] :] if tail else "")
