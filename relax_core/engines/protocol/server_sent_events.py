"""Reads SGLang's server-sent events from a byte stream and combines them into finished responses."""

from __future__ import annotations

import base64
import binascii
from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from relax_core.contracts.engine import FinishReason, Generated, PromptRequest
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.engines.protocol.generate_messages import (
    VersionSpan,
    checked_prompt_tokens,
    decoded,
    token_versions,
    version_number,
)


def read_routed_experts(text: str, *, prompt_tokens: int, response_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Decodes SGLang's meta_info.routed_experts to the experts of the prompt and the experts of the response.

    ``text`` is base64 of int32 [prompt + response - 1, layers, experts per token]. The text has no shape, so the
    results are ``[tokens, 1, layers x experts per token]``, and the caller splits the last axis with the model's sizes.
    The results are read-only uint8 arrays, or uint16 for larger numbers. Raises ValueError if the text does not fit the
    number of tokens.
    """
    tokens = prompt_tokens + response_tokens - 1
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"routed_experts is not base64 of int32 numbers: {error}") from error
    if numbers.size == 0 or numbers.size % tokens or numbers.min() < 0 or numbers.max() > np.iinfo(np.uint16).max:
        raise ValueError(f"routed_experts has {numbers.size} numbers, which are no experts of {tokens} tokens")
    narrow = np.uint8 if numbers.max() <= np.iinfo(np.uint8).max else np.uint16
    experts = read_only(numbers.astype(narrow).reshape(tokens, 1, -1))
    return experts[:prompt_tokens], experts[prompt_tokens:]


def read_only(array: np.ndarray) -> np.ndarray:
    """Makes the array read-only and returns it."""
    array.flags.writeable = False
    return array


_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
UNKNOWN_VERSION = -1  # a weight version that is not a number, such as SGLang's "default" before the first update


_TokenId = Annotated[int, msgspec.Meta(ge=0, le=np.iinfo(np.int32).max)]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Entry(msgspec.Struct, array_like=True, gc=False):
    """Holds the log-prob of a token. SGLang's token id and text are not read."""

    logprob: float


class _FinishReason(msgspec.Struct):
    type: FinishReason
    status_code: int | None = None  # an abort with a status code is a failure of SGLang, not a requested abort
    message: str | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int
    finish_reason: _FinishReason | None = None
    weight_version: str | None = None
    weight_versions: list[_Span] = []
    output_token_logprobs: list[_Entry] = []
    output_token_sampling_mask: list[list[_TokenId]] | None = None  # sets of tokens that top_k, top_p and min_p kept
    output_token_sampling_logprobs: list[float] | None = None  # log-probs over the kept sets
    routed_experts: str | None = None
    cached_tokens: int = 0
    prompt_tokens: int = 0


class _ErrorBody(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    output_ids: list[_TokenId] = []
    meta_info: _Meta | None = None
    index: int = 0
    error: _ErrorBody | None = None


MAX_EVENT_BYTES = 256 << 20
_END = b"\n\n"


class ReceivedTokens(NamedTuple):
    """Holds new tokens of a response, finished or not. ``start`` is the index of the first new token."""

    prompt: int
    sample: int
    start: int
    ids: list[int]


# a response so far: ids as int32, log-probs as float32, and the kept sets of each event
_Growing = tuple["array[int]", "array[float]", list[KeptTokens]]


class EventReader:
    """Combines events into responses. Events are incremental (new tokens) or cumulative (all tokens so far).

    The token count of an event shows its kind. ``samples`` has (prompt, sample) for each event index. ``vocab_size`` is
    the model's vocabulary size, given if the kept sets are needed. With ``reports_tokens``, tokens are yielded as they
    arrive, except tokens that were sampled without a known weight version. ``parts`` counts the complete events, and
    ``pending`` is True while an event is incomplete. ``prefills`` maps each finished (prompt, sample) with tokens to
    (number of prompt tokens from the engine's cache, first version span). If the first span is empty, its version ended
    before a token was sampled.
    """

    def __init__(
        self,
        prompts: Sequence[PromptRequest],
        *,
        samples: Sequence[tuple[int, int]],
        vocab_size: int | None = None,
        reports_tokens: bool = False,
    ) -> None:
        self._reports_tokens = reports_tokens
        self._prompts = prompts
        self._samples = samples
        self._vocab_size = vocab_size
        self.prefills: dict[tuple[int, int], tuple[int, VersionSpan]] = {}
        self._buffer = bytearray()
        self._growing: dict[int, _Growing] = {}
        self.parts = 0

    @property
    def pending(self) -> bool:
        """Returns whether the last event is incomplete."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[Generated | ReceivedTokens | str]:
        """Yields the responses that ``data`` finishes, and the text of a failure of the engine.

        Raises ValueError for an event that is not in SGLang's format or does not fit the request.
        """
        searched = max(0, len(self._buffer) - 1)  # the end may be split, and large events arrive in many pieces
        self._buffer += data
        if self._buffer.find(_END, searched) < 0:
            if len(self._buffer) > MAX_EVENT_BYTES:
                raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
            return
        *events, rest = bytes(self._buffer).split(_END)
        self._buffer = bytearray(rest)
        for event in events:
            self.parts += 1
            payload = event.strip().removeprefix(b"data:").strip()
            if payload and payload != b"[DONE]":
                yield from self._take(decoded(payload, _Event))

    def _take(self, event: _Event) -> Iterator[Generated | ReceivedTokens | str]:
        if event.error is not None:
            yield event.error.message
            return
        meta = event.meta_info
        if meta is None:
            raise ValueError("an event without meta_info")
        if not 0 <= event.index < len(self._samples):
            raise ValueError(f"an event of sample {event.index} of {len(self._samples)}")
        growing = self._growing.get(event.index)
        if growing is None or len(event.output_ids) == meta.completion_tokens:
            growing = self._growing[event.index] = (array("i"), array("f"), [])
        ids, logprobs, kept = growing
        known = meta.weight_version is None or sglang_version(meta.weight_version) != UNKNOWN_VERSION
        if self._reports_tokens and event.output_ids and known:
            yield ReceivedTokens(*self._samples[event.index], len(ids), event.output_ids)
        ids.fromlist(event.output_ids)
        if self._vocab_size is not None and meta.output_token_sampling_mask:
            kept.append(KeptTokens.of_lists(meta.output_token_sampling_mask, vocab_size=self._vocab_size))
        if meta.output_token_sampling_logprobs is None:
            logprobs.fromlist([entry.logprob for entry in meta.output_token_logprobs])
        else:
            logprobs.fromlist(meta.output_token_sampling_logprobs)
        if meta.finish_reason is None:
            return
        if meta.finish_reason.status_code is not None:
            yield f"{meta.finish_reason.status_code}: {meta.finish_reason.message}"
            return
        del self._growing[event.index]
        yield self._finished(event.index, growing, meta, meta.finish_reason.type)

    def _finished(self, index: int, growing: _Growing, meta: _Meta, reason: FinishReason) -> Generated:
        """Returns a finished response. Raises ValueError if its parts are inconsistent."""
        prompt, sample = self._samples[index]
        prompt_tokens = checked_prompt_tokens(meta.prompt_tokens, self._prompts[prompt])
        ids, logprobs, kept = growing
        tokens = len(ids)
        if len(logprobs) != tokens:
            raise ValueError(f"{len(logprobs)} log-probs came for {tokens} tokens")
        spans = _spans(meta, tokens)
        if spans:
            self.prefills[prompt, sample] = meta.cached_tokens, spans[0]
        prompt_experts: np.ndarray | None = None
        response_experts: np.ndarray | None = None
        if meta.routed_experts is not None and tokens:
            prompt_experts, response_experts = read_routed_experts(
                meta.routed_experts, prompt_tokens=len(self._prompts[prompt].input_ids), response_tokens=tokens
            )
        return Generated(
            rid=self._prompts[prompt].rid,
            prompt=prompt,
            sample=sample,
            output_ids=np.frombuffer(ids.tobytes(), dtype=_INT32),
            logprobs=np.frombuffer(logprobs.tobytes(), dtype=_FLOAT32),
            versions=token_versions(spans, tokens=tokens),
            finish_reason=reason,
            prompt_experts=prompt_experts,
            response_experts=response_experts,
            kept=KeptTokens.joined(kept) if kept else None,
            prompt_tokens=prompt_tokens,
            cached_tokens=meta.cached_tokens,
        )


def _spans(meta: _Meta, length: int) -> list[VersionSpan]:
    if meta.weight_versions:
        return [VersionSpan(span.start, span.end, sglang_version(span.version)) for span in meta.weight_versions]
    return [VersionSpan(0, length, sglang_version(meta.weight_version or ""))] if length else []


def sglang_version(version: str) -> int:
    """Returns the version as an integer, or UNKNOWN_VERSION for text such as SGLang's "default"."""
    number = version_number(version)
    return UNKNOWN_VERSION if number is None else number
