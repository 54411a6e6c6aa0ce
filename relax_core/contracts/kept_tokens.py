"""The kept sets: which tokens top_k, top_p and min_p left where a token was sampled.

An engine samples from softmax over such a set, so whoever computes log-probs of the sampled tokens normalises over the
same set. This file is the one place that encodes and decodes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np

BITS = 32  # of a word

# The log-prob of a token that was left out, and its logit: the probability is exactly 0 in float32 and float64. It is
# finite, so that differences of two such log-probs, and a softmax over nothing else, give no NaN.
OUTSIDE = -1e30


class KeptArrays(NamedTuple):
    """Kept sets as arrays. ``counts`` int64 ``[tokens]``. ``listed``, ``masked`` bool ``[tokens]``: which sets are
    given as ids and which as bits; a set of neither kind is the whole vocabulary. ``ids`` int64 ``[listed ids]``: of
    the listed sets, one after the other, ``counts`` of each. ``bits`` uint8 ``[masked sets, bytes]``: bit i of byte j
    is token 8 j + i."""

    counts: np.ndarray
    listed: np.ndarray
    masked: np.ndarray
    ids: np.ndarray
    bits: np.ndarray


class KeptTokens(msgspec.Struct, frozen=True, array_like=True):
    """One kept set for each of some sampled tokens. ``counts``: int32 ``[tokens]``, how many tokens each set has; 0
    says that nothing was left out. ``words``: uint32, set after set. All numbers are little-endian.

    A set of n of ``vocab_size`` tokens takes min(n, ceil(vocab_size / 32)) words: its token ids where these are no
    longer than a bitmask of the vocabulary, else that bitmask (bit i of word j is token 32 j + i). So a set never takes
    more than a bit for each token of the vocabulary.
    """

    vocab_size: int
    counts: bytes
    words: bytes

    @property
    def tokens(self) -> int:
        """How many sets there are."""
        return len(self.counts) // 4

    @property
    def nbytes(self) -> int:
        return len(self.counts) + len(self.words)

    # -- encoding ---------------------------------------------------------------------------------------------------
    @staticmethod
    def of_mask(mask: np.ndarray) -> KeptTokens:
        """Of a bool array ``[tokens, vocab]``, True where a token was kept. No set may be empty."""
        vocab_size = mask.shape[1]
        bits = _packed(mask)
        counts = np.bitwise_count(bits).sum(1, dtype=np.int64)
        assert counts.all(), "a sampled token is in its own set"
        counts[counts == vocab_size] = 0
        width = bits.shape[1]
        listed, masked = (counts > 0) & (counts <= width), counts > width
        if masked.all():
            words = bits.reshape(-1)
        else:
            of_ids = np.repeat(listed, _words_of(counts, width))
            rows = mask if listed.all() else mask[listed]
            words = np.empty(len(of_ids), dtype="<u4")
            words[of_ids] = np.flatnonzero(rows) - np.repeat(np.arange(len(rows)) * vocab_size, counts[listed])
            words[~of_ids] = bits[masked].reshape(-1)
        return KeptTokens(vocab_size, counts.astype("<i4").tobytes(), words.tobytes())

    @staticmethod
    def of_lists(sets: Sequence[Sequence[int]], *, vocab_size: int) -> KeptTokens:
        """Of one list of token ids a sampled token. Raises ValueError for an empty list and an id that is not in the
        vocabulary."""
        counts = np.fromiter(map(len, sets), dtype="<i4", count=len(sets))
        ids = np.fromiter(chain.from_iterable(sets), dtype=np.int64, count=int(counts.sum()))
        if not counts.all():
            raise ValueError(f"the kept set of token {int(np.argmin(counts))} is empty")
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"a kept set has an id that is not in 0..{vocab_size - 1}")
        if (counts <= _mask_words(vocab_size)).all() and (counts < vocab_size).all():
            return KeptTokens(vocab_size, counts.tobytes(), ids.astype("<u4").tobytes())
        parts = []
        for own in np.split(ids, np.cumsum(counts)[:-1]):
            mask = np.zeros((1, vocab_size), dtype=bool)
            mask[0, own] = True
            parts.append(KeptTokens.of_mask(mask))
        return KeptTokens.joined(parts)

    @staticmethod
    def whole(tokens: int, *, vocab_size: int) -> KeptTokens:
        """Of tokens for which nothing was left out."""
        return KeptTokens(vocab_size, bytes(4 * tokens), b"")

    @staticmethod
    def joined(parts: Sequence[KeptTokens]) -> KeptTokens:
        """One after the other; of one vocabulary, and one part at least."""
        assert len({part.vocab_size for part in parts}) == 1, "kept sets of different vocabularies"
        counts, words = (b"".join(one) for one in zip(*((part.counts, part.words) for part in parts), strict=True))
        return KeptTokens(parts[0].vocab_size, counts, words)

    # -- decoding ---------------------------------------------------------------------------------------------------
    def arrays(self) -> KeptArrays:
        """Raises ValueError where counts and words do not belong together."""
        counts, width = self._counts().astype(np.int64), _mask_words(self.vocab_size)
        sizes = _words_of(counts, width)
        outside = counts.size > 0 and not 0 <= counts.min() <= counts.max() < self.vocab_size
        if outside or len(self.words) != 4 * sizes.sum():
            raise ValueError(f"kept sets of {len(counts)} tokens in {len(self.words)} bytes: they do not fit")
        words = np.frombuffer(self.words, dtype="<u4")
        listed, masked = (counts > 0) & (counts <= width), counts > width
        of_ids = np.repeat(listed, sizes)
        ids = words if listed.all() else words[of_ids]
        bits = words if masked.all() else words[~of_ids]
        return KeptArrays(
            counts=counts,
            listed=listed,
            masked=masked,
            ids=ids.astype(np.int64),
            bits=bits.view(np.uint8).reshape(-1, 4 * width),
        )

    def mask(self) -> np.ndarray:
        """bool ``[tokens, vocab]``, True where a token was kept."""
        sets = self.arrays()
        mask = np.zeros((len(sets.counts), 8 * sets.bits.shape[1]), dtype=bool)
        mask[np.repeat(np.flatnonzero(sets.listed), sets.counts[sets.listed]), sets.ids] = True
        mask[sets.masked] = np.unpackbits(sets.bits, axis=1, bitorder="little")
        mask[sets.counts == 0] = True
        return mask[:, : self.vocab_size]

    def lists(self) -> list[list[int]]:
        """One list of token ids a sampled token."""
        return [np.flatnonzero(row).tolist() for row in self.mask()]

    def word_ends(self) -> np.ndarray:
        """int64 ``[tokens]``, behind which word each set ends."""
        return np.cumsum(_words_of(self._counts().astype(np.int64), _mask_words(self.vocab_size)))

    def take(self, places: np.ndarray) -> KeptTokens:
        """The sets at ``places``, int64 ``[n]``, in their order."""
        counts, ends = self._counts(), self.word_ends()
        wanted = np.diff(ends, prepend=0)[places]
        shift = np.repeat(ends[places] - np.cumsum(wanted), wanted)
        words = np.frombuffer(self.words, dtype="<u4")[np.arange(len(shift)) + shift]
        return KeptTokens(self.vocab_size, counts[places].tobytes(), words.tobytes())

    def fault(self, token_ids: Sequence[int] | np.ndarray) -> str | None:
        """Why these cannot be the sets that ``token_ids`` were sampled from, or None."""
        if self.tokens != len(token_ids):
            return f"{self.tokens} kept sets came for {len(token_ids)} tokens"
        try:
            sets = self.arrays()
        except ValueError as error:
            return str(error)
        if sets.ids.size and sets.ids.max() >= self.vocab_size:
            return f"a kept set has token {int(sets.ids.max())}, but the vocabulary has {self.vocab_size}"
        sampled = np.asarray(token_ids, dtype=np.int64)
        if sampled.size and not 0 <= sampled.min() <= sampled.max() < self.vocab_size:
            return f"kept sets of a vocabulary of {self.vocab_size} came for token {int(sampled.max())}"
        inside = sets.counts == 0
        found = sets.ids == np.repeat(sampled[sets.listed], sets.counts[sets.listed])
        inside[np.repeat(np.flatnonzero(sets.listed), sets.counts[sets.listed])[found]] = True
        of_masked = sampled[sets.masked]
        inside[sets.masked] = sets.bits[np.arange(len(of_masked)), of_masked >> 3] >> (of_masked & 7) & 1
        if inside.all():
            return None
        place = int(np.argmin(inside))
        return f"its token {place}, id {token_ids[place]}, is not in the set that it was sampled from"

    def _counts(self) -> np.ndarray:
        return np.frombuffer(self.counts, dtype="<i4")


def set_bytes(kept: int, *, vocab_size: int) -> int:
    """What a set of ``kept`` tokens takes, its count included."""
    return 4 + 4 * min(kept, _mask_words(vocab_size))


def _mask_words(vocab_size: int) -> int:
    return -(-vocab_size // BITS)


def _words_of(counts: np.ndarray, mask_words: int) -> np.ndarray:
    return np.minimum(counts, mask_words)


def _packed(mask: np.ndarray) -> np.ndarray:
    """bool ``[sets, vocab]`` → uint32 ``[sets, words]``."""
    packed = np.packbits(mask, axis=1, bitorder="little")
    words = np.zeros((len(mask), _mask_words(mask.shape[1])), dtype="<u4")
    words.view(np.uint8)[:, : packed.shape[1]] = packed
    return words
