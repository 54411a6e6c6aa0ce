"""Excludes tokens from the softmax of the output layer: tokens outside a row's kept set, and banned tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relax_core.contracts.trees.kept_tokens import OUTSIDE, KeptTokens

_MASKS = 32  # The number of bitmasks unpacked at one time, at one byte for each token of the vocabulary.


class KeptRows:
    """Holds the encoded kept sets of the rows of the output layer; `leave_out` decodes them chunk by chunk.

    Bitmasks are on the device. Ids are on the host, so that counting them does not synchronize with the device.
    """

    def __init__(self, kept: KeptTokens, device: torch.device) -> None:
        sets = kept.arrays()
        self._vocab_size = kept.vocab_size
        self._listed, self._masked = np.flatnonzero(sets.listed), np.flatnonzero(sets.masked)
        self._ids, self._rows_of_ids = sets.ids, np.repeat(self._listed, sets.counts[sets.listed])
        self._bits = torch.from_numpy(sets.bits.copy()).to(device)
        self._powers = 1 << torch.arange(8, dtype=torch.uint8, device=device)

    def leave_out(self, logits: Tensor, rows: slice, *, first: int) -> None:
        """Sets logits ``[rows, width]`` of tokens that are not in their row's set to `OUTSIDE`.

        ``first`` is the id of the first column's token.
        """
        listed, masked = self._listed[_inside(self._listed, rows)], _inside(self._masked, rows)
        if len(listed):
            self._leave_out_listed(logits, rows, listed - rows.start, first=first)
        if masked.stop > masked.start:
            self._leave_out_masked(logits, masked.start, self._masked[masked] - rows.start, first=first)

    def _leave_out_listed(self, logits: Tensor, rows: slice, at: np.ndarray, *, first: int) -> None:
        """Saves the few kept logits, fills their rows and writes them back, which needs no buffer as wide as a row."""
        some = _inside(self._rows_of_ids, rows)
        columns = self._ids[some] - first
        here = (columns >= 0) & (columns < logits.shape[1])
        pairs = np.stack([self._rows_of_ids[some][here] - rows.start, columns[here]])
        kept = torch.from_numpy(pairs).to(logits.device).unbind(0)
        values = logits[kept]
        if len(at) == len(logits):
            logits.fill_(OUTSIDE)
        else:
            logits.index_fill_(0, torch.from_numpy(at).to(logits.device), OUTSIDE)
        logits[kept] = values

    def _leave_out_masked(self, logits: Tensor, number: int, at: np.ndarray, *, first: int) -> None:
        """Applies bitmasks ``number``, ``number`` + 1, … to the rows ``at`` of the logits.

        Tokens beyond the sets' vocabulary are in none of the sets.
        """
        width = max(0, min(logits.shape[1], self._vocab_size - first))
        logits[torch.from_numpy(at).to(logits.device), width:] = OUTSIDE
        begin, end = first // 8, -(-(first + width) // 8)
        for run in np.split(np.arange(len(at)), np.flatnonzero(np.diff(at) > 1) + 1):
            for piece in np.split(run, range(_MASKS, len(run), _MASKS)):
                start, row = number + int(piece[0]), int(at[piece[0]])
                some = self._bits[start : start + len(piece), begin:end]
                outside = (some[:, :, None] & self._powers).eq_(0).view(torch.bool).flatten(1)
                neighbours = logits[row : row + len(piece), :width]
                neighbours.masked_fill_(outside[:, first - 8 * begin :][:, :width], OUTSIDE)


def _inside(numbers: np.ndarray, rows: slice) -> slice:
    """Returns the slice of the ascending row numbers that lie in ``rows``."""
    start, stop = np.searchsorted(numbers, (rows.start, rows.stop)).tolist()
    return slice(start, stop)


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Holds the rows' kept sets, if top_k, top_p or min_p left tokens out, and ``banned`` ids that no row may have."""

    kept: KeptRows | None
    banned: Sequence[int]

    @staticmethod
    def of(kept: KeptTokens | None, banned: Sequence[int], device: torch.device) -> Truncation | None:
        """Returns None if no token is left out."""
        if kept is None and not banned:
            return None
        return Truncation(kept=None if kept is None else KeptRows(kept, device), banned=banned)

    def apply(self, logits: Tensor, rows: slice, *, first: int) -> None:
        """Sets the logits ``[rows, width]`` of excluded tokens to `OUTSIDE`; ``first`` is the first column's token."""
        columns = [token - first for token in self.banned if 0 <= token - first < logits.shape[1]]
        if columns:
            logits.index_fill_(1, torch.tensor(columns, device=logits.device), OUTSIDE)
        if self.kept is not None:
            self.kept.leave_out(logits, rows, first=first)
