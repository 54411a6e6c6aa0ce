"""Weights between Hugging Face names and a Megatron model, by the family's map, both ways and to the bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from relax_core.train.gpt import VALUE_HEAD
from relax_core.train.models.family import Attention, Family, HfConfig, Part, WeightRule
from relax_core.train.specs import parameter_name


def _view_of(parameter: Tensor, part: Part, attention: Attention) -> Tensor:
    """The part of a Megatron parameter that one Hugging Face tensor is, as a view of its memory."""
    if part is Part.whole:
        return parameter
    if part in (Part.gate, Part.up):
        return parameter.chunk(2, dim=0)[0 if part is Part.gate else 1]
    heads = attention.query_heads // attention.groups
    grouped = parameter.view(attention.groups, heads + 2, attention.head_dim, *parameter.shape[1:])
    if part is Part.query:
        return grouped[:, :heads]
    return grouped[:, heads if part is Part.key else heads + 1]


def _hf_shape(view: Tensor, rule: WeightRule) -> tuple[int, ...]:
    """Shape of the Hugging Face tensor: query, key and value views have extra leading axes."""
    if rule.part in (Part.query, Part.key, Part.value):
        return (view.shape[:-1].numel(), view.shape[-1])
    return tuple(view.shape)


class HfWeights:
    """One model's weights under their Hugging Face names, as views into the Megatron parameters.

    ``value_head``: of a critic, whose head has no Hugging Face name and which has no output layer.
    """

    def __init__(
        self, model: torch.nn.Module, family: Family, hf_config: HfConfig, *, value_head: bool = False
    ) -> None:
        parameters = {name: one for name, one in model.named_parameters() if not name.startswith(VALUE_HEAD)}
        attention = family.shape(hf_config).attention
        self._family = family
        self._ignored = family.ignored(hf_config)
        self._views: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        used = set()
        for rule in family.weights(hf_config):
            name = parameter_name(rule.megatron)
            if value_head and name not in parameters:
                self._ignored |= {rule.hf}
                continue
            used.add(name)
            view = _view_of(parameters[name].detach(), rule.part, attention)
            self._views[rule.hf] = (view, _hf_shape(view, rule))
        assert used == parameters.keys(), f"family {family.name} maps not all parameters: {parameters.keys() ^ used}"

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in map order. Whole parameters come as views: valid until the next step."""
        for name, (view, shape) in self._views.items():
            yield name, view.reshape(shape)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies tensors in, in any order; raises ValueError for a missing, unknown, repeated or misshapen one."""
        missing = dict.fromkeys(self._views)
        for name, tensor in tensors:
            if name in self._ignored:
                continue
            if name not in missing:
                problem = "comes twice" if name in self._views else f"is no weight of family {self._family.name}"
                raise ValueError(f"weight {name} {problem}.")
            view, shape = self._views[name]
            if tuple(tensor.shape) != shape:
                raise ValueError(f"weight {name} has shape {tuple(tensor.shape)}; the model's is {shape}.")
            view.copy_(tensor.reshape(view.shape))
            del missing[name]
        if missing:
            raise ValueError(f"{len(missing)} weight(s) missing: {', '.join(list(missing)[:3])} …")
