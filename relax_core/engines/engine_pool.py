"""Distributes prompts over several engines, and requests samples again after an abort or an engine's failure.

**Routing.** All samples of a group go to one engine, which prefills the prompt once. The next turn of an episode goes
to the engine that has cached the previous turns, unless this engine's load exceeds the lightest load by more than the
cost of the turn. The choice of engine does not change tokens, because each sample has its own seed. It may change the
rounding of log-probs, which depends on the other samples in the batch. For reproducible runs, `Router` with ``by_load``
false uses no input that depends on time. It also ignores prefixes that older weights computed: engines have dropped
these prefixes, and a resumed run does not know them.

**Monitoring.** A monitor (`relax_core/contracts/monitor.py`) polls the health, load and weight version of each engine.
It runs while an engine is down, or while several engines exist and prompts are open.

An `OpenPrompt` tracks a prompt in the pool: finished samples, requested samples, and the tokens of partial samples.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from relax_core.contracts.engine import (
    EngineError,
    EngineUnreachable,
    Generated,
    MalformedReply,
    PromptRequest,
    SamplingParams,
)
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.monitor import Check, Monitor, Waiting, not_recorded
from relax_core.engines.engine_states import EngineStates, RequestTimes, fan_out, log_failures
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.engines.protocol.generate_messages import OnTokens, StreamEnd, response_limit
from relax_core.engines.protocol.server_sent_events import read_only

log = logging.getLogger(__name__)


ClientFor = Callable[[int, bool], Awaitable[EngineClient]]
OnEnd = Callable[[StreamEnd], None]
FetchMedia = Callable[[int, EngineClient, Sequence[PromptRequest]], Awaitable[None]]
OnMalformed = Callable[[int, str], Coroutine[Any, Any, None]]
FRUITLESS_ASKS = 5  # the run fails after this many consecutive unrequested aborts of a sample without a new token
PROBE_S = 0.1  # seconds between passes of the monitor, and between probes of a down engine
LOAD_POLL_S = 1.0  # seconds between polls of the engines' loads


def engine_name(engine: int) -> str:
    """Returns the name of an engine by its number."""
    return f"engine-{engine}"


@dataclass(slots=True, eq=False, kw_only=True)
class _PromptBatch:
    """Holds the state of one call of `generate`.

    ``left`` is the number of open prompts. ``events`` gets each complete prompt, None for each cancelled prompt, and an
    exception that ends the call. ``again`` has the prompts to request again, because all requested samples have
    returned and some were aborted. ``silent_since`` maps an engine to the time of its first loss since its last
    response.
    """

    params: SamplingParams
    on_end: OnEnd | None
    on_tokens: OnTokens | None
    left: int
    events: asyncio.Queue[OpenPrompt | Exception | None] = field(default_factory=asyncio.Queue)
    again: list[OpenPrompt] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    silent_since: dict[int, float] = field(default_factory=dict)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs ``work`` as a task of this call. An exception of ``work`` goes to ``events``."""
        task = asyncio.create_task(self._guarded(work))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # `generate` raises it
            self.events.put_nowait(error)


@dataclass(slots=True, eq=False, kw_only=True)
class _Ask:
    """Describes a request in progress at one engine. ``task`` reads the responses. For ``tickets`` see `OpenPrompt`."""

    prompt_batch: _PromptBatch
    tickets: dict[OpenPrompt, int]
    task: asyncio.Task[None]


