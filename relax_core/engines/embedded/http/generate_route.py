"""POST /generate: from a body to a call, and its news back as one reply, server-sent events or compact frames."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec

from relax_core.engines.embedded.http import asgi
from relax_core.engines.embedded.http.asgi import HttpError, Receive, Scope, Send
from relax_core.engines.embedded.http.generate_body import GenerateRequest, RequestLimits, parse_body, parse_generate
from relax_core.engines.embedded.http.replies import finished, sglang_reply, stream_end
from relax_core.engines.embedded.http.request_bounds import MAX_KEPT, MAX_SAMPLES
from relax_core.engines.embedded.http.score_body import ScoreRequest, asks_for_scores, parse_score
from relax_core.engines.embedded.http.score_route import answer_scores
from relax_core.engines.embedded.model.model_config import ModelConfig
from relax_core.engines.embedded.scheduler.calls import Call, Progress, Prompt, waiting_prompts
from relax_core.engines.embedded.scheduler.routing_log import PromptRoutes
from relax_core.engines.embedded.scheduler.scheduler import Scheduler
from relax_core.engines.protocol.frames import EVENT_STREAM, MSGPACK, Frame, StreamFailure, encode_frames
from relax_core.engines.protocol.stop_strings import StopStrings, StopTable

MAX_BODY_BYTES = {"json": 64 << 20, "msgpack": 8 << 20}  # lists of msgpack take 50 times their bytes when they are read
QUICK_BYTES = 1 << 18  # a body of so many is read in no time; a larger one beside the event loop
MAX_OPEN_SAMPLES = 4 * MAX_SAMPLES  # that run or wait


class Failure(msgspec.Struct):
    """The call is over; in the engine's words."""

    message: str


News = list[Progress] | Failure | None  # None: the client hung up


