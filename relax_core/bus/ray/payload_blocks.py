"""Messages to and from the bus process: msgpack bodies, with large payloads beside them in blocks.

A block is a list of uint8 arrays of one column. Ray transfers it out of band and reads it without a copy. Small
payloads stay in the body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec
import numpy as np

from relax_core.bus.ledger.journal import LedgerUnwritable
from relax_core.contracts.bus import BusClosed, BusLost, BusTimeout, Group, Lease, LeaseLost
from relax_core.contracts.columns import PERSISTED_COLUMNS
from relax_core.contracts.media import MediaGone

BLOCK_BYTES = 64 * 1024 * 1024  # a full block is closed, so that one leased group keeps little memory allocated

Block = list[np.ndarray]
BlockLocation = tuple[int, int]  # (number of the block, position in it)
BlockLocations = dict[str, BlockLocation]  # by column
# Groups travel with their small payloads; beside each group are the locations of its large ones.
PutMessage = list[tuple[Group, BlockLocations]]
WriteMessage = dict[str, tuple[dict[str, bytes], BlockLocations]]  # by group_uid
LeaseMessage = tuple[Lease, list[BlockLocations]]

# The client raises these errors with the type that they have in the bus process.
ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (BusTimeout, BusClosed, BusLost, LeaseLost, MediaGone, LedgerUnwritable, ValueError)
}


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Is the answer to a call. ``error`` is a name in `ERRORS`, or empty if ``value`` holds the call's value."""

    error: str
    text: str
    value: msgspec.Raw


class BlockPacker:
    """Separates the small and the large payloads of one call."""

    def __init__(self, *, inline_bytes: int) -> None:
        self._inline_bytes = inline_bytes
        self._filling: dict[str, tuple[int, int]] = {}  # column → (its open block, bytes in it)
        self.blocks: list[Block] = []

    def split(self, columns: Mapping[str, bytes]) -> tuple[dict[str, bytes], BlockLocations]:
        """Returns (payloads for the body, locations of the others in `blocks`)."""
        small: dict[str, bytes] = {}
        large: BlockLocations = {}
        for column, payload in columns.items():
            if len(payload) <= self._inline_bytes or column in PERSISTED_COLUMNS:
                small[column] = payload
            else:
                large[column] = self._add_to_block(column, payload)
        return small, large

    def _add_to_block(self, column: str, payload: bytes) -> BlockLocation:
        number, filled = self._filling.get(column, (-1, BLOCK_BYTES))
        if filled >= BLOCK_BYTES:
            number, filled = len(self.blocks), 0
            self.blocks.append([])
        self.blocks[number].append(np.frombuffer(payload, dtype=np.uint8))
        self._filling[column] = (number, filled + len(payload))
        return number, len(self.blocks[number]) - 1


def join(columns: dict[str, bytes], large: BlockLocations, blocks: Iterable[Block]) -> dict[str, bytes]:
    """Returns the columns of a leased group; large ones are read-only memoryviews of the object store, not copies."""
    blocks = list(blocks)
    views = {column: cast(bytes, blocks[number][position].data) for column, (number, position) in large.items()}
    return columns | views


_encoder = msgspec.msgpack.Encoder()


def encode(value: Any) -> bytes:
    """Returns ``value`` as msgpack."""
    return _encoder.encode(value)
