"""Records the experts that each token was routed to, which the trainer replays (R3, arXiv 2510.11370)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FIRST_TOKENS = 16


@dataclass(slots=True)
class PromptRoutes:
    """Holds the experts of a prompt's tokens, uint8 or uint16 ``[prompt, layers, per_token]``.

    The first prefill sets them. They stay when the prompt is computed anew under other weights.
    """

    experts: np.ndarray | None = None


class RouteTable:
    """Holds the experts of the running samples' response tokens, one entry a slot, moved with the `SlotTable`.

    A token is routed when it passes through the model, so that the newest token of a sample has no experts yet.
    """

    def __init__(self, capacity: int, *, layers: int, per_token: int, experts: int) -> None:
        self.dtype = np.dtype(np.uint8 if experts <= 256 else np.uint16)
        self.shape = (layers, per_token)
        self._experts = np.zeros((capacity, 0, *self.shape), dtype=self.dtype)  # grows once experts are asked for

    def reserve(self, tokens: int) -> None:
        """Makes room for ``tokens`` tokens of every slot; the room grows by doubling."""
        if tokens > self._experts.shape[1]:
            old = self._experts
            width = max(tokens, 2 * old.shape[1], FIRST_TOKENS)
            self._experts = np.zeros((len(old), width, *self.shape), dtype=self.dtype)
            self._experts[:, : old.shape[1]] = old

    def put(self, slot: int, experts: np.ndarray, *, start: int = 0) -> None:
        """Writes the experts ``[tokens, layers, per_token]`` of one sample's tokens from ``start`` on."""
        self.reserve(start + len(experts))
        self._experts[slot, start : start + len(experts)] = experts

    def record(self, tokens: np.ndarray, chosen: np.ndarray) -> None:
        """Writes ``chosen`` ``[slots, layers, per_token]``: of each slot the experts of its token ``tokens[slot]``."""
        self.reserve(int(tokens.max()) + 1)
        self._experts[np.arange(len(tokens)), tokens] = chosen

    def first(self, slot: int, count: int) -> np.ndarray:
        """Returns a copy of the experts of a sample's first ``count`` tokens."""
        return self._experts[slot, :count].copy()

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Moves samples between slots; ``moves`` holds (from, to)."""
        if moves:
            sources, targets = (list(side) for side in zip(*moves, strict=True))
            self._experts[targets] = self._experts[sources]
