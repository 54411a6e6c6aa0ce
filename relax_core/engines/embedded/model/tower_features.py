"""Passes images and videos through the vision tower, and keeps what it gives for the weights in force."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relax_core.contracts.media import Media, MediaItem, MediaReader
from relax_core.contracts.trees.rotary import rotary_of_sequence
from relax_core.engines.embedded.model.prefill import SequenceMedia
from relax_core.families.architecture import VisionTower
from relax_core.families.vision.item_rows import feature_rows

# Features that are kept; an image of 1,024 rows takes 21 MB of a 4B model in bfloat16.
FEATURE_BYTES = 256 << 20


class MediaGone(RuntimeError):
    """Says that the tensors of a request's item cannot be read any more."""


@dataclass(frozen=True, slots=True)
class ItemFeatures:
    """Holds what the tower gives for one item, as `relax_core.families.vision.tower.TowerOutput` does."""

    features: Tensor
    deepstack: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Returns the size in bytes."""
        return sum(one.numel() * one.element_size() for one in (self.features, *self.deepstack))


class MediaFeatures:
    """Gives the features of items; an item passes the tower once for each weight version while it is kept.

    ``module`` is the tower. Features are kept by digest, the least used are dropped beyond ``limit`` bytes, and all of
    them when `forget` says that other weights are in force. ``passes`` counts the items that have passed the tower.
    Each item passes alone, so that its features do not depend on other requests.
    """

    def __init__(
        self,
        tower: VisionTower,
        module: torch.nn.Module,
        reader: MediaReader | None,
        *,
        limit: int = FEATURE_BYTES,
    ) -> None:
        self.passes = 0
        self.nbytes = 0
        self._tower = tower
        self._module = module
        self._reader = reader
        self._limit = limit
        self._kept: OrderedDict[str, ItemFeatures] = OrderedDict()

    def forget(self) -> None:
        """Drops all features, because the tower's weights may have changed."""
        self._kept.clear()
        self.nbytes = 0

    def of_item(self, item: MediaItem) -> ItemFeatures:
        """Returns the features of an item under the weights in force. Raises MediaGone if it cannot be read."""
        found = self._kept.pop(item.digest, None)
        if found is None:
            found = self._pass(item)
            self.nbytes += found.nbytes
        self._kept[item.digest] = found
        while self.nbytes > self._limit and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self.nbytes -= dropped.nbytes
        return found

    def of_sequence(self, length: int, media: Sequence[Media]) -> SequenceMedia | None:
        """Returns what the items of a sequence of ``length`` tokens change, None if there are none.

        Raises MediaGone.
        """
        if not media:
            return None
        found = [self.of_item(one.item) for one in media]
        rows = [np.flatnonzero(feature_rows(self._tower, one.item.ids)) + one.start for one in media]
        positions, following = rotary_of_sequence(length, media)
        return SequenceMedia(
            rows=torch.from_numpy(np.concatenate(rows)),
            features=torch.cat([one.features for one in found]),
            deepstack=tuple(torch.cat(layer) for layer in zip(*(one.deepstack for one in found), strict=True)),
            positions=torch.from_numpy(positions),
            following=following - length,
        )

    def warm_up(self) -> None:
        """Passes the smallest image through the tower, because the first pass takes longer."""
        merge = self._tower.merge_size
        size = self._tower.patch_size * merge
        self._features(np.zeros((1, size, size, 3), dtype=np.uint8), [1, merge, merge])

    def _pass(self, item: MediaItem) -> ItemFeatures:
        assert self._reader is not None, "a request names media although the engine has no media folder"
        try:
            frames = self._reader.tensors(item)["frames"]
        except (ValueError, OSError, KeyError) as error:
            raise MediaGone(f"media {item.digest} {item.words} cannot be read: {error}") from error
        self.passes += 1
        return self._features(frames, item.grid)

    def _features(self, frames: np.ndarray, grid: Sequence[int]) -> ItemFeatures:
        from relax_core.families.vision.tower import pass_items  # it imports transformers' modules

        output = pass_items(self._module, self._tower, [frames], [grid])
        return ItemFeatures(output.features, output.deepstack)
