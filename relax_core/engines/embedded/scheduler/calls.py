"""A /generate call on its way through the scheduler: its prompts, their samples, and what is reported of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from relax_core.contracts.engine import FinishReason
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.engines.embedded.scheduler.routing_log import PromptRoutes
from relax_core.engines.embedded.scheduler.slots import Prefix
from relax_core.engines.embedded.scheduler.token_sampler import SamplingSettings, keys_behind, sample_keys
from relax_core.engines.protocol.stop_strings import StopStrings
from relax_core.engines.protocol.version_spans import VersionSpan


@dataclass(frozen=True, slots=True)
class Progress:
    """News of one sample: the tokens since the last news, or all of them where the call does not stream.

    ``finish`` is None while it goes on; ``matched``: the stop token or string that ended
    it. ``length``: tokens so far, ``spans``
    their weight versions. ``routes``: of a finished sample whose experts are wanted, those of its response tokens but
    the last, ``[length - 1, layers, per_token]``; None for one that never ran. ``kept``: the sets that ``ids`` were
    sampled from, where they are wanted.
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
    """One prompt of a call. ``place``: its place in the call. ``routes``: where its experts are wanted. ``samples``,
    ``generated``: see `PromptRequest`. ``stop``: strings that end a response, where there are any."""

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

    def response(self, ids: list[int]) -> list[int]:
        """A sample's whole response, of which ``ids`` are the tokens that were generated here."""
        return self.token_ids[len(self.token_ids) - self.generated :] + ids if self.generated else ids


@dataclass(slots=True, eq=False)
class Sample:
    """One response. ``marks``: (first token, version) wherever the weight version changed; ``done``, ``done_logprobs``,
    ``done_routes`` and ``done_kept`` hold what was generated while it is out of its slot."""

    prompt: Prompt
    index: int
    key: np.ndarray  # uint64 [1]
    marks: list[tuple[int, int]] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    done_logprobs: list[float] = field(default_factory=list)
    done_routes: np.ndarray | None = None
    done_kept: KeptTokens | None = None
    streamed: int = 0

    def mark(self, start: int, version: int) -> None:
        """Tokens from ``start`` on come from ``version``."""
        if self.marks and self.marks[-1][0] == start:
            self.marks.pop()
        if not self.marks or self.marks[-1][1] != version:
            self.marks.append((start, version))

    def spans(self, length: int) -> list[VersionSpan]:
        """The versions of its first ``length`` tokens."""
        ends = [start for start, _ in self.marks[1:]] + [length]
        return [
            VersionSpan(start, end, version)
            for (start, version), end in zip(self.marks, ends, strict=False)
            if start < end
        ]


@dataclass(slots=True, eq=False)
class Waiting:
    """Samples of one prompt that wait for slots together; one sample alone after it was retracted."""

    prompt: Prompt
    samples: list[Sample]

    def prefix(self) -> Prefix:
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
        )


@dataclass(slots=True, eq=False)
class Call:
    """``stream_interval``: tokens between two pieces of news of a sample, 0 for finished ones only. ``sink`` gets news,
    ``fail`` the words of a failure that ends the call; both are called in the scheduler's thread."""

    sink: Sink
    fail: Fail
    stream_interval: int = 0
    open_samples: int = 0
    submitted: float = field(default_factory=time.perf_counter)
    first_prefill: float = 0.0
    first_token: float = 0.0
    prefill_s: float = 0.0
    finished: float = 0.0


def waiting_prompts(prompts: Sequence[Prompt], *, n: int) -> list[Waiting]:
    """A call's prompts as they enter the queue, each with those of its ``n`` samples that are asked for."""
    groups: list[Waiting] = []
    all_keys = sample_keys([prompt.sampling_seed for prompt in prompts], n)
    for prompt, prompt_keys in zip(prompts, all_keys, strict=True):
        keys = keys_behind(prompt_keys, prompt.generated)
        groups.append(Waiting(prompt, [Sample(prompt, index, keys[index : index + 1]) for index in prompt.samples]))
        prompt.call.open_samples += len(prompt.samples)
    return groups
