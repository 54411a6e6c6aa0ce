"""Gathers the pieces of a sharded model on rank 0, one bucket of whole tensors at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from relax_core.train.hf.weight_rules import Part, Shard, WeightRule
from relax_core.train.hf.weight_slices import WeightSlice

BUCKET_BYTES = 64 << 20
_NO_RANK = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredWeight:
    """Describes a whole tensor: its padded ``shape``, its dtype and, for each piece, the lowest rank that has it."""

    rule: WeightRule
    shape: tuple[int, ...]
    senders: tuple[int, ...]
    dtype: torch.dtype

    @property
    def interleaved(self) -> bool:
        """Is True if the pieces are columns; they arrive one below the other and a copy interleaves them."""
        return self.rule.shard is Shard.row and len(self.senders) > 1

    @property
    def received(self) -> int:
        """Returns the number of elements that rank 0 allocates before it yields any tensor of the bucket."""
        return 0 if self.senders == (0,) else math.prod(self.shape)

    @property
    def copied(self) -> int:
        """Returns the elements that yielding it takes in addition; its reader may still hold the tensor before."""
        if self.interleaved:
            return math.prod(self.shape)
        from_views = self.senders == (0,) and self.rule.part in (Part.query, Part.key, Part.value)
        return 2 * math.prod(self.shape) if from_views else 0


def agree_on_senders(
    rules: Sequence[WeightRule],
    slices: Mapping[str, WeightSlice],
    *,
    device: torch.device,
    dtype_of: Callable[[str], torch.dtype],
) -> list[GatheredWeight]:
    """Exchanges which rank has which pieces and how large each tensor is; all ranks get the list in rule order.

    ``dtype_of`` returns the dtype of a rule's tensor by its Hugging Face name. The call is collective.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    widest = _largest(max((owned.pieces for owned in slices.values()), default=1), device)
    senders, shapes = [], []
    for rule in rules:
        owned = slices.get(rule.hf)
        owners = [_NO_RANK] * widest
        if owned is not None:
            owners[owned.piece] = rank
        senders.append(owners)
        rows, *columns = _padded_shape(owned) if owned is not None else (0,)
        shapes.append([rows, columns[0] if columns else 0, owned.pieces if owned is not None else 0])
    lowest, largest = torch.tensor(senders, device=device), torch.tensor(shapes, device=device)
    if ranks > 1:
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    weights = [
        GatheredWeight(
            rule=rule,
            shape=(rows, columns) if columns else (rows,),
            senders=tuple(owners[:pieces]),
            dtype=dtype_of(rule.hf),
        )
        for rule, owners, (rows, columns, pieces) in zip(rules, lowest.tolist(), largest.tolist(), strict=True)
    ]
    incomplete = [weight.rule.megatron for weight in weights if not weight.senders or _NO_RANK in weight.senders]
    assert not incomplete, f"no rank has some pieces of {incomplete}"
    return weights


def _largest(number: int, device: torch.device) -> int:
    if dist.get_world_size() == 1:
        return number
    largest = torch.tensor(number, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def _padded_shape(owned: WeightSlice) -> tuple[int, ...]:
    return tuple(
        size * owned.pieces if axis == owned.rule.shard.value else size for axis, size in enumerate(owned.matrix.shape)
    )


def buckets_of(
    weights: Sequence[GatheredWeight], *, element_size: int, bucket_bytes: int
) -> list[list[GatheredWeight]]:
    """Splits the list so that rank 0 holds at most ``bucket_bytes`` beside the model, or what one weight takes.

    A reader of the tensors still holds the last one of a bucket while the next bucket is received.
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
    bucket: Sequence[GatheredWeight], slices: Mapping[str, WeightSlice], *, like: Tensor
) -> Iterator[tuple[WeightRule, Tensor]]:
    """Yields (rule, padded tensor) in order on rank 0; other ranks send their pieces and yield nothing.

    Tensors have the device of ``like``. Those that rank 0 has whole are views of its parameters. The timeout
    of the process group bounds every wait. The call is collective.
    """
    rank = dist.get_rank()
    if rank:
        sent = [
            dist.P2POp(dist.isend, slices[weight.rule.hf].matrix.contiguous(), 0)
            for weight in bucket
            for sender in weight.senders
            if sender == rank
        ]
        _run(sent)
        return
    received = _receive(bucket, slices, like=like)
    received.reverse()  # Each tensor is freed after it is yielded.
    for weight in bucket:
        tensor = received.pop()
        if tensor is None:
            yield weight.rule, slices[weight.rule.hf].matrix
        else:
            yield weight.rule, tensor.transpose(0, 1).reshape(weight.shape) if weight.interleaved else tensor


def _receive(
    bucket: Sequence[GatheredWeight], slices: Mapping[str, WeightSlice], *, like: Tensor
) -> list[Tensor | None]:
    """Receives the bucket's tensors on rank 0; an entry is None if rank 0 has the tensor whole."""
    received: list[Tensor | None] = []
    expected: list[dist.P2POp] = []
    for weight in bucket:
        if weight.senders == (0,):
            received.append(None)
            continue
        memory, pieces = _allocate(weight, like=like)
        for sender, piece in zip(weight.senders, pieces, strict=True):
            if sender == 0:
                piece.copy_(slices[weight.rule.hf].matrix)
            else:
                expected.append(dist.P2POp(dist.irecv, piece, sender))
        received.append(memory)
    _run(expected)
    return received


def _allocate(weight: GatheredWeight, *, like: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Allocates a tensor and returns it with its contiguous parts, one for each piece."""
    pieces = len(weight.senders)
    if weight.interleaved:
        rows, columns = weight.shape
        memory = like.new_empty((pieces, rows, columns // pieces), dtype=weight.dtype)
        return memory, memory.unbind(0)
    memory = like.new_empty(weight.shape, dtype=weight.dtype)
    return memory, memory.chunk(pieces, dim=0)


def _run(transfers: list[dist.P2POp]) -> None:
    if transfers:
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
