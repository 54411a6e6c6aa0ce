"""Computes the features of images, videos and sounds with the towers, and caches them for the current weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from relax_core.contracts.media import Media, MediaGone, MediaItem, MediaReader
from relax_core.contracts.rotary import rotary_of_sequence
from relax_core.engines.embedded.model_config import FEATURE_MIB
from relax_core.engines.embedded.prefill import SequenceMedia
from relax_core.families.towers import Towers

if TYPE_CHECKING:
    from relax_core.families.tower_passes import TowerInputs

# Maximum size of the cached features. An image of 1,024 rows takes 21 MB for a 4B model in bfloat16.
FEATURE_BYTES = FEATURE_MIB << 20
# Maximum patches of items that pass the tower together. Up to about this number of patches, the call overhead of the
# tower's modules is larger than the cost of its products.
PASS_PATCHES = 1024


@dataclass(frozen=True, slots=True)
class ItemFeatures:
    """Holds the towers' outputs for an item: ``features`` and each layer of ``deepstack`` are ``[rows, hidden]``."""

    features: Tensor
    deepstack: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Returns the size in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.features, *self.deepstack))


class MediaFeatures:
    """Computes and caches the features of items. A cached item does not pass the towers again.

    ``vision`` and ``audio`` are the towers' modules. Features are cached by digest, up to ``limit`` bytes; the least
    recently used features are dropped first. When the weights change, call `forget` to drop all features.
    ``passes`` counts the items that have passed the towers. Items of one request pass together, up to `PASS_PATCHES`
    patches. A tower does not attend across items. Other items in a pass can therefore change an item's features only by
    rounding; the features of a sound do not change at all.
    """

    def __init__(
        self,
        towers: Towers,
        reader: MediaReader | None,
        *,
        vision: torch.nn.Module | None = None,
        audio: torch.nn.Module | None = None,
        limit: int = FEATURE_BYTES,
    ) -> None:
        self.passes = 0
        self.nbytes = 0
        self._towers = towers
        self._vision, self._audio = vision, audio
        self._reader = reader
        self._limit = limit
        self._kept: OrderedDict[str, ItemFeatures] = OrderedDict()

    def forget(self) -> None:
        """Drops all features; call this when the towers' weights may have changed."""
        self._kept.clear()
        self.nbytes = 0

    def of_sequences(self, sequences: Sequence[tuple[int, Sequence[Media]]]) -> list[SequenceMedia | MediaGone | None]:
        """Returns the media inputs of ``sequences``; a sequence is (number of tokens, items).

        The result is None for a sequence without items, and the error for a sequence with an unreadable item.
        """
        items = {medium.item.digest: medium.item for _, media in sequences for medium in media}
        found = self.of_items(list(items.values()))
        return [self._of_sequence(length, media, found) if media else None for length, media in sequences]

    def of_items(self, items: Sequence[MediaItem]) -> Mapping[str, ItemFeatures | MediaGone]:
        """Returns the features of distinct items under the current weights, by digest; for a lost item, the error."""
        found: dict[str, ItemFeatures | MediaGone] = {}
        tensors: dict[str, Mapping[str, np.ndarray]] = {}
        for item in items:
            if (kept := self._kept.get(item.digest)) is not None:
                found[item.digest] = kept
                continue
            try:
                tensors[item.digest] = self._tensors(item)
            except MediaGone as error:
                found[item.digest] = error
        for together in _passes([item for item in items if item.digest in tensors]):
            passed = self._features(together, [tensors[item.digest] for item in together])
            found.update((item.digest, features) for item, features in zip(together, passed, strict=True))
            self.nbytes += sum(features.nbytes for features in passed)
            self.passes += len(together)
        for digest, features in found.items():
            if isinstance(features, ItemFeatures):
                self._kept[digest] = features
                self._kept.move_to_end(digest)
        while self.nbytes > self._limit and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self.nbytes -= dropped.nbytes
        return found

    def warm_up(self) -> None:
        """Passes the smallest image and the smallest sound through the towers, because the first pass takes longer."""
        from relax_core.families.tower_passes import smallest_image, smallest_sound

        if self._vision is not None:
            self._pass(smallest_image(self._towers))
        if self._audio is not None:
            self._pass(smallest_sound(self._towers))

    def _of_sequence(
        self, length: int, media: Sequence[Media], features: Mapping[str, ItemFeatures | MediaGone]
    ) -> SequenceMedia | MediaGone:
        found: list[ItemFeatures] = []
        for medium in media:
            of_item = features[medium.item.digest]
            if isinstance(of_item, MediaGone):
                return of_item
            found.append(of_item)
        rows = [np.flatnonzero(self._towers.feature_rows(medium.item.ids)) + medium.start for medium in media]
        positions, following = rotary_of_sequence(length, media)
        return SequenceMedia(
            rows=torch.from_numpy(np.concatenate(rows)),
            features=torch.cat([item_features.features for item_features in found]),
            deepstack=tuple(
                torch.cat(layer) for layer in zip(*(item_features.deepstack for item_features in found), strict=True)
            ),
            positions=torch.from_numpy(positions),
            following=following - length,
        )

    def _tensors(self, item: MediaItem) -> Mapping[str, np.ndarray]:
        assert self._reader is not None, "a request names media although the engine has no media folder"
        try:
            return self._reader.tensors(item)
        except (ValueError, OSError) as error:
            raise MediaGone(f"media {item.digest} {item.description} cannot be read: {error}") from error

    def _features(self, items: Sequence[MediaItem], tensors: Sequence[Mapping[str, np.ndarray]]) -> list[ItemFeatures]:
        from relax_core.families.tower_passes import inputs_of  # imports transformers

        outputs = self._pass(inputs_of(items, tensors))
        order = self._towers.order(items)
        if order is not None:
            outputs = outputs[:, torch.from_numpy(order)]
        # Each item gets a copy, because a view would keep the output of the whole pass in memory.
        parts = outputs.split([self._towers.features(item) for item in items], dim=1)
        return [ItemFeatures(part[0].clone(), tuple(layer.clone() for layer in part[1:])) for part in parts]

    def _pass(self, inputs: TowerInputs) -> Tensor:
        from relax_core.families.tower_passes import pass_towers

        return pass_towers(inputs, self._towers, vision=self._vision, audio=self._audio)


def _passes(items: Sequence[MediaItem]) -> Iterator[list[MediaItem]]:
    """Yields the items of each pass. An item with more than `PASS_PATCHES` patches passes alone."""
    together: list[MediaItem] = []
    for item in items:
        if together and sum(media_item.patches for media_item in together) + item.patches > PASS_PATCHES:
            yield together
            together = []
        together.append(item)
    if together:
        yield together
