"""Checks prompts for token ids outside of the vocabulary; both engines refuse them with this text."""

from __future__ import annotations

from collections.abc import Sequence


def unknown_token(index: int, token_ids: Sequence[int], *, rid: str | None, vocab_size: int) -> str | None:
    """Returns an error text for the first unknown token of the request's prompt ``index``, or None if all are known.

    ``rid`` is the prompt's rid, if it has one.
    """
    if not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return None
    position = next(position for position, token in enumerate(token_ids) if not 0 <= token < vocab_size)
    name = f"input_ids[{index}]" if rid is None else f"input_ids[{index}] of rid {rid}"
    return (
        f"{name}: token id {token_ids[position]} at position {position} is not in the vocabulary; ids go from 0 to "
        f"{vocab_size - 1}"
    )
