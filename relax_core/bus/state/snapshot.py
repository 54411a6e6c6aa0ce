"""The bus's part of a checkpoint, stored in bus.msgpack."""

from __future__ import annotations

import msgspec

from relax_core.bus.ledger.ledger import LedgerState


class Snapshot(msgspec.Struct, frozen=True):
    """Holds the state of a bus without its payloads.

    ``version`` is the number of finished train steps. ``next_index`` is the data cursor. ``open_groups`` lists (index,
    attempt) of every group without an end, in order of issue; they are admitted again. With data.mix, ``given`` has the
    number of prompts that each modality has given, and ``drawn`` maps the indices of the open groups to those of their
    prompts in the order of the mix.
    """

    version: int
    next_index: int
    open_groups: list[tuple[int, int]]
    staleness_histogram: dict[int, int]
    ledger: LedgerState
    given: dict[str, int] = {}
    drawn: dict[int, int] = {}
