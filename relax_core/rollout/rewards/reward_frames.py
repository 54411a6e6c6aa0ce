"""The messages between a reward pool and its worker processes: length-prefixed msgpack over two pipes.

The pool sends the settings, and the worker answers with one `Ready`. After that the pool sends one list of
`RewardInput` at a time, and the worker answers with a list of as many `RewardOutput`.
"""

from __future__ import annotations

from typing import Any

import msgspec

HEADER_BYTES = 4


class Ready(msgspec.Struct, frozen=True):
    """Is a worker's first message; ``error`` says why it cannot score, or is empty."""

    error: str


def to_frame(message: Any) -> bytes:
    """Returns 4 bytes of big-endian length and the message as msgpack."""
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def payload_bytes(header: bytes) -> int:
    """Returns the length of a message in bytes from its header."""
    return int.from_bytes(header, "big")
