"""The replay of a trace by the rules of CUDA's caching allocator, each rule alone."""

from __future__ import annotations

import pytest

from relax_core.train.rehearsal.allocator import FREED, MIB, CachingAllocator, DeviceFull


def test_small_blocks_share_a_segment_of_two_mib() -> None:
    allocator = CachingAllocator().replay([(1, 100), (2, 513), (3, MIB)])
    assert allocator.allocated == 512 + 1024 + MIB
    assert allocator.reserved == 2 * MIB
    assert CachingAllocator().replay([(1, MIB), (2, MIB), (3, 1)]).reserved == 4 * MIB


def test_large_blocks_have_segments_of_twenty_mib_or_of_their_own() -> None:
    assert CachingAllocator().replay([(1, MIB + 1), (2, 9 * MIB)]).reserved == 20 * MIB
    assert CachingAllocator().replay([(1, 10 * MIB)]).reserved == 10 * MIB
    assert CachingAllocator().replay([(1, 11 * MIB)]).reserved == 12 * MIB, "a multiple of 2 MiB"


def test_a_large_block_is_split_only_if_more_than_one_mib_is_left() -> None:
    whole = CachingAllocator().replay([(1, 20 * MIB), (1, FREED), (2, 19 * MIB)])
    assert whole.allocated == 20 * MIB
    split = CachingAllocator().replay([(1, 20 * MIB), (1, FREED), (2, 18 * MIB)])
    assert split.allocated == 18 * MIB
    assert split.replay([(3, 2 * MIB)]).reserved == 20 * MIB, "the rest of the segment is used"


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    events = [(1, 40 * MIB), (2, 30 * MIB), (1, FREED), (2, FREED), (3, 28 * MIB), (4, 40 * MIB)]
    assert CachingAllocator().replay(events).reserved == 70 * MIB


def test_free_neighbours_merge_but_not_across_segments() -> None:
    halves = [(1, 40 * MIB), (1, FREED), (2, 20 * MIB), (3, 20 * MIB), (2, FREED), (3, FREED)]
    assert CachingAllocator().replay([*halves, (4, 40 * MIB)]).reserved == 40 * MIB
    apart = [(1, 20 * MIB), (2, 20 * MIB), (1, FREED), (2, FREED), (3, 40 * MIB)]
    assert CachingAllocator().replay(apart).reserved == 80 * MIB


def test_a_full_device_returns_unused_segments_and_then_refuses() -> None:
    full = CachingAllocator(limit=50 * MIB).replay([(1, 20 * MIB), (2, 20 * MIB), (1, FREED), (3, 30 * MIB)])
    assert (full.reserved, full.peak_reserved) == (50 * MIB, 50 * MIB)
    with pytest.raises(DeviceFull, match="2097152 bytes are wanted, 52428800 are reserved and 52428800 allocated"):
        full.allocate(4, 512)
