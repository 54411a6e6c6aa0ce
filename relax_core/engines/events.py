"""SGLang's server-sent events, cut from a byte stream and gathered into finished responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from relax_core.contracts.engine import Generated, PromptRequest
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.sample import FinishReason, RoutedExperts, VersionSpan
from relax_core.engines.routes import read_routed_experts

UNKNOWN_VERSION = -1  # an engine whose weight version is no number, such as SGLang's "default" before the first update


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _FinishReason(msgspec.Struct):
    type: FinishReason
    status_code: int | None = None  # an abort with one is SGLang's own failure, not an abort that was asked for
    message: str | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int
    finish_reason: _FinishReason | None = None
    weight_version: str | None = None
    weight_versions: list[_Span] = []
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    output_token_sampling_mask: list[list[int]] | None = None  # what top_k, top_p and min_p left
    output_token_sampling_logprobs: list[float] | None = None  # over what they left
    routed_experts: str | None = None
    cached_tokens: int = 0


class _Words(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    index: int = 0
    error: _Words | None = None


_decoder = msgspec.json.Decoder(_Event)


class EventReader:
    """Events may be incremental (only the new tokens) or cumulative (all so far): the count of tokens tells which.

    ``cached_tokens``: of each finished (prompt, sample), how much of its prompt the engine had already.
    ``places``: the (prompt, sample) of each event's index; None where every prompt has its ``n`` samples in order.
    ``vocab_size``: of the model, where the kept sets are wanted.
    """

    def __init__(
        self,
        prompts: Sequence[PromptRequest],
        *,
        n: int,
        places: Sequence[tuple[int, int]] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._prompts = prompts
        self._n = n
        self._places = places
        self._vocab_size = vocab_size
        self.cached_tokens: dict[tuple[int, int], int] = {}
        self._buffer = b""
        self._tokens: dict[int, tuple[list[int], list[float], list[KeptTokens]]] = {}

    def feed(self, data: bytes) -> Iterator[Generated | str]:
        """Yields responses that ``data`` finishes, and an engine's failure as its words."""
        *events, self._buffer = (self._buffer + data).split(b"\n\n")
        for event in events:
            payload = event.strip().removeprefix(b"data:").strip()
            if payload and payload != b"[DONE]":
                found = self._take(_decoder.decode(payload))
                if found is not None:
                    yield found

    def _take(self, event: _Event) -> Generated | str | None:
        if event.error is not None:
            return event.error.message
        meta = event.meta_info
        if meta is None:
            return "an event without meta_info"
        ids, logprobs, kept = self._tokens.setdefault(event.index, ([], [], []))
        if len(event.output_ids) == meta.completion_tokens:
            ids.clear()
            logprobs.clear()
            kept.clear()
        ids += event.output_ids
        if self._vocab_size is not None and meta.output_token_sampling_mask:
            try:
                kept.append(KeptTokens.of_lists(meta.output_token_sampling_mask, vocab_size=self._vocab_size))
            except ValueError as error:
                return f"output_token_sampling_mask: {error}"
        if meta.output_token_sampling_logprobs is None:
            logprobs += [logprob for logprob, _, _ in meta.output_token_logprobs]
        else:
            logprobs += meta.output_token_sampling_logprobs
        if meta.finish_reason is None:
            return None
        if meta.finish_reason.status_code is not None:
            return f"{meta.finish_reason.status_code}: {meta.finish_reason.message}"
        del self._tokens[event.index]
        place, sample = divmod(event.index, self._n) if self._places is None else self._places[event.index]
        self.cached_tokens[place, sample] = meta.cached_tokens
        prompt_experts: RoutedExperts | None = None
        response_experts: RoutedExperts | None = None
        if meta.routed_experts is not None and ids:
            prompt_tokens = len(self._prompts[place].input_ids)
            try:
                prompt_experts, response_experts = read_routed_experts(
                    meta.routed_experts, prompt_tokens=prompt_tokens, response_tokens=len(ids)
                )
            except ValueError as error:
                return str(error)
        return Generated(
            rid=self._prompts[place].rid,
            prompt=place,
            sample=sample,
            output_ids=ids,
            logprobs=logprobs,
            weight_versions=_spans(meta, len(ids)),
            finish_reason=meta.finish_reason.type,
            prompt_experts=prompt_experts,
            response_experts=response_experts,
            kept=KeptTokens.joined(kept) if kept else None,
        )


def _spans(meta: _Meta, length: int) -> list[VersionSpan]:
    if meta.weight_versions:
        return [VersionSpan(span.start, span.end, version_number(span.version)) for span in meta.weight_versions]
    return [VersionSpan(0, length, version_number(meta.weight_version or ""))] if length else []


def version_number(version: str) -> int:
    """SGLang's versions are text, "default" before the first update."""
    return int(version) if version.isdecimal() else UNKNOWN_VERSION
