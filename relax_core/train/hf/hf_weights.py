"""Converts weights between Hugging Face names and a Megatron model by the architecture's rules, exactly in both ways.

In any layout each rank reads only the slices of its own parameters. An export gathers the pieces on rank 0, one bucket
at a time. No rank holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from relax_core.families.architecture import Architecture
from relax_core.train.hf.stored_weights import WholeTensor, fused, stored_weights
from relax_core.train.hf.weight_gather import BUCKET_BYTES, agree_on_senders, buckets_of, gather_bucket
from relax_core.train.hf.weight_rules import Shard, WeightRule
from relax_core.train.hf.weight_slices import WeightSlice, part_view, weight_slices
from relax_core.train.model.gpt import VALUE_HEAD

VALUE_RULES = tuple(WeightRule(VALUE_HEAD + name, VALUE_HEAD + name, Shard.replicated) for name in ("weight", "bias"))


class HfWeights:
    """Holds one model's weights under their Hugging Face names; all ranks of the model create it together.

    ``chunks`` are this rank's unwrapped parts of the model: one, or several with a virtual pipeline. ``value_head`` is
    True for a critic, whose head has no Hugging Face name and which has no output layer. ``tensor_of`` returns the
    tensor that is read and written for a parameter, which may be its gradient.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        architecture: Architecture,
        *,
        value_head: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        tensor_of: Callable[[torch.nn.Parameter], Tensor] = torch.Tensor.detach,
    ) -> None:
        self._architecture = architecture
        stored = stored_weights(architecture)
        self._ignored = architecture.ignored_weights
        if value_head and not architecture.tie_word_embeddings:
            self._ignored |= {architecture.output_weight}
            stored = tuple(one for one in stored if one.name != architecture.output_weight)
        self._stored = {one.name: one for one in stored}
        rules = tuple(rule for one in stored for rule in one.rules)
        all_rules = (*rules, *(VALUE_RULES if value_head else ()))
        self._order = {rule.hf: index for index, rule in enumerate(all_rules)}
        slices, unused = weight_slices(
            chunks,
            all_rules,
            architecture,
            tied_output=architecture.tie_word_embeddings or value_head,
            tensor_of=tensor_of,
        )
        assert not unused, f"the rules of family {architecture.family} miss these parameters: {unused}"
        self.all_slices: Mapping[str, WeightSlice] = slices  # with those of a value head
        self._slices = {name: one for name, one in slices.items() if not name.startswith(VALUE_HEAD)}
        self._like = next(iter(self._slices.values())).views[0]
        dtype = next(one.views[0].dtype for name, one in self._slices.items() if not architecture.stays_float32(name))

        def dtype_of(name: str) -> torch.dtype:
            return torch.float32 if architecture.stays_float32(name) else dtype

        weights = agree_on_senders(rules, self._slices, device=self._like.device, dtype_of=dtype_of)
        # The shapes of the weights that `export` yields, in its order.
        self.shapes: Mapping[str, tuple[int, ...]] = {one.name: one.shape for one in stored}
        self._buckets = buckets_of(weights, element_size=self._like.element_size(), bucket_bytes=bucket_bytes)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, whole tensor) in map order on rank 0 and nothing on others; every rank must exhaust it.

        A tensor that rank 0 has whole is a view, valid until the next step. Beside the model, rank 0 holds
        ``bucket_bytes`` bytes, or more if one tensor, its copy (if it is split along its columns) and the tensor before
        it take more. Fused experts of a layer are one tensor, which rank 0 holds besides. The call is collective.
        """
        return fused(self._gathered(), list(self._stored.values()))

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of the rules on rank 0, without the padding of the vocabulary."""
        for bucket in self._buckets:
            for rule, tensor in gather_bucket(bucket, self._slices, like=self._like):
                yield rule.hf, tensor[: self._architecture.vocab_size] if rule.vocabulary else tensor

    def parts(self, tensor_of: Callable[[torch.nn.Parameter], Tensor]) -> Iterator[tuple[int, str, Tensor]]:
        """Yields (index in the map, which all ranks share, name, piece) for this rank's pieces of all tensors.

        ``tensor_of`` returns the tensor of a parameter, such as its gradient.
        """
        for name, weight in self.all_slices.items():
            for parameter in weight.parameters:
                yield self._order[name], name, part_view(tensor_of(parameter), weight.rule.part, self._architecture)

    def load(self, tensors: Iterable[tuple[str, WholeTensor]]) -> None:
        """Copies this rank's slices from ``tensors``, in any order; a tensor in a file is read only where needed.

        Raises ValueError on every rank if a weight is missing, unknown, given twice or has the wrong shape.
        """
        missing = dict.fromkeys(self._stored)
        for name, tensor in tensors:
            if name in self._ignored or self._architecture.passes(name):
                continue
            if name not in missing:
                family = self._architecture.family
                problem = "comes twice" if name in self._stored else f"is not a weight of family {family}"
                raise ValueError(f"weight {name} {problem}.")
            for rule_name, part in self._stored[name].parts(tensor):
                if rule_name in self._slices:
                    self._slices[rule_name].fill(part)
            del missing[name]
        if missing:
            raise ValueError(f"{len(missing)} weight(s) missing: {', '.join(list(missing)[:3])} …")
