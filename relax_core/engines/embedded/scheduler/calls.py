"""Holds the state of /generate calls in the scheduler: prompts, samples, progress reports, and the queue for slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from relax_core.contracts.engine import FinishReason
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media, MediaGone
from relax_core.engines.embedded.model.prefill import SequenceMedia
from relax_core.engines.embedded.model.tower_features import MediaFeatures
from relax_core.engines.embedded.scheduler.slots import Prefix, PromptRoutes
from relax_core.engines.embedded.scheduler.token_sampler import SamplingSettings, keys_behind, sample_keys
from relax_core.engines.protocol.frames import VersionSpan
from relax_core.engines.protocol.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class Progress:
    """Reports one sample: its tokens since the last report, or all of them (`Sample.reported`).

    ``finish`` is None while the sample goes on. ``matched`` is the stop token or string that ended it. ``length`` is
    the number of tokens so far, ``spans`` their weight versions. ``routes`` holds the experts of a finished sample's
    response tokens except the last, ``[length - 1, layers, per_token]``, if they were asked for; it is None for a
    sample that never ran. ``kept`` holds the sets that ``ids`` were sampled from, if they were asked for.
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
    """Holds one checked prompt of a call, which stands at ``index`` in the call.

    ``routes`` is given if the prompt's experts are asked for. ``samples`` and ``generated`` are those of
    `PromptRequest`. ``stop`` holds the strings that end a response, if there are any. ``media`` places the prompt's
    images and videos. ``prefill_s`` is the time of the prefills that it was part of, in seconds. ``cached_tokens`` is
    how many of its tokens the newest of them did not compute. ``queue_s`` is the time before the first of them.
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
        """Returns a sample's whole response, given the tokens ``ids`` that this call has generated."""
        return self.token_ids[len(self.token_ids) - self.generated :] + ids if self.generated else ids


@dataclass(slots=True, eq=False)
class Sample:
    """Holds the state of one response.

    ``marks`` holds (first token, version) for each change of the weight version. ``done``, ``done_logprobs``,
    ``done_routes`` and ``done_kept`` hold what was generated so far while the sample has no slot. ``streamed`` is the
    number of tokens that were reported.
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
        """Returns how many of its tokens its last report leaves out, because earlier ones had them."""
        return 0 if self.prompt.call.whole_at_end else self.streamed

    def mark(self, start: int, version: int) -> None:
        """Records that tokens from ``start`` on come from weights ``version``."""
        if self.marks and self.marks[-1][0] == start:
            self.marks.pop()
        if not self.marks or self.marks[-1][1] != version:
            self.marks.append((start, version))

    def matched(self, ids: list[int]) -> int | str | None:
        """Returns the stop token or the stop string that the last token of ``ids`` completes, or None."""
        if ids[-1] in self.prompt.settings.stop_token_ids:
            return ids[-1]
        return None if self.prompt.stop is None else self.prompt.stop.matched(self.prompt.response(ids))

    def spans(self, length: int) -> list[VersionSpan]:
        """Returns the weight versions of its first ``length`` tokens."""
        ends = [start for start, _ in self.marks[1:]] + [length]
        return [
            VersionSpan(start, end, version)
            for (start, version), end in zip(self.marks, ends, strict=False)
            if start < end
        ]


@dataclass(slots=True, eq=False)
class Waiting:
    """Holds samples of one prompt that wait for slots together; a sample that was retracted waits alone.

    ``goes_on`` is True if it goes before new prompts, because what it goes on from is computed (`WaitingQueue`).
    """

    prompt: Prompt
    samples: list[Sample]
    goes_on: bool = False

    @property
    def tokens(self) -> int:
        """Returns the number of tokens of the prefix."""
        return len(self.prompt.token_ids) + len(self.samples[0].done)

    def prefix(self, media: SequenceMedia | None) -> Prefix:
        """Returns the tokens that are computed once for all of these samples, with what their ``media`` change."""
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

    ``single`` is True if one prompt was given outside a list; with n = 1 the reply is then an object and not a list.
    ``asked_interval`` is the request's stream_interval. `submit` sets what the scheduler reads: ``stream_interval`` is
    the number of tokens between two reports of a sample; with 0 only finished samples are reported. With
    ``whole_at_end`` the last report of a sample has all of its tokens. ``sink`` gets the reports, ``fail`` the message
    of a failure that ends the call; both are called in the scheduler's thread. ``submitted``, ``first_prefill``,
    ``first_token`` and ``finished`` are times of ``time.perf_counter``; 0 stands for a time that has not come.
    ``tower_passes`` and ``media_feature_bytes`` are those of `MediaFeatures` after the call's last prefill.
    """

    n: int
    single: bool = False
    return_logprob: bool = True
    stream: bool = False
    asked_interval: int | None = None
    prompts: list[Prompt] = field(default_factory=list)  # until it is submitted
    samples: int = 0  # of all prompts
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
        """Adds the prompts that the call asks for, and returns the call."""
        self.prompts, self.samples = prompts, sum(len(prompt.samples) for prompt in prompts)
        return self

    def submit(self, sink: Sink, fail: Fail, *, whole_at_end: bool = False) -> list[Waiting]:
        """Begins the call; returns its prompts as the queue takes them, each with its samples that are asked for."""
        self.sink, self.fail, self.whole_at_end = sink, fail, whole_at_end
        if self.stream:  # unfinished samples are reported in frames only if that is asked for
            self.stream_interval = self.asked_interval or (0 if whole_at_end else 1)
        self.submitted = time.perf_counter()
        self.open_samples = self.samples
        prompts, self.prompts = self.prompts, []  # no cycle is left, which would wait for the garbage collector
        all_keys = sample_keys([prompt.sampling_seed for prompt in prompts], self.n)
        groups: list[Waiting] = []
        for prompt, prompt_keys in zip(prompts, all_keys, strict=True):
            keys = keys_behind(prompt_keys, prompt.generated)
            groups.append(Waiting(prompt, [Sample(prompt, index, keys[index : index + 1]) for index in prompt.samples]))
        return groups

    def prefilled(self, *, start: float, end: float, features: MediaFeatures | None) -> None:
        """Records a prefill of some of its prompts, with its times of ``time.perf_counter``."""
        self.first_prefill = self.first_prefill or start
        self.first_token = self.first_token or end
        self.prefill_s += end - start
        if features is not None:
            self.tower_passes, self.media_feature_bytes = features.passes, features.nbytes


