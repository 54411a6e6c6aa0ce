"""The client of an SGLang server: what SGLang does differently from the embedded engine stands here and beside it."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import numpy as np

from relax_core.contracts.engine import (
    EngineError,
    EngineUnreachable,
    FinishReason,
    Generated,
    PromptRequest,
    SamplingParams,
)
from relax_core.engines.pool.open_prompts import cut
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.engines.protocol.frames import StreamEnd
from relax_core.engines.protocol.score_calls import TokenScores, TokensToScore
from relax_core.engines.protocol.server_sent_events import UNKNOWN_VERSION, EventReader, version_number
from relax_core.engines.protocol.stop_strings import StopTable
from relax_core.engines.protocol.version_spans import VersionSpan
from relax_core.engines.protocol.vocabulary import unknown_token
from relax_core.engines.sglang.client.prompt_requests import SampleRequest, sample_requests, sglang_body
from relax_core.engines.sglang.client.sglang_weight_calls import SglangWeightCalls

NOT_OPEN = "no weight-update session is open"  # SGLang's words
FIRST_LOOK_S, LAST_LOOK_S = 0.002, 0.05  # between two looks at a server's weight version, while prompts wait for it


class _Info(msgspec.Struct):
    weight_version: str


_info_decoder = msgspec.json.Decoder(_Info)


@dataclass(eq=False)
class _Held:
    """Prompts of one call that wait for weights, and what is on its way of them after that."""

    prompts: dict[int, PromptRequest]  # place in the caller's prompt batch → prompt
    version: int = UNKNOWN_VERSION  # of the server when they were sent
    aborted: set[str] = field(default_factory=set)
    sent: list[SampleRequest] = field(default_factory=list)


class SglangClient(SglangWeightCalls, EngineClient):
    """SGLang holds no prompts for a weight version: this client does, and only then sends them. Its limits are refused
    in words where the configuration is checked (config/checks/sglang_keys.py).

    ``ranks``: GPUs of the server. ``vocab_size``: of its model; any other token would end it. ``seeds``: it runs with
    --enable-deterministic-inference; else seeds mean nothing to it. ``attached``: somebody else started it, so our
    loader is not inside. ``stops``: by the model's tokenizer, for requests with stop strings.
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
    ) -> None:
        super().__init__(url, token, request_timeout_s=request_timeout_s, control_timeout_s=control_timeout_s)
        self.group_ranks = ranks
        self.has_loader = not attached
        self._vocab_size = vocab_size
        self._seeds = seeds
        self._stops = stops
        self._calls: list[_Held] = []

    # -- generate -----------------------------------------------------------------------------------------------------
    async def generate(
        self,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        *,
        on_end: Callable[[StreamEnd], None] | None = None,
    ) -> AsyncIterator[Generated]:
        """As `EngineClient.generate`; SGLang tells no times of its own."""
        for place, prompt in enumerate(prompts):
            self._check(place, prompt.input_ids, rid=prompt.rid)
        waves: dict[int, dict[int, PromptRequest]] = defaultdict(dict)
        for place, prompt in enumerate(prompts):
            waves[prompt.min_version][place] = prompt
        if len(waves) == 1:
            (version,) = waves
            async for one in self._generate_from(version, waves[version], params):
                yield one
            return
        queue: asyncio.Queue[Generated | Exception | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._into(queue, version, wave, params)) for version, wave in waves.items()]
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
    ) -> None:
        try:
            async for one in self._generate_from(version, wave, params):
                queue.put_nowait(one)
            queue.put_nowait(None)
        except Exception as error:  # whatever it is, its consumer waits for it and raises it
            queue.put_nowait(error)

    async def _generate_from(
        self, version: int, prompts: dict[int, PromptRequest], params: SamplingParams
    ) -> AsyncIterator[Generated]:
        """Holds the prompts until the server has weights ``version``, then asks for all of them at one time. A sample
        whose prompt was partly read from the cache of older weights is asked for again: its log-probs are nobody's."""
        call = _Held(prompts)
        self._calls.append(call)
        try:
            while call.prompts:
                async for one in self._hold(call, version, params):
                    yield one
                again: dict[int, list[int]] = defaultdict(list)
                async for one, mixed in self._ask(call, params):
                    if not mixed:
                        yield one
                    elif call.prompts[one.prompt].rid in call.aborted:
                        yield _never_sent(call.prompts[one.prompt], one.prompt, one.sample)
                    else:
                        again[one.prompt].append(one.sample)
                call.prompts = {
                    place: msgspec.structs.replace(call.prompts[place], samples=samples)
                    for place, samples in again.items()
                }
        finally:
            self._calls.remove(call)

    async def _ask(self, call: _Held, params: SamplingParams) -> AsyncIterator[tuple[Generated, bool]]:
        """One request for everything in the call; with each response, whether other weights made its prompt's cache."""
        if not call.prompts:
            return
        places, chosen = list(call.prompts), list(call.prompts.values())
        call.sent = sample_requests(chosen, n=params.n)
        body = sglang_body(chosen, call.sent, params, version=call.version, seeds=self._seeds)
        reader = EventReader(
            chosen,
            samples=[(one.prompt, one.sample) for one in call.sent],
            vocab_size=self._vocab_size if params.return_kept_tokens else None,
        )
        async for one in self._streamed(
            body, params, lambda response: self._events(response, reader), expected=len(call.sent)
        ):
            prefill = reader.prefills.pop((one.prompt, one.sample), None)
            mixed = False
            if prefill is not None and one.output_ids.size:
                cached, first = prefill
                mixed = prefilled_by_older(first, call.version, cached=cached)
            reason = finish_reason(one, params, generated=chosen[one.prompt].generated)
            whole = msgspec.structs.replace(one, prompt=places[one.prompt], finish_reason=reason)
            yield self._stopped(whole, chosen[one.prompt], params), mixed

    async def _events(self, response: aiohttp.ClientResponse, reader: EventReader) -> AsyncIterator[Generated]:
        """Reads SGLang's server-sent events and yields the responses that they finish."""
        async for data in response.content.iter_any():
            try:
                events = list(reader.feed(data))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise EngineError(f"engine {self.url} /generate: an event that cannot be read: {error}") from error
            for event in events:
                if isinstance(event, str):
                    raise EngineError(f"engine {self.url} /generate: {event}")
                yield event

    def _stopped(self, one: Generated, prompt: PromptRequest, params: SamplingParams) -> Generated:
        """Ends the response with the token that completes a stop string. SGLang looks at the tokens of one request
        alone, and says abort of a response that an abort met when it was complete."""
        if not params.stop or not one.output_ids.size:
            return one
        assert self._stops is not None, "build_client gives it"
        stop = self._stops.of(params.stop)
        assert stop is not None
        before = prompt.input_ids[len(prompt.input_ids) - prompt.generated :] if prompt.generated else []
        end = stop.end(before + one.output_ids.tolist(), checked=len(before))
        if end is None:
            return one
        return msgspec.structs.replace(cut(one, end - len(before)), finish_reason="stop")

    async def _hold(self, call: _Held, version: int, params: SamplingParams) -> AsyncIterator[Generated]:
        """Returns when the version is in; yields what was aborted before."""
        wait_s, deadline = FIRST_LOOK_S, time.monotonic() + self._request_timeout_s
        call.sent = []
        while (found := await self._weight_version()) < max(version, 0):
            if time.monotonic() > deadline:
                raise EngineUnreachable(
                    f"engine {self.url}: weights {found} are still in force after {self._request_timeout_s:.0f} s; "
                    f"prompts wait for {version}"
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LAST_LOOK_S)
            for one in _taken_out(call, params):
                yield one
            if not call.prompts:
                return
        for one in _taken_out(call, params):  # an abort that came with the version
            yield one
        call.version = found

    async def _weight_version(self) -> int:
        try:
            async with self._http_session().get(f"{self.url}/model_info") as response:
                if response.status != 200:
                    raise self._refusal("/model_info", response.status, await response.read())
                return version_number(_info_decoder.decode(await response.read()).weight_version)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineError(f"engine {self.url} /model_info: an answer that cannot be read: {error}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnreachable(f"engine {self.url} /model_info: {type(error).__name__}: {error}") from error

    # -- control ------------------------------------------------------------------------------------------------------
    def ready(self) -> bool:
        """True where it would take prompts now. False is an answer too: it is paused, or takes weights."""
        status, data = self._answer("GET", "/ready", None, timeout_s=self._control_timeout_s)
        if status not in (200, 503):
            raise self._refusal("/ready", status, data)
        return status == 200

    def model_info(self) -> dict[str, Any]:
        """``weight_version`` is -1 until weights of ours are in."""
        info = super().model_info()
        return {**info, "weight_version": str(version_number(info["weight_version"]))}

    def loads(self) -> dict[str, Any]:
        """SGLang's own names, and those of the embedded engine for the same."""
        loads = super().loads()
        held = sum(len(call.prompts) for call in list(self._calls) if not call.sent)
        return {**loads, "running": loads["num_running_reqs"], "queued": loads["num_waiting_reqs"], "held": held}

    def abort(self, rid: str | None = None) -> dict[str, Any]:
        """As `EngineClient.abort`. SGLang knows our prompts' samples by names of their own, and this client which."""
        calls = list(self._calls)
        for call in calls:
            # A thread of its own: the event loop changes both meanwhile.
            call.aborted |= {prompt.rid for prompt in list(call.prompts.values()) if rid in (None, prompt.rid)}
        if rid is None:
            return super().abort()
        known = [one.rid for call in calls for one in list(call.sent) if one.rid.rsplit("/", 2)[0] == rid]
        for name in known or [rid]:
            super().abort(name)
        return {"aborted_samples": len(known)}

    def release_memory(self) -> dict[str, Any]:
        """Running samples wait in the queue meanwhile; SGLang wants to be idle for it. On GPUs its server needs
        --enable-memory-saver, or nothing is given up."""
        self.pause("retract")
        self._memory_released = True
        return self._call("POST", "/release_memory_occupation", {"tags": ["kv_cache"]})

    def resume_memory(self) -> dict[str, Any]:
        self._call("POST", "/resume_memory_occupation", {"tags": ["kv_cache"]})
        self._memory_released = False
        return self.resume()

    def forget_weights(self) -> None:
        """Of a server that another run has used: its version says nothing about ours, nor does its cache. Ends what it
        still does, and a pause and a session that were left behind."""
        self._give_up()
        try:
            self._call("POST", "/end_weight_update", {})
        except EngineError as error:
            if NOT_OPEN not in str(error):
                raise
        self.resume()
        wait_s = self._control_timeout_s / 2  # for the end of what was aborted; SGLang flushes only when it is idle
        status, data = self._answer("POST", f"/flush_cache?timeout={wait_s:g}", None, timeout_s=self._control_timeout_s)
        if status != 200:  # its answer is no JSON
            raise self._refusal("/flush_cache", status, data)

    def score(
        self, rows: Sequence[TokensToScore], *, top_k: int, temperature: float, banned_token_ids: Sequence[int] = ()
    ) -> list[TokenScores]:
        if banned_token_ids or any(row.kept is not None for row in rows):
            raise EngineError(
                f"engine {self.url} /generate: scores without banned tokens, or over kept sets: SGLang scores over the "
                "whole vocabulary only. Use algo.served_by=forward."
            )
        if temperature != 1.0:
            raise EngineError(
                f"engine {self.url} /generate: scores at temperature {temperature:g}: SGLang scores at 1 only. "
                "Use rollout.temperature=1, or algo.served_by=forward."
            )
        for place, row in enumerate(rows):
            self._check(place, row.input_ids, rid=None)
        return super().score(rows, top_k=top_k, temperature=temperature)

    def _check(self, place: int, token_ids: Sequence[int], *, rid: str | None) -> None:
        problem = unknown_token(place, token_ids, rid=rid, vocab_size=self._vocab_size)
        if problem is not None:
            raise EngineError(f"engine {self.url} /generate: {problem}")


def prefilled_by_older(first: VersionSpan, sent_under: int, *, cached: int) -> bool:
    """Whether older weights than those of its first token computed a part of the prompt: what was cached when the
    weights that it was sent under were in force, or what was prefilled when they ended (scheduler_changes.py)."""
    return first.end == 0 or (cached > 0 and first.version > sent_under)


def finish_reason(one: Generated, params: SamplingParams, *, generated: int) -> FinishReason:
    """What really ended it. After an abort SGLang makes one more token and still says abort: where that one was a stop
    token, or the last that was allowed, the response is finished and must not go on. ``generated``: tokens that the
    response had before this request."""
    if one.finish_reason == "abort" and one.output_ids.size:
        if int(one.output_ids[-1]) in params.stop_token_ids:
            return "stop"
        if generated + len(one.output_ids) >= params.max_new_tokens:
            return "length"
    return one.finish_reason


def _taken_out(call: _Held, params: SamplingParams) -> Iterator[Generated]:
    """Empty responses for the prompts that were aborted before they were sent."""
    for place in [place for place, prompt in call.prompts.items() if prompt.rid in call.aborted]:
        prompt = call.prompts.pop(place)
        for sample in range(params.n) if prompt.samples is None else prompt.samples:
            yield _never_sent(prompt, place, sample)


def _never_sent(prompt: PromptRequest, place: int, sample: int) -> Generated:
    return Generated(
        rid=prompt.rid,
        prompt=place,
        sample=sample,
        output_ids=np.empty(0, dtype=np.int32),
        logprobs=np.empty(0, dtype=np.float32),
        versions=np.empty(0, dtype=np.int32),
        finish_reason="abort",
    )
