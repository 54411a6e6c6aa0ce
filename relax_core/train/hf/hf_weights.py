"""Converts weights between Hugging Face names and a Megatron model by the architecture's rules, without loss.

A load reads on each rank only the slices of that rank's parameters. An export gathers the pieces on rank 0, one bucket
at a time, so no rank holds the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from relax_core.families.architecture import Architecture
from relax_core.train.hf.stored_weights import WholeTensor, fused, stored_weights
from relax_core.train.hf.weight_rules import Part, Shard, WeightRule
from relax_core.train.hf.weight_slices import WeightSlice, part_view, weight_slices
from relax_core.train.model.gpt import VALUE_HEAD
from relax_core.weights.lora_merge import LoraFactors, merged

if TYPE_CHECKING:
    from relax_core.train.lora import Adapters

BUCKET_BYTES = 64 << 20
_NO_RANK = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredWeight:
    """Describes a whole tensor: the padded ``shape``, the dtype, and the lowest rank with each piece."""

    rule: WeightRule
    shape: tuple[int, ...]
    senders: tuple[int, ...]
    dtype: torch.dtype

    @property
    def interleaved(self) -> bool:
        """Returns whether the pieces are columns.

        They are received one below the other, and a copy interleaves them.
        """
        return self.rule.shard is Shard.row and len(self.senders) > 1

    @property
    def received(self) -> int:
        """Returns the number of elements that rank 0 allocates before it yields any tensor of the bucket."""
        return 0 if self.senders == (0,) else math.prod(self.shape)

    @property
    def copied(self) -> int:
        """Returns how many further elements exist while the tensor is yielded.

        Its reader may still hold the previous tensor.
        """
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
    """Exchanges the ranks that have the pieces and the tensors' sizes; all ranks get the same list, in rule order.

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
    assert not incomplete, f"pieces are missing on all ranks: {incomplete}"
    return weights


