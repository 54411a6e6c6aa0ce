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
    """Returns the input with the text of the response's sampled tokens, in which one of ``stop`` may be the last.

    `RewardInput` explains ``uid``, ``where``, ``media`` and ``media_folder``. The row comes without bytes of media.
    """
    text = response_text(response, tokenizer=tokenizer)
    return RewardInput(
        response=text,
        stopped=response.finish_reason == "stop",
        answer=str(row["answer"]),
        row=without_bytes(row) if media else row,
        uid=uid,
        where=where,
        media=media,
        media_folder=media_folder,
        stop_string=(stopped_by(text, stop) or "") if response.finish_reason == "stop" else "",
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


def response_text(response: Generated, *, tokenizer: PromptTokenizer) -> str:
    """Returns the text of a response's sampled tokens without the stop token; a stop string stays in it."""
    ids = response.output_ids.tolist()
    ended = response.finish_reason == "stop" and ids and ids[-1] in tokenizer.stop_token_ids
    return tokenizer.decode(ids[:-1] if ended else ids)


def stopped_by(text: str, stop: Sequence[str]) -> str | None:
    """Returns the stop string that stands first in a text."""
    found = [(at, string) for string in stop if (at := text.find(string)) >= 0]
    return min(found)[1] if found else None