class EnginePool:
    """Distributes prompts over engines. Starts with engines 0 to ``count`` - 1; `change_engines` replaces them.

    ``client_for(engine, anew)`` returns the client of an engine, and may wait while the engine starts. ``anew`` is True
    after a failure: the function then looks up the engine's address again. ``timeout_s`` is the maximum time without an
    answer from any engine. ``silent_s``: if one of several engines does not answer for this time, its open samples are
    requested from other engines, and it gets no prompts until it answers again. For ``by_load`` see `Router`; for
    ``max_lag`` and ``lag_s`` see `EngineStates`. ``fetch_media(engine, client, requests)`` returns when the engine has
    the media of the requests. It is None if engines always have the media. ``item_work`` returns the work of the
    model's towers for a media item, in tokens. It is None if the model has no towers. ``on_malformed(engine, why)`` is
    called after a reply that violates the protocol, and restarts the engine. ``waiting`` records each wait for
    responses. All methods belong to one event loop. The choice of engine never changes a prompt's tokens.
    """

    def __init__(
        self,
        count: int,
        client_for: ClientFor,
        *,
        timeout_s: float,
        silent_s: float = 60.0,
        by_load: bool = True,
        max_lag: int = 1,
        lag_s: float = 60.0,
        fetch_media: FetchMedia | None = None,
        item_work: Callable[[MediaItem], float] | None = None,
        on_malformed: OnMalformed | None = None,
        waiting: Waiting = not_recorded,
    ) -> None:
        self._waiting = waiting
        self._on_malformed = on_malformed
        self._item_work = item_work or (lambda item: 0.0)
        self._bring_media = fetch_media
        self._client_for = client_for
        self._timeout_s = timeout_s
        self._silent_s = silent_s
        self.request_times = RequestTimes()
        self._router = Router(count, by_load=by_load)
        self._engines = EngineStates(count, max_lag=max_lag, lag_s=lag_s)
        often_s = min(LOAD_POLL_S, silent_s / 4)
        self._monitor = Monitor(
            [
                Check(name="engines that are down", every_s=0.0, look=self._probe_lost),
                Check(name="engines' answers", every_s=often_s, look=self._ping_all),
                Check(name="engines' loads and weights", every_s=LOAD_POLL_S, look=self._poll_loads),
                Check(name="engines with old weights", every_s=often_s, look=self._relieve_stragglers),
            ]
        )
        self._watching: asyncio.Task[None] | None = None  # task that runs the monitor
        self._looks: dict[tuple[str, int], asyncio.Task[None]] = {}  # (kind, engine) → check in progress
        self._open: dict[str, tuple[OpenPrompt, _PromptBatch]] = {}  # by rid
        self._asks: dict[int, set[_Ask]] = defaultdict(set)  # by engine
        self._logged: set[int] = set()  # stragglers that were logged

    async def generate(
        self,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        *,
        places: Sequence[int],
        on_end: OnEnd | None = None,
        on_tokens: OnTokens | None = None,
    ) -> AsyncIterator[tuple[int, list[Generated]]]:
        """Yields (prompt index, its ``params.n`` responses) as soon as all responses to the prompt are finished.

        Cancelled prompts (`cancel`) are left out. ``places[i]`` breaks the tie between equally loaded engines for
        prompt i. If an engine fails, finished samples are kept, and open samples are requested from another engine, or
        from the same engine as soon as it answers again. An aborted sample continues from its prefix. ``on_end`` gets
        the times that each engine reports. ``on_tokens`` gets tokens while they are sampled; the last tokens of a
        response may be missing.
        """
        prompt_batch = _PromptBatch(params=params, on_end=on_end, on_tokens=on_tokens, left=len(prompts))
        opened = [
            OpenPrompt(
                index=index,
                tie=tie,
                request=request,
                n=params.n,
                cost=response_limit(request, params) + prompt_cost(request, self._item_work) / params.n,
            )
            for index, (request, tie) in enumerate(zip(prompts, places, strict=True))
        ]
        self._open |= {prompt.request.rid: (prompt, prompt_batch) for prompt in opened}
        what = f"responses to {len(prompts)} prompts (first {prompts[0].rid})" if prompts else "nothing"
        try:
            self._keep_watch()
            self._send(prompt_batch, opened)
            while prompt_batch.left:
                with self._waiting(what, on="engine"):
                    event = await prompt_batch.events.get()
                if isinstance(event, Exception):
                    raise event
                prompt_batch.left -= 1
                if event is not None:
                    yield event.index, event.responses()
        finally:
            for task in prompt_batch.tasks:
                task.cancel()
            for prompt in opened:
                self._close(prompt)

    def _close(self, prompt: OpenPrompt) -> None:
        """Stops tracking a prompt and its open samples."""
        prompt.closed = True
        self._open.pop(prompt.request.rid, None)
        self._lose(prompt)

    # -- requests -----------------------------------------------------------------------------------------------------
    def _send(self, prompt_batch: _PromptBatch, prompts: Sequence[OpenPrompt]) -> None:
        """Chooses an engine for each prompt, and sends one request to each chosen engine."""
        usable = self._engines.usable()
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
        await self._engines.wait_usable(timeout_s=self._timeout_s)
        self._send(prompt_batch, prompts)

    async def _ask(self, prompt_batch: _PromptBatch, engine: int, prompts: Sequence[OpenPrompt]) -> None:
        """Sends one request to one engine and records its responses. Unfinished samples are requested again."""
        if not self._engines.takes_prompts(engine):  # the engines have changed since this engine was chosen
            self._send(prompt_batch, prompts)
            return
        requests: list[PromptRequest] = []
        owners: list[OpenPrompt] = []
        tickets: dict[OpenPrompt, int] = {}
        for prompt in prompts:
            if prompt.closed:  # cancelled before the request was sent
                continue
            asked = prompt.ask(engine)
            requests += asked
            owners += [prompt] * len(asked)
            tickets[prompt] = prompt.ticket
            self._router.add_load(engine, prompt.cost * len(prompt.asked))
        if not requests:
            return
        task = asyncio.current_task()
        assert task is not None
        ask = _Ask(prompt_batch=prompt_batch, tickets=tickets, task=task)
        self._asks[engine].add(ask)
        try:
            client = await self._client_for(engine, False)
            if self._bring_media is not None:
                await self._bring_media(engine, client, requests)
            told: dict[str, Any] = {}
            if (on_tokens := prompt_batch.on_tokens) is not None:
                told["on_tokens"] = _token_callback(on_tokens, requests, owners, tickets)
            with self.request_times.of(engine_name(engine), samples=sum(len(ticket.asked) for ticket in tickets)):
                async for generated in client.generate(
                    requests, prompt_batch.params, on_end=prompt_batch.on_end, **told
                ):
                    prompt = owners[generated.prompt]
                    if prompt.owed_by(tickets[prompt]):
                        named = msgspec.structs.replace(generated, engine=engine_name(engine))
                        self._take(prompt_batch, prompt, named, engine)
        except EngineUnreachable as error:
            await self._ask_others(ask, engine, error)
        finally:
            self._asks[engine].discard(ask)

    async def _ask_others(self, ask: _Ask, engine: int, error: EngineUnreachable) -> None:
        """Requests the open samples of a request from other engines, because the request's engine does not answer."""
        self._record_loss(ask.prompt_batch, engine, error)
        owed = [prompt for prompt, ticket in ask.tickets.items() if prompt.owed_by(ticket)]
        for prompt in owed:
            self._lose(prompt)
        if owed:
            self._send(ask.prompt_batch, owed)

    def _fell_silent(self, engine: int, error: EngineUnreachable) -> None:
        """Marks the engine as down and moves its samples. The closed connections make the engine abort the samples."""
        self._lose_engine(engine, error)
        for ask in self._asks.pop(engine, set()):
            ask.task.cancel()
            ask.prompt_batch.start(self._ask_others(ask, engine, error))

    def _record_loss(self, prompt_batch: _PromptBatch, engine: int, error: EngineUnreachable) -> None:
        """Records that the engine does not answer.

        Raises EngineUnreachable if the engine and all other usable engines are lost, and if the engine has returned no
        response for ``timeout_s`` seconds since its first loss.
        """
        log.warning("%s does not answer; its open samples are requested again: %s", engine_name(engine), error)
        self._lose_engine(engine, error)
        if isinstance(error, MalformedReply) and self._on_malformed is not None:
            prompt_batch.start(self._on_malformed(engine, str(error)))
        silent_s = time.monotonic() - prompt_batch.silent_since.setdefault(engine, time.monotonic())
        if silent_s > self._timeout_s and all(
            other_engine in prompt_batch.silent_since for other_engine in self._engines.usable()
        ):
            raise EngineUnreachable(
                f"{engine_name(engine)} has answered nothing for {silent_s:.1f} s; last: {error}"
            ) from error

    def _take(self, prompt_batch: _PromptBatch, prompt: OpenPrompt, generated: Generated, engine: int) -> None:
        prompt_batch.silent_since.pop(engine, None)
        prompt.take(generated)
        self._router.subtract_load(engine, prompt.cost)
        if generated.versions.size:
            self._engines.serves(engine, int(generated.versions[-1]))
        if prompt.fruitless.get(generated.sample, 0) == FRUITLESS_ASKS:
            raise EngineError(
                f"{engine_name(engine)} aborted sample {generated.sample} of prompt "
                f"{prompt.request.rid}, which returned "
                f"without a new token {FRUITLESS_ASKS} times in a row. The run did not request this: see the engine's "
                "log"
            )
        if not prompt.missing:
            self._router.remember_prefix(engine, prompt)
            self._close(prompt)
            prompt_batch.events.put_nowait(prompt)
        elif not prompt.asked:
            prompt_batch.again.append(prompt)
            if len(prompt_batch.again) == 1:
                prompt_batch.start(self._send_again(prompt_batch))

    async def _send_again(self, prompt_batch: _PromptBatch) -> None:
        await asyncio.sleep(0)  # combines prompts that returned in the same read into one request
        prompts, prompt_batch.again = prompt_batch.again, []
        self._send(prompt_batch, prompts)

    def _lose(self, prompt: OpenPrompt) -> None:
        if prompt.engine is not None:
            self._router.subtract_load(prompt.engine, prompt.cost * prompt.lose())

    # -- aborting -----------------------------------------------------------------------------------------------------
    async def abort(self, rids: Iterable[str], *, min_version: int) -> None:
        """Aborts the open samples of prompts. They continue from their prefixes under ``min_version`` or newer."""
        chosen = [self._open[rid][0] for rid in rids if rid in self._open]
        for prompt in chosen:
            newest = max(prompt.request.min_version, min_version)
            prompt.request = msgspec.structs.replace(prompt.request, min_version=newest)
            prompt.excused = True
        await self._abort(owed_rids(chosen))

    async def cancel(self, rids: Iterable[str]) -> None:
        """Cancels prompts. The engines abort their samples, and `generate` continues without them."""
        chosen = [self._open[rid] for rid in rids if rid in self._open]
        owed = owed_rids([prompt for prompt, _ in chosen])
        for prompt, prompt_batch in chosen:
            self._close(prompt)
            prompt_batch.events.put_nowait(None)
        await self._abort(owed)

    async def _abort(self, owed: Mapping[int, Sequence[str]]) -> None:
        calls = {}
        for engine, rids in owed.items():
            try:
                client = await self._client_for(engine, False)
            except EngineUnreachable:  # the request that waits for this engine also fails and is sent to another engine
                continue
            calls[engine_name(engine)] = partial(_abort_each, client, rids)
        aborting = asyncio.ensure_future(asyncio.to_thread(fan_out, calls))
        aborting.add_done_callback(log_failures)
        await asyncio.wait([aborting], timeout=self._silent_s)  # the call to a silent engine may end later
        if aborting.done():
            aborting.result()

    async def forget_prefixes(self) -> None:
        """Makes all engines drop cached keys and values of finished prompts. No prompt may be in progress."""
        calls = {}
        for engine in self._engines.usable():
            calls[engine_name(engine)] = (await self._client_for(engine, False)).flush_cache
        if message := (await asyncio.to_thread(fan_out, calls)).describe():
            log.warning("kept prefixes: %s", message)

    # -- changes of the engines ---------------------------------------------------------------------------------------
    async def change_engines(
        self, serving: Collection[int], *, leaving: Collection[int], moved: Collection[int]
    ) -> None:
        """Sets the engines that get prompts, and the engines that only finish their open samples.

        ``serving`` engines get prompts. ``leaving`` engines get no new prompts. ``moved`` is a part of ``leaving``:
        these engines abort their open samples, which other engines continue from the prefixes. All other engines have
        left, and their open samples are requested from the remaining engines.
        """
        gone = set(self._engines.all) - {*serving, *leaving}
        self._router.change_engines(serving, leaving=leaving)
        self._engines.change({*serving, *leaving}, leaving=leaving)
        self._keep_watch()
        for engine in gone:
            self._fell_silent(engine, EngineUnreachable(f"{engine_name(engine)} has left the run"))
        held = [prompt.request.rid for prompt, _ in self._open.values() if prompt.engine in moved and prompt.asked]
        if held:
            await self.abort(held, min_version=0)

    def open_samples(self, engine: int) -> int:
        """Returns the number of requested samples that the engine has not returned yet."""
        return sum(len(prompt.asked) for prompt, _ in self._open.values() if prompt.engine == engine)

    # -- the monitor of the engines -----------------------------------------------------------------------------------
    def _keep_watch(self) -> None:
        """Starts the monitor if there is an engine to watch and the monitor does not run."""
        if self._is_watched() and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch())

    def _is_watched(self) -> bool:
        return bool(self._engines.down) or (bool(self._open) and len(self._engines.all) > 1)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            if not self._is_watched():
                return
            self._monitor.tick()

    def _ask_each(self, kind: str, engines: Iterable[int], look: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Starts a check of each engine without a running check of this kind.

        Running checks are limited, because each check uses a connection or a thread that other calls need.
        """
        for key in [(kind, engine) for engine in engines]:
            if key not in self._looks:
                self._looks[key] = asyncio.create_task(look(key[1]))
                self._looks[key].add_done_callback(partial(self._looked, key))

    def _looked(self, key: tuple[str, int], look: asyncio.Task[None]) -> None:
        del self._looks[key]

    def _lose_engine(self, engine: int, error: EngineError) -> None:
        """Marks the engine as down; it gets no prompts until a probe succeeds."""
        self._engines.lost(engine, error)
        self._keep_watch()

    def _probe_lost(self) -> None:
        self._ask_each("probe", self._engines.down, self._probe)

    async def _probe(self, engine: int) -> None:
        loss = self._engines.down.get(engine)
        if loss is None:  # the engine has left since
            return
        try:
            client = await self._client_for(engine, True)
        except EngineError as error:
            loss.error = error
            return
        try:
            await client.answers(timeout_s=self._silent_s)
        except EngineError as error:
            loss.error = error
            await client.aclose()  # the next probe gets a new client
        else:
            self._engines.answers(engine, loss)

    def _ping_all(self) -> None:
        """Checks that each engine still answers, if the pool has several engines."""
        if len(self._engines.all) > 1:
            self._ask_each("ping", self._engines.up(), self._ping)

    async def _ping(self, engine: int) -> None:
        try:
            client = await self._client_for(engine, False)
            try:
                await client.answers(timeout_s=self._silent_s / 2)
            except EngineUnreachable:  # this process itself may have been stopped: tries again
                await client.answers(timeout_s=self._silent_s / 2)
        except EngineUnreachable as error:
            self._fell_silent(engine, error)

    def _poll_loads(self) -> None:
        """Reads the load and the weight version of each engine, if the pool has several engines."""
        if len(self._engines.all) > 1:
            self._ask_each("load", self._engines.up(), self._poll_load)

    async def _poll_load(self, engine: int) -> None:
        try:
            client = await self._client_for(engine, False)
            ours = self.open_samples(engine)
            loads = await asyncio.to_thread(client.loads)
            ours = max(ours, self.open_samples(engine))  # samples may have begun or ended since the engine counted
            version = str((await asyncio.to_thread(client.model_info))["weight_version"])
        except EngineError as error:  # the next /generate to this engine handles the failure
            log.debug("%s", error)
            return
        if version.isdecimal():
            self._engines.serves(engine, int(version))
        self._record_other_load(engine, max(0, int(loads["num_running_reqs"]) + int(loads["num_waiting_reqs"]) - ours))

    def _relieve_stragglers(self) -> None:
        """Logs new stragglers and moves their open prompts to other engines."""
        stragglers = set(self._engines.stragglers())
        for engine in stragglers - self._logged:
            log.warning("%s", self._engines.lag_message(engine))
            held: dict[_PromptBatch, list[str]] = {}
            for rid, (prompt, prompt_batch) in self._open.items():
                if prompt.engine == engine:
                    held.setdefault(prompt_batch, []).append(rid)
            for prompt_batch, rids in held.items():
                prompt_batch.start(self.abort(rids, min_version=0))
        self._logged = stragglers

    def _record_other_load(self, engine: int, foreign_samples: int) -> None:
        """Records the load of other clients' samples in an engine, with the mean cost of the pool's samples."""
        opened = [prompt for prompt, _ in self._open.values()]
        if opened:
            mean_cost = sum(prompt.cost for prompt in opened) / len(opened)
            self._router.others(engine, foreign_samples * mean_cost)


def _token_callback(
    on_tokens: OnTokens,
    requests: Sequence[PromptRequest],
    owners: Sequence[OpenPrompt],
    tickets: Mapping[OpenPrompt, int],
) -> OnTokens:
    """Returns a callback that assigns the tokens of a request in progress to the pool's prompts."""

    def tell(number: int, sample: int, start: int, ids: Sequence[int]) -> None:
        prompt = owners[number]
        if prompt.owed_by(tickets[prompt]):
            on_tokens(prompt.index, sample, requests[number].generated + start, ids)

    return tell


def _abort_each(client: EngineClient, rids: Sequence[str]) -> None:
    for rid in rids:
        client.abort(rid)


def prefix_blocks(input_ids: Sequence[int], media: Sequence[Media] = (), *, block: int) -> list[int]:
    """Returns one hash for each complete block of ``block`` tokens. A hash covers all tokens up to its block's end.

    A hash also covers the digests of media items at these tokens, because different items may have equal token ids.
    """
    blocks: list[int] = []
    before = 0
    for start in range(0, len(input_ids) - block + 1, block):
        end = start + block
        items = [medium.item.digest for medium in media if medium.start < end and medium.end > start]
        before = hash((before, *input_ids[start:end], *items))
        blocks.append(before)
    return blocks


PREFIX_BLOCK = 64  # tokens per block; prefixes are compared block by block
LONG_PREFIX = 64  # tokens; a shorter common prefix is ignored, because its prefill is fast
KNOWN_BLOCKS = 1 << 16  # number of recent prefix blocks that are remembered for each engine


class Router:
    """Chooses an engine for each prompt. Starts with engines 0 to ``count`` - 1.

    With ``by_load``, new prompts go to the engine with the fewest outstanding tokens: slow or busy engines get fewer
    prompts. Without ``by_load``, the prompts of one call are spread evenly, independent of earlier calls.
    """

    def __init__(self, count: int, *, by_load: bool) -> None:
        self._place = {engine: engine for engine in range(count)}  # engine → its position among the engines
        self._by_load = by_load
        self._outstanding: defaultdict[int, float] = defaultdict(float)  # outstanding tokens of this pool
        self._others: defaultdict[int, float] = defaultdict(float)  # outstanding tokens of other clients
        self._blocks: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)

    def change_engines(self, engines: Collection[int], *, leaving: Collection[int]) -> None:
        """Sets the engines to choose from. Forgets all other engines except the engines in ``leaving``."""
        self._place = {engine: place for place, engine in enumerate(sorted(engines))}
        known: dict[int, Any]
        for known in (self._outstanding, self._others, self._blocks):
            for engine in known.keys() - {*engines, *leaving}:
                del known[engine]

    def choose(self, prompts: Sequence[OpenPrompt], *, usable: Sequence[int]) -> list[int]:
        """Returns one of the ``usable`` engines for each prompt. Call `add_load` for each request that is sent."""
        if len(usable) == 1:
            return list(usable) * len(prompts)
        loads = {engine: self._load(engine) for engine in usable}
        chosen = []
        for prompt in prompts:
            engine = self._choose_one(prompt, loads)
            loads[engine] += prompt.missing_cost
            chosen.append(engine)
        return chosen

    def _load(self, engine: int) -> float:
        return self._outstanding[engine] + self._others[engine] if self._by_load else 0.0

    def _choose_one(self, prompt: OpenPrompt, loads: dict[int, float]) -> int:
        lightest, input_ids = min(loads.values()), prompt.request.input_ids
        candidates = list(loads)
        blocks = self._named(prompt, input_ids) if len(input_ids) >= LONG_PREFIX else []
        if blocks:
            near = [engine for engine in loads if loads[engine] <= lightest + prompt.missing_cost]
            known = {engine: self._known(engine, blocks) for engine in near}
            most = max(known.values())
            if most * PREFIX_BLOCK >= max(LONG_PREFIX, len(input_ids) / 2):
                candidates = [engine for engine in near if known[engine] == most]
        engine = min(
            candidates,
            key=lambda candidate: (loads[candidate], (self._place[candidate] - prompt.tie) % len(self._place)),
        )
        self._remember(engine, blocks)
        return engine

    def _known(self, engine: int, blocks: Sequence[int]) -> int:
        """Returns how many leading blocks of the prompt the engine has already processed."""
        seen = self._blocks[engine]
        return next((number for number, block in enumerate(blocks) if block not in seen), len(blocks))

    def _remember(self, engine: int, blocks: Sequence[int]) -> None:
        seen = self._blocks[engine]
        for block in blocks:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > KNOWN_BLOCKS:
            seen.popitem(last=False)

    def remember_prefix(self, engine: int, prompt: OpenPrompt) -> None:
        """Records prompt and response (n = 1 only) as a cached prefix of the engine, for the episode's next turn."""
        if len(self._place) > 1 and prompt.n == 1 and engine in self._place:
            token_ids = prompt.request.input_ids + prompt.done[0].output_ids.tolist()
            self._remember(engine, self._named(prompt, token_ids))

    def _named(self, prompt: OpenPrompt, token_ids: Sequence[int]) -> list[int]:
        """Returns the hashes of a sequence's blocks. Without ``by_load``, the hashes also cover the weight version."""
        blocks = prefix_blocks(token_ids, prompt.request.media, block=PREFIX_BLOCK)
        return blocks if self._by_load else [hash((prompt.request.min_version, block)) for block in blocks]

    # -- the engines' load --------------------------------------------------------------------------------------------
    def add_load(self, engine: int, tokens: float) -> None:
        """Adds requested tokens to the engine's load."""
        self._outstanding[engine] += tokens

    def subtract_load(self, engine: int, tokens: float) -> None:
        """Subtracts returned or lost tokens from the engine's load."""
        if engine in self._outstanding:  # false for an engine that has left
            self._outstanding[engine] -= tokens

    def others(self, engine: int, tokens: float) -> None:
        """Sets the load of other clients in the engine, in tokens."""
        if engine in self._place:
            self._others[engine] = tokens


