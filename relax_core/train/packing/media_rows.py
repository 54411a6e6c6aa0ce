"""Finds the rows of a packed stream that get features of a vision tower.

An item passes the tower once in a micro-batch, wherever and however often it occurs there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.tree import TokenTree
from relax_core.families.architecture import VisionTower
from relax_core.families.vision.item_rows import feature_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRows:
    """Names the rows of a stream, or of a part of it, that get features of its ``items``, each of which is there once.

    Row ``rows[i]`` gets feature ``features[i]``; both are int64, and the rows ascend. Features are numbered item by
    item.
    """

    items: tuple[MediaItem, ...]
    rows: np.ndarray
    features: np.ndarray

    def taken(self, kept: np.ndarray, tower: VisionTower) -> MediaRows:
        """Returns the entries at the indexes ``kept`` and the items that these need, with their features renumbered."""
        ends = np.cumsum([_feature_count(item, tower) for item in self.items])
        features = self.features[kept]
        owners = np.searchsorted(ends, features, side="right")
        needed, new = np.unique(owners, return_inverse=True)
        counts = np.diff(ends, prepend=0)[needed]
        first = np.cumsum(counts) - counts
        return MediaRows(
            items=tuple(self.items[index] for index in needed),
            rows=self.rows[kept],
            features=features - (ends - np.diff(ends, prepend=0))[owners] + first[new],
        )


def media_of_stream(trees: Sequence[TokenTree]) -> list[Media]:
    """Returns the media of trees whose rows are concatenated, at their rows there."""
    first, found = 0, list[Media]()
    for tree in trees:
        found += [msgspec.structs.replace(one, start=one.start + first, end=one.end + first) for one in tree.media]
        first += tree.rows
    return found


def media_rows(media: Sequence[Media], tower: VisionTower, *, computed: np.ndarray) -> MediaRows:
    """Returns the stream's rows of ``media``, which is in order of rows.

    ``computed`` is bool ``[rows]`` and True at the rows that are in the stream.
    """
    stream_row = np.cumsum(computed) - 1
    items: dict[str, MediaItem] = {}
    first_feature: dict[str, int] = {}
    count = 0
    for one in media:
        if one.item.digest not in items:
            items[one.item.digest], first_feature[one.item.digest] = one.item, count
            count += _feature_count(one.item, tower)
    rows, features = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for one in media:
        own = one.start + np.flatnonzero(feature_rows(tower, one.item.ids))
        inside = computed[own]
        rows.append(stream_row[own[inside]])
        features.append(first_feature[one.item.digest] + np.flatnonzero(inside))
    return MediaRows(items=tuple(items.values()), rows=np.concatenate(rows), features=np.concatenate(features))


def smallest_frames(tower: VisionTower) -> tuple[np.ndarray, list[int]]:
    """Returns the frames, uint8 ``[frames, height, width, 3]``, and the grid of the smallest item that a tower takes."""
    side = tower.merge_size * tower.patch_size
    return np.zeros((tower.temporal_patch_size, side, side, 3), dtype=np.uint8), [1, tower.merge_size, tower.merge_size]


def tree_patches(trees: Sequence[TokenTree]) -> int:
    """Returns the patches of the distinct items of some trees."""
    return sum({one.item.digest: one.item.patches for one in _media(trees)}.values())


def _media(trees: Sequence[TokenTree]) -> Iterator[Media]:
    for tree in trees:
        yield from tree.media


def _feature_count(item: MediaItem, tower: VisionTower) -> int:
    return item.patches // tower.merge_size**2
