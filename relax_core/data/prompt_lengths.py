"""How many tokens the prompts of a run have, found before it starts.

All rows are looked at where that takes seconds: rows beyond `LOOKED_AT` are left out evenly, and of those that are
looked at the longest are tokenized, up to `TOKENIZED_BYTES` of text. No row has more tokens than bytes, since every
token of a prompt stands for a byte of it or more, so the rest are known to be shorter than a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.data import DataRow
from relax_core.data.files import RowFile
from relax_core.data.tokenizer import PromptTokenizer

LOOKED_AT = 20_000
TOKENIZED_BYTES = 4 << 20

ToMessages = Callable[[DataRow], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class PromptPlace:
    """``where``: file and line of a row. ``tokens``: of its prompt."""

    where: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class PromptLengths:
    """``longest``: of the prompts that were tokenized. ``bound``: no prompt that was looked at has more tokens; it is
    that of ``longest`` where the text was short enough to tokenize. ``too_long``: the prompts of more than ``room``
    tokens, in the order of the file. ``refused``: where and why, of each row that gave no prompt. ``rows``: that were
    looked at."""

    longest: PromptPlace
    bound: int
    too_long: Sequence[PromptPlace]
    refused: Sequence[tuple[str, str]]
    rows: int


def prompt_lengths(
    parts: Sequence[tuple[RowFile, range]], *, tokenizer: PromptTokenizer, messages: ToMessages, room: int | None
) -> PromptLengths:
    """Of the rows of each file that are in its range. ``messages``: a row as a conversation. ``room``: the most tokens
    that a prompt may have, None for any."""
    refused: list[tuple[str, str]] = []
    sizes: list[tuple[int, int, int]] = []  # bytes, part, row
    for part, row in _some(parts):
        rows = parts[part][0]
        try:
            sizes.append((len(prompt_text(rows[row], tokenizer, messages).encode()), part, row))
        except ValueError as error:
            refused.append((rows.where(row), str(error)))
    sizes.sort(key=lambda size: (-size[0], *size[1:]))
    found = _tokenize(sizes, parts, tokenizer, messages, enough=0 if room is None else room)
    too_long = [place for place in found.places.values() if room is not None and place.tokens > room]
    longest = max(found.places.values(), key=lambda place: place.tokens, default=PromptPlace(where="", tokens=0))
    return PromptLengths(
        longest=longest,
        bound=max(longest.tokens, found.rest),
        too_long=too_long,
        refused=refused,
        rows=len(sizes) + len(refused),
    )


@dataclass
class _Tokenized:
    """``places``: by part and row. ``rest``: bytes of the longest prompt that was not tokenized, where one of those may
    have more tokens than all that were."""

    places: dict[tuple[int, int], PromptPlace]
    rest: int = 0


def _tokenize(
    sizes: Sequence[tuple[int, int, int]],
    parts: Sequence[tuple[RowFile, range]],
    tokenizer: PromptTokenizer,
    messages: ToMessages,
    *,
    enough: int,
) -> _Tokenized:
    """The longest texts first, until none that is left can have more tokens than the longest or than ``enough``, or so
    much text was tokenized as may be."""
    found, left, most = _Tokenized(places={}), TOKENIZED_BYTES, 0
    for size, part, row in sizes:
        if size <= most and (size <= enough or not enough):
            break
        if size > left and found.places:
            found.rest = size if size > most else 0
            break
        rows = parts[part][0]
        tokens = len(tokenizer.encode_text(prompt_text(rows[row], tokenizer, messages)))
        found.places[part, row] = PromptPlace(where=rows.where(row), tokens=tokens)
        most, left = max(most, tokens), left - size
    found.places = dict(sorted(found.places.items()))
    return found


def _some(parts: Sequence[tuple[RowFile, range]]) -> Iterator[tuple[int, int]]:
    """Part and row of those that are looked at: every ``step``-th of all."""
    total = sum(len(rows) for _, rows in parts)
    step = max(1, -(-total // LOOKED_AT))
    for part, (_, rows) in enumerate(parts):
        for row in rows[::step]:
            yield part, row


def prompt_text(row: DataRow, tokenizer: PromptTokenizer, messages: ToMessages) -> str:
    """What the chat template writes for a row. Raises ValueError where the env or the template does not take it."""
    try:
        conversation = messages(row)
    except Exception as error:  # an env is a plug-in and raises what it likes
        raise ValueError(f"the env gives no conversation for it: {type(error).__name__}: {error}") from error
    return tokenizer.render(conversation)