@dataclass(slots=True, eq=False, kw_only=True)
class OpenPrompt:
    """Tracks one prompt and its ``n`` samples.

    ``index`` is the prompt's index in the prompt batch. ``tie`` breaks ties between equally loaded engines: engine
    ``tie % count`` is preferred. ``cost`` is the maximum cost of one sample in tokens: its new tokens, and its share of
    the prompt and of the towers' work for the prompt's media. ``done`` has the finished samples. ``partial`` has the
    tokens so far of aborted samples. ``asked`` has the samples that ``engine`` has not returned yet. ``ticket`` counts
    the calls of `ask`; responses to requests with an older ticket are ignored. ``excused`` is True if the pool has
    requested an abort of the samples. ``fruitless`` maps a sample to its number of consecutive aborts without a new
    token, not counting aborts that the pool requested. ``closed`` is True when the prompt is complete or cancelled.
    """

    index: int
    tie: int
    request: PromptRequest
    n: int
    cost: float
    done: dict[int, Generated] = field(default_factory=dict)
    partial: dict[int, Generated] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    engine: int | None = None
    ticket: int = 0
    excused: bool = False
    fruitless: dict[int, int] = field(default_factory=dict)
    closed: bool = False

    @property
    def missing(self) -> int:
        """Returns the number of unfinished samples."""
        return self.n - len(self.done)

    @property
    def missing_cost(self) -> float:
        """Returns the maximum cost of the unfinished samples in tokens."""
        return self.cost * self.missing

    def ask(self, engine: int) -> list[PromptRequest]:
        """Returns the requests for all unfinished samples, and records that ``engine`` must return these samples.

        Samples without a token share one request and one prefill. Each partial sample has a separate request, which
        continues from the sample's prefix.
        """
        assert not self.asked
        missing = [sample for sample in range(self.n) if sample not in self.done]
        self.asked.update(missing)
        self.engine = engine
        self.ticket += 1
        self.excused = False
        if len(missing) == self.n and not self.partial:
            return [self.request]
        on_policy = [sample for sample in missing if sample not in self.partial]
        requests = [msgspec.structs.replace(self.request, samples=on_policy)] if on_policy else []
        for sample in missing:
            if sample in self.partial:
                tokens = self.partial[sample].output_ids.tolist()
                requests.append(
                    msgspec.structs.replace(
                        self.request,
                        input_ids=self.request.input_ids + tokens,
                        samples=[sample],
                        generated=len(tokens),
                    )
                )
        return requests

    def owed_by(self, ticket: int) -> bool:
        """Returns whether the request with this ticket is current and has not returned all samples."""
        return ticket == self.ticket and bool(self.asked)

    def take(self, generated: Generated) -> None:
        """Records a response: a finished sample, or the tokens of an aborted sample."""
        self.asked.remove(generated.sample)
        before = self.partial.pop(generated.sample, None)
        whole = generated if before is None else joined(before, generated)
        if whole.finish_reason != "abort":
            self.done[generated.sample] = whole
            return
        if whole.output_ids.size:
            self.partial[generated.sample] = whole
        if generated.output_ids.size:
            self.fruitless.pop(generated.sample, None)
        elif not self.excused:
            self.fruitless[generated.sample] = self.fruitless.get(generated.sample, 0) + 1

    def lose(self) -> int:
        """Records that no engine has to return the requested samples any more; returns their number."""
        lost = len(self.asked)
        self.asked.clear()
        self.engine = None
        return lost

    def responses(self) -> list[Generated]:
        """Returns the finished samples in order."""
        return [self.done[sample] for sample in range(self.n)]


