"""Turns a data row into the token ids of its prompt: conversation, chat template, limit of length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_core.config.choices import Overlong
from relax_core.contracts.data import TOO_LONG, BadRow, DataRow
from relax_core.contracts.env import EnvSpec, Message
from relax_core.data.tokenizer import PromptTokenizer


class PromptMaker:
    """Makes prompts of at most ``max_prompt_tokens`` tokens; ``overlong`` says what happens to longer ones."""

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
        """Returns the prompt's token ids; ``where`` is the data row's file and line for errors.

        Raises `BadRow` as `text` does, and if the prompt is too long and such rows are dropped. Raises ValueError if
        the prompt is too long and ``overlong`` is error.
        """
        return self.opening(self._messages(row, where=where), where=where)

    def opening(self, messages: Sequence[Message], *, where: str) -> list[int]:
        """Returns the token ids of a conversation that opens an episode; raises as `tokens` does."""
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
            raise BadRow(TOO_LONG, f"{text} It is too long even without its longest message.")
        return cut

    def text(self, row: DataRow, *, where: str) -> str:
        """Returns the whole prompt as the chat template writes it, of any length.

        Raises `BadRow` if the env or the template makes no prompt from the data row.
        """
        return self._render(self._messages(row, where=where), where=where)

    def _messages(self, row: DataRow, *, where: str) -> Sequence[Message]:
        assert self._env.messages is not None, "an env of several turns opens its own episodes"
        try:
            return self._env.messages(row, self._config)
        except Exception as error:  # an env is a plug-in and may raise anything
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
        """Returns the token ids with a part of the longest message left out, so that they just fit.

        The template's own tokens stay. Returns None if that message is not long enough.
        """
        longest = max(range(len(messages)), key=lambda one: len(messages[one]["content"]))
        text = messages[longest]["content"]
        spans = self.tokenizer.spans(text)
        kept = len(spans) - excess
        while kept > 0:
            shorter = dict(messages[longest]) | {"content": shortened(text, spans, kept=kept, how=self._overlong)}
            ids = self._encode([*messages[:longest], shorter, *messages[longest + 1 :]], where=where)
            if len(ids) <= self.max_prompt_tokens:
                return ids
            kept -= len(ids) - self.max_prompt_tokens
        return None


def shortened(text: str, spans: Sequence[tuple[int, int]], *, kept: int, how: Overlong) -> str:
    """Returns ``text`` with ``kept`` of its tokens; ``spans`` holds where each token starts and ends in it.

    truncate_left keeps the end of the text, and truncate_middle half of the tokens at the start and half at the end.
    """
    head = (kept + 1) // 2 if how is Overlong.truncate_middle else 0
    tail = kept - head
    start = text[: spans[head - 1][1]] if head else ""
    return start + (text[spans[-tail][0] :] if tail else "")
