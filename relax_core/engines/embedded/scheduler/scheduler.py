"""Runs the engine's one decode thread: which samples run, which wait, and what happens between two decode steps."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from relax_core.contracts.core_wait import clock_and_core_wait_s
from relax_core.contracts.engine import FinishReason, PauseMode
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.engines.embedded.scheduler.calls import Call, Progress, Sample, Waiting, WaitingQueue, seen_prefixes
from relax_core.engines.embedded.scheduler.decoder import Decoder
from relax_core.engines.embedded.scheduler.token_sampler import NonFiniteLogits
from relax_core.engines.embedded.scheduler.token_scoring import ScoreItem, Scores
from relax_core.engines.protocol.stop_strings import StopStrings

EXACT_SIZES = 16  # decode steps with more samples are counted together with those of nearly as many
COARSE = 8
GAP_S = 2e-4  # after a longer gap, such as a prefill, the wait for a core is read anew before a decode step
DecodeTimes = tuple[tuple[int, int, float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Holds the engine's load at one time.

    ``running``, ``queued`` and ``held`` count samples that decode, wait for slots, and wait for a weight version.
    ``busy_s`` is the time spent in prefill and decoding since the start, in seconds. ``prefill_tokens`` and
    ``cached_tokens`` count the tokens that prefills have computed since the start, and those that they have not,
    because they were kept; ``prefix_cache_bytes`` is the part of ``kv_cache_bytes`` that keeps them. ``token_usage`` is
    the share of engine.max_total_tokens that running samples may come to need. ``tower_passes`` counts the images and
    videos that have passed the vision tower since the start. ``decode_times`` has for each number of samples, coarse
    from `EXACT_SIZES` on, how many decode steps there were since the start, their seconds, and how many of these the
    decode thread was ready to run and got no core. ``decode_columns`` has for the same numbers of samples the columns
    of the KV cache that these steps have read in a layer (`DecodeAttention.columns`).
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
    """Counts decode steps, their wall time, their waits for a core and their columns by the number of samples.

    A larger step takes longer. One thread uses it.
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
        """Ends a decode step with so many samples, which has read so many columns."""
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
NOTHING_ATTESTED = -1  # the weight version before the first attested weights; no request is served under it


class Scheduler(threading.Thread):
    """The decode thread owns the decoder and runs everything that touches it.

    `post` runs an action of another thread here, between two decode steps.
    """

    def __init__(self, decoder: Decoder, *, version: int) -> None:
        super().__init__(name="decode", daemon=True)
        self.version = version
        self.failure: BaseException | None = None
        self._decoder = decoder
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting = WaitingQueue()
        self._running: list[Sample] = []  # by slot
        self._streaming = False  # whether a running sample is reported before it is finished
        self._stopping = False  # whether a running sample has stop strings
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
    def stands_still(self) -> bool:
        """Is True while nothing is decoded, because the engine is paused or its memory is released."""
        return self._pause is not None or self._released

    def post(self, action: Callable[[], T]) -> Future[T]:
        """Runs ``action`` in this thread between two decode steps."""
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
        """Scores given tokens; the result holds the version of the weights in force, and the scores."""
        return self.post(lambda: (self.version, self._decoder.score(items)))

    def submit(self, groups: Sequence[Waiting]) -> None:
        """Appends prompts to the queue."""
        self._inbox.put(lambda: self._waiting.add(groups, goes_on=self._goes_on))

    def _goes_on(self, group: Waiting) -> bool:
        found = self._decoder.prefixes.find(group.prompt.token_ids, group.prompt.media)
        return found is not None and found.whole

    # -- actions, for `post` ----------------------------------------------------------------------------------------
    def abort(self, chosen: Callable[[Sample], bool]) -> int:
        """Ends the samples that ``chosen`` selects, with their tokens so far; returns how many they are."""
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

        With in_place, running samples keep their slots and cache. With retract, they go back to the queue, and their
        cache is computed anew afterwards. With abort, all samples end.
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
        """Runs ``copy`` and puts ``version`` in force; returns the stall in milliseconds.

        Running samples go on with their cache; those with states, which would carry the old weights on, are prefilled
        again. Features of images and videos are computed anew, and no kept prefix is served any more.
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
        """Ends all samples and a pause; nothing runs until `replace_weights` puts a version in force."""
        self.abort(lambda sample: True)
        self.resume()
        self.resume_memory()
        self.replace_weights(None, NOTHING_ATTESTED)

    def forget(self) -> None:
        """Drops kept prefixes and features of images and videos; they are computed anew when a prompt needs them."""
        self._decoder.forget()

    def release_memory(self) -> None:
        """Frees the KV cache; running samples wait for `resume_memory`, and their cache is then computed anew."""
        self._retract()
        self._decoder.free_cache()
        self.forget()
        self._released = True

    def resume_memory(self) -> None:
        """Lets samples run again after `release_memory`."""
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
        """Decodes until the process ends; an exception ends the thread and is kept in ``failure``."""
        try:
            with torch.inference_mode():
                while True:
                    self._receive()
                    if not self.stands_still:
                        start = time.perf_counter()
                        self._work()
                        self._busy_s += time.perf_counter() - start
                        self._deliver()
        except BaseException as error:
            self.failure = error  # the server polls it and ends the process
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
        """Runs all actions that have arrived; if there is nothing to decode, waits for the next one.

        A batch of requests needs no further waiting, because all that arrive during the first one's prefill are
        prefilled together next.
        """
        if self._idle():
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _idle(self) -> bool:
        if self.stands_still:
            return True
        return not self._running and not self._waiting.is_ready(self.version)

    def _admit(self) -> None:
        """Prefills waiting prompts whose weight version is in force, in the queue's order, as many as fit."""
        if self.version == NOTHING_ATTESTED:
            return
        fits = self._decoder.fits
        groups = self._waiting.take(self.version, fits=lambda samples, columns: fits(samples=samples, columns=columns))
        if groups:
            self._prefill(groups)

    def _prefill(self, groups: list[Waiting]) -> None:
        start = time.perf_counter()
        groups, prefixes, unseen = seen_prefixes(groups, self._decoder.see)
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
        """Reports and frees the finished slots; reports the other slots too if their call streams."""
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
        """Returns the finished slots together with the slots whose newest token completes a stop string."""
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
        """Returns the kept sets of a sample's tokens from ``start`` on, or None if they were not asked for."""
        return self._decoder.kept.of_slot(slot, start) if sample.prompt.settings.tells_kept else None

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
        """Puts all running samples, or only those with states, back at the head of the queue with their tokens."""
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
        """Fails the calls of the slots that have no token, and no other calls; returns these calls."""
        self._decoder.clear(error.slots)
        calls = {self._running[slot].prompt.call for slot in error.slots}
        self._fail_calls(calls, f"weight version {self.version}: {error}")
        return calls

    def _fail_calls(self, calls: set[Call], message: str) -> None:
        """Ends these calls with ``message``, whether their samples run or wait."""
        self._waiting.drop(calls)
        self._free([slot for slot, sample in enumerate(self._running) if sample.prompt.call in calls])
        self._deliver()
        for call in calls:
            call.fail(message)
