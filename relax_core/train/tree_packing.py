"""Packs token trees into one stream of rows without pads, and finds the rows that get features of a tower.

The last token of a branch predicts nothing, so it is not in the stream. An item passes a tower once in a micro-batch,
wherever and however often it occurs there. This code runs in every train step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from relax_core.contracts.chains import concatenate_chains
from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.rotary import rotary_positions
from relax_core.contracts.tree import TokenTree
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


# On a CPU, attention without a mask is used if it computes at least this many fewer pairs of token rows.
MASKLESS_SAVES_PAIRS = 2**17


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLayout:
    """Holds some trees as one stream of ``rows`` token rows; ``end`` defines visibility as in a `TokenTree`.

    The output layer is computed only for the ``chosen`` sampled rows (for each tree its row numbers, int64, ascending),
    at the row before each one, which predicts it. ``token_positions`` gives the index of each token among the chosen
    rows, -1 for a token that was not chosen. It is None if tokens and chosen rows are identical.
    """

    token_ids: np.ndarray  # int64 [rows]
    end: np.ndarray  # int64 [rows]
    chosen: Sequence[np.ndarray]  # one array for each tree
    positions: np.ndarray  # int64 [rows], position of the row in its own path
    predicting_rows: np.ndarray  # int64 [chosen], the row whose output predicts each chosen row
    targets: np.ndarray  # int64 [chosen], token ids of the chosen rows
    token_positions: np.ndarray | None  # int64 [tokens]
    sample_ids: np.ndarray  # int64 [tokens], the episode of each token
    num_samples: int
    rotary: np.ndarray | None = None  # int64 or float64 [3, rows], the rotary positions (time, height, width)
    media: MediaRows | None = None  # the rows that get features of a tower


def pack_tree(trees: Sequence[TokenTree], *, trained_only: bool = False, towers: Towers | None = None) -> TreeLayout:
    """Lays out one or more trees as one stream.

    If ``trained_only`` is True and any row is trained, only trained rows are chosen instead of all sampled ones.
    ``towers`` are those of the model. Raises ValueError if a tree has media and there is no tower.
    """
    sizes = np.array([tree.rows for tree in trees])
    before = (np.cumsum(sizes) - sizes).tolist()
    end = np.concatenate([tree.end + first for tree, first in zip(trees, before, strict=True)])
    inner = np.concatenate([tree.computed for tree in trees])
    stream_row = np.concatenate(([0], np.cumsum(inner)))  # for each row, the number of stream rows before it
    token_ids = np.concatenate([tree.token_ids for tree in trees]).astype(np.int64)
    runs = concatenate_chains([tree.runs for tree in trees])
    chosen_of = [tree.sampled for tree in trees]
    if trained_only and any(tree.loss_mask.any() for tree in trees):
        chosen_of = [np.flatnonzero(tree.loss_mask) for tree in trees]
    chosen = np.concatenate([rows + first for rows, first in zip(chosen_of, before, strict=True)])
    token_rows = np.concatenate([tree.tokens[1] + first for tree, first in zip(trees, before, strict=True)])
    episodes = np.array([len(tree.episodes) for tree in trees])
    episodes_before = (np.cumsum(episodes) - episodes).tolist()
    media = media_of_stream(trees)
    if media and towers is None:
        group = next(tree.group_uid for tree in trees if tree.media)
        raise ValueError(
            f"group {group} has {media[0].item.words}, but this model reads text only. Use a model that sees and hears."
        )
    return TreeLayout(
        token_ids=token_ids[inner],
        end=stream_row[end[inner]],
        chosen=chosen_of,
        positions=runs.positions()[inner],
        predicting_rows=stream_row[runs.parents()[chosen]],
        targets=token_ids[chosen],
        token_positions=_token_positions(chosen, token_rows),
        sample_ids=np.concatenate([t.tokens[0] + first for t, first in zip(trees, episodes_before, strict=True)]),
        num_samples=int(episodes.sum()),
        rotary=rotary_positions(runs, media)[:, inner] if media else None,
        media=media_rows(media, towers, computed=inner) if media and towers is not None else None,
    )


def _token_positions(chosen: np.ndarray, token_rows: np.ndarray) -> np.ndarray | None:
    """Returns each token row's index in the ascending ``chosen``, -1 if absent; None if both arrays are equal."""
    if np.array_equal(chosen, token_rows):
        return None
    indexes = np.minimum(np.searchsorted(chosen, token_rows), len(chosen) - 1)
    return np.where(chosen[indexes] == token_rows, indexes, -1)


def tree_starts(end: np.ndarray) -> np.ndarray:
    """Returns the first row of each tree of a stream, int64 ``[trees]``, ascending; ``end`` is int64 ``[rows]``."""
    reach = np.maximum.accumulate(end)
    return np.append(0, np.flatnonzero(reach[:-1] == np.arange(1, len(end))) + 1)
