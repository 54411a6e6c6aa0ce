"""A /generate that asks for no token, only how likely the given ones are: SGLang's ``max_new_tokens`` 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.engines.embedded.http.asgi import HttpError
from relax_core.engines.embedded.http.generate_body import (
    RequestBody,
    RequestLimits,
    SamplingBody,
    banned_tokens,
    per_prompt,
    same_length,
)
from relax_core.engines.embedded.http.request_bounds import MAX_TOPS, TEMPERATURES, is_temperature
from relax_core.engines.embedded.model.model_config import ModelConfig
from relax_core.engines.embedded.scheduler.token_scoring import ScoreItem


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """``single``: one prompt given alone, answered with an object and not with a list."""

    items: list[ScoreItem]
    rids: list[str]
    min_version: int
    single: bool


def asks_for_scores(body: RequestBody) -> bool:
    return any(one.max_new_tokens == 0 for one in body.sampling)


def parse_score(body: RequestBody, *, model: ModelConfig, limits: RequestLimits) -> ScoreRequest:
    """Raises HttpError 400 that says key, value and fix. ``temperature`` 0 is 1, as for greedy tokens."""
    raw, count = body.raw, len(body.prompts)
    _check(body)
    banned = banned_tokens(raw, model)
    kept = raw.kept_tokens if raw.kept_tokens is not None else [None] * count
    same_length("kept_tokens", len(kept), count)
    _check_vocabularies(kept, model)
    starts = per_prompt("logprob_start_len", -1 if raw.logprob_start_len is None else raw.logprob_start_len, count)
    top_ks = per_prompt("top_logprobs_num", raw.top_logprobs_num or 0, count)
    items = []
    given = zip(body.prompts, starts, top_ks, body.sampling, kept, strict=True)
    for place, (ids, start, top_k, sampling, sets) in enumerate(given):
        if len(ids) > limits.context_length:
            raise HttpError(
                400,
                f"input_ids[{place}]: {len(ids)} tokens are longer than the context of {limits.context_length}; "
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
            raise HttpError(400, f"kept_tokens[{place}]: {fault}")
        items.append(
            ScoreItem(
                token_ids=ids,
                start=start,
                top_k=top_k,
                temperature=sampling.temperature or 1.0,
                banned=banned,
                kept=sets,
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
    """One for all sets, and about the model's own: two models of one tokenizer may pad it differently."""
    sizes = {sets.vocab_size for sets in kept if sets is not None}
    if len(sizes) > 1 or any(not 1 <= size <= 2 * model.vocab_size for size in sizes):
        raise HttpError(400, f"kept_tokens: vocabularies of {sorted(sizes)} tokens, the model has {model.vocab_size}")
