"""Passes the media items of a micro-batch through the towers and inserts the features into the first layers.

Every rank of the first pipeline stage holds the whole towers. The ranks of a tensor-parallel group pass the same items
and get the same gradients. A context-parallel rank passes only the items with rows on this rank, so its tower gradients
are partial. They are summed over the ranks like the gradients of all other weights.

With parallel.shard_media the items are distributed over the ranks of both groups, and each rank passes only its own
items. All ranks gather the features of all items, and the backward pass returns to each rank the summed gradient of its
own features. A rank's tower gradients cover only its own items. They are summed once per update: over the
context-parallel ranks with all other gradients, and over the tensor-parallel ranks by `finalize_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor

from relax_core.config.schema import ParallelConfig
from relax_core.contracts.media import MediaItem, MediaReader
from relax_core.families.architecture import Architecture
from relax_core.families.tower_passes import (
    TowerInputs,
    build_tower,
    inputs_of,
    pass_towers,
    smallest_image,
    smallest_sound,
)
from relax_core.families.towers import Towers, item_work
from relax_core.train.context_parallel import RowSharding, gathered_rows, summed_rows
from relax_core.train.micro_batches import TreeLayout

if TYPE_CHECKING:
    from relax_core.train.model.tree_attention import TreeBatch


def shard_items(work: Sequence[float], *, ranks: int) -> list[list[int]]:
    """Returns the indexes of each rank's items, ascending; ``work`` holds the work of each item.

    The items are assigned in descending order of work, each to the rank with the least work so far. If there are fewer
    items than ranks, some ranks get no item.
    """
    loads, sharded = [0.0] * ranks, [list[int]() for _ in range(ranks)]
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        rank = min(range(ranks), key=loads.__getitem__)
        loads[rank] += work[index]
        sharded[rank].append(index)
    return [sorted(numbers) for numbers in sharded]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedItems:
    """Holds this rank's items of a micro-batch, and the indexes of all items' features after `MediaGroup.gather`.

    ``places`` int64 ``[features]`` has these indexes, in the order of all items and their rows. ``longest`` is the
    largest number of features that a rank has.
    """

    own: Sequence[MediaItem]
    places: np.ndarray
    longest: int


@dataclass(frozen=True, kw_only=True)
class MediaGroup:
    """Holds the group of ranks that share the items of each micro-batch: tp x cp ranks of the first stage.

    ``tensor_ranks`` is the number of tensor-parallel ranks and ``tensor_rank`` this rank's number among them; it varies
    fastest in the group. With ``sequence_parallel`` each tensor-parallel rank has the gradients of its own rows;
    without it all tensor-parallel ranks have the same gradients. ``context`` is the context-parallel group, or None for
    a single rank.
    """

    group: dist.ProcessGroup
    tensor_ranks: int
    tensor_rank: int
    sequence_parallel: bool
    context: dist.ProcessGroup | None

    @staticmethod
    def of_this_rank(*, sequence_parallel: bool) -> MediaGroup:
        """Builds the group of this rank from Megatron's groups."""
        several = parallel_state.get_context_parallel_world_size() > 1
        return MediaGroup(
            group=parallel_state.get_tensor_and_context_parallel_group(),
            tensor_ranks=parallel_state.get_tensor_model_parallel_world_size(),
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            sequence_parallel=sequence_parallel,
            context=parallel_state.get_context_parallel_group() if several else None,
        )

    def shard(self, items: Sequence[MediaItem], towers: Towers, *, work: Callable[[MediaItem], float]) -> ShardedItems:
        """Distributes ``items`` by their ``work``; all ranks of the group pass the same items."""
        sharded = shard_items([work(item) for item in items], ranks=self.group.size())
        counts = np.array([towers.features(item) for item in items])
        first = np.cumsum(counts) - counts
        longest = max(int(counts[own].sum()) for own in sharded)
        places = np.empty(int(counts.sum()), dtype=np.int64)
        for rank, own in enumerate(sharded):
            if own:
                order = towers.order([items[index] for index in own])
                rows = np.concatenate([np.arange(first[index], first[index] + counts[index]) for index in own])
                places[rows] = rank * longest + (np.arange(len(rows)) if order is None else order)
        mine = sharded[dist.get_rank(self.group)]
        return ShardedItems(own=[items[index] for index in mine], places=places, longest=longest)

    def gather(self, outputs: Tensor, *, longest: int) -> Tensor:
        """Returns the features of all ranks, ``[layers, ranks * longest, hidden]``, from this rank's ``outputs``.

        ``outputs`` is ``[layers, features, hidden]``. The call and its backward pass are collective. The backward pass
        runs only if ``outputs`` requires a gradient; all ranks must agree on this.
        """
        gathered = _GatherFeatures.apply(outputs.transpose(0, 1), self, longest)
        assert isinstance(gathered, Tensor)
        return gathered.transpose(0, 1)

    def gradients_of_own(self, gradients: Tensor, *, longest: int) -> Tensor:
        """Returns the sum over the ranks of the gradients of this rank's features, ``[longest, …]``.

        ``gradients`` is ``[ranks * longest, …]``: the gradients of all features, computed from this rank's rows.
        """
        if self.sequence_parallel:
            return summed_rows(gradients, self.group)
        # Each context-parallel rank has the gradients of its rows; they are equal on all tensor-parallel ranks.
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


