"""Maps the stored tensors of a Hugging Face folder to the weight rules; a stored tensor may fuse several rules.

A rule's tensor has one or two axes. A stored tensor may have more axes, the rows of several rules, or all experts of a
layer (`relax_core.contracts.family.ExpertLayout`). `weight_problems` reads the headers of a folder's files and checks
them. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError, safe_open

from relax_core.contracts.family import ExpertLayout
from relax_core.families.architecture import Architecture
from relax_core.families.folder import weight_files
from relax_core.families.hf_config import described_parts, read_hf_config
from relax_core.train.hf.weight_rules import Part, WeightRule, tensor_shape, weight_rules
from relax_core.weights.safetensors_stream import stored_bytes

if TYPE_CHECKING:
    from torch import Tensor


class WholeTensor(Protocol):
    """Defines the interface of a tensor in memory or in a file; only the indexed part of a file is read."""

    @property
    def shape(self) -> Sequence[int]:
        """Returns the shape of the whole tensor."""

    def __getitem__(self, index: Any, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Describes a stored tensor: its Hugging Face name, its shape and the weight rules of its contents.

    ``experts`` is the number of experts in the tensor. It is 0 if the tensor has one rule's data, or stacks ``rows``
    rows of each of several rules. ``transposed`` is True if the experts' matrices are stored transposed. ``squares`` is
    True if the experts' matrices in any such tensor of the model are square: a shape then does not show whether the
    tensor is transposed.
    """

    name: str
    shape: tuple[int, ...]
    rules: tuple[WeightRule, ...]
    experts: int = 0
    squares: bool = False
    transposed: bool = False
    rows: tuple[int, ...] = ()

    @property
    def untransposed(self) -> tuple[int, ...] | None:
        """Returns the shape in which transformers saves the experts of a model that it created itself and did not load.

        It is None for other tensors, and if the shape is ambiguous because a matrix is square.
        """
        if not self.transposed or self.squares:
            return None
        return (self.shape[0], self.shape[2], self.shape[1])

    @property
    def outputs(self) -> int:
        """Returns the number of outputs of one expert in a tensor of all experts."""
        return self.shape[2 if self.transposed else 1]

    def problem(self, shape: Sequence[int]) -> str | None:
        """Returns the reason why a tensor of ``shape`` does not match this weight, or None."""
        if tuple(shape) in (self.shape, self.untransposed):
            return None
        return f"has shape {tuple(shape)}; the model's is {self.shape}"

    def parts(self, source: WholeTensor) -> Iterator[tuple[str, WholeTensor]]:
        """Yields (name, tensor) for each rule; a tensor is read when it is indexed.

        Raises ValueError for a wrong shape.

        Fused experts may be in the published form, or in the form that transformers writes if their shape shows that
        form.
        """
        if (problem := self.problem(source.shape)) is not None:
            raise ValueError(f"weight {self.name} {problem}.")
        if not self.experts:
            first = 0
            for rule, rows in zip(self.rules, self.rows or self.shape[:1], strict=True):
                yield rule.hf, _RowPart(source, first, rows) if self.rows else source
                first += rows
            return
        transposed = self.transposed and tuple(source.shape) == self.shape
        per_expert = len(self.rules) // self.experts
        width = self.outputs // per_expert
        for number, rule in enumerate(self.rules):
            expert, part = divmod(number, per_expert)
            yield rule.hf, _ExpertPart(source, expert, part * width, width, transposed=transposed)


class _RowPart:
    """Reads ``rows`` rows of a tensor from row ``first`` on."""

    def __init__(self, source: WholeTensor, first: int, rows: int) -> None:
        self._source, self._first = source, first
        self.shape = (rows, *source.shape[1:])

    def __getitem__(self, index: slice, /) -> Tensor:
        start, stop, _ = index.indices(self.shape[0])
        return self._source[self._first + start : self._first + stop]


class _ExpertPart:
    """Reads one expert's matrix from a tensor of all experts of a layer; its rows are the expert's outputs."""

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
    tower = architecture.tower_shapes
    found: list[StoredWeight] = []
    fused: dict[str, list[WeightRule]] = {}
    for rule in weight_rules(architecture):
        name = fused_name(rule, architecture)
        if name is None:
            shape = tower[rule.hf] if rule.hf in tower else tensor_shape(rule, architecture)
            found.append(StoredWeight(rule.hf, shape, (rule,)))
        elif name in fused:
            fused[name].append(rule)
        else:
            fused[name] = [rule]
            # This entry reserves the tensor's position until all rules of the tensor are known.
            found.append(StoredWeight(name, (), ()))
    return tuple(
        _fused(weight.name, fused[weight.name], architecture) if weight.name in fused else weight for weight in found
    )


def fused_name(rule: WeightRule, architecture: Architecture) -> str | None:
    """Returns the name of the stored tensor that fuses several rules' tensors, or None if the rule is not fused."""
    if "/" in rule.hf:
        return rule.hf[: rule.hf.index("/")]
    if not rule.expert or architecture.expert_layout is ExpertLayout.apart:
        return None
    layer = rule.hf[: rule.hf.index(".experts.")]
    return f"{layer}.experts.{'gate_up_proj' if rule.part in (Part.gate, Part.up) else 'down_proj'}"


