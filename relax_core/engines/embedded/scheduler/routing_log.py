"""Which experts each token was routed to, as the decoder notes it: what the trainer replays (R3, arXiv 2510.11370)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FIRST_TOKENS = 16


@dataclass(slots=True)
class PromptRoutes:
    """Of a prompt's tokens, uint8 or uint16 ``[prompt, layers, per_token]``; set by its first prefill and kept, also
    when it is computed anew under other weights."""

    rows: np.ndarray | None = None


class RouteTable:
    """Of the response tokens of running samples, one row a slot; moved together with the `SlotTable`.

    Row t of a sample is what its response token t was routed to when it was fed. So the newest token has none yet.
    """

    def __init__(self, capacity: int, *, layers: int, per_token: int, experts: int) -> None:
        self.dtype = np.dtype(np.uint8 if experts <= 256 else np.uint16)
        self.shape = (layers, per_token)
        self._rows = np.zeros((capacity, 0, *self.shape), dtype=self.dtype)  # takes memory when somebody asks

    def reserve(self, tokens: int) -> None:
        """Room for ``tokens`` tokens of every slot; grows by doubling."""
        if tokens > self._rows.shape[1]:
            old = self._rows
            width = max(tokens, 2 * old.shape[1], FIRST_TOKENS)
            self._rows = np.zeros((len(old), width, *self.shape), dtype=self.dtype)
            self._rows[:, : old.shape[1]] = old

    def put(self, slot: int, rows: np.ndarray, *, start: int = 0) -> None:
        """Tokens ``start``.. of one sample."""
        self.reserve(start + len(rows))
        self._rows[slot, start : start + len(rows)] = rows

    def record(self, tokens: np.ndarray, chosen: np.ndarray) -> None:
        """Of slots 0.. the token number ``tokens[slot]``; ``chosen`` ``[slots, layers, per_token]``."""
        self.reserve(int(tokens.max()) + 1)
        self._rows[np.arange(len(tokens)), tokens] = chosen

    def rows(self, slot: int, count: int) -> np.ndarray:
        """A copy of a sample's first ``count`` rows."""
        return self._rows[slot, :count].copy()

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        if moves:
            sources, targets = (list(side) for side in zip(*moves, strict=True))
            self._rows[targets] = self._rows[sources]
