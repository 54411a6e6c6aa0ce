"""Prompts with tokens that the model does not know: refused in the same words by every engine."""

from __future__ import annotations

from collections.abc import Sequence


def unknown_token(place: int, token_ids: Sequence[int], *, rid: str | None, vocab_size: int) -> str | None:
    """What is wrong with the first such token of prompt ``place`` of a request, or None. ``rid``: where it has one."""
    if not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return None
    position = next(position for position, token in enumerate(token_ids) if not 0 <= token < vocab_size)
    name = f"input_ids[{place}]" if rid is None else f"input_ids[{place}] of rid {rid}"
    return (
        f"{name}: token id {token_ids[position]} at position {position} is not in the vocabulary; ids go from 0 to "
        f"{vocab_size - 1}"
    )
