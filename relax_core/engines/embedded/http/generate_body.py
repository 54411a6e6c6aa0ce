"""Parses the body of /generate; a field that this engine does not support is refused unless its value is neutral."""

from __future__ import annotations

import reprlib
import secrets
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

from relax_core.contracts.engine import MAX_BANNED, MAX_TOP_K
from relax_core.contracts.media import Media
from relax_core.contracts.trees.kept_tokens import KeptTokens
from relax_core.engines.embedded.http.media_body import PlacedDigests, RequestMedia
from relax_core.engines.embedded.http.request_bounds import (
    MAX_CONTAINERS,
    MAX_SAMPLES,
    MAX_STOPS,
    SEEDS,
    TEMPERATURES,
    VERSIONS,
    RequestLimits,
    check_lengths,
    check_rids,
    check_within,
    is_temperature,
    per_prompt,
    same_length,
    token_set,
)
from relax_core.engines.embedded.model.model_config import ModelConfig
from relax_core.engines.embedded.scheduler.token_sampler import SamplingSettings
from relax_core.engines.http_server.asgi import HttpError
from relax_core.engines.protocol.stop_strings import MOST_STOP_BYTES, MOST_STOPS
from relax_core.engines.protocol.vocabulary import unknown_token


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True):
    """Holds SGLang's sampling_params; the fields after ``stop`` are accepted only at their neutral value."""

    n: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: list[int] | None = None
    sampling_seed: int | None = None
    ignore_eos: bool = False
    stream_interval: int | None = None
    skip_special_tokens: bool = True  # the engine returns no text, so this field and the next two change nothing
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stop: str | list[str] | None = None
    stop_regex: Any = None
    min_new_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    custom_params: Any = None


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
    """Holds the fields of SGLang's GenerateReqInput, and Relax's own.

    Relax's own fields are ``min_version``, ``sampling_seed``, ``banned_token_ids``, ``samples``, ``generated``,
    ``media`` (see `PromptRequest`) and ``kept_tokens``. The fields from ``text`` on are accepted only at their neutral
    value. ``kept_tokens``, ``logprob_start_len`` and ``top_logprobs_num`` are accepted only if the request scores
    tokens (`parse_score`).
    """

    input_ids: list[int | list[int]] | None = None
    rid: str | list[str] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    return_logprob: bool = False
    stream: bool = False
    min_version: int | list[int] = 0
    sampling_seed: int | list[int] | None = None
    banned_token_ids: list[int] = []
    return_routed_experts: bool = False
    return_sampling_mask: bool = False
    samples: list[list[int] | None] | None = None
    generated: int | list[int] = 0
    logprob_start_len: int | list[int] | None = -1
    top_logprobs_num: int | list[int] | None = 0
    kept_tokens: list[KeptTokens | None] | None = None
    media: list[PlacedDigests | None] | None = None
    routing_key: str | None = None  # a router in front of several engines reads it
    return_text_in_logprobs: bool = False  # the engine returns no text
    text: Any = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    modalities: Any = None
    lora_path: Any = None
    session_params: Any = None
    priority: Any = None
    custom_logit_processor: Any = None
    token_ids_logprob: Any = None
    return_hidden_states: bool = False


_SAMPLING_NEUTRAL = tuple(SamplingBody.__struct_fields__[SamplingBody.__struct_fields__.index("stop_regex") :])
_SCORE_ONLY = ("logprob_start_len", "top_logprobs_num", "kept_tokens")
_GENERATE_NEUTRAL = tuple(GenerateBody.__struct_fields__[GenerateBody.__struct_fields__.index("text") :])
_defaults_sampling = SamplingBody()
_defaults_generate = GenerateBody()
_decoder = msgspec.json.Decoder(GenerateBody)


@dataclass(frozen=True, kw_only=True)
class RequestBody:
    """Holds a body whose prompts and types are checked; ``single`` is True if one prompt was given outside a list."""

    raw: GenerateBody
    prompts: list[list[int]]
    single: bool
    sampling: list[SamplingBody]
    rids: list[str]
    media: list[list[Media]]


@dataclass(frozen=True, kw_only=True)
class ParsedPrompt:
    """Holds a checked prompt of a request for tokens; ``samples`` and ``generated`` are those of `PromptRequest`."""

    rid: str
    token_ids: list[int]
    settings: SamplingSettings
    sampling_seed: int
    min_version: int
    samples: list[int]
    generated: int
    stop: tuple[str, ...] = ()
    media: list[Media]


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """Holds a checked request for tokens.

    ``single`` is True if one prompt was given outside a list; with n = 1 the reply is then an object and not a list.
    """

    prompts: list[ParsedPrompt]
    n: int
    single: bool
    return_logprob: bool
    return_routed_experts: bool
    stream: bool
    stream_interval: int | None


