"""The client of an SGLang server; it hides the differences between SGLang and the embedded engine.

A /generate body has a separate request, with its own seed, for each sample. For an external server, the body includes
the images.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import secrets
import struct
import time
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from relax_core.contracts.engine import (
    KV_CACHE,
    WEIGHTS,
    EngineError,
    EngineUnreachable,
    FinishReason,
    Generated,
    PromptRequest,
    SamplingParams,
)
from relax_core.contracts.media import Media, short_form
from relax_core.contracts.media_file import FolderReader
from relax_core.engines.engine_pool import cut
from relax_core.engines.protocol.engine_client import TokenScores, TokensToScore, error_text
from relax_core.engines.protocol.generate_messages import (
    OnTokens,
    ResponseCheck,
    StreamEnd,
    VersionSpan,
    decoded,
    response_limit,
    unknown_token,
)
from relax_core.engines.protocol.server_sent_events import UNKNOWN_VERSION, EventReader, sglang_version
from relax_core.engines.protocol.stop_strings import StopTable
from relax_core.engines.sglang.media.placed_items import placed_name
from relax_core.engines.sglang.sglang_weight_calls import SenderLock, SglangWeightCalls


@dataclass(eq=False)
class HeldPrompts:
    """Holds the prompts of one call that wait for a weight version, and later the requests that were sent for them."""

    prompts: dict[int, PromptRequest]  # index in the caller's prompt batch → prompt
    version: int = UNKNOWN_VERSION  # the server's weight version at the time of sending
    aborted: set[str] = field(default_factory=set)
    sent: list[SampleRequest] = field(default_factory=list)
    on_tokens: OnTokens | None = None

    def report_tokens(self, prompt: int, sample: int, start: int, ids: Sequence[int]) -> None:
        """Reports new tokens. ``prompt`` is the prompt's number in the sent request."""
        if self.on_tokens is not None:
            self.on_tokens(list(self.prompts)[prompt], sample, start, ids)


def taken_out(call: HeldPrompts, params: SamplingParams) -> Iterator[Generated]:
    """Removes prompts that were aborted before they were sent, and yields empty responses for these prompts."""
    for index in [index for index, prompt in call.prompts.items() if prompt.rid in call.aborted]:
        prompt = call.prompts.pop(index)
        for sample in range(params.n) if prompt.samples is None else prompt.samples:
            yield never_sent(prompt, index, sample)


def never_sent(prompt: PromptRequest, index: int, sample: int) -> Generated:
    """Returns an empty response to a prompt that was aborted before it was sent."""
    return Generated(
        rid=prompt.rid,
        prompt=index,
        sample=sample,
        output_ids=np.empty(0, dtype=np.int32),
        logprobs=np.empty(0, dtype=np.float32),
        versions=np.empty(0, dtype=np.int32),
        finish_reason="abort",
    )


def attested(generated: Generated) -> Generated:
    """Returns the response up to the first token that was sampled without a known weight version.

    A server has no weight version after a restart or a failed update, but samples one more token of each response that
    it aborts. The returned response has the finish reason abort, so its remaining tokens are requested again.
    """
    unknown = np.flatnonzero(generated.versions == UNKNOWN_VERSION)
    return (
        msgspec.structs.replace(cut(generated, int(unknown[0])), finish_reason="abort") if unknown.size else generated
    )


def prefilled_by_older(first: VersionSpan, sent_under: int, *, cached: int) -> bool:
    """Returns whether a part of the prompt was computed by older weights than the response's first token.

    Such a part was already in the cache when the prompt was sent under version ``sent_under``, or it was prefilled
    before the version changed (sglang_patches.py). ``first`` is the response's first version span. ``cached`` is the
    number of prompt tokens from the cache, or True if features of images may come from a cache.
    """
    return first.end == 0 or (cached > 0 and first.version > sent_under)


