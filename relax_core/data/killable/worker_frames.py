"""The messages between a worker process and its owner: length-prefixed msgpack over two pipes.

The owner sends the settings, and the worker answers with one `Ready`. After that the owner sends one request at a time,
and the worker answers each with one message.
"""

from __future__ import annotations

from typing import Any

import msgspec

HEADER_BYTES = 4


class Ready(msgspec.Struct, frozen=True):
    """Is a worker's first message; ``error`` says why it cannot work, or is empty."""

    error: str


def to_frame(message: Any) -> bytes:
    """Returns 4 bytes of big-endian length and the message as msgpack."""
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def payload_bytes(header: bytes) -> int:
    """Returns the length of a message in bytes from its header."""
    return int.from_bytes(header, "big")
