"""Passes settings of each micro-batch to the routers of a mixture of experts, and measures the experts' load.

The settings are the experts to replay, the pads, and the weight of the balancing loss. Engine and trainer compute the
router in a different order or precision. If two experts have almost equal scores, engine and trainer may choose
different experts. Whole blocks of the network then differ, beyond rounding. With replay (R3, arXiv 2510.11370) each
token goes to the experts that the engine chose. The trainer computes the experts' weights, so the router keeps its
gradient.

The micro-batch's `TreeBatch` has these settings and reaches every layer of every pipeline stage, also when a layer is
recomputed. So the order of passes cannot mix up the settings of micro-batches that are in progress at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from relax_core.contracts.tree import TokenTree
from relax_core.families.architecture import Architecture
from relax_core.train.micro_batches import REPEATED

if TYPE_CHECKING:
    from relax_core.train.model.tree_attention import TreeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRows:
    """Holds the routing of this rank's rows inside the layers.

    ``experts`` is int64 ``[layers with experts, rows, top_k]`` for all layers of the model, or None if the routers
    choose the experts. ``pads`` is bool ``[rows]``: True at rows that the balancing loss and the counts exclude, which
    are pads and repeated rows of a split tree. It is None if no rank has such rows. ``balance_weight`` multiplies the
    mean balancing loss of the rows. ``counted`` is False for a micro-batch without groups.
    """

    experts: Tensor | None
    pads: Tensor | None
    balance_weight: float
    counted: bool = True


OWN_CHOICE = RouterRows(experts=None, pads=None, balance_weight=0.0)


def packed_experts(trees: Sequence[TokenTree], model: Architecture) -> np.ndarray | None:
    """Returns the trees' routed experts in stream order, ``[rows, layers, top_k]``, or None without routed experts.

    Raises ValueError if the number of layers or an expert does not fit the model.
    """
    present = [tree.extras["routed_experts"] for tree in trees if "routed_experts" in tree.extras]
    if not present:
        return None
    assert len(present) == len(trees), "all groups of a step must have the same columns"
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


def experts_of_rows(experts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Selects ``rows`` of ``experts`` ``[stream, layers, top_k]`` and returns int64 ``[layers, rows, top_k]``.

    A row after the end of the stream is a pad. It gets the first ``top_k`` experts, because a row needs ``top_k``
    different experts.
    """
    stream, layers, top_k = experts.shape
    selected = np.empty((len(rows), layers, top_k), dtype=np.int64)
    real = rows < stream
    selected[real] = experts[rows[real]]
    selected[~real] = np.arange(top_k)
    return np.ascontiguousarray(selected.transpose(1, 0, 2))


def _uncounted(trees: Sequence[TokenTree], *, stream: int, padded_rows: int) -> np.ndarray | None:
    """Returns True at pads and repeated rows, bool ``[padded rows]``, or None without such rows."""
    if padded_rows == stream and not any(REPEATED in tree.extras for tree in trees):
        return None
    whole = np.arange(padded_rows) >= stream
    before = 0
    for tree in trees:
        if REPEATED in tree.extras:
            whole[before : before + tree.computed_rows] = tree.extras[REPEATED][tree.computed]
        before += tree.computed_rows
    return whole


def router_rows(batch: TreeBatch, model: Architecture, *, replays: bool, balance_weight: float) -> RouterRows:
    """Returns the routing of a micro-batch; if ``replays`` is True, experts that come with the groups are replayed."""
    rows, device = batch.sharding.rows_inside_layers(batch.padded_rows), batch.token_ids.device
    uncounted = _uncounted(batch.groups, stream=len(batch.layout.token_ids), padded_rows=batch.padded_rows)
    experts = packed_experts(batch.groups, model) if replays else None
    return RouterRows(
        experts=None if experts is None else torch.from_numpy(experts_of_rows(experts, rows)).to(device),
        pads=None if uncounted is None else torch.from_numpy(uncounted[rows]).to(device),
        balance_weight=balance_weight,
        counted=bool(batch.groups),
    )