def parse_body(body: bytes, *, model: ModelConfig, media: RequestMedia) -> RequestBody:
    """Decodes a JSON body and checks its prompts. Raises HttpError 400 with key, value and fix."""
    if (count := body.count(b"[") + body.count(b"{")) > MAX_CONTAINERS:
        raise HttpError(400, f"/generate: {count} lists and objects, at most {MAX_CONTAINERS} are taken; send fewer")
    try:
        raw = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(400, f"/generate: {error}") from error
    except RecursionError as error:
        raise HttpError(400, "/generate: the body is nested too deep; send flat lists") from error
    _neutral(raw, _defaults_generate, _GENERATE_NEUTRAL, where="")
    prompts, single = _prompts(raw.input_ids)
    rids = _rids(raw.rid, len(prompts))
    for index, (ids, rid) in enumerate(zip(prompts, rids, strict=True)):
        given = None if raw.rid is None else rid
        if (problem := unknown_token(index, ids, rid=given, vocab_size=model.vocab_size)) is not None:
            raise HttpError(400, problem)
    sampling = _sampling(raw.sampling_params, len(prompts))
    items = media.of_prompts(raw.media, prompts)
    return RequestBody(raw=raw, prompts=prompts, single=single, sampling=sampling, rids=rids, media=items)


def parse_generate(body: RequestBody, *, model: ModelConfig, limits: RequestLimits) -> GenerateRequest:
    """Checks a body that asks for new tokens. Raises HttpError 400 with key, value and fix."""
    raw, prompts, sampling = body.raw, body.prompts, body.sampling
    for name in _SCORE_ONLY:
        if getattr(raw, name) not in (None, getattr(_defaults_generate, name)):
            raise HttpError(
                400,
                f"{name}={getattr(raw, name)!r:.100}: the embedded engine scores tokens only in requests that generate "
                "none; send sampling_params.max_new_tokens=0, or leave it out",
            )
    if raw.return_routed_experts and model.experts is None:
        raise HttpError(400, "return_routed_experts=true: the model has no experts; leave it out")
    count = len(prompts)
    n = sampling[0].n
    if any(one.n != n for one in sampling):
        raise HttpError(400, "sampling_params.n: differs between the prompts of a request; send one request for each n")
    if n < 1 or n * count > MAX_SAMPLES:
        raise HttpError(400, f"sampling_params.n: {n} for {count} prompts; 1 to {MAX_SAMPLES} samples a request")
    versions = _versions(raw.min_version, count)
    seeds = _seeds(raw.sampling_seed, sampling, count)
    banned = banned_tokens(raw, model)
    settings = [_settings(one, banned, model, tells_kept=raw.return_sampling_mask) for one in sampling]
    for index, (token_ids, one) in enumerate(zip(prompts, settings, strict=True)):
        check_lengths(index, len(token_ids), one.max_new_tokens, n=n, limits=limits)
    return GenerateRequest(
        prompts=[
            ParsedPrompt(
                rid=rid,
                token_ids=ids,
                settings=one,
                sampling_seed=seed,
                min_version=version,
                samples=samples,
                generated=generated,
                stop=_stop_strings(asked.stop),
                media=items,
            )
            for rid, ids, items, asked, one, seed, version, samples, generated in zip(
                body.rids,
                prompts,
                body.media,
                sampling,
                settings,
                seeds,
                versions,
                _samples(raw.samples, n=n, count=count),
                _generated(raw.generated, prompts),
                strict=True,
            )
        ],
        n=n,
        single=body.single,
        return_logprob=raw.return_logprob,
        return_routed_experts=raw.return_routed_experts,
        stream=raw.stream,
        stream_interval=sampling[0].stream_interval,
    )


def _neutral(raw: Any, defaults: Any, names: tuple[str, ...], *, where: str) -> None:
    for name in names:
        value, neutral = getattr(raw, name), getattr(defaults, name)
        if value != neutral and value is not None:
            raise HttpError(
                400,
                f"{where}{name}={reprlib.repr(value)}: the embedded engine has none; leave it out, or use "
                "engine=sglang",
            )


def _prompts(input_ids: list[int | list[int]] | None) -> tuple[list[list[int]], bool]:
    if not input_ids:
        raise HttpError(400, "input_ids: missing or empty; give the prompt's token ids, or a list of such lists")
    flat = [entry for entry in input_ids if isinstance(entry, int)]
    if flat and len(flat) < len(input_ids):
        raise HttpError(400, "input_ids: ids and lists are mixed; give one list of ids, or a list of such lists")
    prompts = [flat] if flat else [entry for entry in input_ids if isinstance(entry, list)]
    if len(prompts) > MAX_SAMPLES:
        raise HttpError(400, f"input_ids: {len(prompts)} prompts; send {MAX_SAMPLES} at most in one request")
    for index, ids in enumerate(prompts):
        if not ids:
            raise HttpError(400, f"input_ids[{index}]: empty; a prompt has at least one token")
    return prompts, bool(flat)


