"""A prompt on its way through the pool: which samples are in, which are asked for, and from where the others go on."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from relax_core.contracts.engine import Generated, PromptRequest
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.engines.protocol.routed_experts import read_only, with_joined_experts


@dataclass(slots=True, eq=False, kw_only=True)
class OpenPrompt:
    """One prompt with its ``n`` samples. ``place``: its place in the prompt batch. ``tie`` chooses among engines that
    are equally loaded: engine ``tie % count`` comes first. ``cost``: tokens that one of its samples may take, with its
    share of the prompt. ``done``: the finished samples; ``partial``: what aborted ones had so far; ``asked``: those
    that ``engine`` owes now. ``ticket``: number of the newest `ask`; whoever holds an older one owes nothing any more.
    ``excused``: we want the engine to abort what is asked now. ``fruitless``: sample → how often in a row it came back
    aborted without a new token, though nobody here wanted that. ``closed``: it was handed on, or given up."""

    place: int
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
        """Samples that are not finished."""
        return self.n - len(self.done)

    @property
    def missing_cost(self) -> float:
        """Tokens that the missing samples may take."""
        return self.cost * self.missing

    def ask(self, engine: int) -> list[PromptRequest]:
        """The requests for all samples that are missing: those without a token together, so that they share a prefill,
        the others each from its own prefix."""
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
        """Whether samples are still owed by whoever was asked under this number."""
        return ticket == self.ticket and bool(self.asked)

    def take(self, one: Generated) -> None:
        """A response came: a finished sample, or what an aborted one had."""
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
        """The engine that was asked is gone: what it owed is missing again. Returns how many samples that are."""
        lost = len(self.asked)
        self.asked.clear()
        self.engine = None
        return lost

    def responses(self) -> list[Generated]:
        return [self.done[sample] for sample in range(self.n)]


def cut(one: Generated, tokens: int) -> Generated:
    """The response's first tokens, at least one, as if it had ended there."""
    experts = one.response_experts
    return msgspec.structs.replace(
        one,
        output_ids=one.output_ids[:tokens],
        logprobs=one.logprobs[:tokens],
        versions=one.versions[:tokens],
        response_experts=None if experts is None else experts[: tokens - 1],
        kept=None if one.kept is None else one.kept.take(np.arange(tokens)),
    )


def joined(before: Generated, after: Generated) -> Generated:
    """One response from its aborted beginning and what followed: tokens keep the log-probs, the kept sets and the
    weight versions that they were sampled with."""
    kept = [one.kept for one in (before, after) if one.kept is not None]
    whole = msgspec.structs.replace(
        after,
        output_ids=read_only(np.concatenate([before.output_ids, after.output_ids])),
        logprobs=read_only(np.concatenate([before.logprobs, after.logprobs])),
        versions=read_only(np.concatenate([before.versions, after.versions])),
        kept=KeptTokens.joined(kept) if kept else None,
    )
    return with_joined_experts(whole, before, after)
