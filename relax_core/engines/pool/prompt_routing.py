"""Chooses the engine of each prompt by the prompt's prefix and by the engines' load.

A group goes to one engine, which prefills its prompt once. An episode's next turn goes to the engine that answered its
turns before and keeps their keys and values, unless that engine is busier by more than this turn. The choice never
changes the tokens, because seeds belong to samples. It may change the rounding of log-probs, which depends on the
samples in the same batch. `Router` with ``by_load`` false therefore uses nothing that depends on time. Nor does it use
what engines saw under older weights, which they have dropped and which a resumed run does not know.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from relax_core.contracts.media import Media
from relax_core.engines.pool.open_prompts import OpenPrompt


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
