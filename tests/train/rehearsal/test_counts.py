"""Extrapolated counts, and lengthened traces of allocations, without torch."""

from __future__ import annotations

import pytest

from relax_core.train.rehearsal.allocator import FREED, Event
from relax_core.train.rehearsal.counts import Counts, Message, Section, extrapolated
from relax_core.train.rehearsal.timeline import Block, Mark, lengthened


def counts_of(layers: int) -> Counts:
    """The peak is in the head of models of up to 10 layers."""
    message = Message(phase="layers", collective="send", group="pp", ranks=2, calls=layers, bytes=100 * layers)
    return Counts(
        layers=layers,
        rows=[8],
        state={"weights": 1000 + 10 * layers},
        sections=[
            Section(phase="head", bytes=5000, by_category={"head": 5000}),
            Section(phase="layers", bytes=500 * layers, by_category={"layers": 500 * layers}),
        ],
        before=1000 + 10 * layers,
        reserved_by_step=None if layers < 3 else 7000,
        flops={"layers": 7 * layers},
        messages=[message],
        host_reads={"layers": 1 + layers},
        operators=3 + 11 * layers,
        seconds=1.0,
    )


def test_a_long_model_follows_from_two_short_ones_even_if_its_peak_is_elsewhere() -> None:
    found = extrapolated(counts_of(1), counts_of(3), layers=40)
    wanted = counts_of(40)
    assert (found.peak, found.state, found.flops, found.host_reads) == (
        wanted.peak,
        wanted.state,
        wanted.flops,
        wanted.host_reads,
    )
    assert (found.messages, found.operators, found.reserved) == (wanted.messages, wanted.operators, 1400 + 7000)
    assert counts_of(3).peak.phase == "head"
    assert found.peak.phase == "layers"


def test_models_that_differ_are_not_extrapolated() -> None:
    other = counts_of(3)
    other.sections.pop()
    with pytest.raises(ValueError, match="different sections"):
        extrapolated(counts_of(1), other, layers=4)


def trace_of(units: int) -> tuple[list[Event], list[Mark]]:
    """A forward pass, in which a unit frees its predecessor's output and keeps 10 bytes, and a backward pass."""
    events: list[Event] = [(1, 7)]
    marks: list[Mark] = []
    output = 1
    for unit in range(units):
        marks.append((len(events), Block(1, False, unit)))
        events += [(100 + unit, 10), (200 + unit, 20), (output, FREED)]
        output = 200 + unit
    marks.append((len(events), None))
    events += [(2, 5)]
    for unit in reversed(range(units)):
        marks.append((len(events), Block(1, True, unit)))
        events += [(300 + unit, 30), (100 + unit, FREED)]
    marks.append((len(events), None))
    events += [(2, FREED), (output, FREED), *((300 + unit, FREED) for unit in range(units))]
    return events, marks


def sizes(events: list[Event]) -> list[int]:
    """The bytes in use after each event."""
    live: dict[int, int] = {}
    found = []
    for number, size in events:
        if size == FREED:
            del live[number]
        else:
            live[number] = size
        found.append(sum(live.values()))
    return found


@pytest.mark.parametrize("wanted", [3, 4, 9])
def test_a_lengthened_trace_is_that_of_the_long_model(wanted: int) -> None:
    events, marks = trace_of(3)
    longer = lengthened(events, marks, units=3, template=1, wanted=wanted)
    assert sorted(sizes(longer)) == sorted(sizes(trace_of(wanted)[0]))
    assert sizes(longer)[-1] == 0


def test_a_trace_with_units_of_other_sizes_is_refused() -> None:
    events, marks = trace_of(3)
    events = [(number, 21 if (number, size) == (200, 20) else size) for number, size in events]
    with pytest.raises(ValueError, match="is not an allocation of 21 bytes"):
        lengthened(events, marks, units=3, template=1, wanted=5)
