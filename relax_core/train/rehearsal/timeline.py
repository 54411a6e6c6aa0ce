"""Lengthens the allocation trace of a short model to the trace of a model with more layers.

Layers of one kind allocate and free the same sizes in the same order. A trace is divided into blocks, one for each pass
over each unit (the layers after which the kinds repeat). The block of an inner unit is the template, which is repeated
for each additional unit of the longer model. An allocation is identified by its block and its order from the block's
end. A unit therefore frees the allocations of the same unit or its neighbour. Allocations of the first unit only (a
buffer that all layers share) come before the results that its neighbour frees. The module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from relax_core.train.rehearsal.allocator import FREED, Event


class Block(NamedTuple):
    """Names a pass over a unit: the number of the pass through a chunk, its direction, and the unit."""

    number: int
    backward: bool
    unit: int


Mark = tuple[int, Block | None]  # The index of an event, and the block that begins with the event; None: no layer.
_Name = tuple[Block, int] | int  # A block and the order in it, or the number of an allocation outside of the layers.


def lengthened(
    events: Sequence[Event], marks: Sequence[Mark], *, units: int, template: int, wanted: int
) -> list[Event]:
    """Returns the trace of a rank with ``wanted`` units per chunk, from the trace of a rank with ``units`` units.

    ``template`` is an inner unit. Raises ValueError if the trace cannot be lengthened, because a unit would free an
    allocation with another size than the template frees.
    """
    assert 0 < template < units - 1 <= wanted - 1, "the template is an inner unit"
    return _Longer(list(_segments(events, marks)), template=template, more=wanted - units).events()


def _segments(events: Sequence[Event], marks: Sequence[Mark]) -> Iterator[tuple[Block | None, Sequence[Event]]]:
    edges = [(0, None), *marks, (len(events), None)]
    for (first, block), (stop, _) in pairwise(edges):
        if stop > first or block is not None:
            yield block, events[first:stop]


class _Longer:
    def __init__(self, segments: Sequence[tuple[Block | None, Sequence[Event]]], *, template: int, more: int) -> None:
        self._segments, self._template, self._more = segments, template, more
        self._owner: dict[int, _Name] = {}
        self._sizes: dict[int, int] = {}  # of the allocations of the short model
        self._numbers: dict[_Name, int] = {}
        self._made: list[Event] = []
        self._made_sizes: dict[int, int] = {}

    def events(self) -> list[Event]:
        for block, own in self._segments:
            self._own(block, own)
            if block is None:
                self._outside(own)
            elif block.unit == self._template:
                copies = range(self._template, self._template + self._more + 1)
                for unit in reversed(copies) if block.backward else copies:
                    self._inside(block, own, unit=unit)
            else:
                self._inside(block, own, unit=self._moved(block.unit))
        return self._made

    def _own(self, block: Block | None, own: Sequence[Event]) -> None:
        """Assigns names to the allocations of a segment."""
        allocated = [(number, size) for number, size in own if size != FREED]
        for order, (number, size) in enumerate(allocated, start=-len(allocated)):
            self._owner[number] = number if block is None else (block, order)
            self._sizes[number] = size

    def _moved(self, unit: int) -> int:
        """Returns the unit of the longer model for a unit that is not the template."""
        return unit if unit < self._template else unit + self._more

    def _inside(self, block: Block, own: Sequence[Event], *, unit: int) -> None:
        """Adds a block as the block of ``unit`` of the longer model."""
        order = -sum(size != FREED for _, size in own)
        for number, size in own:
            if size != FREED:
                self._allocate((block._replace(unit=unit), order), size)
                order += 1
                continue
            name = self._owner.get(number)
            if isinstance(name, tuple):
                its, place = name
                # A neighbour stays a neighbour.
                self._free((its._replace(unit=unit + its.unit - block.unit), place), self._sizes[number])
            elif name is not None:
                self._free(name, self._sizes[number])

    def _outside(self, own: Sequence[Event]) -> None:
        for number, size in own:
            name = number if size != FREED else self._owner.get(number)
            if size != FREED:
                self._allocate(number, size)
            elif isinstance(name, tuple):
                its, place = name
                if its.unit != self._template:
                    self._free((its._replace(unit=self._moved(its.unit)), place), self._sizes[number])
                    continue
                for unit in range(self._template, self._template + self._more + 1):
                    self._free((its._replace(unit=unit), place), self._sizes[number])
            elif name is not None:
                self._free(name, self._sizes[number])

    def _allocate(self, name: _Name, size: int) -> None:
        number = len(self._made)
        self._numbers[name], self._made_sizes[number] = number, size
        self._made.append((number, size))

    def _free(self, name: _Name, size: int) -> None:
        number = self._numbers.pop(name, None)
        if number is None or self._made_sizes[number] != size:
            raise ValueError(f"{name} is not an allocation of {size} bytes that is in use")
        self._made.append((number, FREED))
