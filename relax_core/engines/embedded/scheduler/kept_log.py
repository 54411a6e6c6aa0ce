"""Which tokens each response token was sampled from, as the decoder notes it (`relax_core.contracts.kept_tokens`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_core.contracts.kept_tokens import KeptTokens


class KeptTable:
    """Of the response tokens of running samples, one row a slot; moved together with the `SlotTable`."""

    def __init__(self, capacity: int, *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows = [(bytearray(), bytearray()) for _ in range(capacity)]  # counts and words of each slot

    def put(self, slot: int, kept: KeptTokens | None) -> None:
        """What a sample that begins in this slot has already: of its first tokens, or None."""
        self._rows[slot] = (
            (bytearray(), bytearray()) if kept is None else (bytearray(kept.counts), bytearray(kept.words))
        )

    def record(self, slots: Sequence[int], kept: KeptTokens) -> None:
        """One more token of each of some slots."""
        ends = kept.word_ends().tolist()
        start = 0
        for number, (slot, end) in enumerate(zip(slots, ends, strict=True)):
            counts, words = self._rows[slot]
            counts += kept.counts[4 * number : 4 * number + 4]
            words += kept.words[4 * start : 4 * end]
            start = end

    def of_slot(self, slot: int, start: int = 0) -> KeptTokens:
        """The sets of a sample's tokens from its token ``start`` on."""
        counts, words = self._rows[slot]
        kept = KeptTokens(self._vocab_size, bytes(counts), bytes(words))
        return kept.take(np.arange(start, kept.tokens)) if start else kept

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        for source, target in moves:
            self._rows[target], self._rows[source] = self._rows[source], (bytearray(), bytearray())
