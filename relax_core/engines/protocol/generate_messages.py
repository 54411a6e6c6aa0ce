"""The messages between engine and client: the /generate body, the frames of its stream, and checks of replies.

The embedded engine's compact stream is a sequence of msgpack frames. Each frame follows its length in 4 big-endian
bytes. A frame has a finished response or, if the request wants them, new tokens of an unfinished response. One write
may have several frames. An end frame closes the stream.

A malformed reply is a failure of the engine, not an error of the caller. The checks raise ValueError, and the clients
convert the ValueError to `relax_core.contracts.engine.MalformedReply`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from relax_core.contracts.engine import FinishReason, Generated, PromptRequest, SamplingParams
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media

_INT32 = np.dtype("<i4")
_INT32_MAX = np.iinfo(_INT32).max


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Says that weight version ``version`` generated the tokens ``[start, end)`` of a response."""

    start: int
    end: int
    version: int


def token_versions(spans: Sequence[VersionSpan], *, tokens: int) -> np.ndarray:
    """Returns the weight version of each token, read-only int32 ``[tokens]``.

    A span may be empty: SGLang sends an empty span for a version that computed the prompt but no token. Raises
    ValueError if the spans do not cover each token exactly once.
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

    ``shape`` is [tokens, MoE layers, experts per token]. ``data`` is little-endian and C-ordered.
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
        """Returns the array as a read-only view. Raises ValueError if ``data`` does not fit ``shape``."""
        if min(self.shape) < 0:  # numpy infers the size of a negative axis
            raise ValueError(f"experts of shape {self.shape}")
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """Holds a finished response; `Generated` describes the fields.

    ``output_ids`` has the bytes of little-endian int32 numbers, and ``logprobs`` the bytes of little-endian float32
    numbers. The engine sends the experts of a prompt with only one of the prompt's responses. ``prompt_tokens`` is the
    number of input tokens that the engine received.
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
        """Returns the response with arrays instead of bytes. The arguments are fields of the returned response.

        Raises ValueError if the version spans do not cover the tokens.
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
    """Holds new tokens of an unfinished response. ``output_ids`` has the bytes of little-endian int32 numbers.

    ``start`` is the index of the first new token in the response's tokens of this call.
    """

    prompt: int
    sample: int
    start: int
    output_ids: bytes


class StreamEnd(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Ends a stream. The times of the call are in milliseconds, as the engine measured them.

    ``held_ms`` is the wait for slots and for the weight version before the first prefill. ``prefill_ms`` is the time of
    all prefills. ``decode_ms`` is the time from the first prefill's end to the last token. ``tower_passes`` and
    ``media_feature_bytes`` are totals of the engine after the call's last prefill: the number of media items that have
    passed the towers, and the bytes of cached features.
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
    """Returns the concatenated bytes of frames."""
    parts: list[bytes] = []
    for frame in frames:
        payload = _encoder.encode(frame)
        parts += (len(payload).to_bytes(_LENGTH_BYTES, "big"), payload)
    return b"".join(parts)


class FrameReader:
    """Splits a byte stream into frames.

    ``parts`` counts the complete frames, and ``pending`` is True while a frame is incomplete.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.parts = 0

    @property
    def pending(self) -> bool:
        """Returns whether the last frame is incomplete."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames that ``data`` completes. Raises ValueError for malformed bytes."""
        self._buffer += data
        if self._first_end(0) > len(self._buffer):  # avoids a copy for each piece of a large frame
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
        """Returns the end of the frame at ``start``. The end is past the buffer while the frame's length is unknown."""
        head = bytes(self._buffer[start : start + _LENGTH_BYTES])
        if len(head) < _LENGTH_BYTES:
            return start + _LENGTH_BYTES
        length = int.from_bytes(head, "big")
        if not 0 < length <= _MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes: this is not a stream of the embedded engine")
        return start + _LENGTH_BYTES + length


def _frame(data: memoryview) -> Frame:
    try:
        return _decoder.decode(data)
    except RecursionError:
        raise ValueError("a frame that is nested too deeply") from None


# Called with new tokens of a response as soon as they are sampled. Arguments: index of the prompt, sample, index of the
# first new token in the response, token ids. If an engine restarts a response, all its tokens are reported again.
OnTokens = Callable[[int, int, int, Sequence[int]], None]


def response_limit(prompt: PromptRequest, params: SamplingParams) -> int:
    """Returns the maximum number of sampled tokens of each response, including tokens of earlier requests."""
    return params.max_new_tokens if prompt.max_new_tokens is None else prompt.max_new_tokens


