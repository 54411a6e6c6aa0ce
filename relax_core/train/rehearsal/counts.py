"""Defines the counts of a rehearsed rank, and extrapolates them from two short models to the model's number of layers.

All layers of one kind have the same cost. Each count, and each section's peak, is therefore linear in the number of
layers, and two short models determine the count of a long model. The section with the largest peak may differ from the
short models. The module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

WEIGHTS, GRADIENTS, ADAM, BUFFERS = STATE = ("weights", "gradients", "Adam states", "buffers")
# Phases; the backward passes begin where autograd computes the gradient of the loss, of the last layer's output, and of
# the first layer's input.
BETWEEN, PACK, EMBEDDING, LAYERS, HEAD = "between", "pack", "embedding and towers", "layers", "head"
HEAD_BACKWARD, LAYERS_BACKWARD = "head backward", "layers backward"
EMBEDDING_BACKWARD = "embedding and towers backward"
PIPELINE, SUMS, REDUCE, OPTIMIZER = "pipeline", "sums", "reduce", "optimizer"
PUBLISH = "publish"  # not a phase of the update
ONCE = (SUMS, REDUCE, OPTIMIZER, BETWEEN)  # phases that an update has once; the others belong to its micro-batches


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the peak of a section in bytes; ``by_category`` are its parts."""

    phase: str
    bytes: int
    by_category: dict[str, int]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Counts the calls of a collective in a phase, in a group of ``ranks`` ranks; ``bytes`` are sent by this rank."""

    phase: str
    collective: str
    group: str
    ranks: int
    calls: int
    bytes: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Returns the key that identifies these messages among the messages of a rank."""
        return self.phase, self.collective, self.group, self.ranks


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the counts of one update of a rank with ``layers`` layers.

    ``rows`` are the rows of each micro-batch. ``state`` maps the categories `STATE` to bytes. ``before`` are the bytes
    in use when the update begins. ``reserved_by_step`` are the bytes that the caching allocator reserves beside them
    during the update of the whole model; None if the short model's trace was not lengthened. ``published`` are the
    bytes that an export of the weights needs in addition to the state (`HfWeights.export`).
    """

    layers: int
    rows: list[int]
    state: dict[str, int]
    sections: list[Section]
    before: int
    reserved_by_step: int | None
    flops: dict[str, int]
    messages: list[Message]
    host_reads: dict[str, int]
    operators: int
    seconds: float
    published: int = 0

    @property
    def peak(self) -> Section:
        """Returns the section with the largest peak."""
        return max(self.sections, key=lambda section: section.bytes)

    @property
    def reserved(self) -> int | None:
        """Returns the bytes that the caching allocator reserves for state and update, None if they are not known."""
        return None if self.reserved_by_step is None else self.before + self.reserved_by_step


def extrapolated(short: Counts, longer: Counts, *, layers: int) -> Counts:
    """Returns the counts of a rank with ``layers`` layers, extrapolated from two ranks with fewer layers.

    Fragmentation is not linear, so the reserved bytes come from the lengthened trace of ``longer``. Raises ValueError
    if both ranks did not go through the same sections.
    """
    if [section.phase for section in short.sections] != [section.phase for section in longer.sections]:
        raise ValueError("the short models go through different sections, so the long one is not known")

    def line(first: int, second: int) -> int:
        return first + round((second - first) * (layers - short.layers) / (longer.layers - short.layers))

    def lines(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
        return {key: line(first.get(key, 0), second.get(key, 0)) for key in dict.fromkeys((*first, *second))}

    sections = [
        Section(
            phase=first.phase,
            bytes=line(first.bytes, second.bytes),
            by_category=lines(first.by_category, second.by_category),
        )
        for first, second in zip(short.sections, longer.sections, strict=True)
    ]
    messages = {message.key: message for message in short.messages}
    found = []
    for message in longer.messages:
        before = messages.get(message.key)
        calls, sent = (0, 0) if before is None else (before.calls, before.bytes)
        found.append(
            msgspec.structs.replace(message, calls=line(calls, message.calls), bytes=line(sent, message.bytes))
        )
    return Counts(
        layers=layers,
        rows=longer.rows,
        state=lines(short.state, longer.state),
        sections=sections,
        before=line(short.before, longer.before),
        reserved_by_step=longer.reserved_by_step,
        flops=lines(short.flops, longer.flops),
        messages=found,
        host_reads=lines(short.host_reads, longer.host_reads),
        operators=line(short.operators, longer.operators),
        seconds=short.seconds + longer.seconds,
        published=max(short.published, longer.published),  # one bucket, which holds tensors of a layer or two
    )
