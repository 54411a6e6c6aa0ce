"""Schedules samples on the engine's decode thread: running samples, waiting samples, actions between decode steps.

The module also has the state of a /generate call: prompts, samples, progress reports, and the queue for slots.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from relax_core.contracts.core_wait import clock_and_core_wait_s
from relax_core.contracts.engine import FinishReason, PauseMode
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media, MediaGone
from relax_core.engines.embedded.decoder import Decoder, Prefix, PromptRoutes, ScoreItem, Scores
from relax_core.engines.embedded.prefill import SequenceMedia
from relax_core.engines.embedded.token_sampler import NonFiniteLogits, SamplingSettings, keys_after, sample_keys
from relax_core.engines.embedded.tower_features import MediaFeatures
from relax_core.engines.protocol.generate_messages import VersionSpan
from relax_core.engines.protocol.stop_strings import StopStrings

EXACT_SIZES = 16  # decode steps with more samples are counted by rounded number of samples
COARSE = 8
GAP_S = 2e-4  # after a longer gap between decode steps, the time of waits for a core is read again
DecodeTimes = tuple[tuple[int, int, float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Holds the engine's current load.

    ``running``, ``queued`` and ``held`` are the numbers of samples that decode, wait for slots, and wait for a weight
    version. All other counts and times are totals since the engine's start. ``busy_s`` is the time in prefill and
    decoding, in seconds. ``prefill_tokens`` counts the tokens that prefills computed, and ``cached_tokens`` the tokens
    from the prefix cache. ``prefix_cache_bytes`` is the prefix cache's part of ``kv_cache_bytes``. ``token_usage`` is
    the share of engine.max_total_tokens that running samples need at their maximum length. ``tower_passes`` counts the
    media items that have passed the towers. ``decode_times`` has an entry for each number of samples, rounded above
    `EXACT_SIZES`: the number of decode steps, their seconds, and the seconds in which the decode thread waited for a
    core. ``decode_columns`` has, for the same numbers of samples, the columns of the KV cache that the steps have read
    in each layer (`DecodeAttention.columns`).
    """

    running: int
    queued: int
    held: int
    busy_s: float
    decode_steps: int
    generated_tokens: int
    kv_cache_bytes: int
    token_usage: float = 0.0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    prefix_cache_bytes: int = 0
    tower_passes: int = 0
    media_feature_bytes: int = 0
    decode_times: DecodeTimes = ()
    decode_columns: tuple[tuple[int, int], ...] = ()