def finalize_gradients(chunks: Sequence[Any], *, sharded: bool) -> None:
    """Reduces the gradients of an update over the ranks; ``chunks`` are Megatron's wrappers of this rank's chunks.

    If ``sharded`` is True, the tensor-parallel ranks passed different items, so their tower gradients are partial.
    """
    finalize_model_grads(list(chunks))
    if sharded:
        sum_tower_gradients([chunk.module for chunk in chunks])


def sum_tower_gradients(models: Sequence[Any]) -> None:
    """Sums the gradients of this rank's towers over the tensor-parallel ranks; the call is collective over them."""
    towers = [tower for model in models for tower in (model.vision, model.audio) if tower is not None]
    gradients = [parameter.main_grad for tower in towers for parameter in tower.parameters() if parameter.requires_grad]
    if not gradients or parallel_state.get_tensor_model_parallel_world_size() == 1:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=parallel_state.get_tensor_model_parallel_group())
    for gradient, summed in zip(
        gradients, flat.split([flat_gradient.numel() for flat_gradient in gradients]), strict=True
    ):
        gradient.copy_(summed.view_as(gradient))


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaInputs:
    """Holds the media items with rows on a rank of the first stage, and the rank's rows that get the features.

    Row ``rows[i]`` inside the layers gets feature ``features[i]`` of the towers' output for ``inputs``; both arrays are
    int64. If the items are distributed over the ranks of ``group``, ``inputs`` has only this rank's items, and
    ``features`` indexes the gathered outputs, which have ``longest`` features per rank. ``deepstack`` is ``[layers,
    rows, hidden]`` after the towers' pass: entry k is added to the rows ``rows`` after layer k.
    """

    inputs: TowerInputs
    rows: Tensor
    features: Tensor
    group: MediaGroup | None = None
    longest: int = 0
    deepstack: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class MediaPlan:
    """Builds the `MediaInputs` of a rank of the first stage for each micro-batch.

    ``group`` has the ranks that share the items, or is None if each rank passes the items of its own rows. ``work``
    returns an item's work in rows of the language model.
    """

    towers: Towers
    reader: MediaReader | None
    group: MediaGroup | None
    work: Callable[[MediaItem], float]
    sharding: RowSharding
    device: torch.device

    def inputs(self, layout: TreeLayout, *, padded_rows: int) -> MediaInputs | None:
        """Returns the inputs of a micro-batch, or None if this rank passes no item and has no row of any item.

        With a ``group`` all its ranks get inputs if the micro-batch has any item, because the gather is collective.
        """
        media = layout.media
        if media is None:
            return None
        if self.group is None:
            mine = self.sharding.rows_of_rank(padded_rows)
            kept = np.isin(media.rows, mine, assume_unique=True)
            if not kept.any():
                return None
            media = media.taken(np.flatnonzero(kept), self.towers)
        inside = self.sharding.rows_inside_layers(padded_rows)
        places = np.minimum(np.searchsorted(inside, media.rows), len(inside) - 1)
        own = inside[places] == media.rows
        items, order, longest = media.items, self.towers.order(media.items), 0
        if self.group is not None:
            sharded = self.group.shard(media.items, self.towers, work=self.work)
            items, order, longest = tuple(sharded.own), sharded.places, sharded.longest
        features = media.features[own] if order is None else order[media.features[own]]
        assert self.reader is not None, "a role with a multimodal model needs a media reader"
        self.reader.fetch(items)
        return MediaInputs(
            inputs=inputs_of(items, [self.reader.tensors(item) for item in items]),
            rows=torch.from_numpy(places[own]).to(self.device),
            features=torch.from_numpy(features).to(self.device),
            group=self.group,
            longest=longest,
        )


