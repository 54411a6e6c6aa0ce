"""Answers POST /generate with one JSON reply, SGLang's server-sent events, or compact frames for Relax's client."""

from __future__ import annotations

import asyncio
import base64
import time
from functools import partial
from typing import Any

import msgspec
import numpy as np

from relax_core.contracts.media import MediaGone
from relax_core.engines import asgi_server as asgi
from relax_core.engines.asgi_server import HttpError, Receive, Scope, Send
from relax_core.engines.embedded.decoder import ScoreItem, Scores
from relax_core.engines.embedded.generate_body import (
    MAX_KEPT,
    MAX_SAMPLES,
    RequestLimits,
    RequestMedia,
    ScoreRequest,
    asks_for_scores,
    parse_body,
    parse_generate,
    parse_score,
)
from relax_core.engines.embedded.model_config import ModelConfig
from relax_core.engines.embedded.prefill import like_lengths
from relax_core.engines.embedded.scheduler import NOTHING_ATTESTED, Call, Progress, Scheduler
from relax_core.engines.embedded.token_sampler import NonFiniteLogits
from relax_core.engines.protocol.generate_messages import (
    EVENT_STREAM,
    FLOAT32,
    INT32,
    MSGPACK,
    Experts,
    Finished,
    Frame,
    Grown,
    StreamEnd,
    StreamFailure,
    encode_frames,
)
from relax_core.engines.protocol.stop_strings import StopTable


def finished(news: Progress, sent: set[int]) -> Finished:
    """Returns the compact frame of a finished sample.

    The experts of a prompt are sent once, with the first sample that has experts. ``sent`` has the indices of the
    prompts with sent experts; the function adds the sample's prompt.
    """
    assert news.finish is not None
    sample = news.sample
    prompt_experts = response_experts = None
    prompt = sample.prompt
    if prompt.routes is not None and prompt.routes.experts is not None and news.routes is not None:
        response_experts = Experts.of(news.routes)
        if prompt.index not in sent:
            sent.add(prompt.index)
            prompt_experts = Experts.of(prompt.routes.experts)
    return Finished(
        rid=sample.prompt.rid,
        prompt=sample.prompt.index,
        sample=sample.index,
        output_ids=np.array(news.ids, dtype=INT32).tobytes(),
        logprobs=np.array(news.logprobs, dtype=FLOAT32).tobytes(),
        weight_versions=news.spans,
        finish_reason=news.finish,
        prompt_experts=prompt_experts,
        response_experts=response_experts,
        kept=news.kept,
        prompt_tokens=len(prompt.token_ids),
        prefill_ms=1e3 * prompt.prefill_s,
        cached_tokens=prompt.cached_tokens,
        queue_ms=1e3 * prompt.queue_s,
    )


def grown(news: Progress) -> Grown:
    """Returns the compact frame with new tokens of an unfinished sample."""
    ids = np.array(news.ids, dtype=INT32)
    return Grown(news.sample.prompt.index, news.sample.index, news.length - len(ids), ids.tobytes())


def stream_end(call: Call) -> StreamEnd:
    """Returns the frame that ends a stream, with the call's times in milliseconds."""
    started = call.first_prefill or call.finished
    return StreamEnd(
        held_ms=1e3 * (started - call.submitted),
        prefill_ms=1e3 * call.prefill_s,
        decode_ms=1e3 * (call.finished - call.first_token) if call.first_token else 0.0,
        tower_passes=call.tower_passes,
        media_feature_bytes=call.media_feature_bytes,
    )


def sglang_reply(news: Progress, *, version: int) -> dict[str, Any]:
    """Returns one response in SGLang's format.

    ``index`` in the reply is the sample's index among all samples of the call, prompt by prompt. In a stream, an event
    has the tokens and log-probs since the sample's last event, but counts and version spans of the whole response.
    """
    sample = news.sample
    prompt = sample.prompt
    spans = news.spans
    meta: dict[str, Any] = {
        "id": prompt.rid,
        "finish_reason": _finish_reason(news),
        "prompt_tokens": len(prompt.token_ids),
        "completion_tokens": news.length,
        "cached_tokens": prompt.cached_tokens,
        "weight_version": str(spans[-1].version if spans else version),
        "weight_versions": [{"version": str(span.version), "start": span.start, "end": span.end} for span in spans],
        "e2e_latency": time.perf_counter() - prompt.call.submitted,
    }
    if prompt.call.return_logprob:
        meta["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(news.logprobs, news.ids, strict=True)
        ]
    if news.kept is not None:
        meta["output_token_sampling_mask"] = news.kept.lists()
        meta["output_token_sampling_logprobs"] = news.logprobs
    if prompt.routes is not None and prompt.routes.experts is not None and news.routes is not None:
        experts = np.concatenate([prompt.routes.experts, news.routes]).astype("<i4")
        meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
    return {"text": "", "output_ids": news.ids, "meta_info": meta, "index": prompt.index * prompt.call.n + sample.index}


