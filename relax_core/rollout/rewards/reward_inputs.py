"""Makes a reward's input from an engine's response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_core.contracts.data import DataRow
from relax_core.contracts.engine import Generated
from relax_core.contracts.media import MediaItem, MediaSource
from relax_core.contracts.reward import RewardInput
from relax_core.data.tokenizer import PromptTokenizer


def reward_input(
    row: DataRow,
    response: Generated,
    *,
    tokenizer: PromptTokenizer,
    stop: Sequence[str] = (),
    uid: str = "",
    where: str = "",
    media: Sequence[MediaItem] = (),
    media_folder: str = "",
) -> RewardInput:
    """Returns the input with the response's text, without the stop token or the string of ``stop`` that ended it.

    `RewardInput` explains ``uid``, ``where``, ``media`` and ``media_folder``. The row comes without bytes of media.
    """
    text = response_text(response, tokenizer=tokenizer, stop=stop)
    return RewardInput(
        response=text,
        stopped=response.finish_reason == "stop",
        answer=str(row["answer"]),
        row=without_bytes(row) if media else row,
        uid=uid,
        where=where,
        media=media,
        media_folder=media_folder,
    )


def without_bytes(value: Any) -> Any:
    """Returns a data row or a conversation with each `MediaSource` as its words: its path, or how many bytes it has."""
    if isinstance(value, MediaSource):
        return value.words
    if isinstance(value, Mapping):
        return {key: without_bytes(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_bytes(one) for one in value]
    return value


def response_text(response: Generated, *, tokenizer: PromptTokenizer, stop: Sequence[str]) -> str:
    """Returns a response's text without the stop token or the string of ``stop`` that ended it."""
    ids = response.output_ids.tolist()
    if response.finish_reason != "stop":
        return tokenizer.decode(ids)
    if ids and ids[-1] in tokenizer.stop_token_ids:
        return tokenizer.decode(ids[:-1])
    text = tokenizer.decode(ids)
    return text[: min((at for string in stop if (at := text.find(string)) >= 0), default=len(text))]