def finish_reason(response: Generated, params: SamplingParams, *, generated: int, limit: int) -> FinishReason:
    """Corrects the finish reason of a response.

    After an abort, SGLang generates one more token and still reports abort. If this token is a stop token or the last
    allowed token, the response is finished and must not continue. ``generated`` is the number of tokens of the response
    before this request. ``limit`` is the maximum number of tokens of the response.
    """
    if response.finish_reason == "abort" and response.output_ids.size:
        if int(response.output_ids[-1]) in params.stop_token_ids:
            return "stop"
        if generated + len(response.output_ids) >= limit:
            return "length"
    return response.finish_reason


NOT_OPEN = "no weight-update session is open"  # a part of SGLang's error text
FIRST_POLL_S, LAST_POLL_S = 0.002, 0.05  # seconds between polls of the weight version while prompts wait


class _Info(msgspec.Struct):
    weight_version: str


class SglangClient(SglangWeightCalls):
    """Calls one SGLang server.

    SGLang cannot delay prompts until a weight version is in force, so this client delays them. The checks of the
    configuration refuse settings that SGLang does not support (config/engine_checks.py).

    ``ranks`` is the number of the server's GPUs. ``vocab_size`` is the model's vocabulary size; a token outside the
    vocabulary would end the server. ``seeds`` is True if the server runs with --enable-deterministic-inference;
    otherwise the server ignores seeds. ``attached`` is True for an external server, which lacks Relax's weight loader.
    ``stops`` finds stop strings with the model's tokenizer. ``media_folder`` contains the items of prompts; to an
    external server, which cannot read this folder, the client sends the images. For ``weights_folder`` and
    ``has_states`` see `SglangWeightCalls`.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        request_timeout_s: float,
        control_timeout_s: float,
        ranks: int,
        vocab_size: int,
        seeds: bool,
        attached: bool = False,
        stops: StopTable | None = None,
        media_folder: Path | None = None,
        weights_folder: Path | None = None,
        has_states: bool = False,
    ) -> None:
        super().__init__(
            url,
            token,
            request_timeout_s=request_timeout_s,
            control_timeout_s=control_timeout_s,
            attached=attached,
            vocab_size=vocab_size,
        )
        self.group_ranks = ranks
        self.weights_folder = weights_folder
        self.has_states = has_states
        self._lock = SenderLock(url, timeout_s=2 * control_timeout_s)
        self.has_loader = not attached
        self._vocabulary = vocab_size
        self._seeds = seeds
        self._stops = stops
        self._images = AttachedImages(media_folder) if attached else None
        self._calls: list[HeldPrompts] = []

    # -- generate -----------------------------------------------------------------------------------------------------
    async def generate(
        self,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        *,
        on_end: Callable[[StreamEnd], None] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> AsyncIterator[Generated]:
        """Implements `EngineClient.generate`. ``on_end`` is never called, because SGLang reports no times."""
        for index, prompt in enumerate(prompts):
            self._check(index, prompt.input_ids, rid=prompt.rid)
        waves: dict[int, dict[int, PromptRequest]] = defaultdict(dict)
        for index, prompt in enumerate(prompts):
            waves[prompt.min_version][index] = prompt
        if len(waves) == 1:
            (version,) = waves
            async for generated in self._generate_from(version, waves[version], params, on_tokens):
                yield generated
            return
        queue: asyncio.Queue[Generated | Exception | None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._into(queue, version, wave, params, on_tokens)) for version, wave in waves.items()
        ]
        running = len(tasks)
        try:
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    async def _into(
        self,
        queue: asyncio.Queue[Generated | Exception | None],
        version: int,
        wave: dict[int, PromptRequest],
        params: SamplingParams,
        on_tokens: OnTokens | None,
    ) -> None:
        try:
            async for generated in self._generate_from(version, wave, params, on_tokens):
                queue.put_nowait(generated)
            queue.put_nowait(None)
        except Exception as error:  # `generate` raises the error
            queue.put_nowait(error)

    async def _generate_from(
        self, version: int, prompts: dict[int, PromptRequest], params: SamplingParams, on_tokens: OnTokens | None
    ) -> AsyncIterator[Generated]:
        """Waits until the server has weights ``version``, then sends one request for all prompts.

        If older weights computed a part of a sample's prompt, the sample is requested again, because its log-probs
        belong to no single weight version.
        """
        call = HeldPrompts(prompts, on_tokens=on_tokens)
        self._calls.append(call)
        try:
            while call.prompts:
                async for generated in self._hold(call, version, params):
                    yield generated
                again: dict[int, list[int]] = defaultdict(list)
                async for generated, mixed in self._ask(call, params):
                    if not mixed:
                        yield generated
                    elif call.prompts[generated.prompt].rid in call.aborted:
                        yield never_sent(call.prompts[generated.prompt], generated.prompt, generated.sample)
                    else:
                        again[generated.prompt].append(generated.sample)
                call.prompts = {
                    index: msgspec.structs.replace(call.prompts[index], samples=samples)
                    for index, samples in again.items()
                }
        finally:
            self._calls.remove(call)

    async def _ask(self, call: HeldPrompts, params: SamplingParams) -> AsyncIterator[tuple[Generated, bool]]:
        """Sends one request for all prompts of the call.

        Yields (response, whether older weights computed a part of its prompt).
        """
        if not call.prompts:
            return
        indices, chosen = list(call.prompts), list(call.prompts.values())
        call.sent = sample_requests(chosen, n=params.n)
        body = sglang_body(
            chosen,
            call.sent,
            params,
            version=call.version,
            seeds=self._seeds,
            media=lambda prompt: self._media_entries(prompt, version=call.version),
            reports_tokens=call.on_tokens is not None,
        )
        reader = EventReader(
            chosen,
            samples=[(request.prompt, request.sample) for request in call.sent],
            vocab_size=self._vocabulary if params.return_kept_tokens else None,
            reports_tokens=call.on_tokens is not None,
        )
        check = ResponseCheck(chosen, params, vocab_size=self._vocabulary, lowest_version=UNKNOWN_VERSION)
        async for generated in self._streamed(
            body, params, lambda response: self._events(response, reader, check, call.report_tokens), check
        ):
            prefill = reader.prefills.pop((generated.prompt, generated.sample), None)
            mixed = False
            if prefill is not None and generated.output_ids.size:
                cached, first = prefill
                features = self._images is not None and bool(chosen[generated.prompt].media)
                mixed = prefilled_by_older(first, call.version, cached=cached or features)
            asked = chosen[generated.prompt]
            known = attested(generated)
            reason = finish_reason(known, params, generated=asked.generated, limit=response_limit(asked, params))
            whole = msgspec.structs.replace(known, prompt=indices[generated.prompt], finish_reason=reason)
            yield self._stopped(whole, chosen[generated.prompt], params), mixed

    def _media_entries(self, prompt: PromptRequest, *, version: int) -> MediaEntries:
        """Returns the token ids to send for a prompt, and the image_data entries of its media items."""
        if self._images is None:
            return named_media(prompt)
        try:
            return self._images.entries(prompt.input_ids, prompt.media, version=version)
        except ValueError as error:
            raise EngineError(f"engine {self.url} /generate: prompt {prompt.rid}: {error}") from error

    def _stopped(self, generated: Generated, prompt: PromptRequest, params: SamplingParams) -> Generated:
        """Cuts the response after the token that completes a stop string.

        SGLang itself does not see a stop string that begins in tokens of an earlier request for the same sample. It
        also reports abort for a response that was already complete at the time of the abort.
        """
        if not params.stop or not generated.output_ids.size:
            return generated
        assert self._stops is not None, "build_client gives it"
        stop = self._stops.of(params.stop)
        assert stop is not None
        before = prompt.input_ids[len(prompt.input_ids) - prompt.generated :] if prompt.generated else []
        end = stop.end(before + generated.output_ids.tolist(), checked=len(before))
        if end is None:
            return generated
        return msgspec.structs.replace(cut(generated, end - len(before)), finish_reason="stop")

    async def _hold(self, call: HeldPrompts, version: int, params: SamplingParams) -> AsyncIterator[Generated]:
        """Waits until weights ``version`` are in force. Yields empty responses for prompts that are aborted before."""
        wait_s, deadline = FIRST_POLL_S, time.monotonic() + self._request_timeout_s
        call.sent = []
        while (found := await self._weight_version()) < max(version, 0):
            if time.monotonic() > deadline:
                raise EngineUnreachable(
                    f"engine {self.url}: weights {found} are still in force after {self._request_timeout_s:.0f} s; "
                    f"prompts wait for weights {version}"
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LAST_POLL_S)
            for generated in taken_out(call, params):
                yield generated
            if not call.prompts:
                return
        for generated in taken_out(call, params):  # aborts since the last check
            yield generated
        call.version = found

    async def _weight_version(self) -> int:
        try:
            asking = self._http_session().get(f"{self.url}/model_info", allow_redirects=False)
            async with asyncio.timeout(self._control_timeout_s), asking as response:
                data = await self._beginning(response)
                if response.status != 200:
                    raise self._refusal("/model_info", response.status, data)
                with self._replying("/model_info"):
                    return sglang_version(decoded(data, _Info).weight_version)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnreachable(f"engine {self.url} /model_info: {error_text(error)}") from error

    # -- control ------------------------------------------------------------------------------------------------------
    def ready(self) -> bool:
        """Returns whether the server accepts prompts now. It does not while it is paused or loads weights."""
        status, data = self._answer("GET", "/ready", None, timeout_s=self._control_timeout_s)
        if status not in (200, 503):
            raise self._refusal("/ready", status, data)
        return status == 200

    def _version_of(self, version: str | int) -> int:
        return sglang_version(str(version))

    def loads(self) -> dict[str, Any]:
        """Returns the load with SGLang's names and with the embedded engine's names."""
        loads = super().loads()
        held = sum(len(call.prompts) for call in list(self._calls) if not call.sent)
        return {**loads, "running": loads["num_running_reqs"], "queued": loads["num_waiting_reqs"], "held": held}

    def abort(self, rid: str | None = None) -> dict[str, Any]:
        """Implements `EngineClient.abort`. In SGLang, each sample has a separate rid; this client tracks the rids."""
        calls = list(self._calls)
        for call in calls:
            # The event loop may change both dictionaries while another thread calls `abort`, so they are copied.
            call.aborted |= {prompt.rid for prompt in list(call.prompts.values()) if rid in (None, prompt.rid)}
        if rid is None:
            return super().abort()
        known = [request.rid for call in calls for request in list(call.sent) if request.rid.rsplit("/", 2)[0] == rid]
        for name in known or [rid]:
            super().abort(name)
        return {"aborted_samples": len(known)}

    def release_memory(self, *, weights: bool = False) -> dict[str, Any]:
        """Frees the KV cache and, with ``weights``, the memory of the weights.

        Running samples wait in the queue, because SGLang must be idle. On GPUs the server needs --enable-memory-saver,
        without which SGLang frees nothing.
        """
        self.pause("retract")
        self._memory_released, self._weights_lost = True, self._weights_lost or weights
        tags = [KV_CACHE, WEIGHTS] if weights else [KV_CACHE]
        return self._call("POST", "/release_memory_occupation", {"tags": tags})

    def resume_memory(self) -> dict[str, Any]:
        """Takes the KV cache's memory again and resumes decoding.

        If no update has filled the memory of the weights, the server serves nothing until it gets a version.
        """
        if self._weights_lost:
            self._rename_weights(UNKNOWN_VERSION)
        self._call("POST", "/resume_memory_occupation", {"tags": [KV_CACHE]})
        self._memory_released = False
        return self.resume()

    def forget_weights(self) -> None:
        """Resets a server that another run has used, because its weight version and cache do not belong to this run.

        Aborts all requests, and ends a pause and an open weight-update session of the other run.
        """
        self._give_up()
        try:
            self._call("POST", "/end_weight_update", {})
        except EngineError as error:
            if NOT_OPEN not in str(error):
                raise
        self.resume()
        self.flush_cache()

    def score(
        self, items: Sequence[TokensToScore], *, top_k: int, temperature: float, banned_token_ids: Sequence[int] = ()
    ) -> list[TokenScores]:
        """Implements `EngineClient.score`. Raises EngineError for options that SGLang does not support."""
        if banned_token_ids or any(item.kept is not None for item in items):
            raise EngineError(
                f"engine {self.url} /generate: scores without banned tokens or over kept sets are not possible; "
                "SGLang scores over the whole vocabulary only. Use algo.served_by=forward."
            )
        if temperature != 1.0:
            raise EngineError(
                f"engine {self.url} /generate: scores at temperature {temperature:g} are not possible, because SGLang "
                "scores at temperature 1 only. Use rollout.temperature=1, or algo.served_by=forward."
            )
        if self._images is not None and any(item.media for item in items):
            raise EngineError(
                f"engine {self.url} /generate: scores of prompts with images are not possible at a server that "
                "engine.urls names, because it expands them by itself. Use algo.served_by=forward."
            )
        for index, item in enumerate(items):
            self._check(index, item.input_ids, rid=None)
        return super().score(items, top_k=top_k, temperature=temperature)

    def _score_body(self, items: Sequence[TokensToScore], **options: Any) -> dict[str, Any]:
        body = super()._score_body(items, **options)
        body.pop("media", None)
        return body | image_data([[placed_name(medium) for medium in item.media] for item in items])

    def _check(self, index: int, token_ids: Sequence[int], *, rid: str | None) -> None:
        problem = unknown_token(index, token_ids, rid=rid, vocab_size=self._vocabulary)
        if problem is not None:
            raise EngineError(f"engine {self.url} /generate: {problem}")


BAN = -1e30  # a logit with probability exactly 0 at every temperature, in float32 and bfloat16
_numbers = itertools.count()
# (token ids to send for a prompt, image_data entries of its media items)
MediaEntries = tuple[list[int], list[str]]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Describes the request of one sample: index of the prompt, sample from 0 to n - 1, and a unique rid."""

    prompt: int
    sample: int
    rid: str


