"""Counts the ends of samples by the modality of their prompt; a run on text names none and counts nothing here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from relax_core.config.modality import MODALITIES
from relax_core.contracts.bus import ModalityCounts


class ModalityState(msgspec.Struct, frozen=True):
    """Is the part of a snapshot that counts by modality.

    ``codes`` has one byte for each group by its index: 0 if nobody has named its modality, else one more than the
    modality's place in `MODALITIES`.
    """

    codes: bytes
    counts: dict[str, ModalityCounts]


class ModalityEnds:
    """Holds the modality of each group, and the samples of each modality that were issued, trained and dropped."""

    def __init__(self) -> None:
        self._codes = bytearray()
        self._issued: Counter[str] = Counter()
        self._trained: Counter[str] = Counter()
        self._dropped: dict[str, Counter[str]] = {}
        self._staleness: dict[str, Counter[int]] = {}

    def name(self, index: int, modality: str, ends: Iterable[int], reasons: Sequence[str]) -> None:
        """Names the modality of group ``index``; a group that has a name keeps it.

        ``ends`` are the ledger's entries of its samples, because a group may have been dropped before anybody read its
        data row. ``reasons`` are the ledger's reasons by number.
        """
        assert modality in MODALITIES
        if len(self._codes) <= index:
            self._codes.extend(bytes(index + 1 - len(self._codes)))
        if self._codes[index]:
            return
        self._codes[index] = MODALITIES.index(modality) + 1
        for code in ends:
            self._issued[modality] += 1
            assert code <= 0, "a group is trained after its data row was read"
            if code < 0:
                self.drop(index, reasons[-code - 1])

    def train(self, index: int, staleness: Sequence[int]) -> None:
        """Counts trained samples of a group, one for each number of ``staleness``."""
        if name := self._name(index):
            self._trained[name] += len(staleness)
            self._staleness.setdefault(name, Counter()).update(staleness)

    def drop(self, index: int, reason: str) -> None:
        """Counts a dropped sample of a group."""
        if name := self._name(index):
            self._dropped.setdefault(name, Counter())[reason] += 1

    def _name(self, index: int) -> str:
        code = self._codes[index] if index < len(self._codes) else 0
        return MODALITIES[code - 1] if code else ""

    def counts(self) -> dict[str, ModalityCounts]:
        """Returns the counts of each modality that has a group."""
        return {
            name: ModalityCounts(
                issued=self._issued[name],
                trained=self._trained[name],
                dropped=dict(sorted(self._dropped.get(name, Counter()).items())),
                staleness=dict(sorted(self._staleness.get(name, Counter()).items())),
            )
            for name in MODALITIES
            if self._issued[name]
        }

    def state(self) -> ModalityState | None:
        """Returns the part of a snapshot, or None if nobody has named a modality."""
        if not self._codes:
            return None
        return ModalityState(codes=bytes(self._codes), counts=self.counts())

    def restore(self, state: ModalityState | None) -> None:
        """Goes back to ``state``."""
        counts = {} if state is None else state.counts
        self._codes = bytearray() if state is None else bytearray(state.codes)
        self._issued = Counter({name: one.issued for name, one in counts.items()})
        self._trained = Counter({name: one.trained for name, one in counts.items()})
        self._dropped = {name: Counter(one.dropped) for name, one in counts.items()}
        self._staleness = {name: Counter(one.staleness) for name, one in counts.items()}