class DecodeMeter:
    """Measures decode steps by number of samples: their count, wall time, wait for a core, and columns.

    Only one thread may use the meter.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._seconds: dict[int, float] = {}
        self._waits: dict[int, float] = {}
        self._columns: dict[int, int] = {}
        self._began_s = self._ended_s = self._waited_s = 0.0

    def begin(self) -> None:
        """Begins a decode step."""
        self._began_s = time.perf_counter()
        if self._began_s - self._ended_s > GAP_S:
            self._began_s, self._waited_s = clock_and_core_wait_s()

    def end(self, samples: int, *, columns: int) -> None:
        """Ends a decode step that had ``samples`` samples and read ``columns`` columns."""
        before_s = self._waited_s
        self._ended_s, self._waited_s = clock_and_core_wait_s()
        took_s = self._ended_s - self._began_s
        size = samples if samples <= EXACT_SIZES else samples - samples % COARSE
        self._counts[size] = self._counts.get(size, 0) + 1
        self._seconds[size] = self._seconds.get(size, 0.0) + took_s
        self._waits[size] = self._waits.get(size, 0.0) + min(took_s, self._waited_s - before_s)
        self._columns[size] = self._columns.get(size, 0) + columns

    def times(self) -> DecodeTimes:
        """Returns (number of samples, steps, seconds, seconds of waits) since the start."""
        return tuple(
            (size, count, round(self._seconds[size], 6), round(self._waits[size], 6))
            for size, count in sorted(self._counts.items())
        )

    def columns(self) -> tuple[tuple[int, int], ...]:
        """Returns (number of samples, columns that attention has read) since the start."""
        return tuple(sorted(self._columns.items()))


T = TypeVar("T")
NOTHING_ATTESTED = -1  # the weight version before the first verified weights; no request is served under this version


class Scheduler(threading.Thread):
    """Implements the decode thread. The thread owns the decoder and runs all code that uses the decoder.

    Other threads pass actions to `post`, which run in the decode thread between two decode steps.
    """

    def __init__(self, decoder: Decoder, *, version: int) -> None:
        super().__init__(name="decode", daemon=True)
        self.version = version
        self.failure: BaseException | None = None
        self._decoder = decoder
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting = WaitingQueue()
        self._running: list[Sample] = []  # by slot
        self._streaming = False  # True if a running sample streams its tokens
        self._stopping = False  # True if a running sample has stop strings
        self._news: dict[Call, list[Progress]] = defaultdict(list)
        self._pause: PauseMode | None = None
        self._released = False
        self._busy_s = 0.0
        self._steps = 0
        self._decoding = DecodeMeter()
        self._tokens = 0
        self._prefill_tokens = 0
        self._cached_tokens = 0

    # -- calls from other threads -----------------------------------------------------------------------------------
    @property
    def is_stopped(self) -> bool:
        """Returns whether decoding is stopped: the engine is paused or its memory is released."""
        return self._pause is not None or self._released

    def post(self, action: Callable[[], T]) -> Future[T]:
        """Runs ``action`` in the decode thread between two decode steps; returns a future of the result."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller no longer waits
            try:
                future.set_result(action())
            except Exception as error:  # the caller raises it
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def score(self, items: Sequence[ScoreItem]) -> Future[tuple[int, list[Scores]]]:
        """Scores given tokens. The future's result is (version of the current weights, scores)."""
        return self.post(lambda: (self.version, self._decoder.score(items)))

    def submit(self, groups: Sequence[Waiting]) -> None:
        """Appends prompts to the queue."""
        self._inbox.put(lambda: self._waiting.add(groups, goes_on=self._goes_on))

    def _goes_on(self, group: Waiting) -> bool:
        found = self._decoder.prefixes.find(group.prompt.token_ids, group.prompt.media)
        return found is not None and found.whole

    # -- actions, for `post` ----------------------------------------------------------------------------------------
    def abort(self, chosen: Callable[[Sample], bool]) -> int:
        """Ends the samples that ``chosen`` selects, and reports their tokens so far. Returns the number of samples."""
        slots = [slot for slot, sample in enumerate(self._running) if chosen(sample)]
        self._finish(slots, reason="abort")
        count = len(slots)
        for sample in self._waiting.remove(chosen):
            routes, done_kept = sample.done_routes, sample.done_kept
            self._report(sample, sample.done, sample.done_logprobs, routes=routes, kept=done_kept, finish="abort")
            count += 1
        self._deliver()
        return count

    def pause(self, mode: PauseMode) -> None:
        """Stops decoding until `resume`.

        With in_place, running samples keep their slots and cache. With retract, running samples return to the queue,
        and their cache is computed again later. With abort, all samples end.
        """
        self._pause = mode
        if mode == "abort":
            self.abort(lambda sample: True)
        elif mode == "retract":
            self._retract()

    def resume(self) -> None:
        """Ends a pause."""
        self._pause = None

    def replace_weights(self, copy: Callable[[], None] | None, version: int) -> float:
        """Runs ``copy`` and activates ``version``. Returns the stall of decoding in milliseconds.

        Running samples continue with their cache. Samples with states are prefilled again, because their states come
        from the old weights. Features of media items and kept prefixes are dropped.
        """
        start = time.perf_counter()
        if copy is not None:
            copy()
            self._retract(only_states=True)
        self.forget()
        self.version = version
        for slot, sample in enumerate(self._running):
            sample.mark(self._decoder.slots.length(slot), version)
        return 1e3 * (time.perf_counter() - start)

    def forget_weights(self) -> None:
        """Ends all samples and a pause. No sample runs until `replace_weights` activates a version."""
        self.abort(lambda sample: True)
        self.resume()
        self.resume_memory()
        self.replace_weights(None, NOTHING_ATTESTED)

    def forget(self) -> None:
        """Drops kept prefixes and features of media items. They are computed again when a prompt needs them."""
        self._decoder.forget()

    def release_memory(self) -> None:
        """Frees the KV cache. Running samples wait for `resume_memory`; their cache is then computed again."""
        self._retract()
        self._decoder.free_cache()
        self.forget()
        self._released = True

    def resume_memory(self) -> None:
        """Allows samples to run again after `release_memory`."""
        self._released = False

    def load(self) -> Load:
        """Returns the engine's load."""
        queued, held = self._waiting.counts(self.version)
        features = self._decoder.features
        return Load(
            running=len(self._running),
            queued=queued,
            held=held,
            busy_s=self._busy_s,
            decode_steps=self._steps,
            generated_tokens=self._tokens,
            kv_cache_bytes=self._decoder.nbytes,
            token_usage=self._decoder.token_usage,
            prefill_tokens=self._prefill_tokens,
            cached_tokens=self._cached_tokens,
            prefix_cache_bytes=self._decoder.prefixes.nbytes,
            tower_passes=0 if features is None else features.passes,
            media_feature_bytes=0 if features is None else features.nbytes,
            decode_times=self._decoding.times(),
            decode_columns=self._decoding.columns(),
        )

    # -- the loop ---------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Decodes until the process ends. An exception ends the thread and is stored in ``failure``."""
        try:
            with torch.inference_mode():
                while True:
                    self._receive()
                    if not self.is_stopped:
                        start = time.perf_counter()
                        self._work()
                        self._busy_s += time.perf_counter() - start
                        self._deliver()
        except BaseException as error:
            self.failure = error  # the server polls ``failure`` and ends the process
            raise

    def _work(self) -> None:
        self._admit()
        if self._running:
            self._steps += 1
            self._decoding.begin()
            try:
                finished = self._decoder.step()
            except NonFiniteLogits as error:
                self._fail(error)
                self._retract(only_states=True)
            else:
                self._decoding.end(len(self._running), columns=self._decoder.columns)
                self._tokens += len(self._running)
                self._finish(self._with_stopped(finished))

    def _receive(self) -> None:
        """Runs all actions that have arrived. If there is nothing to decode, waits for the next action.

        No delay is needed to batch requests: all requests that arrive during a prefill are prefilled together next.
        """
        if self._idle():
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _idle(self) -> bool:
        if self.is_stopped:
            return True
        return not self._running and not self._waiting.is_ready(self.version)

    def _admit(self) -> None:
        """Prefills waiting prompts that may run under the current version, in order, until the slots are full."""
        if self.version == NOTHING_ATTESTED:
            return
        fits = self._decoder.fits
        groups = self._waiting.take(self.version, fits=lambda samples, columns: fits(samples=samples, columns=columns))
        if groups:
            self._prefill(groups)

    def _prefill(self, groups: list[Waiting]) -> None:
        start = time.perf_counter()
        groups, prefixes, unseen = prefixes_with_media(groups, self._decoder.media_inputs)
        for call, error in unseen.items():
            self._fail_calls({call}, str(error))
        if not groups:
            return
        for group in groups:
            self._running.extend(group.samples)
            self._streaming |= group.prompt.call.stream_interval > 0
            self._stopping |= group.prompt.stop is not None
            for sample in group.samples:
                sample.mark(len(sample.done), self.version)
        try:
            finished = self._decoder.admit(prefixes)
        except NonFiniteLogits as error:
            failed = self._fail(error)
            left = [group for group in groups if group.prompt.call not in failed]
            samples = {sample for group in left for sample in group.samples}
            self._free([slot for slot, sample in enumerate(self._running) if sample in samples])
            self._waiting.put_back(left)
            return
        end = time.perf_counter()
        self._tokens += sum(len(group.samples) for group in groups)
        for group, prefix, cached in zip(groups, prefixes, self._decoder.cached, strict=True):
            if not group.prompt.prefill_s:
                group.prompt.queue_s = start - group.prompt.call.submitted
            group.prompt.prefill_s += end - start
            group.prompt.cached_tokens = min(cached, len(group.prompt.token_ids))
            self._prefill_tokens += len(prefix.token_ids) - cached
            self._cached_tokens += cached
        for call in {group.prompt.call for group in groups}:
            call.prefilled(start=start, end=end, features=self._decoder.features)
        self._finish(self._with_stopped(finished))

    # -- the end of samples -------------------------------------------------------------------------------------------
    def _finish(self, slots: Sequence[int] | np.ndarray, *, reason: FinishReason | None = None) -> None:
        """Reports and frees the finished slots. Also reports new tokens of unfinished slots, if their call streams."""
        if len(slots) == 0 and not self._streaming:
            return
        finished = [int(slot) for slot in slots]
        for slot in finished:
            sample = self._running[slot]
            ids, logprobs = self._decoder.slots.output(slot)
            matched = None if reason else sample.matched(ids)
            ended: FinishReason = reason or ("length" if matched is None else "stop")
            routes = None if sample.prompt.routes is None else self._decoder.response_routes(slot)
            kept = self._kept(sample, slot)
            prompt = sample.prompt
            self._decoder.keep(slot, prompt.token_ids + ids, prompt.media, prompt.routes)
            self._report(sample, ids, logprobs, routes=routes, kept=kept, finish=ended, matched=matched)
        if reason is None and self._streaming:
            self._stream(set(finished))
        self._free(finished)

    def _with_stopped(self, finished: np.ndarray) -> np.ndarray:
        """Returns the finished slots, and the slots with a newest token that completes a stop string."""
        if not self._stopping:
            return finished
        tokens = self._decoder.slots.newest_tokens()
        slots_of: dict[StopStrings, list[int]] = defaultdict(list)
        for slot, sample in enumerate(self._running):
            if sample.prompt.stop is not None:
                slots_of[sample.prompt.stop].append(slot)
        found = set(finished.tolist())
        for stop, slots in slots_of.items():
            for index in stop.may_complete(tokens[slots]):
                slot = slots[index]
                length = self._decoder.slots.length(slot)
                ids, _ = self._decoder.slots.output(slot, max(0, length - stop.window))
                if length < stop.window:
                    ids = self._running[slot].prompt.response(ids)
                if stop.matched(ids) is not None:
                    found.add(slot)
        return np.array(sorted(found), dtype=np.int64)

    def _free(self, slots: list[int]) -> None:
        if slots:
            for source, target in self._decoder.remove(slots):
                self._running[target] = self._running[source]
            del self._running[self._decoder.slots.count :]
            self._streaming = self._streaming and bool(self._running)
            self._stopping = self._stopping and bool(self._running)

    def _stream(self, finished: set[int]) -> None:
        for slot, sample in enumerate(self._running):
            call = sample.prompt.call
            length = self._decoder.slots.length(slot)
            if call.stream_interval and slot not in finished and length - sample.streamed >= call.stream_interval:
                ids, logprobs = self._decoder.slots.output(slot, sample.streamed)
                sample.streamed = length
                kept = self._kept(sample, slot, start=length - len(ids))
                spans = sample.spans(length)
                self._news[call].append(Progress(sample, ids, logprobs, length, spans, None, None, kept=kept))

    def _kept(self, sample: Sample, slot: int, *, start: int = 0) -> KeptTokens | None:
        """Returns the kept sets of a sample's tokens from ``start`` on; None if they were not requested."""
        return self._decoder.kept.of_slot(slot, start) if sample.prompt.settings.reports_kept else None

    def _report(
        self,
        sample: Sample,
        ids: list[int],
        logprobs: list[float],
        *,
        routes: np.ndarray | None,
        kept: KeptTokens | None,
        finish: FinishReason,
        matched: int | str | None = None,
    ) -> None:
        call, start = sample.prompt.call, sample.reported
        call.open_samples -= 1
        if call.open_samples == 0:
            call.finished = time.perf_counter()
        length = len(ids)
        spans = sample.spans(length)
        if kept is not None and start:
            kept = kept.take(np.arange(start, length))
        self._news[call].append(
            Progress(sample, ids[start:], logprobs[start:], length, spans, finish, matched, routes, kept)
        )

    def _deliver(self) -> None:
        for call, news in self._news.items():
            call.sink(news)
        self._news.clear()

    def _retract(self, *, only_states: bool = False) -> None:
        """Puts all running samples, with their tokens, at the head of the queue.

        With ``only_states``, does nothing for a model without states.
        """
        if only_states and self._decoder.states is None:
            return
        back: list[Waiting] = []
        for slot, sample in enumerate(self._running):
            sample.done, sample.done_logprobs = self._decoder.slots.output(slot)
            if sample.prompt.routes is not None:
                sample.done_routes = self._decoder.response_routes(slot)
            sample.done_kept = self._kept(sample, slot)
            back.append(Waiting(sample.prompt, [sample]))
        self._free(list(range(len(self._running))))
        self._waiting.put_back(back)

    def _fail(self, error: NonFiniteLogits) -> set[Call]:
        """Fails only the calls of the slots without a token; returns these calls."""
        self._decoder.clear(error.slots)
        calls = {self._running[slot].prompt.call for slot in error.slots}
        self._fail_calls(calls, f"weight version {self.version}: {error}")
        return calls

    def _fail_calls(self, calls: set[Call], message: str) -> None:
        """Ends calls with ``message``, including their running and waiting samples."""
        self._waiting.drop(calls)
        self._free([slot for slot, sample in enumerate(self._running) if sample.prompt.call in calls])
        self._deliver()
        for call in calls:
            call.fail(message)


