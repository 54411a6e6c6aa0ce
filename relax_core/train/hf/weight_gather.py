"""Brings the pieces of a sharded model to rank 0, one bucket of whole tensors at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from relax_core.train.hf.weight_rules import Part, Shard, WeightRule
from relax_core.train.hf.weight_slices import WeightSlice

BUCKET_BYTES = 64 << 20
_NOBODY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredWeight:
    """A whole tensor and the ranks that send its pieces, in order: of replicas the lowest. ``shape``: with padding."""

    rule: WeightRule
    shape: tuple[int, ...]
    senders: tuple[int, ...]

    @property
    def interleaved(self) -> bool:
        """Pieces along the columns arrive one below the other and are put in place by a copy."""
        return self.rule.shard is Shard.row and len(self.senders) > 1

    @property
    def received(self) -> int:
        """Elements that rank 0 makes room for before any tensor of the bucket is given away."""
        return 0 if self.senders == (0,) else math.prod(self.shape)

    @property
    def copied(self) -> int:
        """Elements that giving it away takes beside that; while it is read, the one before it may still be held."""
        if self.interleaved:
            return math.prod(self.shape)
        from_views = self.senders == (0,) and self.rule.part in (Part.query, Part.key, Part.value)
        return 2 * math.prod(self.shape) if from_views else 0


def agree_on_senders(
    rules: Sequence[WeightRule], places: Mapping[str, WeightSlice], *, device: torch.device
) -> list[GatheredWeight]:
    """Collective: every rank tells which pieces it has and how large the whole is (a vector has no columns). All get
    the same list, in the order of ``rules``."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    widest = _largest(max((place.pieces for place in places.values()), default=1), device)
    senders, shapes = [], []
    for rule in rules:
        place = places.get(rule.hf)
        owners = [_NOBODY] * widest
        if place is not None:
            owners[place.piece] = rank
        senders.append(owners)
        rows, *columns = _padded_shape(place) if place is not None else (0,)
        shapes.append([rows, columns[0] if columns else 0, place.pieces if place is not None else 0])
    lowest, largest = torch.tensor(senders, device=device), torch.tensor(shapes, device=device)
    if ranks > 1:
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    weights = [
        GatheredWeight(rule=rule, shape=(rows, columns) if columns else (rows,), senders=tuple(owners[:pieces]))
        for rule, owners, (rows, columns, pieces) in zip(rules, lowest.tolist(), largest.tolist(), strict=True)
    ]
    nowhere = [weight.rule.megatron for weight in weights if not weight.senders or _NOBODY in weight.senders]
    assert not nowhere, f"no rank has all of {nowhere}"
    return weights


def _largest(number: int, device: torch.device) -> int:
    if dist.get_world_size() == 1:
        return number
    largest = torch.tensor(number, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def _padded_shape(place: WeightSlice) -> tuple[int, ...]:
    return tuple(
        size * place.pieces if axis == place.rule.shard.value else size for axis, size in enumerate(place.matrix.shape)
    )


def buckets_of(
    weights: Sequence[GatheredWeight], *, element_size: int, bucket_bytes: int
) -> list[list[GatheredWeight]]:
    """Cuts the list so that rank 0 never holds more than ``bucket_bytes`` beside the model, or one weight's need.

    Whoever reads the tensors still has the last one of a bucket while the next is received.
    """
    buckets: list[list[GatheredWeight]] = [[]]
    received = copied = last = 0
    for weight in weights:
        received, copied = received + weight.received, max(copied, weight.copied)
        if buckets[-1] and (received + copied) * element_size > bucket_bytes:
            buckets.append([])
            received, copied = last + weight.received, weight.copied
        buckets[-1].append(weight)
        last = max(weight.received, weight.copied)
    return buckets


def gather_bucket(
    bucket: Sequence[GatheredWeight], places: Mapping[str, WeightSlice], *, like: Tensor
) -> Iterator[tuple[WeightRule, Tensor]]:
    """Collective. Rank 0 gets (rule, tensor with padding) in order; the others send what is theirs and get nothing.

    Tensors have the dtype and device of ``like``; those that rank 0 has whole are views of its parameters. The
    process group's timeout bounds every wait.
    """
    rank = dist.get_rank()
    if rank:
        sent = [
            dist.P2POp(dist.isend, places[weight.rule.hf].matrix.contiguous(), 0)
            for weight in bucket
            for sender in weight.senders
            if sender == rank
        ]
        _run(sent)
        return
    received = _receive(bucket, places, like=like)
    received.reverse()  # so that each is let go as it is given away
    for weight in bucket:
        tensor = received.pop()
        if tensor is None:
            yield weight.rule, places[weight.rule.hf].matrix
        else:
            yield weight.rule, tensor.transpose(0, 1).reshape(weight.shape) if weight.interleaved else tensor


def _receive(
    bucket: Sequence[GatheredWeight], places: Mapping[str, WeightSlice], *, like: Tensor
) -> list[Tensor | None]:
    """None for what rank 0 has whole."""
    received: list[Tensor | None] = []
    expected: list[dist.P2POp] = []
    for weight in bucket:
        if weight.senders == (0,):
            received.append(None)
            continue
        room, pieces = _room_for(weight, like=like)
        for sender, piece in zip(weight.senders, pieces, strict=True):
            if sender == 0:
                piece.copy_(places[weight.rule.hf].matrix)
            else:
                expected.append(dist.P2POp(dist.irecv, piece, sender))
        received.append(room)
    _run(expected)
    return received


def _room_for(weight: GatheredWeight, *, like: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Memory for a tensor, and its parts that the pieces fill, each in one stretch."""
    pieces = len(weight.senders)
    if weight.interleaved:
        rows, columns = weight.shape
        room = like.new_empty((pieces, rows, columns // pieces))
        return room, room.unbind(0)
    room = like.new_empty(weight.shape)
    return room, room.chunk(pieces, dim=0)


def _run(transfers: list[dist.P2POp]) -> None:
    if transfers:
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