def score_reply(item: ScoreItem, scores: Scores, *, rid: str, version: int, latency_s: float) -> dict[str, Any]:
    """Returns scores in SGLang's format: an entry for each token from ``item.start`` on, the first without log-prob."""
    scored = item.token_ids[item.start + 1 :]
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(item.token_ids),
        "completion_tokens": 0,
        "cached_tokens": 0,
        "weight_version": str(version),
        "weight_versions": [],
        "e2e_latency": latency_s,
        "output_token_logprobs": [],
        "input_token_logprobs": [
            [None, item.token_ids[item.start], None],
            *([logprob, token, None] for logprob, token in zip(scores.logprobs, scored, strict=True)),
        ],
    }
    if item.top_k:
        meta["input_top_logprobs"] = [
            None,
            *(
                [[logprob, token, None] for logprob, token in zip(values, ids, strict=True)]
                for values, ids in zip(scores.top_logprobs, scores.top_ids, strict=True)
            ),
        ]
    return {"text": "", "output_ids": [], "meta_info": meta}


def _finish_reason(news: Progress) -> dict[str, Any] | None:
    match news.finish:
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": news.matched}
        case "length":
            return {"type": "length", "length": news.length}
        case "abort":
            return {"type": "abort", "message": "Aborted"}


async def answer_scores(request: ScoreRequest, scheduler: Scheduler, receive: Receive, send: Send) -> None:
    """Scores the request's tokens and sends a JSON reply.

    Raises HttpError 409 if the requested weights are not active, and 500 if the weights yield non-finite logits.
    """
    if scheduler.version == NOTHING_ATTESTED or scheduler.version < request.min_version:
        raise HttpError(
            409,
            f"min_version {request.min_version}: weights version {scheduler.version} is in force; requests for scores "
            "do not wait, so send the weights first",
        )
    began = time.perf_counter()
    disconnect = asyncio.create_task(_disconnected(receive))
    replies: list[dict[str, Any]] = [{}] * len(request.items)
    try:
        for batch in like_lengths([len(item.token_ids) for item in request.items]):
            if disconnect.done():
                return
            items = [request.items[index] for index in batch]
            version, scores = await asyncio.wrap_future(scheduler.score(items))
            for index, item, score in zip(batch, items, scores, strict=True):
                latency_s = time.perf_counter() - began
                rid = request.rids[index]
                replies[index] = score_reply(item, score, rid=rid, version=version, latency_s=latency_s)
    except MediaGone as error:
        raise HttpError(500, str(error)) from error
    except NonFiniteLogits as error:
        raise HttpError(500, f"weight version {scheduler.version}: {error}") from error
    finally:
        disconnect.cancel()
    await asgi.answer(send, replies[0] if request.single else replies)