@dataclass(frozen=True, slots=True)
class Progress:
    """Reports one sample: its tokens since the last report, or all its tokens (`Sample.reported`).

    ``finish`` is None for an unfinished sample. ``matched`` is the stop token or stop string that ended the sample.
    ``length`` is the number of tokens so far; ``spans`` are their weight versions. ``routes``, if requested, has the
    experts of a finished sample's response tokens except the last, ``[length - 1, layers, per_token]``. It is None for
    a sample that never ran. ``kept``, if requested, has the sets that ``ids`` were sampled from.
    """

    sample: Sample
    ids: list[int]
    logprobs: list[float]
    length: int
    spans: list[VersionSpan]
    finish: FinishReason | None
    matched: int | str | None
    routes: np.ndarray | None = None
    kept: KeptTokens | None = None


Sink = Callable[[list[Progress]], None]  # called in the scheduler's thread
Fail = Callable[[str], None]


@dataclass(slots=True, eq=False)
class Prompt:
    """Holds one checked prompt of a call. ``index`` is the prompt's index in the call.

    ``routes`` is set if experts are requested. For ``samples`` and ``generated`` see `PromptRequest`. ``stop`` has the
    strings that end a response, if any. ``media`` has the prompt's media items with their positions. ``prefill_s`` is
    the total time of prefills with this prompt, in seconds. ``cached_tokens`` is the number of prompt tokens that the
    newest prefill did not compute. ``queue_s`` is the time before the prompt's first prefill.
    """

    call: Call
    index: int
    rid: str
    token_ids: list[int]
    settings: SamplingSettings
    sampling_seed: int
    min_version: int
    routes: PromptRoutes | None = None
    samples: Sequence[int] = (0,)
    generated: int = 0
    stop: StopStrings | None = None
    media: Sequence[Media] = ()
    prefill_s: float = 0.0
    cached_tokens: int = 0
    queue_s: float = 0.0

    def response(self, ids: list[int]) -> list[int]:
        """Returns a sample's complete response; ``ids`` are the tokens that this call has generated."""
        return self.token_ids[len(self.token_ids) - self.generated :] + ids if self.generated else ids


