"""Compares stop strings with the plain definition: after every token, search in the text of all tokens so far."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from relax_core.engines.protocol.stop_strings import StopStrings


def byte_level() -> Tokenizer:
    """Returns a byte-level tokenizer, like Qwen and Llama: a character may span several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    merges = [("<", "/"), ("a", "b"), ("Ġ", "a"), ("</", "a")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    core = Tokenizer(models.BPE(vocabulary, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return core


def sentence_piece() -> Tokenizer:
    """Returns a SentencePiece tokenizer, like Mistral: a token at the start of a text loses its space."""
    pieces = ["▁", "▁a", "a", "b", "▁b", "</", ">", "ab", "é", ".", "▁."]
    core = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="a"))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    return core


TOKENIZERS = {"bytes": byte_level(), "pieces": sentence_piece()}
STOPS = st.lists(st.sampled_from(["</a>", "ab", "a", "é", " a", "b ", "<|im_end|>", "。", " "]), min_size=1, max_size=3)


def likely(tokenizer: Tokenizer) -> list[int]:
    """Draws tokens that often form stop strings."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = "</a> b。éx"
    found = {token for token in range(size) if any(part in tokenizer.decode([token]) for part in texts)}
    found |= set(tokenizer.encode(texts, add_special_tokens=False).ids)
    return sorted(found | set(range(size - 5, size)))


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@given(data=st.data(), stop=STOPS)
def test_the_token_that_completes_a_string_ends_the_response(kind: str, data: st.DataObject, stop: list[str]) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.sampled_from(likely(tokenizer)), max_size=24))
    texts = [tokenizer.decode(ids[:count], skip_special_tokens=False) for count in range(len(ids) + 1)]
    expected = next((count for count, text in enumerate(texts) if any(string in text for string in stop)), None)
    finder = StopStrings(tokenizer, stop)
    assert finder.end(ids) == expected
    if expected is not None:
        assert finder.may_complete(np.array([ids[expected - 1]])).tolist() == [0]
        assert finder.matched(ids[:expected]) in stop
        for checked in range(expected):
            assert finder.end(ids, checked=checked) == expected


def test_most_tokens_need_no_look() -> None:
    """Otherwise each decode step would decode the text of every sample."""
    finder = StopStrings(TOKENIZERS["bytes"], ["</a>"])
    plain = np.array([TOKENIZERS["bytes"].token_to_id(letter) for letter in "bcdefghi"])
    assert finder.may_complete(plain).tolist() == []
    assert finder.may_complete(np.array([TOKENIZERS["bytes"].token_to_id(">"), *plain])).tolist() == [0]
