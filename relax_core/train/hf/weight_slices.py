"""Finds this rank's slices of the Hugging Face tensors in its part of a Megatron model, as views of memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor

from relax_core.contracts.family import DeltaNet
from relax_core.families.architecture import Architecture
from relax_core.train.checkpoints.checkpoint_shards import Block
from relax_core.train.hf.stored_weights import WholeTensor
from relax_core.train.hf.weight_rules import NET_PARTS, Part, Shard, WeightRule, net_widths
from relax_core.train.model.gpt import VALUE_HEAD, parameter_name

_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=local_experts\.)\d+|(?<=experts\.linear_fc[12]\.weight)\d+")
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, kw_only=True)
class WeightSlice:
    """Holds one rank's piece of a Hugging Face tensor: ``piece`` of ``pieces`` equal parts along its rows or columns.

    ``parameters`` are the parameters with this piece: two if this rank also has the output layer's copy of a tied
    embedding. ``views`` are the piece's views of their memory. ``is_copy`` is True if this rank has only the copy.
    ``shape`` is the shape of the whole tensor without the padding of the vocabulary. ``adapt`` adds LoRA factors to the
    piece; it is None for a tensor without factors.
    """

    rule: WeightRule
    parameters: tuple[torch.nn.Parameter, ...]
    views: tuple[Tensor, ...]
    is_copy: bool
    piece: int
    pieces: int
    shape: tuple[int, ...]
    adapt: Callable[[Tensor], Tensor] | None = None

    @property
    def matrix(self) -> Tensor:
        """Returns the piece as a matrix or a vector, or a copy if Megatron interleaves it with other tensors.

        A piece with LoRA factors is the sum of base and factors.
        """
        base = self.base_matrix
        return base if self.adapt is None else self.adapt(base)

    @property
    def base_matrix(self) -> Tensor:
        """Returns the piece as `matrix` does, without LoRA factors."""
        return self.views[0].reshape(piece_shape(self.views[0], self.rule))

    def fill(self, source: WholeTensor) -> None:
        """Copies this piece from ``source``; rows after the vocabulary become 0."""
        axis = 1 if self.rule.shard is Shard.row else 0
        size = piece_shape(self.views[0], self.rule)[axis]
        part = slice(self.piece * size, min((self.piece + 1) * size, self.shape[axis]))
        missing = size - max(0, part.stop - part.start)  # rows that only pad the vocabulary
        values = source[:, part] if axis else source[part] if missing < size else None
        for view in self.views:
            if missing:
                view.zero_()
                view = view[: size - missing]
            if values is not None:
                view.copy_(values.reshape(view.shape))

    def blocks(self, index: int, flat: Tensor, *, start: int = 0) -> Iterator[Block]:
        """Yields the parts of the piece that are in ``flat``, as views of ``flat``.

        ``flat`` holds the elements of ``parameters[index]``, or of the parameter's optimizer state, from element
        ``start`` on.
        """
        view, origin = self.views[index], int(self.parameters[index].storage_offset())
        *_, width = piece = piece_shape(view, self.rule)
        width = width if len(piece) == 2 else 1
        first_row = 0 if self.rule.shard is Shard.row else self.piece * piece[0]
        columns = (self.piece * width if self.rule.shard is Shard.row else 0,) if len(piece) == 2 else ()
        # rows that the whole tensor has; the piece has more if the vocabulary is padded
        rows = self.shape[0] - first_row
        for offset_in_storage, row, elements in _runs(view, width=width):
            run = offset_in_storage - origin  # index of the run's first element in the parameter
            begin, end = max(run, start), min(run + min(elements, (rows - row) * width), start + len(flat))
            for element, row_count, column_count in _rectangles(begin - run, end - run, width=width):
                at = element + run - start
                down, right = divmod(element, width)
                data = flat[at : at + row_count * column_count]
                if columns:
                    offsets = (first_row + row + down, columns[0] + right)
                    yield Block(offsets, data.view(row_count, column_count))
                else:
                    yield Block((first_row + row + down,), data)


def _runs(view: Tensor, *, width: int, row: int = 0) -> Iterator[tuple[int, int, int]]:
    """Yields (offset in the storage, row of the piece, elements) of each contiguous stretch of a view."""
    if view.is_contiguous():
        yield int(view.storage_offset()), row, view.numel()
        return
    for index, part in enumerate(view):
        yield from _runs(part, width=width, row=row + index * part.numel() // width)


def _rectangles(begin: int, end: int, *, width: int) -> Iterator[tuple[int, int, int]]:
    """Splits elements ``begin`` to ``end`` of a matrix into at most three rectangles (first element, rows, columns)."""
    whole_from, whole_to = -(-begin // width) * width, end // width * width
    if begin >= end:
        return
    if whole_from > whole_to:  # All elements are inside one row.
        yield begin, 1, end - begin
        return
    if begin < whole_from:
        yield begin, 1, whole_from - begin
    if whole_from < whole_to:
        yield whole_from, (whole_to - whole_from) // width, width
    if whole_to < end:
        yield whole_to, 1, end - whole_to


def weight_slices(
    chunks: Sequence[torch.nn.Module],
    rules: Sequence[WeightRule],
    architecture: Architecture,
    *,
    tied_output: bool,
    tensor_of: Callable[[torch.nn.Parameter], Tensor],
) -> tuple[dict[str, WeightSlice], set[str]]:
    """Returns this rank's pieces by Hugging Face name, and the names of parameters without a rule.

    If ``tied_output`` is True, the output weight of the last pipeline stage is a copy of the embedding, unless the last
    stage is also the first.
    """
    parameters = parameters_by_global_name(chunks, architecture)
    unused = set(parameters)
    slices = {}
    for rule in rules:
        name = parameter_name(
            rule.megatron, experts=architecture.experts is not None, delta_layers=architecture.delta_layers
        )
        names = [name, _OUTPUT] if tied_output and name == _EMBEDDING else [name]
        held = [parameters[weight_name] for weight_name in names if weight_name in parameters]
        unused.difference_update(names)
        if not held:
            continue
        views = tuple(part_view(tensor_of(parameter), rule.part, architecture) for parameter in held)
        piece, pieces = piece_of_rule(rule)
        slices[rule.hf] = WeightSlice(
            rule=rule,
            parameters=tuple(held),
            views=views,
            is_copy=name not in parameters,
            piece=piece,
            pieces=pieces,
            shape=_whole_shape(views[0], rule, pieces, architecture),
        )
    return slices, unused


def parameters_by_global_name(
    chunks: Sequence[torch.nn.Module], architecture: Architecture
) -> Mapping[str, torch.nn.Parameter]:
    """Returns the parameters by name; layers and experts in the names are numbered over the whole model."""
    experts = architecture.experts.count if architecture.experts is not None else 0
    first_expert = (
        experts // parallel_state.get_expert_model_parallel_world_size()
    ) * parallel_state.get_expert_model_parallel_rank()
    return {name: parameter for chunk in chunks for name, parameter in _numbered(chunk, first_expert=first_expert)}


def _numbered(chunk: torch.nn.Module, *, first_expert: int) -> Iterator[tuple[str, torch.nn.Parameter]]:
    def layer_number(found: re.Match[str]) -> str:
        return str(chunk.decoder.layers[int(found[0])].layer_number - 1)  # type: ignore[index, union-attr]

    for name, parameter in chunk.named_parameters():
        if name.startswith(VALUE_HEAD) and not chunk.post_process:
            continue  # Only the last stage uses the value head.
        global_name = _LAYER.sub(layer_number, name)
        yield _EXPERT.sub(lambda found: str(int(found[0]) + first_expert), global_name), parameter


def piece_of_rule(rule: WeightRule) -> tuple[int, int]:
    """Returns the index of this rank's piece and the number of pieces."""
    if rule.shard is Shard.replicated:
        return 0, 1
    if rule.expert:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def part_view(parameter: Tensor, part: Part, architecture: Architecture) -> Tensor:
    """Returns the part of a Megatron parameter for one Hugging Face tensor, as a view of its memory."""
    if part is Part.whole:
        return parameter
    if part in (Part.gate, Part.up):
        rows = parameter.shape[0] // 2  # no `chunk`, because autograd does not allow writes to its results
        return parameter[:rows] if part is Part.gate else parameter[rows:]
    if part in NET_PARTS:
        assert architecture.delta_net is not None
        return _net_view(parameter, part, architecture.delta_net)
    heads = architecture.num_heads // architecture.num_kv_heads
    queries = heads * (1 + architecture.output_gate)
    grouped = parameter.view(-1, queries + 2, architecture.head_dim, *parameter.shape[1:])  # this rank's groups
    if part is not Part.query:
        return grouped[:, queries if part is Part.key else queries + 1]
    if not architecture.output_gate:
        return grouped[:, :heads]
    # Megatron has a group's queries and then their gates; Hugging Face has for each head the query and then the gate.
    return grouped[:, :queries].unflatten(1, (2, heads)).transpose(1, 2)


def _net_view(parameter: Tensor, part: Part, net: DeltaNet) -> Tensor:
    """Returns this rank's rows of one part of a gated delta net's input projection or convolution."""
    widths = net_widths(net)
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    first = sum(widths[before] for before in NET_PARTS[: NET_PARTS.index(part)]) // ranks
    return parameter[first : first + widths[part] // ranks]


def piece_shape(view: Tensor, rule: WeightRule) -> tuple[int, ...]:
    """Returns the shape of the piece as a matrix or a vector.

    Views of attention parts have more leading axes, and the tower's convolution has more trailing axes.
    """
    if rule.is_bias:
        return (view.numel(),)
    if rule.part in (Part.query, Part.key, Part.value):
        return (view.shape[:-1].numel(), view.shape[-1])
    return (view.shape[0], view.shape[1:].numel()) if view.dim() > 2 else tuple(view.shape)


def _whole_shape(view: Tensor, rule: WeightRule, pieces: int, architecture: Architecture) -> tuple[int, ...]:
    whole = list(piece_shape(view, rule))
    if rule.shard is not Shard.replicated:
        whole[rule.shard.value] *= pieces
    if rule.vocabulary:
        whole[0] = architecture.vocab_size
    return tuple(whole)
