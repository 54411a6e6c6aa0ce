"""What a reward pool and its worker processes say to each other: length-prefixed msgpack over two pipes.

Pool → worker: the knobs, then one `RewardInput` at a time. Worker → pool: one `Ready`, then one `RewardOutput` each.
"""

from __future__ import annotations

from typing import Any

import msgspec

HEADER_BYTES = 4


class Ready(msgspec.Struct, frozen=True):
    """A worker's first word. ``error`` is empty, or says why it cannot score."""

    error: str


def to_frame(message: Any) -> bytes:
    """4 bytes of big-endian length, then the message."""
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def payload_bytes(header: bytes) -> int:
    return int.from_bytes(header, "big")