def named_media(prompt: PromptRequest) -> MediaEntries:
    """Returns a prompt's ids and the names of its media items. A server of the run maps the items' files."""
    return prompt.input_ids, [placed_name(medium) for medium in prompt.media]


def image_data(entries: Sequence[list[str]]) -> dict[str, Any]:
    """Returns the field image_data of a body. If no sample has media, returns {} to leave the field out.

    ``entries`` has a list for each sample; the list is empty for a prompt of text only.
    """
    return {"image_data": list(entries)} if any(entries) else {}


def sample_requests(prompts: Sequence[PromptRequest], *, n: int) -> list[SampleRequest]:
    """Returns one request for each sample of the prompts."""
    return [
        SampleRequest(index, sample, f"{prompt.rid}/{sample}/{next(_numbers)}")
        for index, prompt in enumerate(prompts)
        for sample in (range(n) if prompt.samples is None else prompt.samples)
    ]


def sample_seed(prompt_seed: int, sample: int) -> int:
    """Returns the seed of one sample of a prompt, an integer of 63 bits.

    SGLang adds the token's position to the seed. A response that continues from its prefix therefore continues its
    sequence of random numbers.
    """
    digest = hashlib.blake2b(f"{prompt_seed}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sglang_body(
    prompts: Sequence[PromptRequest],
    samples: Sequence[SampleRequest],
    params: SamplingParams,
    *,
    version: int,
    seeds: bool,
    media: Callable[[PromptRequest], MediaEntries] | None = None,
    reports_tokens: bool = False,
) -> dict[str, Any]:
    """Returns the JSON body of one /generate.

    ``version`` is the weight version in force; SGLang reuses a cached prefix only for requests with the same version.
    If sampling excludes tokens, the body requests the kept sets. SGLang then also returns log-probs over the kept sets;
    its usual log-probs are over the whole vocabulary. ``media`` returns the token ids to send for a prompt and its
    image_data entries; the default is `named_media`. With ``reports_tokens``, SGLang sends an event for each new token.
    """
    sent = [(media or named_media)(prompt) for prompt in prompts]
    bans = {str(token): BAN for token in params.banned_token_ids}
    return {
        "rid": [wanted.rid for wanted in samples],
        "input_ids": [sent[wanted.prompt][0] for wanted in samples],
        "sampling_params": [
            _sampling(prompts[wanted.prompt], wanted.sample, params, bans, seeds=seeds)
            | ({"stream_interval": 1} if reports_tokens else {})
            for wanted in samples
        ],
        "return_logprob": True,
        "stream": True,
        "extra_key": f"weights-{version}",
        "return_sampling_mask": params.truncates,
        "return_routed_experts": params.return_routed_experts,
        **image_data([sent[wanted.prompt][1] for wanted in samples]),
    }


