"""Parses a /generate body that scores given tokens and generates none: SGLang's ``max_new_tokens`` 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relax_core.contracts.trees.kept_tokens import KeptTokens
from relax_core.engines.embedded.http.generate_body import (
    RequestBody,
    SamplingBody,
    banned_tokens,
)
from relax_core.engines.embedded.http.request_bounds import (
    MAX_TOPS,
    TEMPERATURES,
    RequestLimits,
    is_temperature,
    per_prompt,
    same_length,
)
from relax_core.engines.embedded.model.model_config import ModelConfig
from relax_core.engines.embedded.scheduler.token_scoring import ScoreItem
from relax_core.engines.http_server.asgi import HttpError


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """Holds a checked request for scores.

    ``single`` is True if one prompt was given outside a list; the reply is then an object and not a list.
    """

    items: list[ScoreItem]
    rids: list[str]
    min_version: int
    single: bool


def asks_for_scores(body: RequestBody) -> bool:
    """Is True if a prompt of the request asks for no new token."""
    return any(one.max_new_tokens == 0 for one in body.sampling)


def parse_score(body: RequestBody, *, model: ModelConfig, limits: RequestLimits) -> ScoreRequest:
    """Checks a request for scores. Raises HttpError 400 with key, value and fix.

    ``temperature`` 0 counts as 1, as it does for the log-probs of greedy tokens.
    """
    raw, count = body.raw, len(body.prompts)
    _check(body)
    banned = banned_tokens(raw, model)
    kept = raw.kept_tokens if raw.kept_tokens is not None else [None] * count
    same_length("kept_tokens", len(kept), count)
    _check_vocabularies(kept, model)
    starts = per_prompt("logprob_start_len", -1 if raw.logprob_start_len is None else raw.logprob_start_len, count)
    top_ks = per_prompt("top_logprobs_num", raw.top_logprobs_num or 0, count)
    items = []
    given = zip(body.prompts, starts, top_ks, body.sampling, kept, body.media, strict=True)
    for index, (ids, start, top_k, sampling, sets, media) in enumerate(given):
        if len(ids) > limits.context_length:
            raise HttpError(
                400,
                f"input_ids[{index}]: {len(ids)} tokens are longer than the context of {limits.context_length}; "
                "shorten them or raise engine.context_length",
            )
        if not -1 <= start < len(ids):
            raise HttpError(400, f"logprob_start_len: {start} for {len(ids)} tokens; give 0 to {len(ids) - 1}, or -1")
        if not 0 <= top_k <= model.vocab_size:
            raise HttpError(400, f"top_logprobs_num: {top_k}; give 0 to {model.vocab_size}, the vocabulary's size")
        if not is_temperature(sampling.temperature):
            raise HttpError(400, f"sampling_params.temperature: {sampling.temperature}; give {TEMPERATURES}")
        start = len(ids) - 1 if start == -1 else start
        if sets is not None and (fault := sets.fault(ids[start + 1 :])) is not None:
            raise HttpError(400, f"kept_tokens[{index}]: {fault}")
        items.append(
            ScoreItem(
                token_ids=ids,
                start=start,
                top_k=top_k,
                temperature=sampling.temperature or 1.0,
                banned=banned,
                kept=sets,
                media=media,
            )
        )
    tops = sum(item.top_k * (len(item.token_ids) - item.start) for item in items)
    if tops > MAX_TOPS:
        raise HttpError(
            400,
            f"top_logprobs_num: {tops} top-k tokens in all; send fewer prompts at once, for {MAX_TOPS} at most",
        )
    versions = per_prompt("min_version", raw.min_version, count)
    return ScoreRequest(items=items, rids=body.rids, min_version=max(versions), single=body.single)


def _check(body: RequestBody) -> None:
    if any(one.max_new_tokens for one in body.sampling):
        raise HttpError(400, "sampling_params.max_new_tokens: 0 for some prompts of a request only; send two requests")
    if not body.raw.return_logprob:
        raise HttpError(400, "sampling_params.max_new_tokens: 0 needs return_logprob=true; else give 1 or more")
    if body.raw.stream:
        raise HttpError(400, "stream=true with sampling_params.max_new_tokens: 0; scores come in one reply")
    if body.raw.return_sampling_mask:
        raise HttpError(400, "return_sampling_mask=true with sampling_params.max_new_tokens: 0; nothing is sampled")
    neutral = SamplingBody()
    for one in body.sampling:
        for key in ("n", "top_p", "top_k", "min_p"):
            if getattr(one, key) != getattr(neutral, key):
                raise HttpError(
                    400,
                    f"sampling_params.{key}: {getattr(one, key)} with max_new_tokens 0; scores are over all tokens, "
                    "or over kept_tokens: leave it out",
                )


def _check_vocabularies(kept: Sequence[KeptTokens | None], model: ModelConfig) -> None:
    """Raises HttpError 400 if the kept sets have vocabularies of different sizes, or one far from the model's.

    The sizes may differ from the model's own, because two models of one tokenizer may pad it differently.
    """
    sizes = {sets.vocab_size for sets in kept if sets is not None}
    if len(sizes) > 1 or any(not 1 <= size <= 2 * model.vocab_size for size in sizes):
        raise HttpError(400, f"kept_tokens: vocabularies of {sorted(sizes)} tokens, the model has {model.vocab_size}")
