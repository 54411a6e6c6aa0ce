"""Defines the calls that the metrics service sends to the process of a sink, and their answers.

A call is a length of four bytes and msgpack. An answer is one line of JSON text: the words of an error, or an empty
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any, Literal, Self

import msgspec

from relax_core.contracts.sink import HistogramRecord, MetricRecord, Record, TextRecord

LENGTH = 4
_KINDS: dict[str, type[Record]] = {"metric": MetricRecord, "text": TextRecord, "histogram": HistogramRecord}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class SinkCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Is one call: "open" has the plug-in, its values and the run's folder, and "write" has the records."""

    call: Literal["open", "write", "flush", "close"]
    plugin: str = ""
    values: dict[str, Any] = {}
    run_dir: str = ""
    records: list[tuple[str, msgspec.Raw]] = []

    @classmethod
    def write(cls, batch: Sequence[Record]) -> Self:
        """Returns the call that writes a batch."""
        encode = msgspec.msgpack.encode
        return cls(call="write", records=[(_NAMES[type(one)], msgspec.Raw(encode(one))) for one in batch])

    def batch(self) -> list[Record]:
        """Returns the records."""
        return [msgspec.msgpack.decode(data, type=_KINDS[kind]) for kind, data in self.records]


def framed_call(call: SinkCall) -> bytes:
    """Returns the bytes of a call."""
    data = msgspec.msgpack.encode(call)
    return len(data).to_bytes(LENGTH, "big") + data


def read_call(pipe: IO[bytes]) -> SinkCall | None:
    """Returns the next call, or None if the service has closed the pipe or died."""
    head = pipe.read(LENGTH)
    if len(head) < LENGTH:
        return None
    size = int.from_bytes(head, "big")
    data = pipe.read(size)
    return msgspec.msgpack.decode(data, type=SinkCall) if len(data) == size else None


def framed_answer(error: str) -> bytes:
    """Returns the bytes of an answer."""
    return msgspec.json.encode(error) + b"\n"


def answer_in(line: bytes) -> str:
    """Returns the words of an answer. Raises EOFError for a line that is none."""
    try:
        return msgspec.json.decode(line, type=str)
    except msgspec.DecodeError as error:
        raise EOFError(f"answered {line[:80]!r}") from error
