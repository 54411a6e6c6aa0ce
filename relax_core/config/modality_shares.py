"""Names the modality of a prompt, and deals the prompts of a run to modalities in fixed shares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import combinations
from typing import Any

from relax_core.contracts.data import BadRow, DataRow
from relax_core.contracts.media import MEDIA_KINDS, MediaError, MediaKind

TEXT = "text"
LEAST_SHARE = 0.001
LONGEST_BLOCK = 1000  # prompts, so that shares are exact to a thousandth


def modality_of(kinds: Iterable[MediaKind]) -> str:
    """Returns the modality of a prompt that has media of these kinds, such as "text", "video" or "image_audio".

    The name of several kinds consists of their names in the order of `MEDIA_KINDS`.
    """
    there = set(kinds)
    return "_".join(kind for kind in MEDIA_KINDS if kind in there) or TEXT


MODALITIES = (TEXT, *(modality_of(some) for count in (1, 2, 3) for some in combinations(MEDIA_KINDS, count)))


def kinds_of(modality: str) -> tuple[MediaKind, ...]:
    """Returns the kinds of media in prompts of this modality, none for text."""
    return tuple(kind for kind in MEDIA_KINDS if kind in modality.split("_"))


def modality_of_row(row: DataRow | BadRow) -> str:
    """Returns the modality of a data row that was read.

    A row that cannot be used counts with the kind of its bad item, or else as text.
    """
    if isinstance(row, BadRow):
        return row.kind if isinstance(row, MediaError) else TEXT
    prompt = row["prompt"]
    contents = [] if isinstance(prompt, str) else [message["content"] for message in prompt]
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    return modality_of(part["type"] for part in parts)


def mix_problem(mix: Any) -> str | None:
    """Returns what is wrong with a value of data.mix, as a sentence with key, value and fix, or None."""
    told, example = f"data.mix={mix}", "Give shares such as data.mix={video: 0.25, text: 0.75}, or null."
    if not isinstance(mix, dict) or not mix or any(type(share) not in (int, float) for share in mix.values()):
        return f"{told} is no mapping from modalities to numbers. {example}"
    for name in mix:
        if name not in MODALITIES:
            return f"{told}: {name} is no modality. Use some of: {', '.join(MODALITIES)}."
    if not min(mix.values()) >= LEAST_SHARE or not abs(sum(mix.values()) - 1.0) <= 1e-9:
        total = sum(mix.values())
        return f"{told}: the shares sum to {total:g}. They are at least {LEAST_SHARE:g} each and sum to 1. {example}"
    return None


class MixOrder:
    """Deals an endless row of numbered places to modalities in fixed ``shares``, which sum to 1.

    The places form blocks of the same length, at most `LONGEST_BLOCK`. In a block each place goes to the modality that
    is furthest below its share, so every stretch of places has the shares but for less than one place a modality, in
    most cases. All is computed from the shares alone, so any process finds the same modality at a place.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.names = tuple(sorted(shares))
        exact = {name: Fraction(str(shares[name])) for name in self.names}
        self._length = min(LONGEST_BLOCK, math.lcm(*(share.denominator for share in exact.values())))
        self._owners: list[str] = []
        self._before: dict[str, list[int]] = {name: [0] for name in self.names}  # places before each place of a block
        self._places: dict[str, list[int]] = {name: [] for name in self.names}
        for place in range(self._length):
            owner = max(self.names, key=lambda name: exact[name] * (place + 1) - len(self._places[name]))
            self._owners.append(owner)
            self._places[owner].append(place)
            for name in self.names:
                self._before[name].append(len(self._places[name]))

    def at(self, index: int) -> tuple[str, int]:
        """Returns the modality of the place with this index, and how many earlier places it has."""
        block, place = divmod(index, self._length)
        owner = self._owners[place]
        return owner, block * len(self._places[owner]) + self._before[owner][place]

    def index(self, modality: str, number: int) -> int:
        """Returns the index of a modality's place, given how many earlier places it has."""
        block, own = divmod(number, len(self._places[modality]))
        return block * self._length + self._places[modality][own]

    def count(self, modality: str, places: int) -> int:
        """Returns how many of the first ``places`` places the modality has."""
        block, place = divmod(places, self._length)
        return block * len(self._places[modality]) + self._before[modality][place]
