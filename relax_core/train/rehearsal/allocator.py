"""Replays a trace of allocations by the rules of torch's caching allocator, and computes allocated and reserved bytes.

Source of the rules: c10/cuda/CUDACachingAllocator.cpp with its default settings and one stream. Sizes are multiples of
512 bytes. Blocks of up to 1 MiB come from segments of 2 MiB, larger blocks of less than 10 MiB from segments of 20 MiB,
and all others from segments of a multiple of 2 MiB. An allocation gets the smallest free block that is large enough.
The block is split if enough of it remains. A freed block merges with its free neighbours within the segment. Segments
are returned only if the device is full: then all segments without a used block are returned.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

MIB = 1 << 20
GRAIN = 512  # bytes
SMALL = MIB  # the largest block of a small segment
SMALL_SEGMENT, LARGE_SEGMENT, OWN_SEGMENT = 2 * MIB, 20 * MIB, 10 * MIB
ROUNDED = 2 * MIB  # the size of a segment for a single large block is a multiple of this
FREED = -1  # the size of an event that frees an allocation

Event = tuple[int, int]  # The number of an allocation, and its bytes or `FREED`.


class DeviceFull(MemoryError):
    """Reports that a segment does not fit on the device, even after all unused segments are returned."""


@dataclass(slots=True, eq=False)
class _Block:
    """Holds a part of a segment; ``before`` and ``after`` are its neighbours in the segment."""

    size: int
    small: bool
    number: int
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None

    @property
    def order(self) -> tuple[int, int]:
        return self.size, self.number


class CachingAllocator:
    """Holds the segments of a device with ``limit`` bytes; None for a device that is never full.

    ``allocated`` and ``reserved`` are the current bytes of used blocks and of all segments; ``peak_allocated`` and
    ``peak_reserved`` are their maxima.
    """

    def __init__(self, *, limit: int | None = None) -> None:
        self._limit = limit
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._free: dict[bool, list[_Block]] = {True: [], False: []}  # small blocks and other blocks, in `order`
        self._used: dict[int, _Block] = {}
        self._made = 0

    def allocate(self, number: int, size: int) -> None:
        """Allocates ``size`` bytes under ``number``. Raises `DeviceFull`."""
        size = max(GRAIN, -(-size // GRAIN) * GRAIN)
        small = size <= SMALL
        free = self._free[small]
        place = bisect.bisect_left(free, (size, 0), key=lambda block: block.order)
        block = free.pop(place) if place < len(free) else self._segment(size, small=small)
        block.free = False
        left = block.size - size
        if left >= GRAIN if small else left > SMALL:
            rest = self._block(left, small=small)
            rest.before, rest.after = block, block.after
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._put(rest)
        self._used[number] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def free(self, number: int) -> None:
        """Frees the allocation ``number``."""
        block = self._used.pop(number)
        self.allocated -= block.size
        after, before = block.after, block.before
        if after is not None and after.free:
            self._take(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        if before is not None and before.free:
            self._take(before)
            block.size += before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        self._put(block)

    def replay(self, events: Iterable[Event]) -> CachingAllocator:
        """Applies all ``events`` in order and returns itself. Raises `DeviceFull`."""
        for number, size in events:
            if size == FREED:
                self.free(number)
            else:
                self.allocate(number, size)
        return self

    def _segment(self, size: int, *, small: bool) -> _Block:
        whole = SMALL_SEGMENT if small else LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // ROUNDED) * ROUNDED
        if self._limit is not None and self.reserved + whole > self._limit:
            self._return_segments()
            if self.reserved + whole > self._limit:
                raise DeviceFull(
                    f"{whole} bytes are wanted, {self.reserved} are reserved and {self.allocated} allocated, "
                    f"of {self._limit}"
                )
        self.reserved += whole
        return self._block(whole, small=small)

    def _return_segments(self) -> None:
        for free in self._free.values():
            for block in [block for block in free if block.before is None and block.after is None]:
                free.remove(block)
                self.reserved -= block.size

    def _block(self, size: int, *, small: bool) -> _Block:
        self._made += 1
        return _Block(size, small, self._made)

    def _put(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self._free[block.small], block, key=lambda other: other.order)

    def _take(self, block: _Block) -> None:
        free = self._free[block.small]
        free.pop(bisect.bisect_left(free, block.order, key=lambda other: other.order))