@dataclass(slots=True, eq=False)
class Sample:
    """Holds the state of one response.

    ``marks`` has (first token, version) for each change of the weight version. ``done``, ``done_logprobs``,
    ``done_routes`` and ``done_kept`` store the generated tokens and their data while the sample has no slot.
    ``streamed`` is the number of reported tokens.
    """

    prompt: Prompt
    index: int
    key: np.ndarray  # uint64 [1]
    marks: list[tuple[int, int]] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    done_logprobs: list[float] = field(default_factory=list)
    done_routes: np.ndarray | None = None
    done_kept: KeptTokens | None = None
    streamed: int = 0

    @property
    def reported(self) -> int:
        """Returns the number of tokens that the last report leaves out, because earlier reports contained them."""
        return 0 if self.prompt.call.whole_at_end else self.streamed

    def mark(self, start: int, version: int) -> None:
        """Records that tokens from ``start`` on come from weights ``version``."""
        if self.marks and self.marks[-1][0] == start:
            self.marks.pop()
        if not self.marks or self.marks[-1][1] != version:
            self.marks.append((start, version))

    def matched(self, ids: list[int]) -> int | str | None:
        """Returns the stop token or stop string that the last token of ``ids`` completes, or None."""
        if ids[-1] in self.prompt.settings.stop_token_ids:
            return ids[-1]
        return None if self.prompt.stop is None else self.prompt.stop.matched(self.prompt.response(ids))

    def spans(self, length: int) -> list[VersionSpan]:
        """Returns the weight versions of the sample's first ``length`` tokens."""
        ends = [start for start, _ in self.marks[1:]] + [length]
        return [
            VersionSpan(start, end, version)
            for (start, version), end in zip(self.marks, ends, strict=False)
            if start < end
        ]


