"""The ledger: every sample that was issued ends exactly once, trained at a step or dropped with a reason.

An entry is one int32 a sample, at ``index * group_size + place``: 0 has no end, t + 1 was trained at step t,
-(r + 1) was dropped with reason number r. Counts are taken from these entries. Closed entries at the front are counted
once and never again, so that every operation costs the same after a million samples.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from relax_core.contracts.bus import LedgerCounts

if TYPE_CHECKING:
    from relax_core.bus.ledger.journal import Journal


class LedgerState(msgspec.Struct, frozen=True):
    """The ledger in a snapshot. ``ends``: the entries, little-endian int32. ``journal_position``: last event id."""

    group_size: int
    ends: bytes
    reasons: list[str]
    further_ends: dict[int, list[int]]
    journal_position: int


class Ledger:
    """Entries of all samples ever issued; events also go to ``journal`` (None: nowhere)."""

    def __init__(self, *, group_size: int, journal: Journal | None) -> None:
        self._group_size = group_size
        self._journal = journal
        self._ends = array("i")
        self._reasons: list[str] = []
        self._reason_codes: dict[str, int] = {}
        # Ends beyond a sample's first. Nothing in the bus should ever write here; the counts tell whether it did.
        self._further_ends: dict[int, list[int]] = {}
        self._settled = 0  # entries in front that are all closed and already counted
        self._settled_trained = 0
        self._settled_dropped: Counter[int] = Counter()  # by code

    # -- events -------------------------------------------------------------------------------------------------
    def issue(self, index: int, group_uid: str, uids: Sequence[str], *, attempt: int, min_version: int) -> None:
        """Opens a group's samples, or notes that an open one is issued again (``attempt`` > 0)."""
        start = index * self._group_size
        assert start <= len(self._ends)
        if start == len(self._ends):
            self._ends.extend([0] * self._group_size)
            if index == 0 and self._journal and self._journal.position:
                self._journal.roll_back(0)  # what an earlier start left in the file is not of this run
        if self._journal:
            reason = f"attempt {attempt}" if attempt else ""
            self._journal.append("issued", group_uid, uids, version=min_version, reason=reason)

    def put(
        self, group_uid: str, uids: Sequence[str], versions: Sequence[int], *, persisted: tuple[bytes, ...] | None
    ) -> None:
        """``persisted``: the payloads of `PERSISTED_COLUMNS`, kept as they are: whoever reads the file decodes them."""
        if self._journal:
            self._journal.append("put", group_uid, uids, versions=versions, persisted=persisted)

    def lease(self, group_uid: str, uids: Sequence[str], *, step: int, delivery: int) -> None:
        if self._journal:
            reason = f"delivery {delivery}" if delivery > 1 else ""
            self._journal.append("leased", group_uid, uids, step=step, reason=reason)

    def give_back(self, group_uid: str, uids: Sequence[str], *, step: int, reason: str) -> None:
        """The actor's lease ended without training."""
        if self._journal:
            self._journal.append("returned", group_uid, uids, step=step, reason=reason)

    def train(self, index: int, group_uid: str, uids: Sequence[str], versions: Sequence[int], *, step: int) -> None:
        self._end(index, uids, step + 1)
        if self._journal:
            self._journal.append("trained", group_uid, uids, step=step, versions=versions)

    def drop(self, index: int, group_uid: str, reasons: Mapping[str, str], *, step: int) -> None:
        """``reasons``: uid → reason. ``step``: the train step under way."""
        for uid, reason in reasons.items():
            self._end(index, (uid,), -(self._reason_code(reason) + 1))
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
            place = start + int(uid[uid.rindex(".") + 1 :])
            if self._ends[place] == 0:
                self._ends[place] = code
            else:
                self._further_ends.setdefault(place, []).append(code)

    # -- the books ----------------------------------------------------------------------------------------------
    def counts(self, open_indices: Iterable[int]) -> LedgerCounts:
        """Counts over all entries. ``open_indices``: the groups that the bus still holds; a sample without an end that
        belongs to none of them is lost."""
        self._settle()
        trained, drops = _tally(self._ends[self._settled :])
        trained += self._settled_trained
        drops += self._settled_dropped
        dropped = {self._reasons[-code - 1]: count for code, count in drops.items()}
        size = self._group_size
        still_open = sum(self._ends[index * size : (index + 1) * size].count(0) for index in open_indices)
        trained_twice = sum(
            sum(code > 0 for code in (self._ends[place], *further)) > 1 for place, further in self._further_ends.items()
        )
        return LedgerCounts(
            issued=len(self._ends),
            trained=trained,
            dropped=dict(sorted(dropped.items())),
            open=still_open,
            lost=len(self._ends) - trained - sum(dropped.values()) - still_open,
            trained_twice=trained_twice,
        )

    def _settle(self) -> None:
        """Counts the closed entries in front once and moves the mark past them."""
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
        return LedgerState(
            group_size=self._group_size,
            ends=self._ends.tobytes(),
            reasons=list(self._reasons),
            further_ends={place: list(codes) for place, codes in self._further_ends.items()},
            journal_position=self._journal.position if self._journal else 0,
        )

    def restore(self, state: LedgerState) -> None:
        """Goes back to ``state``; events that the journal got after it are set aside."""
        if state.group_size != self._group_size:
            raise ValueError(
                f"bus: the snapshot has group_size={state.group_size}, this run group_size={self._group_size}: "
                "resume with the group size that the checkpoint was made with"
            )
        self._ends = array("i")
        self._ends.frombytes(state.ends)
        self._reasons = list(state.reasons)
        self._reason_codes = {reason: code for code, reason in enumerate(self._reasons)}
        self._further_ends = {place: list(codes) for place, codes in state.further_ends.items()}
        self._settled = 0
        self._settled_trained = 0
        self._settled_dropped = Counter()
        if self._journal:
            self._journal.roll_back(state.journal_position)


def _tally(entries: array[int]) -> tuple[int, Counter[int]]:
    """(entries that were trained, drops by code)."""
    counts = Counter(entries)
    drops = Counter({code: count for code, count in counts.items() if code < 0})
    return sum(count for code, count in counts.items() if code > 0), drops
