"""What is left out of the softmax of the output layer: tokens outside of a row's kept set, and banned tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relax_core.contracts.kept_tokens import OUTSIDE, KeptTokens

_MASKS = 32  # bitmasks that are unpacked at one time: a byte for each token of the vocabulary


class KeptRows:
    """Kept sets, one for each row of the output layer. They stay encoded; `leave_out` decodes a chunk. Bitmasks lie on
    the device, ids on the host, so that no device has to be waited for to know how many there are."""

    def __init__(self, kept: KeptTokens, device: torch.device) -> None:
        sets = kept.arrays()
        self._vocab_size = kept.vocab_size
        self._listed, self._masked = np.flatnonzero(sets.listed), np.flatnonzero(sets.masked)
        self._ids, self._rows_of_ids = sets.ids, np.repeat(self._listed, sets.counts[sets.listed])
        self._bits = torch.from_numpy(sets.bits.copy()).to(device)
        self._powers = 1 << torch.arange(8, dtype=torch.uint8, device=device)

    def leave_out(self, logits: Tensor, rows: slice, *, first: int) -> None:
        """Sets logits ``[rows, words]`` of tokens that are not in their row's set to `OUTSIDE`; ``first``: the first
        word's id."""
        listed, masked = self._listed[_inside(self._listed, rows)], _inside(self._masked, rows)
        if len(listed):
            self._leave_out_listed(logits, rows, listed - rows.start, first=first)
        if masked.stop > masked.start:
            self._leave_out_masked(logits, masked.start, self._masked[masked] - rows.start, first=first)

    def _leave_out_listed(self, logits: Tensor, rows: slice, at: np.ndarray, *, first: int) -> None:
        """The few that are kept are taken aside, and put back into rows that are filled: no buffer as wide as these."""
        some = _inside(self._rows_of_ids, rows)
        places = self._ids[some] - first
        here = (places >= 0) & (places < logits.shape[1])
        pairs = np.stack([self._rows_of_ids[some][here] - rows.start, places[here]])
        kept = torch.from_numpy(pairs).to(logits.device).unbind(0)
        values = logits[kept]
        if len(at) == len(logits):
            logits.fill_(OUTSIDE)
        else:
            logits.index_fill_(0, torch.from_numpy(at).to(logits.device), OUTSIDE)
        logits[kept] = values

    def _leave_out_masked(self, logits: Tensor, number: int, at: np.ndarray, *, first: int) -> None:
        """``at``: the rows of the logits that bitmasks ``number``, ``number`` + 1, … belong to. Words beyond the sets'
        vocabulary are in none of them."""
        words = max(0, min(logits.shape[1], self._vocab_size - first))
        logits[torch.from_numpy(at).to(logits.device), words:] = OUTSIDE
        begin, end = first // 8, -(-(first + words) // 8)
        for run in np.split(np.arange(len(at)), np.flatnonzero(np.diff(at) > 1) + 1):
            for piece in np.split(run, range(_MASKS, len(run), _MASKS)):
                start, row = number + int(piece[0]), int(at[piece[0]])
                some = self._bits[start : start + len(piece), begin:end]
                outside = (some[:, :, None] & self._powers).eq_(0).view(torch.bool).flatten(1)
                neighbours = logits[row : row + len(piece), :words]
                neighbours.masked_fill_(outside[:, first - 8 * begin :][:, :words], OUTSIDE)


def _inside(numbers: np.ndarray, rows: slice) -> slice:
    """Places of the ascending row numbers that lie in ``rows``."""
    start, stop = np.searchsorted(numbers, (rows.start, rows.stop)).tolist()
    return slice(start, stop)


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """``kept``: of each row, where top_k, top_p or min_p left tokens out. ``banned``: ids that no row has."""

    kept: KeptRows | None
    banned: Sequence[int]

    @staticmethod
    def of(kept: KeptTokens | None, banned: Sequence[int], device: torch.device) -> Truncation | None:
        """None where nothing is left out."""
        if kept is None and not banned:
            return None
        return Truncation(kept=None if kept is None else KeptRows(kept, device), banned=banned)

    def apply(self, logits: Tensor, rows: slice, *, first: int) -> None:
        """Sets what is left out of some rows' logits ``[rows, words]`` to `OUTSIDE`; ``first``: the first word's id."""
        places = [token - first for token in self.banned if 0 <= token - first < logits.shape[1]]
        if places:
            logits.index_fill_(1, torch.tensor(places, device=logits.device), OUTSIDE)
        if self.kept is not None:
            self.kept.leave_out(logits, rows, first=first)
