"""Tests the encoding of kept sets: it is lossless, at most as long as a bitmask, and reports wrong data."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.contracts.kept_tokens import KeptTokens, set_bytes

VOCAB = 100  # a bitmask has 4 words


def random_sets(vocab: int, tokens: int, seed: int) -> tuple[np.ndarray, list[int]]:
    """Returns sets with one to all tokens, ``[tokens, vocab]``, and one token of each set."""
    random = np.random.default_rng(seed)
    sampled = random.integers(0, vocab, tokens)
    mask = random.random((tokens, vocab)) < random.choice([0.0, 0.02, 0.3, 1.0], (tokens, 1))
    mask[np.arange(tokens), sampled] = True
    return mask, sampled.tolist()


@settings(max_examples=150, deadline=None)
@given(vocab=st.integers(1, 300), tokens=st.integers(0, 20), seed=st.integers(0, 2**31), data=st.data())
def test_decoding_returns_the_encoded_sets(vocab: int, tokens: int, seed: int, data: st.DataObject) -> None:
    mask, sampled = random_sets(vocab, tokens, seed)
    kept = KeptTokens.of_mask(mask)
    assert kept.tokens == tokens and np.array_equal(kept.mask(), mask)
    assert kept.lists() == [np.flatnonzero(row).tolist() for row in mask]
    assert kept.fault(sampled) is None
    assert kept.nbytes <= sum(set_bytes(int(row.sum()), vocab_size=vocab) for row in mask)
    for wire in (msgspec.msgpack, msgspec.json):
        assert wire.decode(wire.encode(kept), type=KeptTokens) == kept
    places = np.array(data.draw(st.lists(st.integers(0, tokens - 1), max_size=9) if tokens else st.just([])), dtype=int)
    assert np.array_equal(kept.take(places).mask(), mask[places])
    assert np.array_equal(KeptTokens.joined([kept, kept.take(places)]).mask(), np.concatenate([mask, mask[places]]))
    if tokens:
        assert KeptTokens.of_lists(kept.lists(), vocab_size=vocab) == kept


def test_a_flat_distribution_costs_a_bit_a_token_of_the_vocabulary() -> None:
    vocab = 151_936
    mask = np.ones((2, vocab), dtype=bool)
    mask[0, 7] = mask[1, 20:] = False
    kept = KeptTokens.of_mask(mask)
    assert kept.nbytes == (4 + vocab // 8) + (4 + 4 * 20)
    assert (
        KeptTokens.of_mask(np.ones((2, vocab), dtype=bool)).nbytes == KeptTokens.whole(2, vocab_size=vocab).nbytes == 8
    )


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(1, 12), seed=st.integers(0, 2**31))
def test_a_token_outside_of_its_set_is_reported(tokens: int, seed: int) -> None:
    mask, sampled = random_sets(VOCAB, tokens, seed)
    for place in np.flatnonzero(~mask.all(1)).tolist():
        altered = list(sampled)
        altered[place] = int(np.argmin(mask[place]))
        assert KeptTokens.of_mask(mask).fault(altered) == (
            f"its token {place}, id {altered[place]}, is not in the set that it was sampled from"
        )


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (KeptTokens.of_lists([[3]], vocab_size=VOCAB), "1 kept sets came for 2 tokens"),
        (KeptTokens(VOCAB, np.int32([1, 2]).tobytes(), np.uint32([3]).tobytes()), "they do not fit"),
        (KeptTokens(VOCAB, np.int32([1, -1]).tobytes(), np.uint32([3]).tobytes()), "they do not fit"),
        (KeptTokens(VOCAB, np.int32([1, VOCAB]).tobytes(), np.uint32([3] * 5).tobytes()), "they do not fit"),
        (KeptTokens(VOCAB, np.int32([1, 1]).tobytes(), b"123"), "they do not fit"),
        (KeptTokens(VOCAB, np.int32([1, 1]).tobytes(), np.uint32([3, 2**32 - 1]).tobytes()), "has token 4294967295"),
        (KeptTokens.of_mask(np.ones((2, 3), dtype=bool)), "of a vocabulary of 3 came for token 3"),
    ],
)
def test_an_invalid_encoding_is_reported(kept: KeptTokens, message: str) -> None:
    assert message in str(kept.fault([3, 3]))


def test_a_negative_token_is_named() -> None:
    assert str(KeptTokens.of_mask(np.ones((2, 3), dtype=bool)).fault([2, -1])).endswith("came for token -1")


@pytest.mark.parametrize(
    ("sets", "message"), [([[3], []], "token 1 is empty"), ([[3], [VOCAB]], "not in 0..99"), ([[-1]], "not in 0..99")]
)
def test_lists_that_are_no_sets_are_refused(sets: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeptTokens.of_lists(sets, vocab_size=VOCAB)
