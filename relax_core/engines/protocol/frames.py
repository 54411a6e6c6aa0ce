"""The compact stream between the embedded engine and its client: 4 bytes of big-endian length, then a msgpack frame.

A frame is written for each FINISHED response, many in one write; an end frame closes the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
import numpy as np

from relax_core.contracts.engine import FinishReason, Generated
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.engines.protocol.version_spans import VersionSpan, token_versions

MSGPACK = "application/msgpack"
EVENT_STREAM = "text/event-stream"
_LENGTH_BYTES = 4
_MAX_FRAME_BYTES = 256 << 20
INT32, FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


class Experts(msgspec.Struct, frozen=True, array_like=True):
    """The experts that some tokens were routed to: ``shape`` is [tokens, MoE layers, experts a token], ``data`` is
    little-endian and C-ordered."""

    dtype: Literal["uint8", "uint16"]
    shape: tuple[int, int, int]
    data: bytes

    @staticmethod
    def of(experts: np.ndarray) -> Experts:
        """Of a uint8 or uint16 array ``[tokens, layers, per token]``."""
        dtype: Literal["uint8", "uint16"] = "uint8" if experts.dtype == np.uint8 else "uint16"
        tokens, layers, per_token = experts.shape
        return Experts(dtype, (tokens, layers, per_token), experts.astype(dtype, copy=False).tobytes())

    def array(self) -> np.ndarray:
        """A read-only view; raises ValueError where ``data`` does not fit ``shape``."""
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """A finished response; see `Generated`. ``output_ids`` are the bytes of little-endian int32, ``logprobs`` those of
    little-endian float32. The engine tells a prompt's experts with one of its responses only."""

    rid: str
    prompt: int
    sample: int
    output_ids: bytes
    logprobs: bytes
    weight_versions: list[VersionSpan]
    finish_reason: FinishReason
    prompt_experts: Experts | None = None
    response_experts: Experts | None = None
    kept: KeptTokens | None = None

    def response(self, *, prompt_experts: np.ndarray | None = None) -> Generated:
        """The response with ``prompt_experts`` as its prompt's. Raises ValueError where its spans do not cover its
        tokens."""
        ids = np.frombuffer(self.output_ids, dtype=INT32)
        return Generated(
            rid=self.rid,
            prompt=self.prompt,
            sample=self.sample,
            output_ids=ids,
            logprobs=np.frombuffer(self.logprobs, dtype=FLOAT32),
            versions=token_versions(self.weight_versions, tokens=len(ids)),
            finish_reason=self.finish_reason,
            prompt_experts=prompt_experts,
            response_experts=None if self.response_experts is None else self.response_experts.array(),
            kept=self.kept,
        )


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