def banned_tokens(raw: GenerateBody, model: ModelConfig) -> tuple[int, ...]:
    """Returns the banned token ids, sorted. Raises HttpError 400 if they are unknown, too many, or all tokens."""
    banned = token_set("banned_token_ids", raw.banned_token_ids, vocab_size=model.vocab_size, limit=MAX_BANNED)
    if len(banned) == model.vocab_size:
        raise HttpError(400, "banned_token_ids: every token of the vocabulary is banned; leave at least one")
    return banned


def _sampling(raw: dict[str, Any] | list[dict[str, Any]] | None, count: int) -> list[SamplingBody]:
    given = raw if isinstance(raw, list) else [raw or {}]
    try:
        bodies = [msgspec.convert(one, SamplingBody) for one in given]
    except msgspec.ValidationError as error:
        raise HttpError(400, f"sampling_params: {error}") from error
    for body in bodies:
        _neutral(body, _defaults_sampling, _SAMPLING_NEUTRAL, where="sampling_params.")
    if isinstance(raw, list):
        same_length("sampling_params", len(bodies), count)
        return bodies
    return bodies * count


def _seeds(given: int | list[int] | None, sampling: list[SamplingBody], count: int) -> list[int]:
    if given is not None:
        seeds = per_prompt("sampling_seed", given, count)
    else:
        seeds = [secrets.randbits(63) if one.sampling_seed is None else one.sampling_seed for one in sampling]
    check_within("sampling_seed", seeds, SEEDS, words="an integer of 64 bits")
    return seeds


def _versions(given: int | list[int], count: int) -> list[int]:
    versions = per_prompt("min_version", given, count)
    check_within("min_version", versions, VERSIONS, words="a version's number, or -1")
    return versions


def _samples(given: list[list[int] | None] | None, *, n: int, count: int) -> list[list[int]]:
    """Returns the indices of the responses that are asked for, of each prompt."""
    if given is None:
        return [list(range(n))] * count
    same_length("samples", len(given), count)
    for index, chosen in enumerate(given):
        if chosen is not None and not (chosen and len(set(chosen)) == len(chosen) and set(chosen) <= set(range(n))):
            raise HttpError(400, f"samples[{index}]: {chosen}; give different numbers from 0 to n - 1 = {n - 1}")
    return [list(range(n)) if chosen is None else chosen for chosen in given]


def _generated(given: int | list[int], prompts: list[list[int]]) -> list[int]:
    """Returns for each prompt how many tokens at its end belong to the response."""
    counts = per_prompt("generated", given, len(prompts))
    for index, (count, ids) in enumerate(zip(counts, prompts, strict=True)):
        if not 0 <= count < len(ids):
            raise HttpError(400, f"generated[{index}]: {count} of {len(ids)} input_ids; give 0 to {len(ids) - 1}")
    return counts


def _stop_strings(given: str | list[str] | None) -> tuple[str, ...]:
    stop = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stop) > MOST_STOPS or not all(0 < len(string.encode()) <= MOST_STOP_BYTES for string in stop):
        raise HttpError(
            400,
            f"sampling_params.stop: {len(stop)} strings; give {MOST_STOPS} at most, 1 to {MOST_STOP_BYTES} bytes each",
        )
    return stop


def _rids(given: str | list[str] | None, count: int) -> list[str]:
    if given is None:
        return [uuid.uuid4().hex for _ in range(count)]
    check_rids(given)
    if isinstance(given, str):
        return [given] if count == 1 else [f"{given}_{index}" for index in range(count)]
    same_length("rid", len(given), count)
    return given


def _settings(body: SamplingBody, banned: tuple[int, ...], model: ModelConfig, *, tells_kept: bool) -> SamplingSettings:
    bounds = {
        "temperature": (body.temperature, is_temperature(body.temperature), TEMPERATURES),
        "top_p": (body.top_p, 0.0 < body.top_p <= 1.0, "above 0, at most 1 (off)"),
        "top_k": (body.top_k, body.top_k == -1 or 1 <= body.top_k <= MAX_TOP_K, f"-1 (off), or 1 to {MAX_TOP_K}"),
        "min_p": (body.min_p, 0.0 <= body.min_p < 1.0, "0 (off) or more, below 1"),
        "max_new_tokens": (body.max_new_tokens, body.max_new_tokens >= 1, "1 or more"),
        "stream_interval": (body.stream_interval, (body.stream_interval or 1) >= 1, "1 or more"),
    }
    for key, (value, fits, words) in bounds.items():
        if not fits:
            raise HttpError(400, f"sampling_params.{key}: {value}; give {words}")
    key, given = "sampling_params.stop_token_ids", body.stop_token_ids or []
    stops = token_set(key, given, vocab_size=model.vocab_size, limit=MAX_STOPS)
    if not body.ignore_eos:
        stops = tuple(sorted({*stops, *model.eos_token_ids}))
    settings = SamplingSettings(
        max_new_tokens=body.max_new_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        stop_token_ids=stops,
        banned_token_ids=banned,
        tells_kept=tells_kept,
    )
    if tells_kept and not settings.truncates:
        raise HttpError(
            400, "return_sampling_mask=true: every token is kept; give a top_k, top_p or min_p, or leave it out"
        )
    return settings
