"""Weights between Hugging Face names and a Megatron model, by the map of its architecture, both ways and to the bit.

Under any layout: each rank reads only the slices of its own parameters, and an export brings the pieces together on
rank 0, a bucket at a time. No rank ever holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from relax_core.families.architecture import OUTPUT_WEIGHT, Architecture
from relax_core.train.hf.weight_gather import BUCKET_BYTES, agree_on_senders, buckets_of, gather_bucket
from relax_core.train.hf.weight_rules import Shard, WeightRule, weight_rules
from relax_core.train.hf.weight_slices import WeightSlice, WholeTensor, part_view, weight_places
from relax_core.train.model.gpt import VALUE_HEAD

VALUE_RULES = tuple(WeightRule(VALUE_HEAD + name, VALUE_HEAD + name, Shard.replicated) for name in ("weight", "bias"))


class HfWeights:
    """One model's weights under their Hugging Face names; every rank of the model makes one at the same time.

    ``chunks``: this rank's parts of the model, unwrapped: one, or several with a virtual pipeline. ``value_head``: of a
    critic, whose head has no Hugging Face name and which has no output layer. ``tensor_of``: what is read and written;
    its gradient may stand for a parameter.
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
        rules = weight_rules(architecture)
        self._ignored = architecture.ignored_weights
        if value_head and not architecture.tie_word_embeddings:
            self._ignored |= {OUTPUT_WEIGHT}
            rules = tuple(rule for rule in rules if rule.hf != OUTPUT_WEIGHT)
        all_rules = (*rules, *(VALUE_RULES if value_head else ()))
        self._order = {rule.hf: place for place, rule in enumerate(all_rules)}
        places, unused = weight_places(
            chunks,
            all_rules,
            architecture,
            tied_output=architecture.tie_word_embeddings or value_head,
            tensor_of=tensor_of,
        )
        assert not unused, f"family {architecture.family} maps not all parameters: {unused}"
        self.all_places: Mapping[str, WeightSlice] = places  # those of a value head as well
        self._places = {name: place for name, place in places.items() if not name.startswith(VALUE_HEAD)}
        self._like = next(iter(self._places.values())).views[0]
        weights = agree_on_senders(rules, self._places, device=self._like.device)
        self.shapes: Mapping[str, tuple[int, ...]] = {  # of what `export` gives, in its order
            weight.rule.hf: (architecture.vocab_size, *weight.shape[1:]) if weight.rule.vocabulary else weight.shape
            for weight in weights
        }
        self._buckets = buckets_of(weights, element_size=self._like.element_size(), bucket_bytes=bucket_bytes)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: every rank runs it to its end. Rank 0 gets (name, whole tensor) in map order, others nothing.

        What rank 0 has whole comes as a view: valid until the next step. Beside the model it holds ``bucket_bytes``, or
        more where one tensor, its copy (where it is cut along its columns) and the one before it take more.
        """
        for bucket in self._buckets:
            for rule, tensor in gather_bucket(bucket, self._places, like=self._like):
                yield rule.hf, tensor[: self.shapes[rule.hf][0]]

    def parts(self, tensor_of: Callable[[torch.nn.Parameter], Tensor]) -> Iterator[tuple[int, str, Tensor]]:
        """This rank's piece of each Hugging Face tensor, or what ``tensor_of`` gives for its parameter, such as its
        gradient: (place in the order of the map, which all ranks share, name, piece)."""
        for name, weight in self.all_places.items():
            for parameter in weight.parameters:
                yield self._order[name], name, part_view(tensor_of(parameter), weight.rule.part, self._architecture)

    def load(self, tensors: Iterable[tuple[str, WholeTensor]]) -> None:
        """Copies in what is this rank's, in any order; a stored tensor is read no further than that.

        Raises ValueError, on every rank, for a missing, unknown, repeated or misshapen one.
        """
        missing = dict.fromkeys(self.shapes)
        for name, tensor in tensors:
            if name in self._ignored:
                continue
            if name not in missing:
                family = self._architecture.family
                problem = "comes twice" if name in self.shapes else f"is no weight of family {family}"
                raise ValueError(f"weight {name} {problem}.")
            if tuple(tensor.shape) != self.shapes[name]:
                raise ValueError(f"weight {name} has shape {tuple(tensor.shape)}; the model's is {self.shapes[name]}.")
            if name in self._places:
                self._places[name].fill(tensor)
            del missing[name]
        if missing:
            raise ValueError(f"{len(missing)} weight(s) missing: {', '.join(list(missing)[:3])} …")