async def _disconnected(receive: Receive) -> None:
    """Waits until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


MAX_BODY_BYTES = 64 << 20
QUICK_BYTES = 1 << 18  # larger bodies are parsed in a thread
MAX_OPEN_SAMPLES = 4 * MAX_SAMPLES  # maximum running and waiting samples of all requests


class Failure(msgspec.Struct):
    """Reports that the call has failed; ``message`` is sent to the client."""

    message: str


News = list[Progress] | Failure | None  # None: the client has disconnected


class GenerateRoute:
    """Handles /generate. If a client disconnects, its samples are aborted."""

    def __init__(
        self, scheduler: Scheduler, model: ModelConfig, limits: RequestLimits, stops: StopTable, media: RequestMedia
    ) -> None:
        self._media = media
        self._scheduler = scheduler
        self._stops = stops
        self._model = model
        self._limits = limits
        self._open_samples = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Raises HttpError for an invalid body."""
        compact = MSGPACK.encode() in asgi.headers(scope).get(b"accept", b"")
        body = await asgi.read_body(scope, receive, limit=MAX_BODY_BYTES)
        parse = partial(self._parse, body)
        request = parse() if len(body) <= QUICK_BYTES else await asyncio.to_thread(parse)
        if isinstance(request, ScoreRequest):
            await answer_scores(request, self._scheduler, receive, send)
            return
        if not (request.stream and compact):
            _check_kept_lists(request, vocab_size=self._model.vocab_size)
        samples = request.samples
        if self._open_samples + samples > MAX_OPEN_SAMPLES:
            raise HttpError(503, f"/generate: {self._open_samples} samples run or wait; retry when some have ended")
        self._open_samples += samples
        try:
            await self._generate(request, receive, send, compact=compact)
        finally:
            self._open_samples -= samples

    def _parse(self, body: bytes) -> Call | ScoreRequest:
        parsed = parse_body(body, model=self._model, media=self._media)
        if asks_for_scores(parsed):
            return parse_score(parsed, model=self._model, limits=self._limits)
        return parse_generate(parsed, model=self._model, limits=self._limits, stops=self._stops)

    async def _generate(self, call: Call, receive: Receive, send: Send, *, compact: bool) -> None:
        inbox: asyncio.Queue[News] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def sink(news: list[Progress]) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, news)

        def fail(message: str) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, Failure(message))

        self._scheduler.submit(call.submit(sink, fail, whole_at_end=compact))
        watcher = asyncio.create_task(_report_disconnect(receive, inbox))
        try:
            if not call.stream:
                await self._whole(call, inbox, send)
            elif compact:
                await self._frames(call, inbox, send)
            else:
                await self._events(call, inbox, send)
        finally:
            watcher.cancel()
            if call.open_samples:
                self._scheduler.post(lambda: self._scheduler.abort(lambda sample: sample.prompt.call is call))

    async def _whole(self, call: Call, inbox: asyncio.Queue[News], send: Send) -> None:
        """Sends one JSON reply when all samples are finished."""
        replies: list[dict[str, Any]] = []
        expected = call.samples
        while len(replies) < expected:
            news = await inbox.get()
            if news is None:
                return
            if isinstance(news, Failure):
                call.open_samples = 0
                raise HttpError(500, news.message)
            replies += [self._reply(progress) for progress in news]
        replies.sort(key=lambda reply: reply["index"])
        for reply in replies:
            del reply["index"]
        alone = call.single and call.n == 1
        await asgi.answer(send, replies[0] if alone else replies)

    def _reply(self, news: Progress) -> dict[str, Any]:
        return sglang_reply(news, version=self._scheduler.version)

    async def _frames(self, call: Call, inbox: asyncio.Queue[News], send: Send) -> None:
        """Sends one frame for each report. The frames of one decode step share one write."""
        await asgi.start_response(send, status=200, content_type=MSGPACK.encode())
        left, more = call.samples, True
        sent: set[int] = set()  # indices of the prompts with sent experts
        while more:
            news = await inbox.get()
            if news is None:
                return
            frames: list[Frame]
            if isinstance(news, Failure):
                call.open_samples, more = 0, False
                frames = [StreamFailure(news.message)]
            else:
                frames = [
                    finished(progress, sent) if progress.finish is not None else grown(progress) for progress in news
                ]
                left -= sum(progress.finish is not None for progress in news)
                if left == 0:
                    more = False
                    frames.append(stream_end(call))
            await send({"type": "http.response.body", "body": encode_frames(frames), "more_body": more})

    async def _events(self, call: Call, inbox: asyncio.Queue[News], send: Send) -> None:
        """Sends SGLang's server-sent events. An event has the tokens since the sample's last event."""
        await asgi.start_response(send, status=200, content_type=EVENT_STREAM.encode())
        left = call.samples
        while left:
            news = await inbox.get()
            if news is None:
                return
            if isinstance(news, Failure):
                call.open_samples = left = 0
                events = [asgi.error_payload(500, news.message)]
            else:
                events = [self._reply(progress) for progress in news]
                left -= sum(progress.finish is not None for progress in news)
            body = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _check_kept_lists(request: Call, *, vocab_size: int) -> None:
    """Raises HttpError 400 if a JSON reply could list too many ids of kept tokens."""
    most = 0
    for prompt in request.prompts:
        settings = prompt.settings
        if settings.reports_kept:
            width = min(settings.top_k, vocab_size) if settings.top_k > 0 else vocab_size
            most += len(prompt.samples) * settings.max_new_tokens * width
    if most > MAX_KEPT:
        raise HttpError(
            400,
            f"return_sampling_mask=true: up to {most} kept tokens, at most {MAX_KEPT} are returned; give a smaller "
            "top_k or max_new_tokens, or send fewer prompts",
        )


async def _report_disconnect(receive: Receive, inbox: asyncio.Queue[News]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    inbox.put_nowait(None)