def media_plan(
    architecture: Architecture,
    reader: MediaReader | None,
    parallel: ParallelConfig,
    sharding: RowSharding,
    *,
    device: torch.device,
) -> MediaPlan | None:
    """Returns this rank's plan; None for a text-only model, or if the rank is not on the first pipeline stage."""
    towers = Towers.of(architecture)
    if towers is None or not parallel_state.is_pipeline_first_stage():
        return None
    sharded = parallel.shard_media and parallel.tp * parallel.cp > 1
    return MediaPlan(
        towers=towers,
        reader=reader,
        work=partial(item_work, architecture),
        group=MediaGroup.of_this_rank(sequence_parallel=parallel.sequence_parallel) if sharded else None,
        sharding=sharding,
        device=device,
    )


def add_towers(model: Any, towers: Towers, *, dtype: torch.dtype, device: torch.device, recompute: bool) -> None:
    """Gives the first chunk of a model its towers; its first layers add the further outputs of the vision tower.

    If ``recompute`` is True, the backward pass computes the activations of the towers' layers again.
    """
    for name, tower in (("vision", towers.vision), ("audio", towers.audio)):
        if tower is not None:
            module: Any = build_tower(tower, dtype=dtype, device=device)
            if recompute:
                module.gradient_checkpointing_enable({"use_reentrant": False})
            setattr(model, name, module)
    for number in range(0 if towers.vision is None else towers.vision.deepstack_layers):
        model.decoder.layers[number].register_forward_hook(partial(_add_deepstack, number), with_kwargs=True)


def with_features(model: Any, hidden: Tensor, tree: TreeBatch) -> tuple[Tensor, TreeBatch]:
    """Inserts the features into the embedded rows ``[rows, 1, hidden]``.

    Returns the rows and the batch with deepstack rows.

    ``model`` is the first chunk. If this rank has no item for a trained tower, the smallest item passes that tower with
    weight zero. Every weight then has a gradient on every rank in every micro-batch; overlapped reduction requires
    this.
    """
    towers, modules, media = model.towers, {"vision": model.vision, "audio": model.audio}, tree.media
    given = TowerInputs() if media is None else media.inputs
    for module, mine, smallest in (
        (model.vision, given.frames, smallest_image),
        (model.audio, given.sounds, smallest_sound),
    ):
        if module is not None and not mine and _trains(module):
            hidden = hidden + 0.0 * pass_towers(smallest(towers), towers, **modules).sum()
    if media is None:
        return hidden, tree
    if media.group is not None:
        outputs = _gathered(media, media.group, model)
    else:
        outputs = pass_towers(media.inputs, towers, **modules)
    if media.group is None and model.config.sequence_parallel:
        # Each rank of the group uses the features of its own rows, so the backward pass sums their gradients.
        outputs = copy_to_tensor_model_parallel_region(outputs)
    outputs = outputs[:, media.features]
    hidden = hidden.index_copy(0, media.rows, outputs[0, :, None])
    return hidden, replace(tree, media=replace(media, deepstack=outputs[1:]))


def _gathered(media: MediaInputs, group: MediaGroup, model: Any) -> Tensor:
    """Returns the towers' output for the items of all ranks of the group; the call is collective."""
    towers, modules = model.towers, {"vision": model.vision, "audio": model.audio}
    if any(media.inputs):
        own = pass_towers(media.inputs, towers, **modules)
    else:
        layers = 0 if towers.vision is None else towers.vision.deepstack_layers
        own = media.features.new_zeros(1 + layers, 0, model.config.hidden_size, dtype=model.config.params_dtype)
    if not own.requires_grad and any(module is not None and _trains(module) for module in modules.values()):
        own.requires_grad_()  # A rank without items for a trained tower takes part in the other ranks' backward pass.
    return group.gather(own, longest=media.longest)


def _trains(module: torch.nn.Module) -> bool:
    return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())


def _add_deepstack(number: int, layer: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Adds the deepstack rows after layer ``number``.

    The addition is outside the layer, so a recomputed layer does not run the tower's backward pass a second time.
    """
    media = kwargs["attention_mask"].media
    if media is None:
        return None
    hidden, context = output
    return hidden.index_add(0, media.rows, media.deepstack[number, :, None]), context
