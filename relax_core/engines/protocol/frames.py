"""Encodes the compact stream from the embedded engine to its client: 4 bytes of big-endian length, a msgpack frame.

The engine writes one frame for each finished response, and for new tokens of others if the call asks for them, several
frames in one write. An end frame closes the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from relax_core.contracts.engine import FinishReason, Generated
from relax_core.contracts.kept_tokens import KeptTokens

_INT32 = np.dtype("<i4")
_INT32_MAX = np.iinfo(_INT32).max


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Says that weight version ``version`` generated the tokens ``[start, end)`` of a response."""

    start: int
    end: int
    version: int


def token_versions(spans: Sequence[VersionSpan], *, tokens: int) -> np.ndarray:
    """Returns the weight version of each token, read-only int32 ``[tokens]``.

    A span may be empty: SGLang sends one if a version computed the prompt and no token. Raises ValueError if the spans
    leave a token out or name one twice.
    """
    end, parts = 0, []
    for span in spans:
        if not span.start == end <= span.end <= tokens:
            break
        end = span.end
        if not -1 <= span.version <= _INT32_MAX:
            raise ValueError(f"weight version {span.version}")
        parts.append(span.version.to_bytes(4, "little", signed=True) * (end - span.start))
    if end != tokens or len(parts) != len(spans):
        found = [(span.start, span.end) for span in spans]
        raise ValueError(f"weight_versions name the tokens {found}, but the response has {tokens} tokens")
    return np.frombuffer(b"".join(parts), dtype=_INT32)


MSGPACK = "application/msgpack"
EVENT_STREAM = "text/event-stream"
_LENGTH_BYTES = 4
_MAX_FRAME_BYTES = 256 << 20
INT32, FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


class Experts(msgspec.Struct, frozen=True, array_like=True):
    """Holds the experts that tokens were routed to.

    ``shape`` is [tokens, MoE layers, experts a token]; ``data`` is little-endian and C-ordered.
    """

    dtype: Literal["uint8", "uint16"]
    shape: tuple[int, int, int]
    data: bytes

    @staticmethod
    def of(experts: np.ndarray) -> Experts:
        """Packs a uint8 or uint16 array ``[tokens, layers, per token]``."""
        dtype: Literal["uint8", "uint16"] = "uint8" if experts.dtype == np.uint8 else "uint16"
        tokens, layers, per_token = experts.shape
        return Experts(dtype, (tokens, layers, per_token), experts.astype(dtype, copy=False).tobytes())

    def array(self) -> np.ndarray:
        """Returns the numbers as a read-only view. Raises ValueError if ``data`` does not fit ``shape``."""
        if min(self.shape) < 0:  # numpy would choose that axis
            raise ValueError(f"experts of shape {self.shape}")
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """Holds a finished response, as `Generated` describes it.

    ``output_ids`` holds the bytes of little-endian int32, ``logprobs`` those of little-endian float32. The engine sends
    a prompt's experts with one of its responses only. ``prompt_tokens`` is the number of input tokens that the engine
    saw.
    """

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
    prompt_tokens: int = 0
    prefill_ms: float = 0.0
    cached_tokens: int = 0
    queue_ms: float = 0.0

    def response(self, *, prompt_tokens: int = 0, prompt_experts: np.ndarray | None = None) -> Generated:
        """Returns the response as arrays, with the given number of prompt tokens and experts of its prompt.

        Raises ValueError if its version spans do not cover its tokens.
        """
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
            prompt_tokens=prompt_tokens,
            prefill_ms=self.prefill_ms,
            cached_tokens=self.cached_tokens,
            queue_ms=self.queue_ms,
        )


class Grown(msgspec.Struct, frozen=True, array_like=True, tag="grown"):
    """Tells new tokens of a response that is not finished; ``output_ids`` holds the bytes of little-endian int32.

    ``start`` is the index of the first of them among the tokens of this call.
    """

    prompt: int
    sample: int
    start: int
    output_ids: bytes


class StreamEnd(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Ends a stream with the engine's own times of the call, in milliseconds.

    ``held_ms`` is the wait before the first prefill, for slots and for the weight version. ``prefill_ms`` is the time
    of all prefills. ``decode_ms`` is the time from the first prefill's end to the last token. After the call's last
    prefill ``tower_passes`` items have passed the engine's vision tower, and ``media_feature_bytes`` are kept of them.
    """

    held_ms: float
    prefill_ms: float
    decode_ms: float
    tower_passes: int = 0
    media_feature_bytes: int = 0


class StreamFailure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """Ends a stream with a failure; ``message`` is the engine's text."""

    message: str


Frame = Finished | Grown | StreamEnd | StreamFailure
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frames(frames: Iterable[Frame]) -> bytes:
    """Returns the bytes of the frames, one after the other."""
    parts: list[bytes] = []
    for frame in frames:
        payload = _encoder.encode(frame)
        parts += (len(payload).to_bytes(_LENGTH_BYTES, "big"), payload)
    return b"".join(parts)


class FrameReader:
    """Splits a byte stream into frames.

    ``parts`` counts the whole frames, and ``pending`` says that a frame has begun and not ended.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.parts = 0

    @property
    def pending(self) -> bool:
        """Is True if the last bytes belong to a part that has not ended."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames that ``data`` completes. Raises ValueError for bytes that are no frame."""
        self._buffer += data
        if self._first_end(0) > len(self._buffer):  # no copy for each piece of a large frame
            return
        start = 0
        view = memoryview(bytes(self._buffer))
        while (end := self._first_end(start)) <= len(view):
            frame = _frame(view[start + _LENGTH_BYTES : end])
            self.parts += 1
            start = end
            yield frame
        del self._buffer[:start]

    def _first_end(self, start: int) -> int:
        """Returns where the frame at ``start`` ends, which is beyond the buffer if its length is not known yet."""
        head = bytes(self._buffer[start : start + _LENGTH_BYTES])
        if len(head) < _LENGTH_BYTES:
            return start + _LENGTH_BYTES
        length = int.from_bytes(head, "big")
        if not 0 < length <= _MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes: this is no stream of the embedded engine")
        return start + _LENGTH_BYTES + length


def _frame(data: memoryview) -> Frame:
    try:
        return _decoder.decode(data)
    except RecursionError:
        raise ValueError("a frame that is nested too deeply") from None
