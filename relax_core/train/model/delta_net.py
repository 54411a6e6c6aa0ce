"""Computes a gated delta net over a tree-packed stream, in place of a Megatron layer's self-attention.

A segment is a chain of rows: each row except the first is the only child of the row before it. A segment's initial
state is the state after the last row of its parent segment. It is zero at the root of a tree. The stream is processed
level by level. All segments of one level, over all trees of the stream, are computed together. The convolution of a row
reads the rows above it on its path.

Tensor parallelism splits the net by heads: a rank has some key heads and the value heads that use them. With context
parallelism the ranks gather the projections. Every rank computes the whole stream and keeps its own rows.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    checkpoint,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from relax_core.contracts.chains import chains_of
from relax_core.contracts.family import DeltaNet
from relax_core.families.delta_rule import CHUNK_ROWS, Segments, gated_delta_rule, gated_norm, log_decay
from relax_core.train.device import training_device

if TYPE_CHECKING:
    from relax_core.train.model.tree_attention import TreeBatch


@dataclass(frozen=True, slots=True)
class Level:
    """Holds the segments of one level: the stream rows of the segments, int64 ``[rows]``, segment by segment.

    ``lengths`` are the lengths of the segments. ``parents`` int64 ``[segments]`` are the indexes of their parents in
    the level above, or None for the roots.
    """

    rows: Tensor
    lengths: tuple[int, ...]
    parents: Tensor | None
    segments: Segments


@dataclass(frozen=True, slots=True)
class SegmentLevels:
    """Holds the levels of a stream of ``rows`` rows, and the rows that the convolution reads.

    ``above`` int64 ``[kernel - 1, rows]`` has at [k, row] the stream row that is k + 1 rows above ``row`` on its path,
    or ``rows`` if the path is shorter. ``row_places`` int64 ``[rows]`` is each row's index in the concatenated rows of
    the levels.
    """

    levels: tuple[Level, ...]
    above: Tensor
    row_places: Tensor

    @staticmethod
    def of(
        end: np.ndarray, *, kernel: int, chunk_rows: int | None = None, device: torch.device | str = "cpu"
    ) -> SegmentLevels:
        """Plans a stream; row q sees row k if and only if k <= q < ``end[k]``, int64 ``[rows]``.

        Chunks have ``chunk_rows`` rows, by default `CHUNK_ROWS`.
        """
        chunk_rows = chunk_rows or CHUNK_ROWS
        chains, count = chains_of(end), len(end)
        of_chain = np.zeros(len(chains.start), dtype=np.int64)
        for chain, parent in enumerate(chains.parent.tolist()):
            of_chain[chain] = 0 if parent < 0 else of_chain[parent] + 1
        levels: list[Level] = []
        number = np.zeros(len(chains.start), dtype=np.int64)  # index of each chain within its level
        for level in range(int(of_chain.max()) + 1):
            mine = np.flatnonzero(of_chain == level)
            number[mine] = np.arange(len(mine))
            start, lengths = chains.start[mine], (chains.stop - chains.start)[mine]
            rows = np.repeat(start - np.cumsum(lengths) + lengths, lengths) + np.arange(int(lengths.sum()))
            parents = torch.from_numpy(number[chains.parent[mine]]).to(device) if level else None
            sizes = tuple(lengths.tolist())
            segments = Segments.of(sizes, chunk_rows=chunk_rows, device=device)
            levels.append(Level(torch.from_numpy(rows).to(device), sizes, parents, segments))
        parent_rows = np.append(chains.parents(), -1)  # index -1 (no row) maps to -1
        above = np.empty((kernel - 1, count), dtype=np.int64)
        found = np.arange(count)
        for ancestors in above:
            found = parent_rows[found]
            ancestors[:] = np.where(found < 0, count, found)
        order = torch.cat([level.rows for level in levels])
        places = torch.empty_like(order)
        places[order] = torch.arange(count, device=order.device)
        return SegmentLevels(tuple(levels), torch.from_numpy(above).to(device), places)

    def convolved(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Returns the causal convolution of ``rows`` ``[rows, channels]`` along each path, of the same shape.

        ``weight`` is ``[channels, kernel]``; its last column belongs to the row itself.
        """
        with_zero = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        output = rows * weight[:, -1]
        for distance, above in enumerate(self.above, start=2):
            output = output + with_zero.index_select(0, above) * weight[:, -distance]
        return output


class DeltaRule(Protocol):
    """Computes the gated delta rule over the segments of one level."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, level: Level, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns outputs and states as `relax_core.families.delta_rule.gated_delta_rule` does."""
        ...


def delta_rule() -> DeltaRule:
    """Returns the rule for this process's device: flash-linear-attention's on a GPU that has it, else torch's."""
    return _flash_rule if training_device().cuda and importlib.util.find_spec("fla") is not None else _torch_rule


def _torch_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, level: Level, states: Tensor
) -> tuple[Tensor, Tensor]:
    return gated_delta_rule(query, key, value, decay, strength, level.segments, states)


