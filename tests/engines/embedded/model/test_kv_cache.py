"""Compares the attention of decode steps with its definition, over slots of very different lengths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_core.engines.embedded.kv_cache import (
    CacheViews,
    DecodeAttention,
    KVCache,
    columns_read,
    slots_alone,
)

LAYERS, KV_HEADS, QUERIES, DIM, STEPS = 2, 2, 3, 4, 3
FEW_LONG = [40, 900, 38, 41, 12, 700, 44, 39, 40, 8, 42, 43]


def cache_of(slots: int, columns: int) -> KVCache:
    data = torch.randn(LAYERS, 2, slots, KV_HEADS, columns, DIM)
    return cast(KVCache, SimpleNamespace(data=data))


def attended(cache: KVCache, layer: int, slot: int, length: int, query: torch.Tensor) -> torch.Tensor:
    """Returns the attention of one slot by the definition, ``[query heads * dim]``."""
    keys, values = cache.data[layer, :, slot, :, :length]
    scores = query.view(KV_HEADS, QUERIES, DIM) @ keys.transpose(1, 2)
    return (scores.softmax(-1) @ values).reshape(-1)


@pytest.mark.parametrize("lengths", [FEW_LONG, [5, 5, 5], [1], [1000], [3, 2000], sorted(FEW_LONG)])
def test_each_slot_attends_to_its_own_columns(lengths: list[int]) -> None:
    torch.manual_seed(0)
    positions = np.array(lengths) - 1
    cache = cache_of(len(lengths), max(lengths) + STEPS)
    attention = DecodeAttention(CacheViews(cache), positions, steps=STEPS, dtype=torch.float32)
    for step in range(STEPS):
        if step:
            attention.advance()
        for layer in range(LAYERS):
            q = torch.randn(len(lengths), KV_HEADS * QUERIES * DIM)
            kv = torch.randn(len(lengths), 2 * KV_HEADS, DIM)
            found = attention(layer, q, kv)
            for slot, length in enumerate(lengths):
                at = cache.data[layer, :, slot, :, length - 1 + step]
                torch.testing.assert_close(at.reshape(-1, DIM), kv[slot])
                expected = attended(cache, layer, slot, length + step, q[slot])
                torch.testing.assert_close(found[slot], expected)


def test_a_few_long_slots_are_computed_alone() -> None:
    many = np.array([*FEW_LONG, *[40] * 100])
    assert sorted(slots_alone(many).tolist()) == [1, 5]
    cache = cache_of(len(many), 910)
    attention = DecodeAttention(CacheViews(cache), many - 1, steps=1, dtype=torch.float32)
    assert attention.columns == columns_read(many) == len(many) * 44 + 900 + 700
    assert not len(slots_alone(np.full(100, 64)))
    assert not len(slots_alone(np.arange(1, 100)))


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=60))
def test_the_slots_alone_are_the_longest_and_never_all(lengths: list[int]) -> None:
    given_lengths: Any = np.array(lengths)
    alone = slots_alone(given_lengths)
    rest = np.delete(given_lengths, alone)
    assert len(rest)
    assert all(given_lengths[slot] >= rest.max() for slot in alone)
