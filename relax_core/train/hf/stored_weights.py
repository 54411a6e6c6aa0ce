"""The tensors of a Hugging Face folder, each of which is one tensor of the weight rules or many of them fused.

A rule's tensor has one or two axes. A folder may hold a tensor of more axes, and all experts of a layer in one
transposed tensor (`relax_core.contracts.family.Family`). It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from relax_core.families.architecture import Architecture
from relax_core.train.hf.weight_rules import Part, WeightRule, tensor_shape, weight_rules

if TYPE_CHECKING:
    from torch import Tensor


class WholeTensor(Protocol):
    """Is a tensor, or a tensor in a file that reads only what is indexed (weights/folder_stream.py)."""

    @property
    def shape(self) -> Sequence[int]:
        """Returns the shape of the whole tensor."""

    def __getitem__(self, index: Any, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Describes a tensor of a folder: its Hugging Face name, its shape and the rules of the tensors that it holds.

    ``experts`` is the number of experts that it holds, 0 if it holds one rule's tensor. ``squares`` is True if an
    expert's matrices are square in any such tensor of the model, so that its shape does not tell if it is transposed.
    """

    name: str
    shape: tuple[int, ...]
    rules: tuple[WeightRule, ...]
    experts: int = 0
    squares: bool = False

    @property
    def untransposed(self) -> tuple[int, ...] | None:
        """Returns the shape in which transformers writes the experts of a model that it has not loaded.

        It is None for other tensors, and for experts of which some tensor is square: their shape does not tell.
        """
        if not self.experts or self.squares:
            return None
        return (self.shape[0], self.shape[2], self.shape[1])

    def problem(self, shape: Sequence[int]) -> str | None:
        """Returns why a tensor of ``shape`` is not this one, None if it is."""
        if tuple(shape) in (self.shape, self.untransposed):
            return None
        return f"has shape {tuple(shape)}; the model's is {self.shape}"

    def parts(self, source: WholeTensor) -> Iterator[tuple[str, WholeTensor]]:
        """Yields (name, tensor) of each rule; what a reader indexes is read then. Raises ValueError for a wrong shape.

        Fused experts are read as published, and also as transformers writes them if their shape tells it.
        """
        if (problem := self.problem(source.shape)) is not None:
            raise ValueError(f"weight {self.name} {problem}.")
        if not self.experts:
            yield self.rules[0].hf, source
            return
        transposed = tuple(source.shape) == self.shape
        each = len(self.rules) // self.experts
        width = self.shape[2] // each
        for number, rule in enumerate(self.rules):
            expert, part = divmod(number, each)
            yield rule.hf, _ExpertPart(source, expert, part * width, width, transposed=transposed)


class _ExpertPart:
    """Is one expert's matrix inside a tensor of all experts of a layer; its rows are the expert's outputs."""

    def __init__(self, source: WholeTensor, expert: int, first: int, width: int, *, transposed: bool) -> None:
        self._source, self._expert, self._first, self._transposed = source, expert, first, transposed
        self.shape = (width, source.shape[1]) if transposed else (width, source.shape[2])

    def __getitem__(self, index: Any, /) -> Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        start, stop, _ = rows.indices(self.shape[0])
        rows = slice(self._first + start, self._first + stop)
        if self._transposed:
            return self._source[self._expert, columns, rows].transpose(0, 1)
        return self._source[self._expert, rows, columns]


def stored_weights(architecture: Architecture) -> tuple[StoredWeight, ...]:
    """Returns the tensors of a folder in the order of an export."""
    tower = {} if architecture.vision is None else architecture.vision.weight_shapes
    found: list[StoredWeight] = []
    fused: dict[str, list[WeightRule]] = {}
    for rule in weight_rules(architecture):
        name = fused_name(rule) if architecture.fused_experts else None
        if name is None:
            shape = tower[rule.hf] if rule.hf in tower else tensor_shape(rule, architecture)
            found.append(StoredWeight(rule.hf, shape, (rule,)))
        elif name in fused:
            fused[name].append(rule)
        else:
            fused[name] = [rule]
            found.append(StoredWeight(name, (), ()))  # It keeps the place until all its rules are known.
    return tuple(_fused(one.name, fused[one.name], architecture) if one.name in fused else one for one in found)


def fused_name(rule: WeightRule) -> str | None:
    """Returns the name of the tensor that holds an expert's one together with the others', None for other rules."""
    if not rule.expert:
        return None
    layer = rule.hf[: rule.hf.index(".experts.")]
    return f"{layer}.experts.{'gate_up_proj' if rule.part in (Part.gate, Part.up) else 'down_proj'}"


def _fused(name: str, rules: Sequence[WeightRule], architecture: Architecture) -> StoredWeight:
    assert architecture.experts is not None, "a fused tensor holds experts"
    count, width, hidden = architecture.experts.count, architecture.experts.width, architecture.hidden_size
    outputs, inputs = tensor_shape(rules[0], architecture)
    shape = (count, inputs, outputs * (len(rules) // count))
    return StoredWeight(name, shape, tuple(rules), count, squares=hidden in (width, 2 * width))


def fused(tensors: Iterable[tuple[str, Tensor]], stored: Sequence[StoredWeight]) -> Iterator[tuple[str, Tensor]]:
    """Yields the stored tensors from those of the rules, which come in the order of the rules.

    One fused tensor is in memory at a time. ``tensors`` is read to its end; it may be empty.
    """
    incoming = iter(tensors)
    for weight in stored:
        if weight.experts:
            whole = _joined(weight, incoming)
            if whole is not None:
                yield weight.name, whole
            del whole
            continue
        for name, tensor in islice(incoming, 1):
            assert name == weight.rules[0].hf, f"{name} comes in place of {weight.name}"
            yield weight.name, tensor.reshape(weight.shape)
            del tensor  # This frees the tensor before the next one is made.
    assert next(incoming, None) is None, "there are more tensors than the model has"


def _joined(weight: StoredWeight, incoming: Iterator[tuple[str, Tensor]]) -> Tensor | None:
    """Returns a layer's experts in one tensor, None if nothing comes."""
    whole: Tensor | None = None
    each = len(weight.rules) // weight.experts
    width = weight.shape[2] // each
    for number, (name, tensor) in enumerate(islice(incoming, len(weight.rules))):
        assert name == weight.rules[number].hf, f"{name} comes in place of {weight.rules[number].hf}"
        if whole is None:
            whole = tensor.new_empty(weight.shape)
        expert, part = divmod(number, each)
        whole[expert, :, part * width : (part + 1) * width] = tensor.transpose(0, 1)
        del tensor
    return whole