@dataclass(slots=True, eq=False)
class Waiting:
    """Holds samples of one prompt that wait for slots together. A retracted sample waits alone.

    ``goes_on`` is True if the samples continue a kept prefix or were retracted; such entries run before new prompts.
    """

    prompt: Prompt
    samples: list[Sample]
    goes_on: bool = False

    @property
    def tokens(self) -> int:
        """Returns the number of tokens of the prefix."""
        return len(self.prompt.token_ids) + len(self.samples[0].done)

    def prefix(self, media: SequenceMedia | None) -> Prefix:
        """Returns the prefix that is prefilled once for all these samples, with its ``media`` inputs."""
        first = self.samples[0]
        return Prefix(
            token_ids=self.prompt.token_ids + first.done,
            settings=self.prompt.settings,
            keys=np.concatenate([sample.key for sample in self.samples]),
            done=first.done,
            done_logprobs=first.done_logprobs,
            routes=self.prompt.routes,
            done_routes=first.done_routes,
            done_kept=first.done_kept,
            media=media,
            items=tuple(self.prompt.media),
        )


@dataclass(slots=True, eq=False)
class Call:
    """Holds one checked /generate call for ``n`` samples of each prompt, and its state.

    ``single`` is True for one prompt outside a list; with n = 1 the reply is then an object and not a list.
    ``asked_interval`` is the request's stream_interval. `submit` sets the fields that the scheduler reads.
    ``stream_interval`` is the number of tokens between two reports of a sample; 0 means that only finished samples are
    reported. With ``whole_at_end``, the last report of a sample has all its tokens. ``sink`` gets the reports. ``fail``
    gets the message of a failure that ends the call. The scheduler's thread calls ``sink`` and ``fail``. ``submitted``,
    ``first_prefill``, ``first_token`` and ``finished`` are times of ``time.perf_counter``; 0 means not yet.
    ``tower_passes`` and ``media_feature_bytes`` are the counts of `MediaFeatures` after the call's last prefill.
    """

    n: int
    single: bool = False
    return_logprob: bool = True
    stream: bool = False
    asked_interval: int | None = None
    prompts: list[Prompt] = field(default_factory=list)  # empty after `submit`
    samples: int = 0  # number of samples of all prompts
    sink: Sink = field(init=False)
    fail: Fail = field(init=False)
    stream_interval: int = 0
    whole_at_end: bool = False
    open_samples: int = 0
    submitted: float = 0.0
    first_prefill: float = 0.0
    first_token: float = 0.0
    prefill_s: float = 0.0
    finished: float = 0.0
    tower_passes: int = 0
    media_feature_bytes: int = 0

    def add(self, prompts: list[Prompt]) -> Call:
        """Adds the prompts of the call and returns the call."""
        self.prompts, self.samples = prompts, sum(len(prompt.samples) for prompt in prompts)
        return self

    def submit(self, sink: Sink, fail: Fail, *, whole_at_end: bool = False) -> list[Waiting]:
        """Begins the call. Returns the entries for the queue: each prompt with its requested samples."""
        self.sink, self.fail, self.whole_at_end = sink, fail, whole_at_end
        if self.stream:  # frames report unfinished samples only on request
            self.stream_interval = self.asked_interval or (0 if whole_at_end else 1)
        self.submitted = time.perf_counter()
        self.open_samples = self.samples
        prompts, self.prompts = self.prompts, []  # breaks a reference cycle
        all_keys = sample_keys([prompt.sampling_seed for prompt in prompts], self.n)
        groups: list[Waiting] = []
        for prompt, prompt_keys in zip(prompts, all_keys, strict=True):
            keys = keys_after(prompt_keys, prompt.generated)
            groups.append(Waiting(prompt, [Sample(prompt, index, keys[index : index + 1]) for index in prompt.samples]))
        return groups

    def prefilled(self, *, start: float, end: float, features: MediaFeatures | None) -> None:
        """Records a prefill of some prompts of the call. ``start`` and ``end`` are times of ``time.perf_counter``."""
        self.first_prefill = self.first_prefill or start
        self.first_token = self.first_token or end
        self.prefill_s += end - start
        if features is not None:
            self.tower_passes, self.media_feature_bytes = features.passes, features.nbytes


