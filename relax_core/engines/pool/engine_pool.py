"""Several engines behind one face: which prompt goes where, and what happens when one dies or samples are aborted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from relax_core.contracts.engine import EngineError, EngineUnreachable, Generated, PromptRequest, SamplingParams
from relax_core.engines.pool.engine_watch import LOOK_S, ClientFor, EngineWatch
from relax_core.engines.pool.fan_out import FanOut, fan_out
from relax_core.engines.pool.open_prompts import OpenPrompt
from relax_core.engines.pool.prompt_routing import Router
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.engines.protocol.frames import StreamEnd

OnEnd = Callable[[StreamEnd], None]
FRUITLESS_ASKS = 5  # in a row of one sample: an engine that aborts it unasked without a token will not do better
log = logging.getLogger(__name__)


def engine_name(engine: int) -> str:
    return f"engine-{engine}"


@dataclass(slots=True, eq=False, kw_only=True)
class _PromptBatch:
    """One `generate`. ``events``: prompts that are complete, None for one that was given up, or the error that nobody
    here can mend. ``again``: prompts whose samples have all come back, some of them aborted. ``silent_since``: engine →
    when it was first lost without a response since."""

    params: SamplingParams
    on_end: OnEnd | None
    left: int
    events: asyncio.Queue[OpenPrompt | Exception | None] = field(default_factory=asyncio.Queue)
    again: list[OpenPrompt] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    silent_since: dict[int, float] = field(default_factory=dict)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guarded(work))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # crosses to the consumer, who raises it
            self.events.put_nowait(error)


@dataclass(slots=True, eq=False, kw_only=True)
class _Ask:
    """One request under way at one engine, in ``task``. ``tickets``: see `OpenPrompt.ask`."""

    prompt_batch: _PromptBatch
    tickets: dict[OpenPrompt, int]
    task: asyncio.Task[None]


class EnginePool:
    """``client_for(engine, on_policy)`` gives the engine's client and may wait for an engine that is starting; after a
    failure it is asked for a fresh address. ``patience_s``: how long nobody at all may answer. ``silent_s``: one of
    several engines that gives no sign of life for so long gets nothing until it does, and what it owes is asked of the
    others. ``by_load``: see `Router`; ``max_lag``, ``lag_s``: see `EngineWatch`.

    All methods belong to one event loop. Where a prompt goes never changes its tokens, only who shares its batch.
    """

    def __init__(
        self,
        count: int,
        client_for: ClientFor,
        *,
        patience_s: float,
        silent_s: float = 60.0,
        by_load: bool = True,
        max_lag: int = 1,
        lag_s: float = 60.0,
    ) -> None:
        self._count = count
        self._client_for = client_for
        self._patience_s = patience_s
        self._silent_s = silent_s
        self._look_s = min(LOOK_S, silent_s / 4)
        self._router = Router(count, by_load=by_load)
        self._watch = EngineWatch(
            count, client_for, patience_s=patience_s, silent_s=silent_s, max_lag=max_lag, lag_s=lag_s
        )
        self._open: dict[str, tuple[OpenPrompt, _PromptBatch]] = {}  # by rid
        self._asks: dict[int, set[_Ask]] = defaultdict(set)  # by engine
        self._named: set[int] = set()  # stragglers that were named

    async def generate(
        self,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        *,
        places: Sequence[int],
        on_end: OnEnd | None = None,
    ) -> AsyncIterator[tuple[int, list[Generated]]]:
        """Yields (prompt, its ``params.n`` responses) as soon as all of them are in, in order of completion; a prompt
        that `cancel` gave up is left out.

        ``places[i]`` chooses among engines that are equally loaded. When an engine dies, the samples that it owed are
        asked of another, or of itself when it is back; finished ones are kept. A sample that comes back aborted goes on
        from its prefix. ``on_end`` gets each engine's own times.
        """
        prompt_batch = _PromptBatch(params=params, on_end=on_end, left=len(prompts))
        opened = [
            OpenPrompt(
                place=place,
                tie=tie,
                request=request,
                n=params.n,
                cost=params.max_new_tokens + len(request.input_ids) / params.n,
            )
            for place, (request, tie) in enumerate(zip(prompts, places, strict=True))
        ]
        self._open |= {prompt.request.rid: (prompt, prompt_batch) for prompt in opened}
        try:
            if self._count > 1:
                prompt_batch.start(self._keep_looking())
            self._send(prompt_batch, opened)
            while prompt_batch.left:
                event = await prompt_batch.events.get()
                if isinstance(event, Exception):
                    raise event
                prompt_batch.left -= 1
                if event is not None:
                    yield event.place, event.responses()
        finally:
            for task in prompt_batch.tasks:
                task.cancel()
            for prompt in opened:
                self._close(prompt)

    def _close(self, prompt: OpenPrompt) -> None:
        """Nothing more is expected of it."""
        prompt.closed = True
        self._open.pop(prompt.request.rid, None)
        self._lose(prompt)

    # -- asking -------------------------------------------------------------------------------------------------------
    def _send(self, prompt_batch: _PromptBatch, prompts: Sequence[OpenPrompt]) -> None:
        """Chooses an engine for each prompt and asks; one request an engine."""
        usable = self._watch.usable()
        if not usable:
            prompt_batch.start(self._send_when_usable(prompt_batch, prompts))
            return
        still_open = [prompt for prompt in prompts if not prompt.closed]
        chosen = self._router.choose(still_open, usable=usable)
        shares: dict[int, list[OpenPrompt]] = {}
        for engine, prompt in zip(chosen, still_open, strict=True):
            shares.setdefault(engine, []).append(prompt)
        for engine, share in shares.items():
            prompt_batch.start(self._ask(prompt_batch, engine, share))

    async def _send_when_usable(self, prompt_batch: _PromptBatch, prompts: Sequence[OpenPrompt]) -> None:
        await self._watch.wait_usable()
        self._send(prompt_batch, prompts)

    async def _ask(self, prompt_batch: _PromptBatch, engine: int, prompts: Sequence[OpenPrompt]) -> None:
        """One request to one engine. Whoever does not come out of it finished is asked again."""
        requests: list[PromptRequest] = []
        owners: list[OpenPrompt] = []
        tickets: dict[OpenPrompt, int] = {}
        for prompt in prompts:
            if prompt.closed:  # given up since it was sent
                continue
            asked = prompt.ask(engine)
            requests += asked
            owners += [prompt] * len(asked)
            tickets[prompt] = prompt.ticket
            self._router.asked(engine, prompt.cost * len(prompt.asked))
        if not requests:
            return
        task = asyncio.current_task()
        assert task is not None
        ask = _Ask(prompt_batch=prompt_batch, tickets=tickets, task=task)
        self._asks[engine].add(ask)
        try:
            client = await self._client_for(engine, False)
            async for one in client.generate(requests, prompt_batch.params, on_end=prompt_batch.on_end):
                prompt = owners[one.prompt]
                if prompt.owed_by(tickets[prompt]):
                    self._take(prompt_batch, prompt, msgspec.structs.replace(one, engine=engine_name(engine)), engine)
        except EngineUnreachable as error:
            await self._ask_others(ask, engine, error)
        finally:
            self._asks[engine].discard(ask)

    async def _ask_others(self, ask: _Ask, engine: int, error: EngineUnreachable) -> None:
        """The engine does not answer: what it owes of this request is asked of whoever may be asked now."""
        self._note_lost(ask.prompt_batch, engine, error)
        owed = [prompt for prompt, ticket in ask.tickets.items() if prompt.owed_by(ticket)]
        for prompt in owed:
            self._lose(prompt)
        if owed:
            self._send(ask.prompt_batch, owed)

    def _fell_silent(self, engine: int, error: EngineUnreachable) -> None:
        """Hangs up, so that the engine ends what it was asked when it goes on: late answers are nobody's."""
        self._watch.lost(engine, error)
        for ask in self._asks.pop(engine, set()):
            ask.task.cancel()
            ask.prompt_batch.start(self._ask_others(ask, engine, error))

    def _note_lost(self, prompt_batch: _PromptBatch, engine: int, error: EngineUnreachable) -> None:
        """Raises EngineUnreachable where the engine comes back each time and never gets anywhere, and no other engine
        does better."""
        log.warning("%s is lost, what it owed is asked again: %s", engine_name(engine), error)
        self._watch.lost(engine, error)
        silent_s = time.monotonic() - prompt_batch.silent_since.setdefault(engine, time.monotonic())
        if silent_s > self._patience_s and all(other in prompt_batch.silent_since for other in self._watch.usable()):
            raise EngineUnreachable(
                f"{engine_name(engine)} has answered nothing for {silent_s:.1f} s; last: {error}"
            ) from error

    def _take(self, prompt_batch: _PromptBatch, prompt: OpenPrompt, one: Generated, engine: int) -> None:
        prompt_batch.silent_since.pop(engine, None)
        prompt.take(one)
        self._router.came_back(engine, prompt.cost)
        if one.versions.size:
            self._watch.serves(engine, int(one.versions[-1]))
        if prompt.fruitless.get(one.sample, 0) == FRUITLESS_ASKS:
            raise EngineError(
                f"{engine_name(engine)} aborted sample {one.sample} of prompt {prompt.request.rid}, which came back "
                f"without a new token {FRUITLESS_ASKS} times in a row. Nobody here asked for that: see the engine's log"
            )
        if not prompt.missing:
            self._close(prompt)
            prompt_batch.events.put_nowait(prompt)
        elif not prompt.asked:
            prompt_batch.again.append(prompt)
            if len(prompt_batch.again) == 1:
                prompt_batch.start(self._send_again(prompt_batch))

    async def _send_again(self, prompt_batch: _PromptBatch) -> None:
        await asyncio.sleep(0)  # what came back in one read goes out in one request
        prompts, prompt_batch.again = prompt_batch.again, []
        self._send(prompt_batch, prompts)

    def _lose(self, prompt: OpenPrompt) -> None:
        if prompt.engine is not None:
            self._router.came_back(prompt.engine, prompt.cost * prompt.lose())

    # -- aborting -----------------------------------------------------------------------------------------------------
    async def abort(self, rids: Iterable[str], *, min_version: int) -> None:
        """Aborts what is open of these prompts; their samples go on from their prefixes with weights ``min_version`` or
        newer."""
        chosen = [self._open[rid][0] for rid in rids if rid in self._open]
        for prompt in chosen:
            newest = max(prompt.request.min_version, min_version)
            prompt.request = msgspec.structs.replace(prompt.request, min_version=newest)
            prompt.excused = True
        await self._abort(_by_engine(chosen))

    async def cancel(self, rids: Iterable[str]) -> None:
        """Gives these prompts up: their prompt batches go on without them, and the engines stop working on them."""
        chosen = [self._open[rid] for rid in rids if rid in self._open]
        owed = _by_engine([prompt for prompt, _ in chosen])
        for prompt, prompt_batch in chosen:
            self._close(prompt)
            prompt_batch.events.put_nowait(None)
        await self._abort(owed)

    async def _abort(self, owed: Mapping[int, Sequence[str]]) -> None:
        calls = {}
        for engine, rids in owed.items():
            try:
                client = await self._client_for(engine, False)
            except EngineUnreachable:  # it owes nothing any more; the stream that waits for it hears so too
                continue
            calls[engine_name(engine)] = partial(_abort_each, client, rids)
        aborting = asyncio.ensure_future(asyncio.to_thread(fan_out, calls))
        aborting.add_done_callback(_tell_failures)
        await asyncio.wait([aborting], timeout=self._silent_s)  # a silent engine's call ends beside us
        if aborting.done():
            aborting.result()

    # -- looking ------------------------------------------------------------------------------------------------------
    async def _keep_looking(self) -> None:
        """Of several engines: sees which of them live, their loads and weights; takes from a straggler what it
        holds."""
        while True:
            self._watch.listen(self._fell_silent)
            self._watch.look(self._heard)
            stragglers = set(self._watch.stragglers())
            for engine in stragglers - self._named:
                log.warning("%s", self._watch.lag_words(engine))
                held = [prompt.request.rid for prompt, _ in self._open.values() if prompt.engine == engine]
                await self.abort(held, min_version=0)
            self._named = stragglers
            await asyncio.sleep(self._look_s)

    def _heard(self, engine: int, samples: int) -> None:
        """What the engine has to do beyond what we asked for is others' work, taken to be like ours."""
        opened = [prompt for prompt, _ in self._open.values()]
        if opened:
            ours = sum(len(prompt.asked) for prompt in opened if prompt.engine == engine)
            mean_cost = sum(prompt.cost for prompt in opened) / len(opened)
            self._router.others(engine, max(0, samples - ours) * mean_cost)


def _by_engine(prompts: Iterable[OpenPrompt]) -> dict[int, list[str]]:
    """Engine → rids of what it owes."""
    owed: dict[int, list[str]] = {}
    for prompt in prompts:
        if prompt.engine is not None and prompt.asked:
            owed.setdefault(prompt.engine, []).append(prompt.request.rid)
    return owed


def _tell_failures(aborting: asyncio.Future[FanOut[None]]) -> None:
    if not aborting.cancelled() and aborting.exception() is None and (words := aborting.result().words()):
        log.warning("abort: %s", words)


def _abort_each(client: EngineClient, rids: Sequence[str]) -> None:
    for rid in rids:
        client.abort(rid)
