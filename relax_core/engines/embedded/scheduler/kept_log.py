"""Records the set of tokens that each response token was sampled from (`relax_core.contracts.trees.kept_tokens`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_core.contracts.trees.kept_tokens import KeptTokens


class KeptTable:
    """Holds the kept sets of the running samples' response tokens, one entry a slot, moved with the `SlotTable`."""

    def __init__(self, capacity: int, *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._sets = [(bytearray(), bytearray()) for _ in range(capacity)]  # counts and words of each slot

    def put(self, slot: int, kept: KeptTokens | None) -> None:
        """Starts a sample in this slot; ``kept`` holds the sets of the tokens that it has already, or is None."""
        self._sets[slot] = (
            (bytearray(), bytearray()) if kept is None else (bytearray(kept.counts), bytearray(kept.words))
        )

    def record(self, slots: Sequence[int], kept: KeptTokens) -> None:
        """Appends the set of one more token to each of ``slots``."""
        ends = kept.word_ends().tolist()
        start = 0
        for number, (slot, end) in enumerate(zip(slots, ends, strict=True)):
            counts, words = self._sets[slot]
            counts += kept.counts[4 * number : 4 * number + 4]
            words += kept.words[4 * start : 4 * end]
            start = end

    def of_slot(self, slot: int, start: int = 0) -> KeptTokens:
        """Returns the sets of a sample's tokens from its token ``start`` on."""
        counts, words = self._sets[slot]
        kept = KeptTokens(self._vocab_size, bytes(counts), bytes(words))
        return kept.take(np.arange(start, kept.tokens)) if start else kept

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Moves samples between slots; ``moves`` holds (from, to)."""
        for source, target in moves:
            self._sets[target], self._sets[source] = self._sets[source], (bytearray(), bytearray())