def _fused(name: str, rules: Sequence[WeightRule], architecture: Architecture) -> StoredWeight:
    if not rules[0].expert:
        assert architecture.delta_net is not None, "only a gated delta net has fused rows"
        rows = tuple(tensor_shape(rule, architecture)[0] for rule in rules)
        width = tensor_shape(rules[0], architecture)[1]
        middle = (1,) if rules[0].megatron.endswith(".convolution") else ()
        return StoredWeight(name, (sum(rows), *middle, width), tuple(rules), rows=rows)
    assert architecture.experts is not None, "a fused tensor holds experts"
    count, width, hidden = architecture.experts.count, architecture.experts.width, architecture.hidden_size
    outputs, inputs = tensor_shape(rules[0], architecture)
    outputs *= len(rules) // count
    transposed = architecture.expert_layout is ExpertLayout.transposed
    shape = (count, inputs, outputs) if transposed else (count, outputs, inputs)
    squares = hidden in (width, 2 * width)
    return StoredWeight(name, shape, tuple(rules), count, squares=squares, transposed=transposed)


def fused(tensors: Iterable[tuple[str, Tensor]], stored: Sequence[StoredWeight]) -> Iterator[tuple[str, Tensor]]:
    """Yields the stored tensors, built from ``tensors``: the rules' tensors in the order of the rules.

    One fused tensor is in memory at a time. ``tensors`` is exhausted; it may be empty.
    """
    incoming = iter(tensors)
    for weight in stored:
        if weight.experts or weight.rows:
            whole = _joined(weight, incoming)
            if whole is not None:
                yield weight.name, whole
            del whole
            continue
        for name, tensor in islice(incoming, 1):
            assert name == weight.rules[0].hf, f"{name} arrived, expected {weight.name}"
            yield weight.name, tensor.reshape(weight.shape)
            del tensor  # This frees the tensor before the next tensor is made.
    assert next(incoming, None) is None, "there are more tensors than the model's weights"


def _joined(weight: StoredWeight, incoming: Iterator[tuple[str, Tensor]]) -> Tensor | None:
    """Returns a layer's experts, or the rows of several rules, in one tensor; None if ``tensors`` is exhausted."""
    whole: Tensor | None = None
    per_expert = len(weight.rules) // (weight.experts or 1)
    width = 0 if weight.rows else weight.outputs // per_expert
    for number, (name, tensor) in enumerate(islice(incoming, len(weight.rules))):
        assert name == weight.rules[number].hf, f"{name} arrived, expected {weight.rules[number].hf}"
        if whole is None:
            whole = tensor.new_empty(weight.shape)
        expert, part = divmod(number, per_expert)
        rows = slice(part * width, (part + 1) * width)
        if weight.rows:
            first = sum(weight.rows[:number])
            whole[first : first + weight.rows[number]] = tensor.reshape(-1, *weight.shape[1:])
        elif weight.transposed:
            whole[expert, :, rows] = tensor.transpose(0, 1)
        else:
            whole[expert, rows] = tensor
        del tensor
    return whole


def stored_shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...], Path]]:
    """Yields (name, shape, file) of every weight of a folder; raises ValueError if a file cannot be read."""
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                    yield name, tuple(file.get_slice(name).get_shape()), path
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}. Download it again.") from error


def passed_bytes(folder: Path, passed: tuple[str, ...]) -> int:
    """Returns the size of all tensors with a prefix in ``copied_prefixes``, from the headers of the files."""
    if not passed:
        return 0
    stored = (named_tensor for path in weight_files(folder) for named_tensor in stored_bytes(path))
    return sum(tensor.nbytes for name, tensor in stored if name.startswith(passed))


def weight_problems(folder: Path, architecture: Architecture) -> list[str]:
    """Returns one sentence for each reason why the trainer cannot load the folder, or an empty list."""
    stored = {weight.name: weight for weight in stored_weights(architecture)}
    ignored = architecture.ignored_weights
    problems, found, passed = [], dict[str, Path](), set[str]()
    try:
        for name, shape, path in stored_shapes(folder):
            if architecture.is_copied(name):
                passed.add(name.split(".")[0])
            if name in ignored or architecture.is_copied(name):
                continue
            if name not in stored:
                problems.append(f"{path}: {name} is not a weight of family {architecture.family}.")
            elif name in found:
                problems.append(f"{path}: {name} is also in {found[name]}.")
            elif stored[name].problem(shape) is not None:
                problems.append(f"{path}: {name} has shape {shape}; config.json requires {stored[name].shape}.")
            found[name] = path
    except ValueError as error:
        return [*problems, str(error)]
    if not found:
        return [f"{folder} has no *.safetensors file. Give a Hugging Face folder with weights."]
    described = described_parts(read_hf_config(folder)) if architecture.copied_prefixes else ()
    for part in described:
        if part not in passed and f"{part}." in architecture.copied_prefixes:
            problems.append(
                f"{folder}: config.json describes {part}, and no file has its weights, so exports would lack them. "
                "Fetch the folder again, or set enable_audio_output to false in its config.json."
            )
    missing = [name for name in stored if name not in found]
    if missing:
        problems.append(f"{folder}: {len(missing)} of {len(stored)} weights are missing: {', '.join(missing[:3])} …")
    return problems