def prompt_cost(request: PromptRequest, item_work: Callable[[MediaItem], float]) -> float:
    """Returns the prefill cost of a prompt in tokens. ``item_work`` returns the towers' work for an item in tokens."""
    return len(request.input_ids) + sum(item_work(medium.item) for medium in request.media)


def owed_rids(prompts: Iterable[OpenPrompt]) -> dict[int, list[str]]:
    """Returns, for each engine, the rids of its prompts with unreturned samples."""
    owed: dict[int, list[str]] = {}
    for prompt in prompts:
        if prompt.engine is not None and prompt.asked:
            owed.setdefault(prompt.engine, []).append(prompt.request.rid)
    return owed


def cut(generated: Generated, tokens: int) -> Generated:
    """Returns the response, cut after its first ``tokens`` tokens."""
    experts = generated.response_experts
    return msgspec.structs.replace(
        generated,
        output_ids=generated.output_ids[:tokens],
        logprobs=generated.logprobs[:tokens],
        versions=generated.versions[:tokens],
        response_experts=None if experts is None or not tokens else experts[: tokens - 1],
        kept=None if generated.kept is None else generated.kept.take(np.arange(tokens)),
    )


def joined(before: Generated, after: Generated) -> Generated:
    """Joins an aborted response and its continuation.

    Each token keeps its log-prob, kept set and weight version from the time of sampling.
    """
    kept = [generated.kept for generated in (before, after) if generated.kept is not None]
    whole = msgspec.structs.replace(
        after,
        output_ids=read_only(np.concatenate([before.output_ids, after.output_ids])),
        logprobs=read_only(np.concatenate([before.logprobs, after.logprobs])),
        versions=read_only(np.concatenate([before.versions, after.versions])),
        kept=KeptTokens.joined(kept) if kept else None,
        cached_tokens=before.cached_tokens,
        queue_ms=before.queue_ms + after.queue_ms,
    )
    return _with_joined_experts(whole, before, after)


def _with_joined_experts(whole: Generated, before: Generated, after: Generated) -> Generated:
    """Adds experts to ``whole``, the response that was joined from ``before`` and ``after``.

    Each token keeps the experts of its first pass through the model, because its recorded log-prob belongs to these
    experts. Tokens without such experts get their experts from the prompt of ``after``. These are the last token of
    ``before``, and tokens without experts in the engine's reply: SGLang returns no experts if the prompt of an aborted
    request came from its cache.
    """
    if after.prompt_experts is None or after.response_experts is None:  # not requested, or ``after`` never ran
        experts = before.prompt_experts, before.response_experts
    else:
        prefilled = after.prompt_experts  # experts of the prompt and of the tokens of ``before``
        known = [part for part in (before.prompt_experts, before.response_experts) if part is not None]
        joined = read_only(np.concatenate([*known, prefilled[sum(map(len, known)) :], after.response_experts]))
        prompt_tokens = len(prefilled) - len(before.output_ids)
        experts = joined[:prompt_tokens], joined[prompt_tokens:]
    return msgspec.structs.replace(whole, prompt_experts=experts[0], response_experts=experts[1])
