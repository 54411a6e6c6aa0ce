"""Chooses the engine of each prompt by the prompt's prefix and by the engines' load.

A group goes to one engine, which prefills its prompt once. An episode's next turn goes to the engine that answered its
turns before and keeps their keys and values, unless that engine is busier by more than this turn. The choice never
changes the tokens, because seeds belong to samples. It may change the rounding of log-probs, which depends on the
samples in the same batch. `Router` with ``by_load`` false therefore uses nothing that depends on time. Nor does it use
what engines saw under older weights, which they have dropped and which a resumed run does not know.

An `OpenPrompt` tracks a prompt in the pool: which samples are finished, which are requested, and the partial samples'
tokens.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from relax_core.contracts.engine import Generated, PromptRequest
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media, MediaItem
from relax_core.engines.protocol.server_sent_events import read_only


def prefix_blocks(input_ids: Sequence[int], media: Sequence[Media] = (), *, block: int) -> list[int]:
    """Returns one hash for each whole block of ``block`` tokens; it covers all tokens up to the block's end.

    It covers the digests of the images, videos and sounds of these rows too, because different ones may have equal ids.
    """
    blocks: list[int] = []
    before = 0
    for start in range(0, len(input_ids) - block + 1, block):
        end = start + block
        items = [one.item.digest for one in media if one.start < end and one.end > start]
        before = hash((before, *input_ids[start:end], *items))
        blocks.append(before)
    return blocks


PREFIX_BLOCK = 64  # tokens; prefixes are compared in blocks of these
LONG_PREFIX = 64  # tokens; a shorter common prefix does not decide, because its prefill is fast
KNOWN_BLOCKS = 1 << 16  # newest prefix blocks that are remembered for each engine


class Router:
    """Chooses engines for prompts, at first among engines 0 to ``count`` - 1.

    With ``by_load``, new prompts go to the engine with the fewest outstanding tokens, so that a slow or busy engine
    gets fewer. Without it, only the prompts that are routed together are spread evenly.
    """

    def __init__(self, count: int, *, by_load: bool) -> None:
        self._place = {engine: engine for engine in range(count)}  # engine → its place among the engines
        self._by_load = by_load
        self._outstanding: defaultdict[int, float] = defaultdict(float)  # tokens that this pool has asked for
        self._others: defaultdict[int, float] = defaultdict(float)  # tokens of other clients, as the engine reports
        self._blocks: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)

    def change_engines(self, engines: Collection[int], *, leaving: Collection[int]) -> None:
        """Sets the engines that may be chosen, and forgets all others but those in ``leaving``."""
        self._place = {engine: place for place, engine in enumerate(sorted(engines))}
        known: dict[int, Any]
        for known in (self._outstanding, self._others, self._blocks):
            for engine in known.keys() - {*engines, *leaving}:
                del known[engine]

    def choose(self, prompts: Sequence[OpenPrompt], *, usable: Sequence[int]) -> list[int]:
        """Returns one of the ``usable`` engines for each prompt; call `asked` for each request that is sent then."""
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
        engine = min(candidates, key=lambda one: (loads[one], (self._place[one] - prompt.tie) % len(self._place)))
        self._remember(engine, blocks)
        return engine

    def _known(self, engine: int, blocks: Sequence[int]) -> int:
        """Returns how many blocks from the prompt's start on the engine has seen."""
        seen = self._blocks[engine]
        return next((number for number, block in enumerate(blocks) if block not in seen), len(blocks))

    def _remember(self, engine: int, blocks: Sequence[int]) -> None:
        seen = self._blocks[engine]
        for block in blocks:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > KNOWN_BLOCKS:
            seen.popitem(last=False)

    def answered(self, engine: int, prompt: OpenPrompt) -> None:
        """Remembers that the engine has finished a prompt's one response, from which an episode's next turn goes on."""
        if len(self._place) > 1 and prompt.n == 1 and engine in self._place:
            token_ids = prompt.request.input_ids + prompt.done[0].output_ids.tolist()
            self._remember(engine, self._named(prompt, token_ids))

    def _named(self, prompt: OpenPrompt, token_ids: Sequence[int]) -> list[int]:
        """Returns the names of a sequence's blocks; without ``by_load`` they hold for one weight version."""
        blocks = prefix_blocks(token_ids, prompt.request.media, block=PREFIX_BLOCK)
        return blocks if self._by_load else [hash((prompt.request.min_version, block)) for block in blocks]

    # -- the engines' load --------------------------------------------------------------------------------------------
    def asked(self, engine: int, tokens: float) -> None:
        """Adds tokens that were asked of the engine."""
        self._outstanding[engine] += tokens

    def came_back(self, engine: int, tokens: float) -> None:
        """Subtracts tokens that the engine has returned or lost."""
        if engine in self._outstanding:  # an engine that has left is forgotten
            self._outstanding[engine] -= tokens

    def others(self, engine: int, tokens: float) -> None:
        """Sets how many tokens other clients have asked of the engine."""
        if engine in self._place:
            self._others[engine] = tokens


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
