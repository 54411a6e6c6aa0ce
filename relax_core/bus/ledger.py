"""The ledger in memory: records how each issued sample ends, trained at a step or dropped with a reason.

Each sample has one int32 entry at ``index * group_size + number``: 0 means open, ``t+1`` means trained at step t, and
``-(r+1)`` means dropped with reason number r. All counts are computed from these entries. Closed entries before the
first open entry are counted only once, so the cost of a count does not grow with the number of samples.

Counts and checkpoints come from the entries, which take four bytes per sample, so no call to the bus reads the disk.
The journal is a log of events for people. A run can resume from a checkpoint without the journal's file.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from relax_core.config.modality import MODALITIES
from relax_core.contracts.bus import LedgerCounts, ModalityCounts

if TYPE_CHECKING:
    from relax_core.bus.journal import Journal


class LedgerState(msgspec.Struct, frozen=True):
    """Holds the ledger's part of a snapshot.

    ``ends`` contains the entries as little-endian int32. ``journal_position`` is the id of the last event.
    """

    group_size: int
    ends: bytes
    reasons: list[str]
    further_ends: dict[int, list[int]]
    journal_position: int
    modalities: ModalityState | None = None


class Ledger:
    """Stores an entry for each issued sample, and appends each event to ``journal``, if given."""

    def __init__(self, *, group_size: int, journal: Journal | None) -> None:
        self._group_size = group_size
        self._journal = journal
        self._ends = array("i")
        self._reasons: list[str] = []
        self._reason_codes: dict[str, int] = {}
        # entry → codes of further ends of a sample that had already ended. `counts` reports samples trained twice.
        self._further_ends: dict[int, list[int]] = {}
        self._settled = 0  # number of leading entries that are closed and counted
        self._settled_trained = 0
        self._settled_dropped: Counter[int] = Counter()  # drops by code
        self._modalities = ModalityEnds()

    # -- events -------------------------------------------------------------------------------------------------
    def issue(self, index: int, group_uid: str, uids: Sequence[str], *, attempt: int, min_version: int) -> None:
        """Opens the samples of a new group, or records that an open group is issued again (``attempt`` > 0)."""
        start = index * self._group_size
        assert start <= len(self._ends)
        if start == len(self._ends):
            self._ends.extend([0] * self._group_size)
            if index == 0 and self._journal and self._journal.position:
                self._journal.roll_back(0)  # undoes events of an earlier start of the run
        if self._journal:
            reason = f"attempt {attempt}" if attempt else ""
            self._journal.append("issued", group_uid, uids, version=min_version, reason=reason)

    def name_modality(self, index: int, modality: str) -> None:
        """Sets the modality of an issued group; later calls for the same group have no effect."""
        ends = self._ends[index * self._group_size : (index + 1) * self._group_size]
        self._modalities.name(index, modality, ends, self._reasons)

    def put(
        self, group_uid: str, uids: Sequence[str], versions: Sequence[int], *, persisted: tuple[bytes, ...] | None
    ) -> None:
        """Records that a group is complete. ``persisted`` contains the encoded payloads of `PERSISTED_COLUMNS`."""
        if self._journal:
            self._journal.append("put", group_uid, uids, versions=versions, persisted=persisted)

    def lease(self, group_uid: str, uids: Sequence[str], *, step: int, delivery: int) -> None:
        """Records that the actor leased a group for ``step``; ``delivery`` counts the actor's leases of the group."""
        if self._journal:
            reason = f"delivery {delivery}" if delivery > 1 else ""
            self._journal.append("leased", group_uid, uids, step=step, reason=reason)

    def give_back(self, group_uid: str, uids: Sequence[str], *, step: int, reason: str) -> None:
        """Records that the actor's lease of a group ended without training."""
        if self._journal:
            self._journal.append("returned", group_uid, uids, step=step, reason=reason)

    def train(self, index: int, group_uid: str, uids: Sequence[str], versions: Sequence[int], *, step: int) -> None:
        """Ends samples as trained at ``step``. ``versions`` has one weight version for each uid."""
        self._end(index, uids, step + 1)
        self._modalities.train(index, [step - version for version in versions])
        if self._journal:
            self._journal.append("trained", group_uid, uids, step=step, versions=versions)

    def drop(self, index: int, group_uid: str, reasons: Mapping[str, str], *, step: int) -> None:
        """Ends samples as dropped. ``reasons`` maps uid to reason; ``step`` is the current train step."""
        for uid, reason in reasons.items():
            self._end(index, (uid,), -(self._reason_code(reason) + 1))
            self._modalities.drop(index, reason)
            if self._journal:
                self._journal.append("dropped", group_uid, (uid,), step=step, reason=reason)

    def _reason_code(self, reason: str) -> int:
        code = self._reason_codes.get(reason)
        if code is None:
            code = self._reason_codes[reason] = len(self._reasons)
            self._reasons.append(reason)
        return code

    def _end(self, index: int, uids: Sequence[str], code: int) -> None:
        start = index * self._group_size
        for uid in uids:
            entry = start + int(uid[uid.rindex(".") + 1 :])
            if self._ends[entry] == 0:
                self._ends[entry] = code
            else:
                self._further_ends.setdefault(entry, []).append(code)

    # -- counts -------------------------------------------------------------------------------------------------
    def counts(self, open_indices: Iterable[int]) -> LedgerCounts:
        """Counts samples over all entries.

        ``open_indices`` lists the groups that the bus still stores. An open sample of a group outside this list is
        lost.
        """
        self._settle()
        trained, drops = _tally(self._ends[self._settled :])
        trained += self._settled_trained
        drops += self._settled_dropped
        dropped = {self._reasons[-code - 1]: count for code, count in drops.items()}
        size = self._group_size
        still_open = sum(self._ends[index * size : (index + 1) * size].count(0) for index in open_indices)
        trained_twice = sum(
            sum(code > 0 for code in (self._ends[entry], *further)) > 1 for entry, further in self._further_ends.items()
        )
        return LedgerCounts(
            issued=len(self._ends),
            trained=trained,
            dropped=dict(sorted(dropped.items())),
            open=still_open,
            lost=len(self._ends) - trained - sum(dropped.values()) - still_open,
            trained_twice=trained_twice,
            modalities=self._modalities.counts(),
        )

    def _settle(self) -> None:
        """Counts the closed entries before the first open entry, and stores the counts for later calls."""
        try:
            first_open = self._ends.index(0, self._settled)
        except ValueError:
            first_open = len(self._ends)
        trained, dropped = _tally(self._ends[self._settled : first_open])
        self._settled_trained += trained
        self._settled_dropped += dropped
        self._settled = first_open

    # -- snapshots ----------------------------------------------------------------------------------------------
    def state(self) -> LedgerState:
        """Returns the ledger's part of a snapshot."""
        return LedgerState(
            group_size=self._group_size,
            ends=self._ends.tobytes(),
            reasons=list(self._reasons),
            further_ends={entry: list(codes) for entry, codes in self._further_ends.items()},
            journal_position=self._journal.position if self._journal else 0,
            modalities=self._modalities.state(),
        )

    def restore(self, state: LedgerState) -> None:
        """Restores ``state`` and rolls back later events in the journal.

        Raises ValueError if the snapshot's group size differs from the run's group size.
        """
        if state.group_size != self._group_size:
            raise ValueError(
                f"bus: the snapshot has group_size={state.group_size}, this run group_size={self._group_size}: "
                "resume with the group size that the checkpoint was made with"
            )
        self._ends = array("i")
        self._ends.frombytes(state.ends)
        self._reasons = list(state.reasons)
        self._reason_codes = {reason: code for code, reason in enumerate(self._reasons)}
        self._further_ends = {entry: list(codes) for entry, codes in state.further_ends.items()}
        self._settled = 0
        self._settled_trained = 0
        self._settled_dropped = Counter()
        self._modalities.restore(state.modalities)
        if self._journal:
            self._journal.roll_back(state.journal_position)


