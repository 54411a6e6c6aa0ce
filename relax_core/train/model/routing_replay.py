"""Prepares what a micro-batch gives to its routers: experts to replay, its pads, and its balancing-loss weight.

An engine and the trainer compute the same router in a different order or precision. If two experts score almost the
same, they choose differently, and then whole blocks of the network differ and not only roundings. With replay (R3,
arXiv 2510.11370) each token goes to the experts that the engine chose. The trainer computes their weights, so the
router keeps its gradient.

All of it travels with the micro-batch's `TreeBatch` to every layer of every pipeline stage, and again into a layer that
is recomputed. No order of passes can mix up micro-batches, however many of them are in progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from relax_core.config.schema import ParallelConfig
from relax_core.contracts.tree import TokenTree
from relax_core.families.architecture import Architecture
from relax_core.train.packing.micro_batches import REPEATED
from relax_core.train.parallel.context_parallel import RowSharding


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRows:
    """Holds the routing of this rank's rows inside the layers.

    ``experts`` is int64 ``[layers with experts, rows, top_k]`` for all layers of the model, or None if the routers
    choose. ``pads`` is bool ``[rows]``, or None if no rank has pads: it is True at rows that neither the balancing loss
    nor the counts include, which are pads and rows that another piece of the group also has. ``balance_weight``
    multiplies the mean balancing loss of the rows. ``counted`` is False for a micro-batch without groups.
    """

    experts: Tensor | None
    pads: Tensor | None
    balance_weight: float
    counted: bool = True


OWN_CHOICE = RouterRows(experts=None, pads=None, balance_weight=0.0)


def packed_experts(trees: Sequence[TokenTree], model: Architecture) -> np.ndarray | None:
    """Returns the trees' experts in the order of their stream, ``[rows, layers, top_k]``, or None if there are none.

    Raises ValueError if the number of layers or an expert does not fit the model.
    """
    present = [tree.extras["routed_experts"] for tree in trees if "routed_experts" in tree.extras]
    if not present:
        return None
    assert len(present) == len(trees), "either all groups of a step have a column or none has it"
    assert model.experts is not None
    found = []
    for tree, experts in zip(trees, present, strict=True):
        wanted = (tree.rows, model.num_layers, model.experts.per_token)
        if experts.size != np.prod(wanted) or len(experts) != wanted[0]:
            raise ValueError(
                f"group {tree.group_uid}: its routed experts have shape {list(experts.shape)}, but its rows, the "
                f"model's layers with experts and the experts a token are {list(wanted)}. Check that the engine serves "
                "this model."
            )
        if int(experts.max()) >= model.experts.count:
            raise ValueError(
                f"group {tree.group_uid}: a token was routed to expert {experts.max()}, but the model has "
                f"{model.experts.count} experts."
            )
        # SGLang returns no shape: layers and experts arrive as one axis.
        found.append(experts.reshape(wanted)[tree.computed])
    return np.concatenate(found)


def rows_inside_layers(sharding: RowSharding, padded_rows: int, *, parts: int, part: int) -> np.ndarray:
    """Returns the stream's row numbers that this rank has inside the layers, int64.

    They are its context-parallel rows, and of these the ``part`` of ``parts`` that sequence parallelism assigns to it.
    """
    rows = sharding.rows_of_rank(padded_rows)
    return rows.reshape(parts, -1)[part]


def experts_of_rows(experts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Selects ``rows`` of ``experts`` ``[stream, layers, top_k]`` and returns int64 ``[layers, rows, top_k]``.

    A row after the end of the stream is a pad. It goes to the first experts, because it needs ``top_k`` different ones.
    """
    stream, layers, top_k = experts.shape
    selected = np.empty((len(rows), layers, top_k), dtype=np.int64)
    real = rows < stream
    selected[real] = experts[rows[real]]
    selected[~real] = np.arange(top_k)
    return np.ascontiguousarray(selected.transpose(1, 0, 2))


def _uncounted(trees: Sequence[TokenTree], *, stream: int, padded_rows: int) -> np.ndarray | None:
    """Returns True at pads and repeated rows, bool ``[padded rows]``, or None if there are none."""
    if padded_rows == stream and not any(REPEATED in tree.extras for tree in trees):
        return None
    whole = np.arange(padded_rows) >= stream
    before = 0
    for tree in trees:
        if REPEATED in tree.extras:
            whole[before : before + tree.computed_rows] = tree.extras[REPEATED][tree.computed]
        before += tree.computed_rows
    return whole


@dataclass(frozen=True, kw_only=True)
class RouterPlan:
    """Makes the `RouterRows` of this rank for each micro-batch.

    ``part`` and ``parts`` are those of sequence parallelism. If ``replays`` is True, experts that come with the groups
    are replayed.
    """

    model: Architecture
    sharding: RowSharding
    parts: int
    part: int
    replays: bool
    device: torch.device

    def router_rows(
        self, trees: Sequence[TokenTree], *, stream: int, padded_rows: int, balance_weight: float
    ) -> RouterRows:
        """Returns the routing of a micro-batch with ``stream`` rows, and ``padded_rows`` rows with its pads."""
        rows = rows_inside_layers(self.sharding, padded_rows, parts=self.parts, part=self.part)
        uncounted = _uncounted(trees, stream=stream, padded_rows=padded_rows)
        experts = packed_experts(trees, self.model) if self.replays else None
        return RouterRows(
            experts=None if experts is None else torch.from_numpy(experts_of_rows(experts, rows)).to(self.device),
            pads=None if uncounted is None else torch.from_numpy(uncounted[rows]).to(self.device),
            balance_weight=balance_weight,
            counted=bool(trees),
        )


def router_plan(
    architecture: Architecture, parallel: ParallelConfig, sharding: RowSharding, *, replays: bool, device: torch.device
) -> RouterPlan | None:
    """Returns this rank's plan, or None for a dense model."""
    if architecture.experts is None:
        return None
    return RouterPlan(
        model=architecture,
        sharding=sharding,
        parts=parallel.tp if parallel.sequence_parallel else 1,
        part=parallel_state.get_tensor_model_parallel_rank() if parallel.sequence_parallel else 0,
        replays=replays,
        device=device,
    )
