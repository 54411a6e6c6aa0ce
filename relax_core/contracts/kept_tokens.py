"""Encodes and decodes kept sets. The kept set of a sampled token: the tokens that top_k, top_p and min_p kept.

An engine samples a token from the softmax over the token's kept set, so the token's log-prob must be normalised over
the same set. Only this module encodes and decodes kept sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np

BITS = 32  # bits per word

# The log-prob and the logit of an excluded token. Its probability is exactly 0 in float32 and float64. The value is
# finite, because infinite values would give NaN in a difference of two such log-probs and in a softmax over only such
# logits.
OUTSIDE = -1e30


class KeptArrays(NamedTuple):
    """Holds kept sets as arrays.

    ``counts`` int64 ``[tokens]`` has the number of tokens in each set. ``listed`` (bool ``[tokens]``) marks the sets
    that are stored as token ids, and ``masked`` (bool ``[tokens]``) the sets that are stored as bits. A set without
    either mark is the whole vocabulary. ``ids`` int64 ``[listed ids]`` has the token ids of all listed sets, set after
    set. ``bits`` uint8 ``[masked sets, bytes]`` has the bits of the masked sets: bit i of byte j is token 8 j + i.
    """

    counts: np.ndarray
    listed: np.ndarray
    masked: np.ndarray
    ids: np.ndarray
    bits: np.ndarray


class KeptTokens(msgspec.Struct, frozen=True, array_like=True):
    """Holds encoded kept sets, one for each sampled token.

    ``counts`` is int32 ``[tokens]``, the number of tokens in each set; 0 means that no token was excluded. ``words`` is
    uint32, set after set. All numbers are little-endian.

    A set of n out of ``vocab_size`` tokens takes min(n, ceil(vocab_size / 32)) words. The words are the set's token
    ids, or a bitmask of the vocabulary (bit i of word j is token 32 j + i) if the bitmask is shorter. So a set never
    takes more than one bit for each token of the vocabulary.
    """

    vocab_size: int
    counts: bytes
    words: bytes

    @property
    def tokens(self) -> int:
        """Returns the number of sets."""
        return len(self.counts) // 4

    @property
    def nbytes(self) -> int:
        """Returns the number of bytes of all sets."""
        return len(self.counts) + len(self.words)

    # -- encoding ---------------------------------------------------------------------------------------------------
    @staticmethod
    def of_mask(mask: np.ndarray) -> KeptTokens:
        """Encodes a bool array ``[tokens, vocab]``, True for kept tokens. Every set must have a token."""
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
        """Encodes one list of token ids for each sampled token.

        Raises ValueError for an empty list and for an id that is not in the vocabulary.
        """
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
        """Returns the kept sets of ``tokens`` tokens that were sampled from the whole vocabulary."""
        return KeptTokens(vocab_size, bytes(4 * tokens), b"")

    @staticmethod
    def joined(parts: Sequence[KeptTokens]) -> KeptTokens:
        """Concatenates sets of the same vocabulary; ``parts`` has at least one entry."""
        assert len({part.vocab_size for part in parts}) == 1, "kept sets of different vocabularies"
        counts, words = (
            b"".join(column) for column in zip(*((part.counts, part.words) for part in parts), strict=True)
        )
        return KeptTokens(parts[0].vocab_size, counts, words)

    # -- decoding ---------------------------------------------------------------------------------------------------
    def arrays(self) -> KeptArrays:
        """Decodes the sets. Raises ValueError if counts and words contradict each other."""
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
        """Returns a bool array ``[tokens, vocab]``, True for kept tokens."""
        sets = self.arrays()
        mask = np.zeros((len(sets.counts), 8 * sets.bits.shape[1]), dtype=bool)
        mask[np.repeat(np.flatnonzero(sets.listed), sets.counts[sets.listed]), sets.ids] = True
        mask[sets.masked] = np.unpackbits(sets.bits, axis=1, bitorder="little")
        mask[sets.counts == 0] = True
        return mask[:, : self.vocab_size]

    def lists(self) -> list[list[int]]:
        """Returns one list of token ids for each sampled token."""
        return [np.flatnonzero(row).tolist() for row in self.mask()]

    def word_ends(self) -> np.ndarray:
        """Returns the index after each set's last word in ``words``, int64 ``[tokens]``."""
        return np.cumsum(_words_of(self._counts().astype(np.int64), _mask_words(self.vocab_size)))

    def take(self, positions: np.ndarray) -> KeptTokens:
        """Returns the sets at ``positions`` (int64 ``[n]``), in the order of ``positions``."""
        counts, ends = self._counts(), self.word_ends()
        wanted = np.diff(ends, prepend=0)[positions]
        shift = np.repeat(ends[positions] - np.cumsum(wanted), wanted)
        words = np.frombuffer(self.words, dtype="<u4")[np.arange(len(shift)) + shift]
        return KeptTokens(self.vocab_size, counts[positions].tobytes(), words.tobytes())

    def fault(self, token_ids: Sequence[int] | np.ndarray) -> str | None:
        """Returns why ``token_ids`` cannot have been sampled from these sets; None if they may have been."""
        if self.tokens != len(token_ids):
            return f"{self.tokens} kept sets came for {len(token_ids)} tokens"
        try:
            sets = self.arrays()
        except ValueError as error:
            return str(error)
        if sets.ids.size and sets.ids.max() >= self.vocab_size:
            return f"a kept set has token {int(sets.ids.max())}, but the vocabulary has {self.vocab_size}"
        sampled = np.asarray(token_ids, dtype=np.int64)
        unknown = sampled[(sampled < 0) | (sampled >= self.vocab_size)]
        if unknown.size:
            return f"kept sets of a vocabulary of {self.vocab_size} came for token {int(unknown[0])}"
        inside = sets.counts == 0
        found = sets.ids == np.repeat(sampled[sets.listed], sets.counts[sets.listed])
        inside[np.repeat(np.flatnonzero(sets.listed), sets.counts[sets.listed])[found]] = True
        of_masked = sampled[sets.masked]
        inside[sets.masked] = sets.bits[np.arange(len(of_masked)), of_masked >> 3] >> (of_masked & 7) & 1
        if inside.all():
            return None
        position = int(np.argmin(inside))
        return f"its token {position}, id {token_ids[position]}, is not in the set that it was sampled from"

    def _counts(self) -> np.ndarray:
        return np.frombuffer(self.counts, dtype="<i4")


def set_bytes(kept: int, *, vocab_size: int) -> int:
    """Returns the number of bytes that a set of ``kept`` tokens takes, including its count."""
    return 4 + 4 * min(kept, _mask_words(vocab_size))


def _mask_words(vocab_size: int) -> int:
    return -(-vocab_size // BITS)


def _words_of(counts: np.ndarray, mask_words: int) -> np.ndarray:
    return np.minimum(counts, mask_words)


def _packed(mask: np.ndarray) -> np.ndarray:
    """Packs bool ``[sets, vocab]`` into uint32 ``[sets, words]``."""
    packed = np.packbits(mask, axis=1, bitorder="little")
    words = np.zeros((len(mask), _mask_words(mask.shape[1])), dtype="<u4")
    words.view(np.uint8)[:, : packed.shape[1]] = packed
    return words
