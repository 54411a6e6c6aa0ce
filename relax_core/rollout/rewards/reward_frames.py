"""What a reward pool and its worker processes say to each other: length-prefixed msgpack over two pipes.

The pool sends the settings, and the worker answers with one `Ready`. Then the pool sends one list of `RewardInput` at a
time, and the worker answers with a list of as many `RewardOutput`.
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
