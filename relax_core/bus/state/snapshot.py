"""The bus's part of a checkpoint, as it lies in bus.msgpack."""

from __future__ import annotations

import msgspec

from relax_core.bus.ledger.ledger import LedgerState


class Snapshot(msgspec.Struct, frozen=True):
    """``next_index``: the data cursor. ``open_groups``: (index, attempt) of every group without an end, in order of
    issue; they are admitted again. ``version``: train steps done."""

    version: int
    next_index: int
    open_groups: list[tuple[int, int]]
    staleness_histogram: dict[int, int]
    ledger: LedgerState
