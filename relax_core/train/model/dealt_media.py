"""Deals the items of a micro-batch over the ranks of the first pipeline stage (parallel.shard_media).

Each rank of a tensor- and context-parallel group passes its own items through its towers. The features of all items are
gathered on every rank of the group, and the backward pass brings each rank the summed gradient of its own features. The
towers' gradients are those of a rank's own items, so they are summed over the group once an update: over the
context-parallel ranks with all other gradients, and over the tensor-parallel ranks by `finalize_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from relax_core.contracts.media import MediaItem
from relax_core.families.towers import Towers
from relax_core.train.parallel.context_parallel import gathered_rows, summed_rows


def deal_items(work: Sequence[float], *, ranks: int) -> list[list[int]]:
    """Returns the indexes of each rank's items, ascending; ``work`` is that of each item.

    The items are dealt in falling order of their work, each to the rank that has the least work so far. A rank gets
    none if there are fewer items than ranks.
    """
    loads, dealt = [0.0] * ranks, [list[int]() for _ in range(ranks)]
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        rank = min(range(ranks), key=loads.__getitem__)
        loads[rank] += work[index]
        dealt[rank].append(index)
    return [sorted(one) for one in dealt]


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtItems:
    """Holds a rank's own items of a micro-batch, and where the features of all items stand after `MediaGroup.gather`.

    ``places`` is int64 ``[features]``, in the order of all items and their rows. ``longest`` is the largest number of
    features that a rank has.
    """

    own: Sequence[MediaItem]
    places: np.ndarray
    longest: int


@dataclass(frozen=True, kw_only=True)
class MediaGroup:
    """Is the group of ranks that share the items of each micro-batch: tp x cp ranks of the first stage.

    ``tensor_ranks`` and ``tensor_rank`` are those of tensor parallelism, which goes fastest in the group. With
    ``sequence_parallel`` each tensor-parallel rank has the gradients of its own rows; without it all have the same
    gradients. ``context`` is the context-parallel group, None for one rank.
    """

    group: dist.ProcessGroup
    tensor_ranks: int
    tensor_rank: int
    sequence_parallel: bool
    context: dist.ProcessGroup | None

    @staticmethod
    def of_this_rank(*, sequence_parallel: bool) -> MediaGroup:
        """Builds it from Megatron's groups."""
        several = parallel_state.get_context_parallel_world_size() > 1
        return MediaGroup(
            group=parallel_state.get_tensor_and_context_parallel_group(),
            tensor_ranks=parallel_state.get_tensor_model_parallel_world_size(),
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            sequence_parallel=sequence_parallel,
            context=parallel_state.get_context_parallel_group() if several else None,
        )

    def deal(self, items: Sequence[MediaItem], towers: Towers, *, work: Callable[[MediaItem], float]) -> DealtItems:
        """Deals ``items``, which are the same on all ranks of the group, by their ``work``."""
        dealt = deal_items([work(item) for item in items], ranks=self.group.size())
        counts = np.array([towers.features(item) for item in items])
        first = np.cumsum(counts) - counts
        longest = max(int(counts[own].sum()) for own in dealt)
        places = np.empty(int(counts.sum()), dtype=np.int64)
        for rank, own in enumerate(dealt):
            if own:
                order = towers.order([items[index] for index in own])
                rows = np.concatenate([np.arange(first[index], first[index] + counts[index]) for index in own])
                places[rows] = rank * longest + (np.arange(len(rows)) if order is None else order)
        mine = dealt[dist.get_rank(self.group)]
        return DealtItems(own=[items[index] for index in mine], places=places, longest=longest)

    def gather(self, outputs: Tensor, *, longest: int) -> Tensor:
        """Returns the features of all ranks, ``[layers, ranks * longest, hidden]``, from this rank's ``outputs``.

        ``outputs`` is ``[layers, features, hidden]``. The call is collective, and so is its backward pass, which runs
        if ``outputs`` requires a gradient; this must be the same on all ranks.
        """
        gathered = _GatherFeatures.apply(outputs.transpose(0, 1), self, longest)
        assert isinstance(gathered, Tensor)
        return gathered.transpose(0, 1)

    def gradients_of_own(self, gradients: Tensor, *, longest: int) -> Tensor:
        """Returns the sum over the ranks of the gradients of this rank's features, ``[longest, …]``.

        ``gradients`` is ``[ranks * longest, …]``, of all features, as this rank's rows give them.
        """
        if self.sequence_parallel:
            return summed_rows(gradients, self.group)
        # Each context-parallel rank has the gradients of its rows, those of one tensor-parallel rank stand for all.
        of_ranks = gradients.view(-1, self.tensor_ranks, longest, *gradients.shape[1:])
        same = of_ranks[:, self.tensor_rank].flatten(0, 1)
        return same if self.context is None else summed_rows(same.contiguous(), self.context)


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, group: MediaGroup, longest: int) -> Tensor:
        ctx.group, ctx.longest, ctx.own = group, longest, len(features)
        padded = features.new_zeros(longest, *features.shape[1:])
        padded[: len(features)] = features
        return gathered_rows(padded, group.group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None]:
        group: MediaGroup = ctx.group
        return group.gradients_of_own(gradients.contiguous(), longest=ctx.longest)[: ctx.own], None, None


def finalize_gradients(chunks: Sequence[Any], *, dealt: bool) -> None:
    """Reduces the gradients of an update over the ranks; ``chunks`` are Megatron's wrappers of this rank's chunks.

    If ``dealt`` is True, each tensor-parallel rank passed other items, so the gradients of its towers are partial.
    """
    finalize_model_grads(list(chunks))
    if dealt:
        sum_tower_gradients([chunk.module for chunk in chunks])


def sum_tower_gradients(models: Sequence[Any]) -> None:
    """Sums the gradients of the towers of this rank's chunks over the tensor-parallel ranks, all of which call it."""
    towers = [one for model in models for one in (model.vision, model.audio) if one is not None]
    gradients = [one.main_grad for tower in towers for one in tower.parameters() if one.requires_grad]
    if not gradients or parallel_state.get_tensor_model_parallel_world_size() == 1:
        return
    flat = torch.cat([one.reshape(-1) for one in gradients])
    dist.all_reduce(flat, group=parallel_state.get_tensor_model_parallel_group())
    for gradient, summed in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))