def seen_prefixes(
    groups: Sequence[Waiting],
    see: Callable[[Sequence[tuple[int, Sequence[Media]]]], Sequence[SequenceMedia | MediaGone | None]],
) -> tuple[list[Waiting], list[Prefix], dict[Call, MediaGone]]:
    """Returns groups and their prefixes, with what ``see`` gives for the images and videos of that many tokens.

    The groups of a call for which ``see`` gives MediaGone are left out; the call is returned with its error.
    """
    failed: dict[Call, MediaGone] = {}
    seen: list[tuple[Waiting, Prefix]] = []
    for group, media in zip(groups, see([(one.tokens, one.prompt.media) for one in groups]), strict=True):
        if isinstance(media, MediaGone):
            failed[group.prompt.call] = media
        else:
            seen.append((group, group.prefix(media)))
    seen = [(group, prefix) for group, prefix in seen if group.prompt.call not in failed]
    return [group for group, _ in seen], [prefix for _, prefix in seen], failed


class WaitingQueue:
    """Holds the prompts that wait for slots or for a weight version, in the order in which they are taken.

    A retracted sample comes first. Then come the prompts that go on from a kept prefix, such as the next turn of an
    episode, so that its prefix is not dropped while it waits; then all others. Each kind stands in order of arrival.
    """

    def __init__(self) -> None:
        self._groups: list[Waiting] = []

    def add(self, groups: Sequence[Waiting], *, goes_on: Callable[[Waiting], bool]) -> None:
        """Appends prompts that have arrived; ``goes_on`` says which of them go on from a kept prefix."""
        for group in groups:
            group.goes_on = goes_on(group)
        self._groups = sorted([*self._groups, *groups], key=lambda group: not group.goes_on)

    def put_back(self, groups: Sequence[Waiting]) -> None:
        """Puts prompts at the head of the queue."""
        for group in groups:
            group.goes_on = True
        self._groups = [*groups, *self._groups]

    def is_ready(self, version: int) -> bool:
        """Is True if a prompt waits that may run under weights ``version``."""
        return any(group.prompt.min_version <= version for group in self._groups)

    def take(self, version: int, *, fits: Callable[[int, int], bool]) -> list[Waiting]:
        """Removes and returns the first prompts that may run under weights ``version``, as many as fit.

        ``fits(samples, columns)`` says whether so many more samples can run, the longest of which needs ``columns``.
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
        """Removes the prompts of these calls."""
        self._groups = [group for group in self._groups if group.prompt.call not in calls]

    def counts(self, version: int) -> tuple[int, int]:
        """Returns how many samples wait for slots, and how many for a newer weight version than ``version``."""
        held = sum(len(group.samples) for group in self._groups if group.prompt.min_version > version)
        return sum(len(group.samples) for group in self._groups) - held, held