def generate_body(
    prompts: Sequence[PromptRequest], params: SamplingParams, *, reports_tokens: bool = False
) -> dict[str, Any]:
    """Returns the JSON body of one /generate for all prompts.

    With ``reports_tokens``, the engine sends new tokens while they are sampled.
    """
    sampling: dict[str, Any] = {
        "n": params.n,
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "stop_token_ids": params.stop_token_ids,
    }
    if params.stop:
        sampling["stop"] = params.stop
    if reports_tokens:
        sampling["stream_interval"] = 1
    body = {
        "rid": [prompt.rid for prompt in prompts],
        "input_ids": [prompt.input_ids for prompt in prompts],
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": True,
        "min_version": [prompt.min_version for prompt in prompts],
        "sampling_seed": [prompt.sampling_seed for prompt in prompts],
        "banned_token_ids": params.banned_token_ids,
        "return_routed_experts": params.return_routed_experts,
        "return_sampling_mask": params.return_kept_tokens,
    }
    if any(prompt.samples is not None for prompt in prompts):
        body["samples"] = [prompt.samples for prompt in prompts]
    if any(prompt.generated for prompt in prompts):
        body["generated"] = [prompt.generated for prompt in prompts]
    if any(prompt.generated or prompt.max_new_tokens is not None for prompt in prompts):
        body["sampling_params"] = [
            sampling | {"max_new_tokens": response_limit(prompt, params) - prompt.generated} for prompt in prompts
        ]
    return body | media_fields([prompt.media for prompt in prompts])


def media_fields(prompts: Sequence[Sequence[Media]]) -> dict[str, Any]:
    """Returns the field ``media`` of a /generate body: for each prompt, (digest, index of first token) of each item.

    If no prompt has an item, the field is left out: engines without media support then accept the request.
    """
    if not any(prompts):
        return {}
    return {"media": [[(medium.item.digest, medium.start) for medium in media] for media in prompts]}


class OtherPrompt(ValueError):
    """Reports that the engine expands the prompt's media to another number of tokens. A retry does not help."""


def checked_prompt_tokens(seen: int, prompt: PromptRequest) -> int:
    """Returns the engine's number of prompt tokens, without the ``generated`` tokens at the end; 0 if unknown.

    ``seen`` is the number of input tokens that the engine reports; 0 means unknown. Raises ValueError if ``seen``
    differs from the sent number, because the trainer would train on another prompt. If the prompt has media, the error
    is `OtherPrompt`.
    """
    if seen and seen != len(prompt.input_ids):
        kind = OtherPrompt if prompt.media else ValueError
        raise kind(
            f"prompt {prompt.rid}: the engine saw {seen} prompt tokens and the request has {len(prompt.input_ids)}; "
            "engine and trainer expand the prompt's images or videos differently"
        )
    return seen - prompt.generated if seen else 0


def unknown_token(index: int, token_ids: Sequence[int], *, rid: str | None, vocab_size: int) -> str | None:
    """Returns an error text for the first unknown token of prompt ``index`` of a request; None if all are known.

    ``rid`` is the rid of the prompt, if any.
    """
    if not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return None
    position = next(position for position, token in enumerate(token_ids) if not 0 <= token < vocab_size)
    name = f"input_ids[{index}]" if rid is None else f"input_ids[{index}] of rid {rid}"
    return (
        f"{name}: token id {token_ids[position]} at position {position} is not in the vocabulary; ids go from 0 to "
        f"{vocab_size - 1}"
    )


T = TypeVar("T")
WORDS = 500  # maximum characters of a server's text in an error message
MAX_NUMBER = np.iinfo(np.int32).max  # maximum token id, and maximum weight version
NEWS = 16  # maximum events or frames per token of a call
# Log-probs are at most 0, but bfloat16 rounding may exceed 0 a little.
MAX_LOGPROB = 1e-2
_SIGNS = 12  # maximum characters of a weight version

Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]


class ModelInfo(msgspec.Struct):
    """Holds the fields of /model_info that the client reads."""

    weight_version: str | int


class Updated(msgspec.Struct):
    """Holds the fields that a client reads from the reply to a weight update."""

    stall_ms: Seconds


class Load(msgspec.Struct):
    """Holds the fields of one entry of /v1/loads that the client reads."""

    num_running_reqs: Natural
    num_waiting_reqs: Natural
    running: Natural = 0
    queued: Natural = 0
    held: Natural = 0
    kv_cache_bytes: Natural = 0
    generated_tokens: Natural | None = None
    gen_throughput: Seconds | None = None
    token_usage: Seconds | None = None
    decode_times: list[tuple[Natural, Natural, Seconds, Seconds]] = []


class Loads(msgspec.Struct):
    """Holds the fields of /v1/loads that the client reads."""

    loads: Annotated[list[Load], msgspec.Meta(min_length=1)]


def decoded(data: bytes, kind: type[T]) -> T:
    """Decodes a JSON text as ``kind``. Raises ValueError, also for JSON that is nested too deeply."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def reply_object(data: bytes, needs: type[msgspec.Struct] | None) -> dict[str, Any]:
    """Returns the JSON object of a reply. Raises ValueError if the reply is malformed or lacks fields of ``needs``.

    The object is empty for an empty body and for null, which SGLang sends for calls without a result.
    """
    reply = (decoded(data, dict[str, Any] | None) if data else None) or {}  # type: ignore[arg-type]
    if needs is not None:
        msgspec.convert(reply, needs)
    return reply


def version_number(version: str | int) -> int | None:
    """Returns a weight version as an integer. Returns -1 for no version, and None for other text."""
    text = str(version) if isinstance(version, str) or 0 <= abs(version) <= MAX_NUMBER else ""
    if len(text) > _SIGNS or not text.isascii() or not text.removeprefix("-").isdecimal():
        return None
    number = int(text)
    return number if -1 <= number <= MAX_NUMBER else None


def printable_text(text: str) -> str:
    """Returns the beginning of a server's text as one line of printable characters."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text[:WORDS]).split())