if not hasattr(moe_utils, "te_general_gemm"):
    # megatron-core 0.16.1 reads this name always but defines it only with Transformer Engine
    moe_utils.te_general_gemm = None


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor,
    *,
    num_out_tokens: int,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts rows by their experts like Megatron's function of this name, but the host does not wait for the device.

    ``tokens`` is ``[rows, hidden]``; ``routing_map``, bool, and ``probs`` are ``[rows, experts]``. Returns the rows
    ``[num_out_tokens, hidden]``, their probabilities and their row numbers, int64 ``[num_out_tokens]``. No row is
    dropped, so the number of chosen pairs is known. Megatron selects by a mask, and the host has to read its size.
    """
    assert not fused and not drop_and_pad, "transformer_config does not set them"
    pairs = torch.nonzero_static(routing_map.T.reshape(-1), size=num_out_tokens)[:, 0]
    rows = pairs % len(tokens)
    return tokens.index_select(0, rows), probs.T.reshape(-1).index_select(0, pairs), rows


token_dispatcher.permute = permute


class MoeTransformerLayer(TransformerLayer):
    """Passes the micro-batch's `RouterRows` to the layer's router before the layer's forward pass.

    This is part of `forward`, so a recomputed pass repeats it. Megatron's RouterReplay needs a list for recomputation
    that is switched between forward and backward passes; this class does not use it.
    """

    def forward(self, *args: Any, attention_mask: TreeBatch, **kwargs: Any) -> Any:
        """Runs the layer; see `TransformerLayer.forward`."""
        if isinstance(self.mlp, MoELayer):
            assert isinstance(self.mlp.router, BalancedRouter)
            self.mlp.router.follow(attention_mask.routers)
        return super().forward(*args, attention_mask=attention_mask, **kwargs)


class BalancedRouter(TopKRouter):
    """Extends Megatron's router by replay, a weighted balancing loss and counts.

    `follow` sets the experts to replay. The balancing loss is weighted by the micro-batch's share of the update. The
    router counts how often each expert is chosen.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Megatron's global list would keep a reference to every model.
        RouterReplay.clear_global_router_replay_instances()
        self.experts_index = -1  # the index of the router's layer among the model's layers with experts
        self._rows = OWN_CHOICE
        self.clear_counts()

    def follow(self, rows: RouterRows) -> None:
        """Sets the micro-batch of the next passes."""
        self._rows = rows
        if rows.experts is None:
            self.router_replay.clear_router_replay_action()
            return
        self.router_replay.target_topk_idx = rows.experts[self.experts_index]
        self.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def clear_counts(self) -> None:
        """Resets ``chosen`` (int64 ``[experts]``) and ``balance_sum`` (the weighted sum of balancing losses)."""
        self.chosen = torch.zeros(self.num_experts, dtype=torch.int64)
        self.balance_sum, self.balance_weight = torch.zeros(()), 0.0

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Routes like Megatron, but excludes the micro-batch's pads from the balancing loss and the counts."""
        assert padding_mask is None
        pads = self._rows.pads
        probabilities, chosen = super().routing(logits, padding_mask=pads)
        # The first pass of a recomputed layer runs without gradient.
        if self._rows.counted and torch.is_grad_enabled():
            counted = chosen if pads is None else chosen & ~pads[:, None]
            self.chosen = self.chosen.to(counted.device) + counted.sum(0)
        return probabilities, chosen

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Attaches the balancing loss, weighted by the micro-batch's share of the algorithm's denominator.

        Megatron multiplies the loss by the number of rows and later divides by the number of trained tokens. These
        numbers are equal in pre-training, but not here.
        """
        weight = self._rows.balance_weight
        # The loss is the sum of the parts on the ranks of the group.
        self.balance_sum = self.balance_sum.to(aux_loss.device) + aux_loss.detach() * (weight / aux_loss_coeff)
        self.balance_weight += weight / self.tp_cp_group.size()
        return MoEAuxLossAutoScaler.apply(activation, aux_loss * weight)


def routers(chunks: Sequence[torch.nn.Module]) -> Iterator[BalancedRouter]:
    """Yields the routers of a rank's layers in order."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, BalancedRouter))


def number_routers(chunks: Sequence[torch.nn.Module]) -> None:
    """Sets each router's index among the model's layers; all layers have experts, and Megatron counts from 1."""
    for router in routers(chunks):
        router.experts_index = router.layer_number - 1


def clear_counts(mine: Sequence[BalancedRouter]) -> None:
    """Resets the counts of all routers."""
    for router in mine:
        router.clear_counts()


def balance_metrics(
    mine: Sequence[BalancedRouter], *, layers: int, experts: int, group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Returns metrics of the distribution of the update's tokens over the experts, over all layers and ranks.

    ``mine`` are this rank's routers (`routers`). The call is collective over ``group``, a gloo group of all ranks, or
    None for a single rank. ``max_load`` and ``min_load`` are the largest and the smallest number of tokens of an expert
    in any layer, relative to an even load. ``entropy`` is the entropy of the experts' shares relative to even shares,
    averaged over the layers. ``balance_loss`` is the balancing loss without its coefficient, averaged over the layers;
    it is 1 for even shares, and absent if the balancing loss is off.
    """
    found = torch.zeros(layers, experts + 2, dtype=torch.float64)
    if mine:
        device = mine[0].weight.device  # a router without a pass has its counts on the host
        counts = torch.stack([router.chosen.to(device) for router in mine]).double()
        balance = torch.stack([router.balance_sum.to(device) for router in mine]).double()
        numbers = torch.cat([counts, balance[:, None]], dim=1).cpu()
        for router, own in zip(mine, numbers, strict=True):
            found[router.experts_index, : experts + 1] += own
            found[router.experts_index, experts + 1] += torch.tensor(router.balance_weight)
    if group is not None:
        dist.all_reduce(found, group=group)
    return loads(found[:, :experts].numpy()) | _balance_loss(found[:, experts:].numpy())


def loads(chosen: np.ndarray) -> dict[str, float]:
    """Returns the loads of `balance_metrics` from ``chosen`` ``[layers, experts]``, the counts of each expert."""
    experts = chosen.shape[1]
    share = chosen / np.maximum(chosen.sum(1, keepdims=True), 1.0)
    surprisal = np.where(share > 0, -np.log(np.where(share > 0, share, 1.0)), 0.0)
    return {
        "max_load": float(share.max()) * experts,
        "min_load": float(share.min()) * experts,
        "entropy": float((share * surprisal).sum(1).mean() / np.log(experts)) if experts > 1 else 1.0,
    }


def _balance_loss(sums: np.ndarray) -> dict[str, float]:
    weight = sums[:, 1].sum()
    return {"balance_loss": float(sums[:, 0].sum() / weight)} if weight else {}
