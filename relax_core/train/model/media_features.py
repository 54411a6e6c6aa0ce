"""Passes the items of a micro-batch through the towers and puts their features into the first layers.

Every rank of the first pipeline stage holds the whole towers. The ranks of a tensor-parallel group pass the same items
and get the same gradients. A context-parallel rank passes the items of which it has rows, so its gradients are partial;
they are summed like those of all other weights. With parallel.shard_media the ranks of both groups share the items
instead (dealt_media.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor

from relax_core.config.schema import ParallelConfig
from relax_core.contracts.media import MediaItem, MediaReader
from relax_core.families.architecture import Architecture
from relax_core.families.media_work import item_work
from relax_core.families.tower_passes import TowerInputs, inputs_of, pass_towers, smallest_image, smallest_sound
from relax_core.families.towers import Towers
from relax_core.families.vision.tower import build_tower
from relax_core.train.model.dealt_media import MediaGroup
from relax_core.train.model.routing_replay import rows_inside_layers
from relax_core.train.packing.tree_packing import TreeLayout
from relax_core.train.parallel.context_parallel import RowSharding

if TYPE_CHECKING:
    from relax_core.train.attention.tree_attention import TreeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaInputs:
    """Holds the items of which a rank of the first stage has rows, and those of its rows that get their features.

    Row ``rows[i]`` inside the layers gets feature ``features[i]`` of what the towers give for ``inputs``, both int64.
    If the items are dealt over the ranks of ``group``, ``inputs`` are those of this rank, and ``features`` number what
    is gathered, of which each rank has ``longest``. ``deepstack`` is ``[layers, rows, hidden]`` after the towers' pass:
    its entry k is added to these rows after layer k.
    """

    inputs: TowerInputs
    rows: Tensor
    features: Tensor
    group: MediaGroup | None = None
    longest: int = 0
    deepstack: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class MediaPlan:
    """Makes the `MediaInputs` of a rank of the first stage for each micro-batch.

    ``part`` and ``parts`` are those of sequence parallelism. ``group`` are the ranks over which items are dealt, None
    if each rank passes the items of its own rows. ``work`` returns an item's work in rows of the language model.
    """

    towers: Towers
    reader: MediaReader | None
    group: MediaGroup | None
    work: Callable[[MediaItem], float]
    sharding: RowSharding
    parts: int
    part: int
    device: torch.device

    def inputs(self, layout: TreeLayout, *, padded_rows: int) -> MediaInputs | None:
        """Returns the inputs of a micro-batch, or None if this rank passes no item and has no row of one.

        Where items are dealt, all ranks of the group have inputs if any item is there, since they gather together.
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
        inside = rows_inside_layers(self.sharding, padded_rows, parts=self.parts, part=self.part)
        places = np.minimum(np.searchsorted(inside, media.rows), len(inside) - 1)
        own = inside[places] == media.rows
        items, order, longest = media.items, self.towers.order(media.items), 0
        if self.group is not None:
            dealt = self.group.deal(media.items, self.towers, work=self.work)
            items, order, longest = tuple(dealt.own), dealt.places, dealt.longest
        features = media.features[own] if order is None else order[media.features[own]]
        assert self.reader is not None, "a role whose model sees is given a reader of media"
        self.reader.bring(items)
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
    """Returns this rank's plan, or None if it is not on the first pipeline stage or the model reads text only."""
    towers = Towers.of(architecture)
    if towers is None or not parallel_state.is_pipeline_first_stage():
        return None
    dealt = parallel.shard_media and parallel.tp * parallel.cp > 1
    return MediaPlan(
        towers=towers,
        reader=reader,
        work=partial(item_work, architecture),
        group=MediaGroup.of_this_rank(sequence_parallel=parallel.sequence_parallel) if dealt else None,
        sharding=sharding,
        parts=parallel.tp if parallel.sequence_parallel else 1,
        part=parallel_state.get_tensor_model_parallel_rank() if parallel.sequence_parallel else 0,
        device=device,
    )


def add_towers(model: Any, towers: Towers, *, dtype: torch.dtype, device: str, recompute: bool) -> None:
    """Gives the first chunk of a model its towers; its first layers add the further outputs of the vision tower.

    If ``recompute`` is True the activations of the towers' layers are computed again in the backward pass.
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
    """Returns the embedded rows ``[rows, 1, hidden]`` with the features, and the batch with the deepstack rows.

    ``model`` is the first chunk. If no item of a trained tower is here, the smallest item passes it at weight zero, so
    that every weight has a gradient on every rank in every micro-batch, which overlapped reduction needs.
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
    """Returns the towers' output for the items of all ranks of the group; it is collective."""
    towers, modules = model.towers, {"vision": model.vision, "audio": model.audio}
    if any(media.inputs):
        own = pass_towers(media.inputs, towers, **modules)
    else:
        layers = 0 if towers.vision is None else towers.vision.deepstack_layers
        own = media.features.new_zeros(1 + layers, 0, model.config.hidden_size, dtype=model.config.params_dtype)
    if not own.requires_grad and any(module is not None and _trains(module) for module in modules.values()):
        own.requires_grad_()  # A rank without items of a trained tower takes part in the backward pass of the others.
    return group.gather(own, longest=media.longest)


def _trains(module: torch.nn.Module) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in module.parameters())


def _add_deepstack(number: int, layer: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Adds the deepstack rows after layer ``number``.

    This is outside of the layer, so a layer that is recomputed does not go backward through the tower a second time.
    """
    media = kwargs["attention_mask"].media
    if media is None:
        return None
    hidden, context = output
    return hidden.index_add(0, media.rows, media.deepstack[number, :, None]), context
