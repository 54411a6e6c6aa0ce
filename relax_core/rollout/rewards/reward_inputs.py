"""Makes a reward's input from an engine's response."""

from __future__ import annotations

from collections.abc import Sequence

from relax_core.contracts.data import DataRow
from relax_core.contracts.engine import Generated
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
) -> RewardInput:
    """Returns the input with the response's text, without the stop token or the string of ``stop`` that ended it.

    `RewardInput` explains ``uid`` and ``where``.
    """
    text = response_text(response, tokenizer=tokenizer, stop=stop)
    stopped = response.finish_reason == "stop"
    return RewardInput(response=text, stopped=stopped, answer=str(row["answer"]), row=row, uid=uid, where=where)


def response_text(response: Generated, *, tokenizer: PromptTokenizer, stop: Sequence[str]) -> str:
    """Returns a response's text without the stop token or the string of ``stop`` that ended it."""
    ids = response.output_ids.tolist()
    if response.finish_reason != "stop":
        return tokenizer.decode(ids)
    if ids and ids[-1] in tokenizer.stop_token_ids:
        return tokenizer.decode(ids[:-1])
    text = tokenizer.decode(ids)
    return text[: min((at for string in stop if (at := text.find(string)) >= 0), default=len(text))]
