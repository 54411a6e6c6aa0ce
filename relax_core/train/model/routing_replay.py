"""What a micro-batch tells the routers of its experts: the experts to replay (R3, arXiv 2510.11370), its pads, and how
much its balancing loss weighs.

An engine and the trainer compute the same router in another order or precision, and where two experts are close, they
choose differently: then whole blocks of the network differ, not a rounding. With replay each token goes to the experts
that the engine chose. Their weights are computed here, so the router keeps its gradient.

All of it travels with the micro-batch's `TreeBatch`, to every layer of every pipeline stage and again into a layer that
is recomputed. So no order of passes, however many micro-batches are under way, can mix them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relax_core.contracts.tree import TokenTree
from relax_core.families.architecture import Architecture
from relax_core.train.packing.micro_batches import REPEATED
from relax_core.train.parallel.context_parallel import RowCut


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRows:
    """Of this rank's rows inside the layers.

    ``experts``: int64 ``[layers with experts, rows, top_k]``, all layers of the model; None where the routers choose
    themselves. ``pads``: bool ``[rows]``, rows that neither the balancing loss nor the counts see, which are pads and
    rows that another piece of their group has too; None where no rank has any. ``balance_weight``: what the mean
    balancing loss of the rows is multiplied by. ``counted``: False for a row that is computed only to keep other ranks
    company."""

    experts: Tensor | None
    pads: Tensor | None
    balance_weight: float
    counted: bool = True


OWN_CHOICE = RouterRows(experts=None, pads=None, balance_weight=0.0)


def packed_experts(trees: Sequence[TokenTree], model: Architecture) -> np.ndarray | None:
    """The trees' experts in the order of their common stream, ``[rows, layers, top_k]``; None where none came.

    Raises ValueError for what does not fit the model: another number of layers, or an expert that it does not have.
    """
    present = [tree.extras["routed_experts"] for tree in trees if "routed_experts" in tree.extras]
    if not present:
        return None
    assert len(present) == len(trees), "a column is there for all groups of a step or for none"
    assert model.experts is not None
    found = []
    for tree, experts in zip(trees, present, strict=True):
        wanted = (tree.rows, model.num_layers, model.experts.per_token)
        if experts.size != np.prod(wanted) or len(experts) != wanted[0]:
            raise ValueError(
                f"group {tree.group_uid}: routed experts of shape {list(experts.shape)}, but its rows, the model's "
                f"layers with experts and the experts a token are {list(wanted)}. Is the engine's model another one?"
            )
        if int(experts.max()) >= model.experts.count:
            raise ValueError(
                f"group {tree.group_uid}: routed to expert {experts.max()}, but the model has "
                f"{model.experts.count} experts."
            )
        found.append(
            experts.reshape(wanted)[tree.computed]
        )  # SGLang tells no shape: layers and experts come as one axis
    return np.concatenate(found)


def rows_inside_layers(cut: RowCut, padded_rows: int, *, parts: int, part: int) -> np.ndarray:
    """Numbers in the stream of the rows that this rank has inside the layers, int64: its context-parallel rows, and of
    these the ``part`` of ``parts`` that sequence parallelism leaves it."""
    rows = cut.rows_of_rank(padded_rows)
    return rows.reshape(parts, -1)[part]


def cut_experts(experts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """``experts`` ``[stream, layers, top_k]`` at the stream's ``rows`` → int64 ``[layers, rows, top_k]``. A row behind
    the stream's end is a pad: it goes to the first experts, for it must go to ``top_k`` different ones."""
    stream, layers, top_k = experts.shape
    cut = np.empty((len(rows), layers, top_k), dtype=np.int64)
    real = rows < stream
    cut[real] = experts[rows[real]]
    cut[~real] = np.arange(top_k)
    return np.ascontiguousarray(cut.transpose(1, 0, 2))


def _uncounted(trees: Sequence[TokenTree], *, stream: int, padded_rows: int) -> np.ndarray | None:
    """Pads and repeated rows, bool ``[padded rows]``; None without any."""
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
    """How this rank makes the `RouterRows` of a micro-batch. ``parts``, ``part``: of sequence parallelism. ``replays``:
    whether experts that came with the groups are followed."""

    model: Architecture
    cut: RowCut
    parts: int
    part: int
    replays: bool
    device: torch.device

    def router_rows(
        self, trees: Sequence[TokenTree], *, stream: int, padded_rows: int, balance_weight: float
    ) -> RouterRows:
        """Of a micro-batch whose stream has ``stream`` rows, and with its pads ``padded_rows``."""
        rows = rows_inside_layers(self.cut, padded_rows, parts=self.parts, part=self.part)
        uncounted = _uncounted(trees, stream=stream, padded_rows=padded_rows)
        experts = packed_experts(trees, self.model) if self.replays else None
        return RouterRows(
            experts=None if experts is None else torch.from_numpy(cut_experts(experts, rows)).to(self.device),
            pads=None if uncounted is None else torch.from_numpy(uncounted[rows]).to(self.device),
            balance_weight=balance_weight,
            counted=bool(trees),
        )
