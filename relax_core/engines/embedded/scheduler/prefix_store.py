"""Keeps keys and values of finished responses, so that the next turn of an episode prefills its new tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from relax_core.contracts.media import Media
from relax_core.engines.embedded.model.recurrent_states import StateTable
from relax_core.engines.pool.prompt_routing import prefix_blocks

BLOCK = 32  # tokens; a shorter common prefix is prefilled anew, because that takes no longer than to find and copy it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptPrefix:
    """Holds what the weights in force have computed of one sequence.

    ``token_ids`` is int64 ``[tokens]``, and ``media`` places the sequence's images, videos and sounds. ``kv`` is
    ``[layers, 2, kv_heads, tokens, head_dim]``. ``states`` are those behind the last token, for a model with a gated
    delta net. ``experts`` ``[tokens, layers, per_token]`` is given if the experts of all tokens are known.
    """

    token_ids: np.ndarray
    media: tuple[Media, ...]
    kv: Tensor
    states: StateTable | None = None
    experts: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Returns the size of keys, values and states, in bytes."""
        return self.kv.nbytes + (0 if self.states is None else self.states.nbytes)

    def common(self, token_ids: np.ndarray, media: Sequence[Media]) -> int:
        """Returns how many first tokens it has in common with another sequence."""
        most = min(len(token_ids), len(self.token_ids))
        differ = np.flatnonzero(self.token_ids[:most] != token_ids[:most])
        if len(differ):
            most = int(differ[0])
        ours, others = (_placed(items, most) for items in (self.media, media))
        return min((start for start, _ in ours ^ others), default=most)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPrefix:
    """Says that the first ``tokens`` tokens of a prompt are those of ``kept``."""

    kept: KeptPrefix
    tokens: int

    @property
    def whole(self) -> bool:
        """Is True if the prompt goes on from all that is kept, as an episode's next turn does."""
        return self.tokens == len(self.kept.token_ids)


class PrefixStore:
    """Keeps up to ``tokens`` tokens of prefixes; those that were used least recently are dropped.

    All of them come from the weights in force: `forget` drops them before other weights take over. A state counts as
    ``state_tokens`` tokens, which is 0 for a model without states. A model with states is served only from a prefix's
    end, because no state is kept of the tokens before it.
    """

    def __init__(self, tokens: int, *, state_tokens: int = 0) -> None:
        self.nbytes = 0
        self._most = tokens
        self._state_tokens = state_tokens
        self._used = 0
        self._blocks: dict[KeptPrefix, list[int]] = {}  # of each prefix, the least recently used first
        self._by_block: dict[int, dict[KeptPrefix, None]] = {}

    @property
    def is_on(self) -> bool:
        """Is True if anything can be kept."""
        return self._most > 0

    def find(self, token_ids: Sequence[int], media: Sequence[Media], *, experts: bool = False) -> FoundPrefix | None:
        """Returns what serves most tokens of a prompt, but never its last one, whose output is always computed.

        ``experts`` says that the experts of the served tokens are needed.
        """
        if not self._blocks:
            return None
        asked = np.array(token_ids[:-1], dtype=np.int64)
        chain = [block for block in prefix_blocks(token_ids[:-1], media, block=BLOCK) if block in self._by_block]
        for block in reversed(chain):
            found = [
                FoundPrefix(kept=kept, tokens=kept.common(asked, media))
                for kept in self._by_block[block]
                if kept.experts is not None or not experts
            ]
            if self._state_tokens:
                found = [one for one in found if one.whole]
            if found and (best := max(found, key=lambda one: one.tokens)).tokens >= BLOCK:
                self._touch(best.kept)
                return best
        return None

    def covers(self, token_ids: Sequence[int], media: Sequence[Media]) -> bool:
        """Is True if a sequence need not be kept: all of it is kept already, or it is too short or too long."""
        if not BLOCK <= len(token_ids) <= self._most - self._state_tokens:
            return True
        found = self.find([*token_ids, 0], media)
        return found is not None and found.tokens == len(token_ids) and (found.whole or not self._state_tokens)

    def keep(self, new: KeptPrefix) -> None:
        """Keeps a prefix that `covers` does not say is kept, in place of those that it goes on from."""
        blocks = prefix_blocks(new.token_ids.tolist(), new.media, block=BLOCK)
        for old in [kept for block in blocks for kept in self._by_block.get(block, ()) if self._ends_at(kept, block)]:
            if old.common(new.token_ids, new.media) == len(old.token_ids):
                self._drop(old)
        self._blocks[new] = blocks
        for block in blocks:
            self._by_block.setdefault(block, {})[new] = None
        self._used += self._size(new)
        self.nbytes += new.nbytes
        while self._used > self._most:
            self._drop(next(iter(self._blocks)))

    def forget(self) -> None:
        """Drops everything."""
        self._blocks.clear()
        self._by_block.clear()
        self._used = self.nbytes = 0

    def _size(self, kept: KeptPrefix) -> int:
        return len(kept.token_ids) + self._state_tokens

    def _ends_at(self, kept: KeptPrefix, block: int) -> bool:
        return self._blocks[kept][-1] == block

    def _touch(self, kept: KeptPrefix) -> None:
        self._blocks[kept] = self._blocks.pop(kept)

    def _drop(self, kept: KeptPrefix) -> None:
        for block in self._blocks.pop(kept):
            del self._by_block[block][kept]
            if not self._by_block[block]:
                del self._by_block[block]
        self._used -= self._size(kept)
        self.nbytes -= kept.nbytes


def _placed(media: Sequence[Media], tokens: int) -> set[tuple[int, str]]:
    """Returns where items begin in the first ``tokens`` tokens, and which they are."""
    return {(one.start, one.item.digest) for one in media if one.start < tokens}
