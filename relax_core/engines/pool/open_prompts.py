"""Tracks a prompt in the pool: which samples are finished, which are requested, and the partial ones' tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from relax_core.contracts.engine import Generated, PromptRequest
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import MediaItem
from relax_core.engines.protocol.server_sent_events import read_only


@dataclass(slots=True, eq=False, kw_only=True)
class OpenPrompt:
    """Holds one prompt with its ``n`` samples.

    ``index`` is its index in the prompt batch. ``tie`` chooses among engines that are equally loaded: engine ``tie %
    count`` comes first. ``cost`` is the number of tokens that one sample may take, with its share of the prompt and of
    the towers' work for the prompt's media, in tokens.
    ``done`` holds the finished samples, ``partial`` the tokens so far of aborted ones, and ``asked`` those that
    ``engine`` has to return now. ``ticket`` counts the calls of `ask`; a request with an older ticket counts no more.
    ``excused`` is True if the pool itself wants the engine to abort the samples that are asked for. ``fruitless`` maps
    a sample to how often in a row the engine aborted it without a new token though the pool did not want that.
    ``closed`` is True once the prompt was handed on or given up.
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
        """Returns the number of samples that are not finished."""
        return self.n - len(self.done)

    @property
    def missing_cost(self) -> float:
        """Returns the number of tokens that the missing samples may take."""
        return self.cost * self.missing

    def ask(self, engine: int) -> list[PromptRequest]:
        """Returns the requests for all missing samples, and counts them as asked of ``engine``.

        Samples without a token share one request, so that they share a prefill. Each of the others has a request that
        goes on from its own prefix.
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
        """Is True if the request with this ticket still has to return samples."""
        return ticket == self.ticket and bool(self.asked)

    def take(self, one: Generated) -> None:
        """Takes a response: a finished sample, or the tokens so far of an aborted one."""
        self.asked.remove(one.sample)
        before = self.partial.pop(one.sample, None)
        whole = one if before is None else joined(before, one)
        if whole.finish_reason != "abort":
            self.done[one.sample] = whole
            return
        if whole.output_ids.size:
            self.partial[one.sample] = whole
        if one.output_ids.size:
            self.fruitless.pop(one.sample, None)
        elif not self.excused:
            self.fruitless[one.sample] = self.fruitless.get(one.sample, 0) + 1

    def lose(self) -> int:
        """Counts the samples that were asked for as missing again; returns how many they are."""
        lost = len(self.asked)
        self.asked.clear()
        self.engine = None
        return lost

    def responses(self) -> list[Generated]:
        """Returns the finished samples in order."""
        return [self.done[sample] for sample in range(self.n)]


def prompt_cost(request: PromptRequest, item_work: Callable[[MediaItem], float]) -> float:
    """Returns what a prompt's prefill costs in tokens; ``item_work`` returns the towers' work for an item in tokens."""
    return len(request.input_ids) + sum(item_work(one.item) for one in request.media)


def owed_rids(prompts: Iterable[OpenPrompt]) -> dict[int, list[str]]:
    """Maps each engine to the rids of the prompts that it still has to answer."""
    owed: dict[int, list[str]] = {}
    for prompt in prompts:
        if prompt.engine is not None and prompt.asked:
            owed.setdefault(prompt.engine, []).append(prompt.request.rid)
    return owed


def cut(one: Generated, tokens: int) -> Generated:
    """Returns the response's first ``tokens`` tokens as if it had ended there."""
    experts = one.response_experts
    return msgspec.structs.replace(
        one,
        output_ids=one.output_ids[:tokens],
        logprobs=one.logprobs[:tokens],
        versions=one.versions[:tokens],
        response_experts=None if experts is None or not tokens else experts[: tokens - 1],
        kept=None if one.kept is None else one.kept.take(np.arange(tokens)),
    )


def joined(before: Generated, after: Generated) -> Generated:
    """Joins an aborted beginning of a response and the tokens after it.

    Tokens keep the log-probs, the kept sets and the weight versions that they were sampled with.
    """
    kept = [one.kept for one in (before, after) if one.kept is not None]
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
    """Returns ``whole``, the response joined from ``before`` and ``after``, with the experts of both.

    Each token keeps the experts of its first pass through the model, because they belong to the log-probs that were
    sampled. The other tokens get the experts that ``after`` has for them at the end of its prompt. These are the last
    token of ``before``, which had no experts yet, and tokens for which the engine returned none, as SGLang does if a
    request is aborted whose prompt came from its cache.
    """
    if after.prompt_experts is None or after.response_experts is None:  # not asked for, or ``after`` never ran
        experts = before.prompt_experts, before.response_experts
    else:
        prefilled = after.prompt_experts  # experts of the prompt and of the tokens of ``before``
        known = [part for part in (before.prompt_experts, before.response_experts) if part is not None]
        joined = read_only(np.concatenate([*known, prefilled[sum(map(len, known)) :], after.response_experts]))
        prompt_tokens = len(prefilled) - len(before.output_ids)
        experts = joined[:prompt_tokens], joined[prompt_tokens:]
    return msgspec.structs.replace(whole, prompt_experts=experts[0], response_experts=experts[1])
