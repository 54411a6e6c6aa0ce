"""Finds the rows of a packed stream that get features of a vision tower.

An item passes the tower once in a micro-batch, wherever and however often it occurs there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.tree import TokenTree
from relax_core.families.architecture import Architecture
from relax_core.families.media_work import item_work
from relax_core.families.towers import Towers


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRows:
    """Names the rows of a stream, or of a part of it, that get features of its ``items``, each of which is there once.

    Row ``rows[i]`` gets feature ``features[i]``; both are int64, and the rows ascend. Features are numbered item by
    item.
    """

    items: tuple[MediaItem, ...]
    rows: np.ndarray
    features: np.ndarray

    def taken(self, kept: np.ndarray, towers: Towers) -> MediaRows:
        """Returns the entries at the indexes ``kept`` and the items that these need, with their features renumbered."""
        ends = np.cumsum([towers.features(item) for item in self.items])
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


def media_rows(media: Sequence[Media], towers: Towers, *, computed: np.ndarray) -> MediaRows:
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
            count += towers.features(one.item)
    rows, features = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for one in media:
        own = one.start + np.flatnonzero(towers.feature_rows(one.item.ids))
        inside = computed[own]
        rows.append(stream_row[own[inside]])
        features.append(first_feature[one.item.digest] + np.flatnonzero(inside))
    return MediaRows(items=tuple(items.values()), rows=np.concatenate(rows), features=np.concatenate(features))


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerWork:
    """Says what an item costs: ``rows`` returns the work of a model's towers for it, in rows of the language model.

    ``most_patches`` bounds the patches that pass a rank's tower in a micro-batch (parallel.micro_batch_patches).
    """

    rows: Callable[[MediaItem], float] = lambda item: 0.0
    most_patches: int = sys.maxsize

    @staticmethod
    def of(architecture: Architecture, *, most_patches: int) -> TowerWork:
        """Returns the work of a model's towers."""
        if Towers.of(architecture) is None:
            return NO_TOWER
        return TowerWork(rows=partial(item_work, architecture), most_patches=most_patches)


NO_TOWER = TowerWork()


def distinct_items(trees: Sequence[TokenTree]) -> list[MediaItem]:
    """Returns the items of some trees, each once."""
    return list({one.item.digest: one.item for tree in trees for one in tree.media}.values())