def prefixes_with_media(
    groups: Sequence[Waiting],
    see: Callable[[Sequence[tuple[int, Sequence[Media]]]], Sequence[SequenceMedia | MediaGone | None]],
) -> tuple[list[Waiting], list[Prefix], dict[Call, MediaGone]]:
    """Returns groups and their prefixes with media inputs, which ``see`` returns for (number of tokens, items).

    If ``see`` returns MediaGone for a group, all groups of the group's call are left out. The third result maps such
    calls to the error.
    """
    failed: dict[Call, MediaGone] = {}
    seen: list[tuple[Waiting, Prefix]] = []
    for group, media in zip(
        groups, see([(sample_group.tokens, sample_group.prompt.media) for sample_group in groups]), strict=True
    ):
        if isinstance(media, MediaGone):
            failed[group.prompt.call] = media
        else:
            seen.append((group, group.prefix(media)))
    seen = [(group, prefix) for group, prefix in seen if group.prompt.call not in failed]
    return [group for group, _ in seen], [prefix for _, prefix in seen], failed


class WaitingQueue:
    """Stores the prompts that wait for slots or for a weight version, in the order of their admission.

    Retracted samples come first. Next are prompts that continue a kept prefix, such as the next turn of an episode,
    because the prefix could be dropped while they wait. All other prompts follow. Each kind is in order of arrival.
    """

    def __init__(self) -> None:
        self._groups: list[Waiting] = []

    def add(self, groups: Sequence[Waiting], *, goes_on: Callable[[Waiting], bool]) -> None:
        """Adds new prompts. ``goes_on`` returns whether a prompt continues a kept prefix."""
        for group in groups:
            group.goes_on = goes_on(group)
        self._groups = sorted([*self._groups, *groups], key=lambda group: not group.goes_on)

    def put_back(self, groups: Sequence[Waiting]) -> None:
        """Puts prompts at the head of the queue."""
        for group in groups:
            group.goes_on = True
        self._groups = [*groups, *self._groups]

    def is_ready(self, version: int) -> bool:
        """Returns whether a waiting prompt may run under weights ``version``."""
        return any(group.prompt.min_version <= version for group in self._groups)

    def take(self, version: int, *, fits: Callable[[int, int], bool]) -> list[Waiting]:
        """Removes and returns the first prompts that may run under weights ``version`` and fit.

        ``fits(samples, columns)`` returns whether ``samples`` more samples of at most ``columns`` columns can run.
        """
        taken: list[Waiting] = []
        held: list[Waiting] = []
        samples = columns = seen = 0
        for group in self._groups:
            if group.prompt.min_version > version:
                held.append(group)
            else:
                samples += len(group.samples)
                columns = max(columns, len(group.prompt.token_ids) + group.prompt.settings.max_new_tokens)
                if not fits(samples, columns):
                    break
                taken.append(group)
            seen += 1
        if taken:
            self._groups = held + self._groups[seen:]
        return taken

    def remove(self, chosen: Callable[[Sample], bool]) -> list[Sample]:
        """Removes and returns the samples that ``chosen`` selects."""
        removed: list[Sample] = []
        for group in self._groups:
            removed += [sample for sample in group.samples if chosen(sample)]
            group.samples = [sample for sample in group.samples if not chosen(sample)]
        self._groups = [group for group in self._groups if group.samples]
        return removed

    def drop(self, calls: Collection[Call]) -> None:
        """Removes the prompts of ``calls``."""
        self._groups = [group for group in self._groups if group.prompt.call not in calls]

    def counts(self, version: int) -> tuple[int, int]:
        """Returns how many samples wait for slots, and how many wait for a version newer than ``version``."""
        held = sum(len(group.samples) for group in self._groups if group.prompt.min_version > version)
        return sum(len(group.samples) for group in self._groups) - held, held