def _largest(number: int, device: torch.device) -> int:
    if dist.get_world_size() == 1:
        return number
    largest = torch.tensor(number, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def _padded_shape(owned: WeightSlice) -> tuple[int, ...]:
    return tuple(
        size * owned.pieces if axis == owned.rule.shard.value else size
        for axis, size in enumerate(owned.base_matrix.shape)
    )


def buckets_of(
    weights: Sequence[GatheredWeight], *, element_size: int, bucket_bytes: int
) -> list[list[GatheredWeight]]:
    """Splits the list into buckets; rank 0 holds at most ``bucket_bytes``, or one weight, in addition to the model.

    The bound includes the last tensor of a bucket, which its reader still holds while the next bucket is received.
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
    """Yields (rule, padded tensor) in order on rank 0. Other ranks send their pieces and yield nothing.

    Tensors are on the device of ``like``. Tensors that are completely on rank 0 are views of its parameters. The
    timeout of the process group bounds every wait. The call is collective.
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
    """Receives the bucket's tensors on rank 0; an entry is None if rank 0 already has the complete tensor."""
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
    """Allocates a tensor; returns the tensor and one contiguous part of it for each piece."""
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


def _adapted(piece: WeightSlice, a: WeightSlice, b: WeightSlice, scale: float) -> WeightSlice:
    """Returns the slice with the sum of its base and its factors."""
    return replace(piece, adapt=lambda base: merged(base, a.base_matrix, b.base_matrix, scale))


VALUE_RULES = tuple(WeightRule(VALUE_HEAD + name, VALUE_HEAD + name, Shard.replicated) for name in ("weight", "bias"))


class HfWeights:
    """Maps one model's weights to their Hugging Face names; all ranks of the model create it together.

    ``chunks`` are this rank's unwrapped parts of the model: one part, or several with a virtual pipeline.
    ``value_head`` is True for a critic: it has no output layer, and its head has no Hugging Face name. ``tensor_of``
    returns the tensor to read and write for a parameter, for example the parameter's gradient. ``adapters`` are the
    model's LoRA adapters; `export` then yields the sums of base weights and factors.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        architecture: Architecture,
        *,
        value_head: bool = False,
        adapters: Adapters | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        tensor_of: Callable[[torch.nn.Parameter], Tensor] = torch.Tensor.detach,
    ) -> None:
        self._architecture = architecture
        stored = stored_weights(architecture)
        self._ignored = architecture.ignored_weights
        if value_head and not architecture.tie_word_embeddings:
            self._ignored |= {architecture.output_weight}
            stored = tuple(weight for weight in stored if weight.name != architecture.output_weight)
        self._stored = {weight.name: weight for weight in stored}
        rules = tuple(rule for weight in stored for rule in weight.rules)
        factor_rules = () if adapters is None else tuple(adapters.rules)
        all_rules = (*rules, *(VALUE_RULES if value_head else ()), *factor_rules)
        self._order = {rule.hf: index for index, rule in enumerate(all_rules)}
        slices, unused = weight_slices(
            chunks,
            all_rules,
            architecture,
            tied_output=architecture.tie_word_embeddings or value_head,
            tensor_of=tensor_of,
        )
        assert not unused, f"the rules of family {architecture.family} do not cover these parameters: {unused}"
        self.all_slices: Mapping[str, WeightSlice] = slices  # including the slices of a value head and of factors
        names = {rule.hf for rule in factor_rules}
        self.factor_slices = {name: piece for name, piece in slices.items() if name in names}
        self._slices = {
            name: piece for name, piece in slices.items() if not name.startswith(VALUE_HEAD) and name not in names
        }
        self._like = next(iter(self._slices.values())).views[0]
        dtype = next(piece.views[0].dtype for name, piece in self._slices.items() if not architecture.is_float32(name))

        def dtype_of(name: str) -> torch.dtype:
            return torch.float32 if architecture.is_float32(name) else dtype

        weights = agree_on_senders(rules, self._slices, device=self._like.device, dtype_of=dtype_of)
        # the shapes of the weights in the order of `export`
        self.shapes: Mapping[str, tuple[int, ...]] = {weight.name: weight.shape for weight in stored}
        self._buckets = buckets_of(weights, element_size=self._like.element_size(), bucket_bytes=bucket_bytes)
        self._factor_buckets: list[list[GatheredWeight]] = []
        self._scale, self._adapted = 0.0, dict[str, str]()  # the scale, and the adapted tensor of each factor B
        if adapters is not None:
            self._scale, self._adapted = adapters.scale, {pair.b.hf: pair.base.hf for pair in adapters.tensors}
            for pair in adapters.tensors:
                if (base := self._slices.get(pair.base.hf)) is not None:  # this rank has a piece of the tensor
                    a, b = self.factor_slices[pair.a.hf], self.factor_slices[pair.b.hf]
                    self._slices[pair.base.hf] = _adapted(base, a, b, adapters.scale)
            factors = agree_on_senders(
                factor_rules, self.factor_slices, device=self._like.device, dtype_of=lambda name: dtype
            )
            self._factor_buckets = buckets_of(
                factors, element_size=self._like.element_size(), bucket_bytes=bucket_bytes
            )

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, whole tensor) in rule order on rank 0, and nothing on other ranks; every rank must exhaust it.

        A tensor that is completely on rank 0 is a view and valid until the next step. In addition to the model, rank 0
        holds ``bucket_bytes`` bytes. A large tensor may need more: the tensor, its copy (if it is split along its
        columns) and the previous tensor. Fused experts of a layer are one further tensor on rank 0. The call is
        collective.
        """
        return fused(self._gathered(), list(self._stored.values()))

    def export_base(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of `export` without LoRA factors."""
        plain = {name: replace(piece, adapt=None) for name, piece in self._slices.items()}
        return fused(self._gathered(plain), list(self._stored.values()))

    def export_factors(self) -> Iterator[LoraFactors]:
        """Yields the LoRA factors of each adapted tensor on rank 0, in rule order; every rank must exhaust it.

        The call is collective.
        """
        gathered = (
            found
            for bucket in self._factor_buckets
            for found in gather_bucket(bucket, self.factor_slices, like=self._like)
        )
        for _, a in gathered:
            rule, b = next(gathered)
            yield LoraFactors(self._adapted[rule.hf], a, b, self._scale)

    def _gathered(self, slices: Mapping[str, WeightSlice] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of the rules on rank 0, without the padding of the vocabulary."""
        for bucket in self._buckets:
            for rule, tensor in gather_bucket(bucket, slices or self._slices, like=self._like):
                yield rule.hf, tensor[: self._architecture.vocab_size] if rule.vocabulary else tensor

    def parts(self, tensor_of: Callable[[torch.nn.Parameter], Tensor]) -> Iterator[tuple[int, str, Tensor]]:
        """Yields (index, name, piece) for this rank's pieces of all tensors; a name has the same index on all ranks.

        ``tensor_of`` returns the tensor to read for a parameter, for example its gradient.
        """
        for name, weight in self.all_slices.items():
            for parameter in weight.parameters:
                yield self._order[name], name, part_view(tensor_of(parameter), weight.rule.part, self._architecture)

    def load(self, tensors: Iterable[tuple[str, WholeTensor]]) -> None:
        """Copies this rank's slices from ``tensors``, in any order; from a file only the needed slices are read.

        Raises ValueError on every rank if a weight is missing, unknown, given twice or has the wrong shape.
        """
        missing = dict.fromkeys(self._stored)
        for name, tensor in tensors:
            if name in self._ignored or self._architecture.is_copied(name):
                continue
            if name not in missing:
                family = self._architecture.family
                problem = "comes twice" if name in self._stored else f"is not a weight of family {family}"
                raise ValueError(f"weight {name} {problem}.")
            for rule_name, part in self._stored[name].parts(tensor):
                if rule_name in self._slices:
                    self._slices[rule_name].fill(part)
            del missing[name]
        if missing:
            raise ValueError(f"{len(missing)} weight(s) missing: {', '.join(list(missing)[:3])} …")