class ResponseCheck:
    """Checks the responses of one /generate call, and the tokens that are streamed before a response is finished.

    ``vocab_size`` is the model's vocabulary size, or None if it is unknown. ``lowest_version`` is -1 for an engine that
    may have sampled without a weight version. The methods raise ValueError.
    """

    def __init__(
        self,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        *,
        vocab_size: int | None,
        lowest_version: int = 0,
    ) -> None:
        self._prompts = prompts
        self._limits = [response_limit(prompt, params) - prompt.generated for prompt in prompts]
        self._vocab_size = vocab_size
        self._end_of_ids = MAX_NUMBER if vocab_size is None else vocab_size
        self._lowest_version = lowest_version
        self.owed = {
            (index, sample)
            for index, prompt in enumerate(prompts)
            for sample in (range(params.n) if prompt.samples is None else prompt.samples)
        }
        self.expected = len(self.owed)
        limit = max(self._limits, default=0)
        self._news_left = NEWS * self.expected * (limit + 1)

    def news(self, parts: int) -> None:
        """Counts events or frames, to refuse an endless number of them."""
        self._news_left -= parts
        if self._news_left < 0:
            raise ValueError("more events or frames than the requested tokens can have")

    def place(self, prompt: int, sample: int) -> None:
        """Checks that the response was requested and has not arrived before."""
        if (prompt, sample) not in self.owed:
            raise ValueError(f"sample {sample} of prompt {prompt} was not requested, or arrived twice")

    def check_new_tokens(self, prompt: int, sample: int, start: int, ids: Sequence[int]) -> None:
        """Checks new tokens of an unfinished response. ``start`` is the index of the first new token."""
        self.place(prompt, sample)
        if not 0 <= start <= start + len(ids) <= self._limits[prompt]:
            raise ValueError(f"tokens {start} to {start + len(ids)} of at most {self._limits[prompt]}")
        self._check_ids(np.asarray(ids, dtype=np.int64))

    def finished(self, generated: Generated) -> None:
        """Checks a finished response."""
        self.place(generated.prompt, generated.sample)
        prompt, tokens = self._prompts[generated.prompt], len(generated.output_ids)
        if generated.rid != prompt.rid:
            raise ValueError(f"prompt {generated.prompt} has another rid")
        if tokens > self._limits[generated.prompt]:
            raise ValueError(f"{tokens} tokens, and at most {self._limits[generated.prompt]} were requested")
        self._check_ids(generated.output_ids)
        if len(generated.logprobs) != tokens:
            raise ValueError(f"{len(generated.logprobs)} log-probs came for {tokens} tokens")
        if tokens and not (np.isfinite(generated.logprobs).all() and float(generated.logprobs.max()) <= MAX_LOGPROB):
            raise ValueError("a log-prob is not finite, or is above 0")
        if tokens and int(generated.versions.min()) < self._lowest_version:
            raise ValueError(f"weight version {int(generated.versions.min())}")
        if generated.kept is not None and self._vocab_size not in (None, generated.kept.vocab_size):
            raise ValueError(f"the kept sets have a wrong vocabulary size, {generated.kept.vocab_size}")
        if generated.kept is not None and (fault := generated.kept.fault(generated.output_ids)) is not None:
            raise ValueError(fault)
        self._check_experts(generated, prompt_tokens=len(prompt.input_ids))
        check_times(generated.prefill_ms, generated.queue_ms)
        if not 0 <= generated.cached_tokens <= MAX_NUMBER:
            raise ValueError(f"{generated.cached_tokens} cached tokens")
        self.owed.discard((generated.prompt, generated.sample))

    def _check_ids(self, ids: np.ndarray) -> None:
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._end_of_ids:
            raise ValueError(f"token ids from {int(ids.min())} to {int(ids.max())}, outside the vocabulary")

    def _check_experts(self, generated: Generated, *, prompt_tokens: int) -> None:
        response, prompt = generated.response_experts, generated.prompt_experts
        if response is None and prompt is None:
            return
        if response is None or prompt is None:
            raise ValueError("experts of the prompt or of the response are missing")
        rows = len(prompt), len(response)
        if rows != (prompt_tokens, max(0, len(generated.output_ids) - 1)) or prompt.shape[1:] != response.shape[1:]:
            raise ValueError(f"experts {prompt.shape} and {response.shape}, which do not fit the response's tokens")


def check_times(*values: float) -> None:
    """Raises ValueError for a duration that is negative or not finite."""
    if not all(math.isfinite(value) and value >= 0.0 for value in values):
        raise ValueError("a duration is negative, or is not a number")
