"""The compact stream between the embedded engine and its client: 4 bytes of big-endian length, then a msgpack frame.

A frame is written for each FINISHED response, many in one write; an end frame closes the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from relax_core.contracts.engine import Generated

MSGPACK = "application/msgpack"
EVENT_STREAM = "text/event-stream"
_LENGTH_BYTES = 4
_MAX_FRAME_BYTES = 256 << 20


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    response: Generated


class StreamEnd(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The engine's own times of one call, in milliseconds: until its first prefill began (waiting for room and for its
    weight version), all its prefills, and from the first prefill's end to the last token."""

    held_ms: float
    prefill_ms: float
    decode_ms: float


class StreamFailure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    message: str


Frame = Finished | StreamEnd | StreamFailure
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frames(frames: Iterable[Frame]) -> bytes:
    parts: list[bytes] = []
    for frame in frames:
        payload = _encoder.encode(frame)
        parts += (len(payload).to_bytes(_LENGTH_BYTES, "big"), payload)
    return b"".join(parts)


class FrameReader:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames that ``data`` completes; raises ValueError for what is no frame."""
        self._buffer += data
        start = 0
        view = memoryview(bytes(self._buffer))
        while len(view) - start >= _LENGTH_BYTES:
            length = int.from_bytes(view[start : start + _LENGTH_BYTES], "big")
            if length > _MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes: this is no stream of the embedded engine")
            end = start + _LENGTH_BYTES + length
            if end > len(view):
                break
            frame: Frame = _decoder.decode(view[start + _LENGTH_BYTES : end])
            start = end
            yield frame
        del self._buffer[:start]