class GenerateRoute:
    """Answers /generate. A client that hangs up has its samples aborted."""

    def __init__(self, scheduler: Scheduler, model: ModelConfig, limits: RequestLimits, stops: StopTable) -> None:
        self._scheduler = scheduler
        self._stops = stops
        self._model = model
        self._limits = limits
        self._open_samples = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = asgi.headers(scope)
        accepted, packed = MSGPACK.encode() in fields.get(b"accept", b""), _is_msgpack(fields)
        body = await asgi.read_body(scope, receive, limit=MAX_BODY_BYTES["msgpack" if packed else "json"])
        parse = partial(self._parse, body, msgpack=packed)
        request = parse() if len(body) <= QUICK_BYTES else await asyncio.to_thread(parse)
        whole_msgpack = accepted or (packed and not fields.get(b"accept"))
        if isinstance(request, ScoreRequest):
            await answer_scores(request, self._scheduler, receive, send, msgpack=whole_msgpack)
            return
        if not (request.stream and accepted):
            _check_kept_lists(request, vocab_size=self._model.vocab_size)
        samples = _samples_of(request)
        if self._open_samples + samples > MAX_OPEN_SAMPLES:
            raise HttpError(503, f"/generate: {self._open_samples} samples run or wait; ask again when some have ended")
        self._open_samples += samples
        try:
            await self._generate(request, receive, send, compact=accepted, whole_msgpack=whole_msgpack)
        finally:
            self._open_samples -= samples

    def _parse(self, body: bytes, *, msgpack: bool) -> GenerateRequest | ScoreRequest:
        parsed = parse_body(body, msgpack=msgpack, model=self._model)
        if asks_for_scores(parsed):
            return parse_score(parsed, model=self._model, limits=self._limits)
        return parse_generate(parsed, model=self._model, limits=self._limits)

    async def _generate(
        self, request: GenerateRequest, receive: Receive, send: Send, *, compact: bool, whole_msgpack: bool
    ) -> None:
        inbox: asyncio.Queue[News] = asyncio.Queue()
        call = self._submit(request, inbox, compact=compact)
        watcher = asyncio.create_task(_watch(receive, inbox))
        try:
            if not request.stream:
                await self._whole(request, call, inbox, send, msgpack=whole_msgpack)
            elif compact:
                await self._frames(request, call, inbox, send)
            else:
                await self._events(request, call, inbox, send)
        finally:
            watcher.cancel()
            if call.open_samples:
                self._scheduler.post(lambda: self._scheduler.abort(lambda sample: sample.prompt.call is call))

    def _submit(self, request: GenerateRequest, inbox: asyncio.Queue[News], *, compact: bool) -> Call:
        loop = asyncio.get_running_loop()

        def sink(news: list[Progress]) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, news)

        def fail(message: str) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, Failure(message))

        growing = request.stream and not compact
        call = Call(sink, fail, stream_interval=request.stream_interval if growing else 0)
        prompts = [
            Prompt(
                call,
                place,
                one.rid,
                one.token_ids,
                one.settings,
                one.sampling_seed,
                one.min_version,
                routes=PromptRoutes() if request.return_routed_experts else None,
                samples=one.samples,
                generated=one.generated,
                stop=self._stop_strings(one.stop),
            )
            for place, one in enumerate(request.prompts)
        ]
        self._scheduler.submit(waiting_prompts(prompts, n=request.n))
        return call

    def _stop_strings(self, stop: tuple[str, ...]) -> StopStrings | None:
        try:
            return self._stops.of(stop)
        except ValueError as error:
            raise HttpError(400, f"sampling_params.stop: {error}") from error

    async def _whole(
        self, request: GenerateRequest, call: Call, inbox: asyncio.Queue[News], send: Send, *, msgpack: bool
    ) -> None:
        replies: list[dict[str, Any]] = []
        expected = _samples_of(request)
        while len(replies) < expected:
            news = await inbox.get()
            if news is None:
                return
            if isinstance(news, Failure):
                call.open_samples = 0
                raise HttpError(500, news.message)
            replies += [self._reply(request, one) for one in news]
        replies.sort(key=lambda reply: reply["index"])
        for reply in replies:
            del reply["index"]
        alone = request.single and request.n == 1
        await asgi.answer(send, replies[0] if alone else replies, msgpack=msgpack)

    def _reply(self, request: GenerateRequest, news: Progress) -> dict[str, Any]:
        version = self._scheduler.version
        return sglang_reply(news, n=request.n, version=version, return_logprob=request.return_logprob)

    async def _frames(self, request: GenerateRequest, call: Call, inbox: asyncio.Queue[News], send: Send) -> None:
        """Compact frames, one write for what a decode step finished."""
        await asgi.start_response(send, status=200, content_type=MSGPACK.encode())
        left, more = _samples_of(request), True
        told: set[int] = set()  # prompts whose experts are on their way
        while more:
            news = await inbox.get()
            if news is None:
                return
            frames: list[Frame]
            if isinstance(news, Failure):
                call.open_samples, more = 0, False
                frames = [StreamFailure(news.message)]
            else:
                frames = [finished(one, told) for one in news]
                left -= len(news)
                if left == 0:
                    more = False
                    frames.append(stream_end(call))
            await send({"type": "http.response.body", "body": encode_frames(frames), "more_body": more})

    async def _events(self, request: GenerateRequest, call: Call, inbox: asyncio.Queue[News], send: Send) -> None:
        """SGLang's server-sent events, incremental."""
        await asgi.start_response(send, status=200, content_type=EVENT_STREAM.encode())
        left = _samples_of(request)
        while left:
            news = await inbox.get()
            if news is None:
                return
            if isinstance(news, Failure):
                call.open_samples = left = 0
                events = [asgi.error_payload(500, news.message)]
            else:
                events = [self._reply(request, one) for one in news]
                left -= sum(one.finish is not None for one in news)
            body = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _is_msgpack(fields: dict[bytes, bytes]) -> bool:
    return fields.get(b"content-type", b"").startswith(MSGPACK.encode())


def _samples_of(request: GenerateRequest) -> int:
    return sum(len(prompt.samples) for prompt in request.prompts)


def _check_kept_lists(request: GenerateRequest, *, vocab_size: int) -> None:
    """Raises HttpError 400 where a reply, which lists the ids of kept sets, would have too many of them."""
    most = 0
    for prompt in request.prompts:
        settings = prompt.settings
        if settings.tells_kept:
            width = min(settings.top_k, vocab_size) if settings.top_k > 0 else vocab_size
            most += len(prompt.samples) * settings.max_new_tokens * width
    if most > MAX_KEPT:
        raise HttpError(
            400,
            f"return_sampling_mask=true: up to {most} kept tokens, at most {MAX_KEPT} are told; give a smaller top_k "
            "or max_new_tokens, or send fewer prompts",
        )


async def _watch(receive: Receive, inbox: asyncio.Queue[News]) -> None:
    """Reports a client that hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    inbox.put_nowait(None)
