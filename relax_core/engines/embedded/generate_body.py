"""Parses and checks the body of /generate. Unsupported fields are refused, except at their neutral value."""

from __future__ import annotations

import reprlib
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from relax_core.contracts.engine import MAX_BANNED, MAX_TEMPERATURE, MAX_TOP_K, MIN_TEMPERATURE
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media, MediaItem, MediaTensor
from relax_core.contracts.media_file import FolderReader
from relax_core.engines.asgi_server import HttpError, clipped
from relax_core.engines.embedded.decoder import PromptRoutes, ScoreItem
from relax_core.engines.embedded.model_config import ModelConfig
from relax_core.engines.embedded.scheduler import Call, Prompt
from relax_core.engines.embedded.token_sampler import SamplingSettings
from relax_core.engines.protocol.generate_messages import unknown_token
from relax_core.engines.protocol.stop_strings import MAX_STOP_BYTES, MAX_STOP_STRINGS, StopStrings, StopTable
from relax_core.families.towers import Towers

MAX_SAMPLES = 65536  # maximum samples of one request: prompts times n
MAX_CONTAINERS = 4 * MAX_SAMPLES  # maximum lists and objects of a body; decoded, they take much more memory
MAX_STOPS = 1024  # maximum stop tokens of one sample; each step of a batch compares with all of them
MAX_RID = 1024  # characters
MAX_TOPS = 1 << 24  # maximum top-k tokens in one reply
MAX_KEPT = 1 << 24  # maximum kept tokens in one reply that lists their ids
SEEDS = range(-(1 << 63), 1 << 64)  # 64 bits, signed or unsigned
VERSIONS = range(-1, 1 << 63)
TEMPERATURES = f"0 (greedy), or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Holds the engine's limits on a request, in tokens and samples.

    ``state_tokens`` is the size of a sample's states in cache tokens, for a model with a gated delta net; else 0.
    """

    context_length: int
    max_running_samples: int
    max_total_tokens: int
    state_tokens: int


def is_temperature(value: float) -> bool:
    """Returns whether the engine supports this temperature; 0 means greedy decoding."""
    return value == 0.0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE


def check_within(key: str, values: Sequence[int], allowed: range, *, words: str) -> None:
    """Raises HttpError 400 for a value outside ``allowed``."""
    bad = next((value for value in values if value not in allowed), None)
    if bad is not None:
        raise HttpError(400, f"{key}: {bad}; give {words}")


def check_rids(given: str | list[str]) -> None:
    """Raises HttpError 400 for a rid that is too long."""
    longest = len(given) if isinstance(given, str) else max(map(len, given), default=0)
    if longest > MAX_RID:
        raise HttpError(400, f"rid: {longest} characters; give {MAX_RID} at most")


def token_set(key: str, ids: Sequence[int], *, vocab_size: int, limit: int) -> tuple[int, ...]:
    """Returns the distinct ids in ascending order. Raises HttpError 400 for more than ``limit`` ids or unknown ids."""
    different = sorted(set(ids))
    if len(different) > limit:
        raise HttpError(400, f"{key}: {len(different)} token ids; give {limit} at most")
    bad = next((token for token in different if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise HttpError(400, f"{key}: token id {bad} is not in the vocabulary; ids go from 0 to {vocab_size - 1}")
    return tuple(different)


def same_length(key: str, found: int, count: int) -> None:
    """Raises HttpError 400 if a list does not have one entry for each of ``count`` prompts."""
    if found != count:
        raise HttpError(400, f"{key}: {found} entries for {count} prompts; give one for each, or a single value")


def per_prompt(key: str, value: int | list[int], count: int) -> list[int]:
    """Returns one value for each prompt. Raises HttpError 400 for a list of another length."""
    if isinstance(value, int):
        return [value] * count
    same_length(key, len(value), count)
    return value


def check_lengths(index: int, prompt: int, new: int, *, n: int, limits: RequestLimits) -> None:
    """Raises HttpError 400 if ``n`` samples of the prompt, with up to ``new`` tokens each, exceed the limits."""
    total = prompt + new
    if total > limits.context_length:
        raise HttpError(
            400,
            f"input_ids[{index}]: prompt of {prompt} tokens + max_new_tokens {new} = {total} is longer than the "
            f"context of {limits.context_length}; shorten one of them or raise engine.context_length",
        )
    if n > limits.max_running_samples:
        raise HttpError(
            400,
            f"sampling_params.n: {n} samples of one prompt, at most {limits.max_running_samples} run at one time; "
            f"lower n or raise engine.max_running_samples",
        )
    needed = n * (total + limits.state_tokens)
    if needed > limits.max_total_tokens:
        states = f", each with states of {limits.state_tokens} more," if limits.state_tokens else ""
        raise HttpError(
            400,
            f"input_ids[{index}]: n={n} samples of up to {total} tokens{states} need {needed} cache tokens, there are "
            f"{limits.max_total_tokens}; lower n or max_new_tokens, or raise engine.max_total_tokens",
        )


# The media items of one prompt: (digest, index of the item's first row in the prompt's token ids).
PlacedDigests = list[tuple[str, int]]


class RequestMedia:
    """Finds the media items of requests in the folder ``--media-folder``."""

    def __init__(self, reader: FolderReader | None, model: ModelConfig) -> None:
        self._reader = reader
        self._towers = Towers.of(model)

    def of_prompts(
        self, given: Sequence[PlacedDigests | None] | None, prompts: Sequence[Sequence[int]]
    ) -> list[list[Media]]:
        """Returns the media items of each prompt, in order of their rows.

        Raises HttpError 400 for an item that is missing in the folder or does not fit the prompt's tokens, and for
        placeholder tokens without an item.
        """
        entries = [None] * len(prompts) if given is None else list(given)
        same_length("media", len(entries), len(prompts))
        if self._towers is None:
            if any(entries):
                raise HttpError(400, "media: the model reads text only; leave it out, or serve a model with a tower")
            return [[] for _ in prompts]
        placed = zip(entries, prompts, strict=True)
        return [self._of_prompt(index, media or [], ids, self._towers) for index, (media, ids) in enumerate(placed)]

    def _of_prompt(self, index: int, entries: PlacedDigests, token_ids: Sequence[int], towers: Towers) -> list[Media]:
        ids = np.array(token_ids, dtype=np.int64)
        blind = towers.feature_rows(ids)
        media: list[Media] = []
        done = 0
        for digest, start in entries:
            where = f"media[{index}] {clipped(digest)} at {start}"
            item = self._item(digest, where)
            end = start + item.rows
            if start < done or end > len(ids):
                raise HttpError(
                    400, f"{where}: its {item.rows} rows do not fit the {len(ids)} input_ids after row {done}"
                )
            if not np.array_equal(ids[start:end], item.ids):
                raise HttpError(400, f"{where}: input_ids {start} to {end - 1} are not the item's {item.rows} ids")
            _check_item(item, towers, where)
            blind[start:end] = False
            media.append(Media(item, start, end))
            done = end
        if blind.any():
            first = int(np.flatnonzero(blind)[0])
            raise HttpError(
                400,
                f"input_ids[{index}]: token {int(ids[first])} at {first} stands for an image, video or sound, and no "
                "item of media is there; send the prompt's media",
            )
        return media

    def _item(self, digest: str, where: str) -> MediaItem:
        if self._reader is None:
            raise HttpError(400, f"{where}: the engine was started without --media-folder; start it with one")
        try:
            return self._reader.open(digest)[0]
        except (ValueError, OSError) as error:
            raise HttpError(400, f"{where}: {clipped(str(error), length=500)}") from error


def _check_item(item: MediaItem, towers: Towers, where: str) -> None:
    """Raises HttpError 400 for an item that was encoded for another model: the towers cannot process such an item."""
    if len(item.grid) != 3:
        raise HttpError(
            400,
            f"{where}: a grid of {item.grid}, expected time, height and width; the item was encoded for another model",
        )
    ids = item.ids
    rows, heard = int(towers.feature_rows(ids).sum()), int(towers.audio_rows(ids).sum())
    tensors = {tensor.name: tensor for tensor in item.tensors}
    frames, sound = _shape(tensors, "frames", "uint8"), _shape(tensors, "features", "float32")
    fits = rows == towers.features(item) and _moves_on(item, towers)
    if item.kind != "audio":
        tower, (time, height, width) = towers.vision, item.grid
        fits = fits and tower is not None and not (height % tower.merge_size or width % tower.merge_size)
        if fits and tower is not None:
            cells = [height * tower.patch_size, width * tower.patch_size, 3]
            fits = frames[1:] == cells and -(-frames[0] // tower.temporal_patch_size) == time
    if item.kind == "audio" or item.audio_frames:
        fits = fits and towers.audio is not None and sound == [towers.audio.mel_bins, item.audio_frames]
        fits = fits and towers.audio is not None and heard == towers.audio.rows_of_frames(item.audio_frames)
    if not fits:
        raise HttpError(
            400,
            f"{where}: {rows} rows that move positions by {item.advance:g}, frames {frames} and sound {sound} for a "
            f"grid of {item.grid}, of which this model's towers make {towers.features(item)} features; the item was "
            "encoded for another model",
        )


def _moves_on(item: MediaItem, towers: Towers) -> bool:
    """Returns whether an item's rotary offsets are valid and its advance of the position is within the limit.

    The limit is the largest offset plus 1 for a video with positions in seconds, else the number of rows.
    """
    if not item.rows or len(item.offsets) != 3 * len(item.token_ids):
        return False
    offsets = item.rotary_offsets
    timed = item.kind == "video" and towers.vision is not None and towers.vision.positions_per_second is not None
    most = float(offsets.max()) + 1 if timed else item.rows
    return bool(np.isfinite(offsets).all()) and offsets.min() >= 0 and 0 < item.advance <= most


def _shape(tensors: Mapping[str, MediaTensor], name: str, dtype: str) -> list[int]:
    """Returns the shape of an item's tensor; [0] if the item has no such tensor of this dtype."""
    tensor = tensors.get(name)
    return tensor.shape if tensor is not None and tensor.dtype == dtype else [0]


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True):
    """Holds SGLang's sampling_params. Fields after ``stop`` are accepted only at their neutral value."""

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
    skip_special_tokens: bool = True  # this field and the next two have no effect, because the engine returns no text
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
    """Holds the fields of SGLang's GenerateReqInput, and additional fields of Relax.

    Relax's additional fields are ``min_version``, ``sampling_seed``, ``banned_token_ids``, ``samples``, ``generated``,
    ``media`` (see `PromptRequest`) and ``kept_tokens``. The fields from ``text`` on are accepted only at their neutral
    value. ``kept_tokens``, ``logprob_start_len`` and ``top_logprobs_num`` are accepted only in requests for scores
    (`parse_score`).
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
    routing_key: str | None = None  # for a router in front of several engines
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
    """Holds a body with checked prompts and types. ``single`` is True for one prompt outside a list."""

    raw: GenerateBody
    prompts: list[list[int]]
    single: bool
    sampling: list[SamplingBody]
    rids: list[str]
    media: list[list[Media]]


def parse_body(body: bytes, *, model: ModelConfig, media: RequestMedia) -> RequestBody:
    """Decodes a JSON body and checks its prompts. Raises HttpError 400 with key, value and fix."""
    if (count := body.count(b"[") + body.count(b"{")) > MAX_CONTAINERS:
        raise HttpError(400, f"/generate: {count} lists and objects, at most {MAX_CONTAINERS} are accepted; send fewer")
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


def parse_generate(body: RequestBody, *, model: ModelConfig, limits: RequestLimits, stops: StopTable) -> Call:
    """Checks a body that requests new tokens and returns the call. Raises HttpError 400 with key, value and fix."""
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
    if any(sampling_body.n != n for sampling_body in sampling):
        raise HttpError(400, "sampling_params.n: differs between the prompts of a request; send one request for each n")
    if n < 1 or n * count > MAX_SAMPLES:
        raise HttpError(400, f"sampling_params.n: {n} for {count} prompts; 1 to {MAX_SAMPLES} samples a request")
    versions = _versions(raw.min_version, count)
    seeds = _seeds(raw.sampling_seed, sampling, count)
    banned = banned_tokens(raw, model)
    settings = [
        _settings(sampling_body, banned, model, reports_kept=raw.return_sampling_mask) for sampling_body in sampling
    ]
    for index, (token_ids, setting) in enumerate(zip(prompts, settings, strict=True)):
        check_lengths(index, len(token_ids), setting.max_new_tokens, n=n, limits=limits)
    call = Call(
        n=n,
        single=body.single,
        return_logprob=raw.return_logprob,
        stream=raw.stream,
        asked_interval=sampling[0].stream_interval,
    )
    chosen, generated = _samples(raw.samples, n=n, count=count), _generated(raw.generated, prompts)
    return call.add(
        [
            Prompt(
                call,
                index,
                body.rids[index],
                prompts[index],
                settings[index],
                seeds[index],
                versions[index],
                routes=PromptRoutes() if raw.return_routed_experts else None,
                samples=chosen[index],
                generated=generated[index],
                stop=_stop_strings(sampling[index].stop, stops),
                media=body.media[index],
            )
            for index in range(count)
        ]
    )


def _neutral(raw: Any, defaults: Any, names: tuple[str, ...], *, where: str) -> None:
    for name in names:
        value, neutral = getattr(raw, name), getattr(defaults, name)
        if value != neutral and value is not None:
            raise HttpError(
                400,
                f"{where}{name}={reprlib.repr(value)}: the embedded engine does not support it; leave it out, or use "
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
    """Returns the banned token ids, sorted. Raises HttpError 400 for unknown or too many ids, or if all are banned."""
    banned = token_set("banned_token_ids", raw.banned_token_ids, vocab_size=model.vocab_size, limit=MAX_BANNED)
    if len(banned) == model.vocab_size:
        raise HttpError(400, "banned_token_ids: every token of the vocabulary is banned; leave at least one")
    return banned


def _sampling(raw: dict[str, Any] | list[dict[str, Any]] | None, count: int) -> list[SamplingBody]:
    given = raw if isinstance(raw, list) else [raw or {}]
    try:
        bodies = [msgspec.convert(sampling_body, SamplingBody) for sampling_body in given]
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
        seeds = [
            secrets.randbits(63) if sampling_body.sampling_seed is None else sampling_body.sampling_seed
            for sampling_body in sampling
        ]
    check_within("sampling_seed", seeds, SEEDS, words="an integer of 64 bits")
    return seeds


def _versions(given: int | list[int], count: int) -> list[int]:
    versions = per_prompt("min_version", given, count)
    check_within("min_version", versions, VERSIONS, words="a version's number, or -1")
    return versions


def _samples(given: list[list[int] | None] | None, *, n: int, count: int) -> list[list[int]]:
    """Returns the indices of the requested samples of each prompt."""
    if given is None:
        return [list(range(n))] * count
    same_length("samples", len(given), count)
    for index, chosen in enumerate(given):
        if chosen is not None and not (chosen and len(set(chosen)) == len(chosen) and set(chosen) <= set(range(n))):
            raise HttpError(400, f"samples[{index}]: {chosen}; give different numbers from 0 to n - 1 = {n - 1}")
    return [list(range(n)) if chosen is None else chosen for chosen in given]


def _generated(given: int | list[int], prompts: list[list[int]]) -> list[int]:
    """Returns for each prompt how many tokens at its end belong to a partial response."""
    counts = per_prompt("generated", given, len(prompts))
    for index, (count, ids) in enumerate(zip(counts, prompts, strict=True)):
        if not 0 <= count < len(ids):
            raise HttpError(400, f"generated[{index}]: {count} of {len(ids)} input_ids; give 0 to {len(ids) - 1}")
    return counts


def _stop_strings(given: str | list[str] | None, stops: StopTable) -> StopStrings | None:
    stop = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stop) > MAX_STOP_STRINGS or not all(0 < len(string.encode()) <= MAX_STOP_BYTES for string in stop):
        raise HttpError(
            400,
            f"sampling_params.stop: {len(stop)} strings; give {MAX_STOP_STRINGS} at most, 1 to {MAX_STOP_BYTES} bytes "
            "each",
        )
    try:
        return stops.of(stop)
    except ValueError as error:
        raise HttpError(400, f"sampling_params.stop: {error}") from error


def _rids(given: str | list[str] | None, count: int) -> list[str]:
    if given is None:
        return [uuid.uuid4().hex for _ in range(count)]
    check_rids(given)
    if isinstance(given, str):
        return [given] if count == 1 else [f"{given}_{index}" for index in range(count)]
    same_length("rid", len(given), count)
    return given


def _settings(
    body: SamplingBody, banned: tuple[int, ...], model: ModelConfig, *, reports_kept: bool
) -> SamplingSettings:
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
        reports_kept=reports_kept,
    )
    if reports_kept and not settings.truncates:
        raise HttpError(
            400, "return_sampling_mask=true: every token is kept; give a top_k, top_p or min_p, or leave it out"
        )
    return settings


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """Holds a checked request for scores.

    ``single`` is True for one prompt outside a list: the reply is then an object and not a list.
    """

    items: list[ScoreItem]
    rids: list[str]
    min_version: int
    single: bool


def asks_for_scores(body: RequestBody) -> bool:
    """Returns whether a prompt of the request has max_new_tokens 0, which means scoring."""
    return any(sampling_body.max_new_tokens == 0 for sampling_body in body.sampling)


def parse_score(body: RequestBody, *, model: ModelConfig, limits: RequestLimits) -> ScoreRequest:
    """Checks a request for scores. Raises HttpError 400 with key, value and fix.

    ``temperature`` 0 is replaced by 1, because log-probs of greedy tokens are at temperature 1, too.
    """
    raw, count = body.raw, len(body.prompts)
    _check_score(body)
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


def _check_score(body: RequestBody) -> None:
    if any(sampling_body.max_new_tokens for sampling_body in body.sampling):
        raise HttpError(400, "sampling_params.max_new_tokens: 0 for some prompts of a request only; send two requests")
    if not body.raw.return_logprob:
        raise HttpError(400, "sampling_params.max_new_tokens: 0 needs return_logprob=true; else give 1 or more")
    if body.raw.stream:
        raise HttpError(400, "stream=true with sampling_params.max_new_tokens: 0; scores come in one reply")
    if body.raw.return_sampling_mask:
        raise HttpError(400, "return_sampling_mask=true with sampling_params.max_new_tokens: 0; nothing is sampled")
    neutral = SamplingBody()
    for sampling_body in body.sampling:
        for key in ("n", "top_p", "top_k", "min_p"):
            if getattr(sampling_body, key) != getattr(neutral, key):
                raise HttpError(
                    400,
                    f"sampling_params.{key}: {getattr(sampling_body, key)} with max_new_tokens 0; "
                    "scores are over all tokens, "
                    "or over kept_tokens: leave it out",
                )


def _check_vocabularies(kept: Sequence[KeptTokens | None], model: ModelConfig) -> None:
    """Raises HttpError 400 if kept sets have vocabularies of different sizes, or of a size far from the model's.

    The size may differ from the model's size, because two models with the same tokenizer may be padded differently.
    """
    sizes = {sets.vocab_size for sets in kept if sets is not None}
    if len(sizes) > 1 or any(not 1 <= size <= 2 * model.vocab_size for size in sizes):
        raise HttpError(400, f"kept_tokens: vocabularies of {sorted(sizes)} tokens, the model has {model.vocab_size}")
