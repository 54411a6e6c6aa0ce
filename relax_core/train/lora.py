"""Trains low-rank adapters (LoRA, arXiv 2106.09685) of linear layers in weight space.

An adapted layer computes with W + s·B·A, where W is frozen and only the factors A ``[rank, in]`` and B ``[out, rank]``
are trained. Each Hugging Face tensor has its factors, also where Megatron fuses several tensors into one parameter. The
factors are parameters of the layer, so Megatron's wrapper, optimizer and overlap treat them like other weights. Tensor
parallelism splits B like the rows, or A like the columns, of the base weight. The other factor is replicated, and its
gradient is summed over the ranks. So sequence, context and pipeline parallelism need no code here.

B is 0 at first, so training begins with the base model. A is uniform in ±1/√in, as in PEFT, with a seed of its name.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor

from relax_core.families.architecture import Architecture
from relax_core.train.hf.weight_rules import Part, Shard, WeightRule, tensor_shape, weight_rules
from relax_core.train.hf.weight_slices import parameters_by_global_name, part_view, piece_of_rule, piece_shape
from relax_core.train.model.gpt import parameter_name
from relax_core.weights.lora_merge import Lora, factor_names, merged


@dataclass(frozen=True, kw_only=True)
class AdaptedTensor:
    """Holds the rule of an adapted Hugging Face tensor and the rules of its factors."""

    base: WeightRule
    a: WeightRule
    b: WeightRule


def adapted_tensors(architecture: Architecture, lora: Lora) -> list[AdaptedTensor]:
    """Returns the adapted tensors: linear layers of the language model that ``lora.targets`` names, without experts."""
    found = []
    for rule in weight_rules(architecture):
        names = rule.hf.split(".")
        if len(names) < 2 or names[-1] != "weight" or names[-2] not in lora.targets or rule.expert:
            continue
        of_a, of_b = factor_names(rule.hf)
        module = rule.megatron.rpartition(".")[0]
        a, b = (rule.shard if rule.shard is split else Shard.replicated for split in (Shard.row, Shard.column))
        found.append(
            AdaptedTensor(
                base=rule,
                a=WeightRule(of_a, f"{module}.{_attribute(rule, 'A')}", a),
                b=WeightRule(of_b, f"{module}.{_attribute(rule, 'B')}", b),
            )
        )
    return found


def _attribute(rule: WeightRule, factor: str) -> str:
    return f"lora_{factor}_{rule.hf.split('.')[-2]}"


class Adapters:
    """Adds factors to this rank's part of a model, and switches them off and on.

    Create it before Megatron's wrapper and optimizer. It freezes all other parameters of the model. Raises ValueError
    for a rank above the size of an adapted matrix.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], architecture: Architecture, lora: Lora, *, seed: int) -> None:
        self.tensors = adapted_tensors(architecture, lora)
        self.scale = lora.scale
        self._enabled = True
        of_parameter: dict[str, list[AdaptedTensor]] = {}
        for tensor in self.tensors:
            name = parameter_name(
                tensor.base.megatron, experts=architecture.experts is not None, delta_layers=architecture.delta_layers
            )
            of_parameter.setdefault(name, []).append(tensor)
        for chunk in chunks:
            chunk.requires_grad_(False)
        names = {id(weight): name for name, weight in parameters_by_global_name(chunks, architecture).items()}
        for module in [module for chunk in chunks for module in chunk.modules()]:
            weight = module._parameters.get("weight")
            if weight is not None and (adapted := of_parameter.get(names.get(id(weight), ""))):
                self._adapt(module, weight, adapted, architecture, lora, seed=seed)

    def _adapt(
        self,
        module: torch.nn.Module,
        weight: torch.nn.Parameter,
        adapted: Sequence[AdaptedTensor],
        architecture: Architecture,
        lora: Lora,
        *,
        seed: int,
    ) -> None:
        for tensor in adapted:
            out, into = tensor_shape(tensor.base, architecture)
            if lora.rank > min(out, into):
                raise ValueError(
                    f"model.lora.rank={lora.rank}: {tensor.base.hf} is {out} x {into}. Use {min(out, into)} or less, "
                    "or take the layer out of model.lora.targets."
                )
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {tensor.base.hf}".encode()))
            a = (torch.rand(lora.rank, into, generator=generator) * 2 - 1) / math.sqrt(into)
            for rule, value, axis in ((tensor.a, a, 1), (tensor.b, torch.zeros(out, lora.rank), 0)):
                piece, pieces = piece_of_rule(rule)
                own = value.chunk(pieces, axis)[piece].to(dtype=weight.dtype, device=weight.device)
                factor = torch.nn.Parameter(own.clone())
                set_tensor_model_parallel_attributes(factor, pieces > 1, axis, 1)
                module.register_parameter(rule.megatron.rpartition(".")[2], factor)
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._enabled:
                return inner(*args, **kwargs)
            base = module._parameters["weight"]
            assert base is not None
            adapted_weight: Any = self._merged(module, base, adapted, architecture)
            module._parameters["weight"] = adapted_weight
            try:
                return inner(*args, **kwargs)
            finally:
                module._parameters["weight"] = base

        module.forward = forward

    def _merged(
        self, module: torch.nn.Module, base: Tensor, adapted: Sequence[AdaptedTensor], architecture: Architecture
    ) -> Tensor:
        """Returns the layer's adapted weight; gradients reach the factors."""
        whole = base
        if adapted[0].base.part is not Part.whole:
            whole = base.clone()
        for tensor in adapted:
            a, b = (getattr(module, rule.megatron.rpartition(".")[2]) for rule in (tensor.a, tensor.b))
            group = parallel_state.get_tensor_model_parallel_group()
            if tensor.base.shard is Shard.column:
                a = copy_to_tensor_model_parallel_region(a, group=group)
            else:
                b = copy_to_tensor_model_parallel_region(b, group=group)
            if whole is base:
                return merged(base, a, b, self.scale)
            view = part_view(base, tensor.base.part, architecture)
            made = merged(view.reshape(piece_shape(view, tensor.base)), a, b, self.scale)
            part_view(whole, tensor.base.part, architecture).copy_(made.view(view.shape))
        return whole

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Computes with the base weights while the block runs."""
        self._enabled = False
        try:
            yield
        finally:
            self._enabled = True

    @property
    def rules(self) -> list[WeightRule]:
        """Returns the rules of all factors, A before B for each tensor."""
        return [rule for tensor in self.tensors for rule in (tensor.a, tensor.b)]