def _tally(entries: array[int]) -> tuple[int, Counter[int]]:
    """Returns (number of trained entries, number of drops by code)."""
    counts = Counter(entries)
    drops = Counter({code: count for code, count in counts.items() if code < 0})
    return sum(count for code, count in counts.items() if code > 0), drops


class ModalityState(msgspec.Struct, frozen=True):
    """Holds the modalities of groups and the counts by modality in a snapshot.

    ``codes`` has one byte for each group, at the group's index: 0 for an unknown modality, else 1 + the modality's
    index in `MODALITIES`.
    """

    codes: bytes
    counts: dict[str, ModalityCounts]


class ModalityEnds:
    """Stores the modality of each group, and counts the issued, trained and dropped samples of each modality."""

    def __init__(self) -> None:
        self._codes = bytearray()
        self._issued: Counter[str] = Counter()
        self._trained: Counter[str] = Counter()
        self._dropped: dict[str, Counter[str]] = {}
        self._staleness: dict[str, Counter[int]] = {}

    def name(self, index: int, modality: str, ends: Iterable[int], reasons: Sequence[str]) -> None:
        """Sets the modality of group ``index`` unless it is set already.

        ``ends`` are the ledger's entries of the group's samples, because a group may be dropped before its data row is
        read. ``reasons`` lists the ledger's reasons by number.
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
        """Counts trained samples of a group; ``staleness`` has one number for each sample."""
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
        """Returns the state for a snapshot, or None if no modality is known."""
        if not self._codes:
            return None
        return ModalityState(codes=bytes(self._codes), counts=self.counts())

    def restore(self, state: ModalityState | None) -> None:
        """Restores ``state``."""
        counts = {} if state is None else state.counts
        self._codes = bytearray() if state is None else bytearray(state.codes)
        self._issued = Counter({name: count.issued for name, count in counts.items()})
        self._trained = Counter({name: count.trained for name, count in counts.items()})
        self._dropped = {name: Counter(count.dropped) for name, count in counts.items()}
        self._staleness = {name: Counter(count.staleness) for name, count in counts.items()}