def _sampling(
    prompt: PromptRequest, sample: int, params: SamplingParams, bans: dict[str, float], *, seeds: bool
) -> dict[str, Any]:
    new_tokens = response_limit(prompt, params) - prompt.generated
    fields: dict[str, Any] = {
        "max_new_tokens": new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "stop_token_ids": params.stop_token_ids,
        "stream_interval": new_tokens,  # SGLang then sends events only for the first token and the end
    }
    if params.stop:
        fields["stop"] = params.stop
    if bans:
        fields["logit_bias"] = bans
    if seeds:
        fields["sampling_seed"] = sample_seed(prompt.sampling_seed, sample)
    return fields


_COMPRESSION = 1  # zlib's fastest level, because the server is near


class AttachedImages:
    """Encodes the images of requests to an external server, which decodes images itself.

    SGLang caches the features of an image by its bytes, also across weight updates. Each PNG therefore contains a text
    with a random mark and the weight version: its bytes differ after a weight update.
    """

    def __init__(self, media_folder: Path | None) -> None:
        self._reader = None if media_folder is None else FolderReader(media_folder)
        self._mark = secrets.token_hex(8)

    def entries(self, input_ids: list[int], media: Sequence[Media], *, version: int) -> MediaEntries:
        """Returns the ids with one placeholder per image, and the images as base64 of PNGs.

        Raises ValueError for a video, because SGLang would resize its frames and tokenize its times again.
        """
        if not media:
            return input_ids, []
        if any(medium.item.kind == "video" for medium in media):
            raise ValueError(
                "a server that engine.urls names takes images only, and the prompt has a video. Let the run start its "
                "servers (drop engine.urls), or leave videos out (modality=text, or other data)."
            )
        if self._reader is None:
            raise ValueError("the prompt has an image, and the run has no media folder (modality=text?).")
        comment = f"{self._mark} {version}"
        frames = [self._reader.tensors(medium.item)["frames"][0] for medium in media]
        pictures = [base64.b64encode(png(frame, comment=comment)).decode() for frame in frames]
        return short_form(input_ids, media), pictures


def png(frame: np.ndarray, *, comment: str) -> bytes:
    """Returns a frame, uint8 ``[height, width, 3]``, as a PNG with a text chunk (W3C PNG, third edition)."""
    height, width, _ = frame.shape
    rows = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # each row begins with filter type 0: none
    rows[:, 1:] = frame.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits per colour, RGB, not interlaced
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, data)
        for kind, data in (
            (b"IHDR", header),
            (b"tEXt", b"Comment\0" + comment.encode("latin-1")),
            (b"IDAT", zlib.compress(rows.tobytes(), _COMPRESSION)),
            (b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
