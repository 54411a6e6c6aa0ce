"""Computes products of tokens with weights, and mixture-of-experts layers made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.contracts.family import Experts

ONEDNN_FROM = 1 << 21  # multiply-adds, for which MKL takes about 40 µs
# Token counts are padded to a multiple of _STEP: oneDNN takes 0.4 ms to prepare a shape, and keeps 1,024 shapes.
_STEP = 64


def product(tokens: Tensor, weight_t: Tensor) -> Tensor:
    """Returns ``tokens`` ``[tokens, in]`` times ``weight_t`` ``[in, out]``, a transposed view: ``[tokens, out]``."""
    if _for_onednn(tokens, weight_t):
        return _onednn(tokens, weight_t)
    return torch.mm(tokens, weight_t)


def add_product(x: Tensor, tokens: Tensor, weight_t: Tensor) -> Tensor:
    """Returns the product plus ``x``, which is ``[tokens, out]``, or ``[out]`` and then added to every token."""
    if _for_onednn(tokens, weight_t):
        return _onednn(tokens, weight_t).add_(x)
    return torch.addmm(x, tokens, weight_t)


def _for_onednn(tokens: Tensor, weight_t: Tensor) -> bool:
    """Is True for large float32 products of enough tokens; in bfloat16 torch uses oneDNN by itself.

    Fewer tokens than `_STEP` would mostly multiply the padding.
    """
    count = tokens.shape[0]
    return count >= _STEP and count * weight_t.numel() >= ONEDNN_FROM and tokens.dtype == torch.float32


def _onednn(tokens: Tensor, weight_t: Tensor) -> Tensor:
    count = tokens.shape[0]
    if over := count % _STEP:
        tokens = F.pad(tokens, (0, 0, 0, _STEP - over))
    found: Tensor = torch.ops.mkldnn._linear_pointwise(tokens, weight_t.t(), None, "none", [], "")
    return found[:count]


class DenseWeights(NamedTuple):
    """Holds the weights of a gated feed-forward network; a name that ends in ``_t`` is that of a transposed view."""

    gate_up_t: Tensor  # [hidden, 2 * intermediate]
    down_t: Tensor  # [intermediate, hidden]


class ExpertWeights(NamedTuple):
    """Holds one layer's router and experts, in the model's dtype; ``shared`` is the expert that every token uses."""

    router_t: Tensor  # [hidden, experts]
    each: list[DenseWeights]
    shared: DenseWeights | None
    shared_gate_t: Tensor  # [hidden, 1]


def choose_experts(tokens: Tensor, router_t: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Returns the router's weights and chosen experts by Qwen3-MoE's rule, both ``[tokens, per_token]``.

    The rule takes the softmax over all experts in float32 and the ``per_token`` most likely ones, most likely first.
    ``tokens`` is ``[tokens, hidden]``; the weights have its dtype, the experts are int64.
    """
    scores = product(tokens, router_t).softmax(-1, dtype=torch.float32)
    weights, chosen = scores.topk(experts.per_token, -1)
    if experts.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(tokens.dtype), chosen


def mix_experts(
    tokens: Tensor, weights: Tensor, chosen: Tensor, mlp: ExpertWeights, *, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns the weighted sum of the chosen experts' outputs, plus the shared one's, ``[tokens, hidden]``.

    Tokens are sorted by expert, so that each chosen expert computes one product. Compared with one product over all
    experts and with products padded to the busiest expert, this was measured as the fastest from a hundred tokens on
    at every size, and it is the only one that is affordable for a large model.
    """
    per_token = chosen.shape[1]
    flat = chosen.view(-1)
    order = flat.argsort(stable=True)
    owners = order.div(per_token, rounding_mode="floor")
    sorted_tokens = tokens.index_select(0, owners)
    outputs = torch.empty_like(sorted_tokens)
    start = 0
    for expert, count in enumerate(flat.bincount(minlength=len(mlp.each)).tolist()):
        if count:
            end = start + count
            outputs[start:end] = feed_forward(sorted_tokens[start:end], mlp.each[expert], activation=activation)
            start = end
    outputs.mul_(weights.view(-1).index_select(0, order)[:, None])
    mixed = torch.zeros_like(tokens).index_add_(0, owners, outputs)
    if mlp.shared is not None:
        gate = product(tokens, mlp.shared_gate_t).sigmoid_()
        mixed.addcmul_(gate, feed_forward(tokens, mlp.shared, activation=activation))
    return mixed


def feed_forward(tokens: Tensor, weights: DenseWeights, *, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns a gated feed-forward network's output, ``[tokens, hidden]``."""
    gate, up = product(tokens, weights.gate_up_t).chunk(2, -1)
    return product(activation(gate).mul_(up), weights.down_t)