def _flash_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, level: Level, states: Tensor
) -> tuple[Tensor, Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    repeats = value.shape[1] // key.shape[1]
    edges = torch.tensor([0, *level.lengths], device=query.device).cumsum(0)
    output, final = chunk_gated_delta_rule(
        query.repeat_interleave(repeats, 1)[None],
        key.repeat_interleave(repeats, 1)[None],
        value[None],
        g=decay[None],
        beta=strength[None],
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=edges,
    )
    return output[0], final


class TreeDeltaNet(MegatronModule):
    """Computes a gated delta net; Megatron passes the `TreeBatch` to it as the attention mask.

    ``in_proj`` and ``out_proj`` are linear layers that Megatron splits; the rows of ``in_proj`` are in the order of
    `relax_core.train.hf.weight_rules.NET_PARTS`. If ``recompute`` is True the activations between these two layers are
    computed again in the backward pass.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        net: DeltaNet,
        in_proj: Any,
        out_proj: Any,
        layer_number: int,
        recompute: bool = False,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        self.net, self.recompute, self.layer_number, self._rule = net, recompute, layer_number, delta_rule()
        self._ranks = parallel_state.get_tensor_model_parallel_world_size()
        heads = net.value_heads // self._ranks
        shared = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj = build_module(
            in_proj,
            config.hidden_size,
            net.channels + net.values + 2 * net.value_heads,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **shared,
        )
        self.convolution = torch.nn.Parameter(torch.empty(net.channels // self._ranks, net.kernel))
        self.A_log = torch.nn.Parameter(torch.empty(heads))
        self.dt_bias = torch.nn.Parameter(torch.empty(heads))
        for parameter in (self.convolution, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        self.out_norm = torch.nn.Parameter(torch.empty(net.value_dim))
        self.out_proj = build_module(
            out_proj,
            net.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **shared,
        )

    def forward(self, hidden_states: Tensor, attention_mask: TreeBatch, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Maps this rank's rows ``[rows, 1, hidden]`` to outputs of the same shape."""
        projected, _ = self.in_proj(hidden_states)

        def compute(projected: Tensor) -> Tensor:
            return self._heads(projected[:, 0], attention_mask)[:, None]

        if self.recompute and torch.is_grad_enabled():
            heads = checkpoint(compute, False, projected)
        else:
            heads = compute(projected)
        output: tuple[Tensor, Tensor | None] = self.out_proj(heads)
        return output

    def _heads(self, projected: Tensor, tree: TreeBatch) -> Tensor:
        """Returns the normed and gated outputs of this rank's rows and heads, ``[rows, values / ranks]``."""
        net, ranks = self.net, self._ranks
        widths = [net.channels // ranks, net.values // ranks, 2 * net.value_heads // ranks]
        mixed, gate, scalars = projected.split(widths, -1)
        stream, mine = _whole_stream(torch.cat([mixed, scalars], -1), tree)
        mixed, strength, decay = stream.split([widths[0], widths[2] // 2, widths[2] // 2], -1)
        assert tree.levels is not None, "a model with a gated delta net gets the levels of its trees"
        mixed = F.silu(tree.levels.convolved(mixed, self.convolution.to(mixed.dtype)))
        outputs = self._over_levels(mixed, log_decay(self.A_log, decay, self.dt_bias), strength.sigmoid(), tree.levels)
        if mine is not None:
            # A pad reads the row of zeros after the stream.
            outputs = torch.cat([outputs, outputs.new_zeros(1, *outputs.shape[1:])])[mine]
        # Each rank has the gradient of the norm for its own heads; the backward pass sums these gradients.
        weight = copy_to_tensor_model_parallel_region(self.out_norm)
        gate = gate.unflatten(-1, (-1, net.value_dim))
        return gated_norm(outputs.to(gate.dtype), gate, weight, eps=self.config.layernorm_epsilon).flatten(1)

    def _over_levels(self, mixed: Tensor, decay: Tensor, strength: Tensor, levels: SegmentLevels) -> Tensor:
        """Returns the outputs of all rows of the stream, ``[rows, value heads / ranks, value dim]``."""
        net, ranks = self.net, self._ranks
        keys, values = net.keys // ranks, net.values // ranks
        query, key, value = (
            part.unflatten(-1, (-1, size))
            for part, size in zip(
                mixed.split([keys, keys, values], -1), (net.key_dim, net.key_dim, net.value_dim), strict=True
            )
        )
        outputs: list[Tensor] = []
        states = value.new_zeros(0)
        for level in levels.levels:
            if level.parents is None:
                shape = (len(level.lengths), net.value_heads // ranks, net.key_dim, net.value_dim)
                states = value.new_zeros(shape, dtype=torch.float32)
            else:
                states = states.index_select(0, level.parents)
            own = [tensor.index_select(0, level.rows) for tensor in (query, key, value, decay, strength)]
            found, states = self._rule(own[0], own[1], own[2], own[3], own[4], level, states)
            outputs.append(found)
        return torch.cat(outputs).index_select(0, levels.row_places)


def _whole_stream(rows: Tensor, tree: TreeBatch) -> tuple[Tensor, Tensor | None]:
    """Returns all rows of the stream without pads, and the index of each of this rank's rows in the stream.

    The indexes are None if this rank has exactly the stream's rows. The index of a pad is after the stream's end.
    """
    assert tree.levels is not None
    count = len(tree.levels.row_places)
    if tree.stream_places is None:
        return rows, None
    if tree.sharding.group is None:
        return rows[:count], tree.stream_places
    # The backward pass of the gather sums the ranks' gradients and returns to each rank the sums for its own rows.
    gathered = gather_from_sequence_parallel_region(rows, group=tree.sharding.group)
    return gathered.index_select(0, tree.gathered_rows), tree.stream_places
