"""Plans the updates of a train step: mini-batches and epochs of leased groups, micro-batches, and packed streams.

**Updates.** The first epoch's mini-batches have the groups in order of arrival; later epochs shuffle the groups. This
module also adds up the times and the metrics of a step's updates.

**Micro-batches.** Leased groups are decoded and divided into micro-batches for all ranks, in order of issue and within
a budget of rows. Trees arrive lease by lease, and a micro-batch closes as soon as the next tree does not fit. A
micro-batch's content therefore depends on the order of the trees and not on their arrival times. A tree that is larger
than the budget is split between episodes; each piece repeats the rows that its episodes share with episodes of other
pieces. An episode is never split, because sequence-level ratios and lengths are computed over whole episodes. A tree of
a data row is never split, because the loss may compare its episodes. The work
of an image, a video or a sound is its rows plus the towers' work, in rows. An item passes the towers once per
micro-batch of a rank, so its work counts once per micro-batch. A second budget bounds the patches that pass a vision
tower, and thus the tower's memory.

**Packing.** The trees of a micro-batch are one stream of rows without pads. The last token of a branch predicts no
token, so it is not in the stream.

This module imports no torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from relax_core.contracts.bus import Group
from relax_core.contracts.chains import concatenate_chains
from relax_core.contracts.columns import ADVANTAGES, decode_tree
from relax_core.contracts.core_wait import clock_and_core_wait_s
from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.rotary import rotary_positions
from relax_core.contracts.train import OWN_PARTS, RankTimes, StepMetrics
from relax_core.contracts.tree import MISMATCHED, TRUNCATED, TokenTree
from relax_core.families.architecture import Architecture
from relax_core.families.towers import Towers, item_work


def decode_train_tree(group: Group, *, step: int, oldest_version: int) -> tuple[TokenTree, dict[str, str]]:
    """Returns the tree for train step ``step``, and the ledger reason of each untrained episode by uid.

    Tokens older than ``oldest_version`` are masked (mode.on_stale=mask; with drop the bus never leases such a group).
    An episode that arrives without trained tokens was truncated (rollout.mask_truncated), or it has another data row's
    response. The extra ``on_policy`` is
    True for tokens of episodes that were completely sampled with the step's initial weights. For these tokens the
    log-probs of rollout and trainer agree up to rounding. Other tokens attend to cache entries that the engine computed
    with older weights. No engine sampled the tokens of data rows.
    """
    tree = decode_tree(group)
    masked = dict.fromkeys(_untrained(tree), MISMATCHED if tree.is_of_data else TRUNCATED)
    on_policy = tree.oldest_versions(trained=False) == step
    if tree.is_of_data:
        on_policy = np.zeros_like(on_policy)
    if min(group.versions) < oldest_version:
        tree = tree.with_loss_mask(tree.loss_mask & (tree.versions >= oldest_version))
        masked = dict.fromkeys(_untrained(tree), "stale") | masked
    return tree.with_extras(on_policy=on_policy[tree.tokens[0]]), masked


def _untrained(tree: TokenTree) -> list[str]:
    """Returns the uids of episodes without a trained token."""
    return [episode.uid for episode, trained in zip(tree.episodes, tree.trained_episodes(), strict=True) if not trained]


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerWork:
    """Holds the cost of media items: ``rows`` returns the towers' work for an item, in rows of the language model.

    ``most_patches`` is the maximum number of patches that pass a rank's tower in a micro-batch
    (parallel.micro_batch_patches).
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
    """Returns the distinct media items of some trees."""
    return list({medium.item.digest: medium.item for tree in trees for medium in tree.media}.values())


REPEATED = "repeated"
ROW = "row"
Piece = tuple[int, int, int]  # The index of a tree, its first episode, and the end of its episodes (exclusive).


class Load(NamedTuple):
    """Holds the load that some runs add to a bin: work in rows, number of patches, and digests of the runs' items."""

    work: int
    patches: int
    items: frozenset[str]


class Work(NamedTuple):
    """Holds the work of a tree: the runs of each unit, each run's computed rows, and each run's media items.

    A unit is an episode, or the whole tree for data rows, because their losses may compare the episodes of a group. The
    list ``ends`` has the end of each unit's episodes (exclusive). An item is (digest, towers' work in rows, patches).
    """

    paths: list[list[int]]
    ends: list[int]
    rows: list[int]
    items: dict[int, list[tuple[str, int, int]]]

    def load(self, path: Sequence[int], *, seen: Set[int] = frozenset(), shown: Set[str] = frozenset()) -> Load:
        """Returns the load that ``path`` adds to a bin that already has the runs ``seen`` and the items ``shown``."""
        new = [run for run in path if run not in seen]
        rows = sum(self.rows[run] for run in new)
        if not self.items:
            return Load(rows, 0, frozenset())
        items = [item for run in new for item in self.items.get(run, ())]
        found = {digest: (work, patches) for digest, work, patches in items if digest not in shown}
        work, patches = sum(pair[0] for pair in found.values()), sum(pair[1] for pair in found.values())
        return Load(rows + work, patches, frozenset(found))


class MicroBatcher:
    """Collects trees into micro-batches and splits trees that are larger than a micro-batch.

    In a micro-batch each of the ``ranks`` data-parallel ranks has at most ``budget_rows`` rows of work (computed rows
    plus the towers' work in rows) and at most ``tower.most_patches`` patches. A single unit (`Work`) may exceed these
    bounds.
    """

    def __init__(self, budget_rows: int, *, ranks: int = 1, tower: TowerWork = NO_TOWER) -> None:
        self._budget, self._ranks, self._tower = budget_rows, ranks, tower
        self._open: list[TokenTree] = []
        self._open_work: list[Work] = []  # empty for a single rank

    def add(self, trees: Sequence[TokenTree]) -> list[list[TokenTree]]:
        """Adds trees and returns the micro-batches that became full."""
        full = []
        for tree in trees:
            work = [] if self._ranks == 1 else [_work(tree, self._tower)]
            if self._open and not self._fits([*self._open, tree], [*self._open_work, *work]):
                full.append(self.flush())
            if self._open or self._fits([tree], work):
                self._open.append(tree)
                self._open_work += work
                continue
            bins = _pieces_of_bins(
                [tree], _fill_bins([_work(tree, self._tower)], self._budget, self._tower.most_patches)
            )
            for first in range(0, len(bins), self._ranks):
                full.append([piece for rank_bin in bins[first : first + self._ranks] for piece in rank_bin])
            self._open = full.pop()  # The last piece may leave room for more trees.
            self._open_work = [] if self._ranks == 1 else [_work(piece, self._tower) for piece in self._open]
        return full

    def flush(self) -> list[TokenTree]:
        """Returns the open (possibly empty) micro-batch, and starts a new one."""
        batch, self._open, self._open_work = self._open, [], []
        return batch

    def _fits(self, trees: Sequence[TokenTree], work: Sequence[Work]) -> bool:
        if self._ranks == 1:
            single = len(trees) == 1 and (len(trees[0].episodes) == 1 or trees[0].is_of_data)
            items = distinct_items(trees)
            load = sum(tree.computed_rows for tree in trees) + sum(round(self._tower.rows(item)) for item in items)
            patches = sum(item.patches for item in items)
            return single or (load <= self._budget and patches <= self._tower.most_patches)
        return len(_fill_bins(work, self._budget, self._tower.most_patches)) <= self._ranks


def with_row_numbers(trees: Sequence[TokenTree]) -> list[TokenTree]:
    """Returns the trees with the extra ``row``, which numbers the rows of all trees from 0.

    Pieces of a tree keep the extra, so a piece's results can be written back to the rows of the tree.
    """
    before = np.cumsum([0, *(tree.rows for tree in trees)]).tolist()
    return [
        tree.with_extras(**{ROW: np.arange(first, first + tree.rows)})
        for tree, first in zip(trees, before, strict=False)
    ]


def split_over_ranks(trees: Sequence[TokenTree], ranks: int, *, tower: TowerWork = NO_TOWER) -> list[list[TokenTree]]:
    """Splits one micro-batch into the episodes of each data-parallel rank, in order of issue.

    The split minimizes the largest work of a rank: rows plus the towers' work in rows. A rank may get no episodes. A
    rank gets at most ``tower.most_patches`` patches if such a split exists. It exists for the micro-batches of a
    `MicroBatcher` with the same ``tower``.
    """
    if ranks == 1:
        return [list(trees)]
    work = [_work(tree, tower) for tree in trees]
    load = sum(tree_work.load(range(len(tree_work.rows))).work for tree_work in work)
    patches = tower.most_patches if len(_fill_bins(work, load, tower.most_patches)) <= ranks else sys.maxsize
    low, high = -(-load // ranks), load
    while low < high:
        middle = (low + high) // 2
        if len(_fill_bins(work, middle, patches)) <= ranks:
            high = middle
        else:
            low = middle + 1
    shares = _pieces_of_bins(trees, _fill_bins(work, high, patches))
    return [*shares, *([] for _ in range(ranks - len(shares)))]


def _fill_bins(trees: Sequence[Work], capacity: int, most_patches: int) -> list[list[Piece]]:
    """Fills bins in order; a bin has at most ``capacity`` work and ``most_patches`` patches, or one larger unit."""
    bins: list[list[Piece]] = []
    load, patches = capacity + 1, 0  # The first episode opens a bin.
    shown: set[str] = set()
    for index, work in enumerate(trees):
        seen: set[int] = set()
        first = before = 0
        for path, end in zip(work.paths, work.ends, strict=True):
            more = work.load(path, seen=seen, shown=shown)
            over = load + more.work > capacity or patches + more.patches > most_patches
            if over and (load or not bins):
                if before > first:
                    bins[-1].append((index, first, before))
                bins.append([])
                first, load, patches, seen, shown = before, 0, 0, set(), set()
                more = work.load(path)
            load, patches = load + more.work, patches + more.patches
            seen.update(path)
            shown |= more.items
            before = end
        bins[-1].append((index, first, before))
    return bins


def _work(tree: TokenTree, tower: TowerWork) -> Work:
    runs = tree.runs
    rows = (runs.stop - runs.start - (runs.stop == runs.end)).tolist()
    parent = runs.parent.tolist()
    paths: list[list[int]] = []
    for episode in tree.episodes:
        path: dict[int, None] = {}
        for run in runs.of_rows(np.array(episode.leaves)).tolist():
            while run >= 0 and run not in path:
                path[run] = None
                run = parent[run]
        paths.append(list(path))
    items: dict[int, list[tuple[str, int, int]]] = {}
    for media in tree.media:
        item = media.item
        found = items.setdefault(int(runs.of_rows(np.array(media.start))), [])
        found.append((item.digest, round(tower.rows(item)), item.patches))
    if tree.is_of_data:
        return Work([list(dict.fromkeys(run for path in paths for run in path))], [len(paths)], rows, items)
    return Work(paths, list(range(1, len(paths) + 1)), rows, items)


def _pieces_of_bins(trees: Sequence[TokenTree], bins: Sequence[Sequence[Piece]]) -> list[list[TokenTree]]:
    """Returns the trees of each bin.

    The first piece of a tree with a trained row represents the group in counts.
    """
    counted: set[int] = set()
    made: list[list[TokenTree]] = []
    for pieces in bins:
        made.append([])
        for index, first, stop in pieces:
            piece = piece_of(trees[index], first, stop)
            counts = trees[index].counts_group and index not in counted and bool(piece.loss_mask.any())
            if counts and piece is not trees[index]:
                counted.add(index)
                piece = replace(piece, counts_group=True)
            made[-1].append(piece)
    return made


def piece_of(tree: TokenTree, first: int, stop: int) -> TokenTree:
    """Returns a tree of the episodes ``first`` to ``stop`` (exclusive), or ``tree`` itself if these are all episodes.

    The extra ``repeated`` is True at rows that an earlier piece has, too. Each row is thus counted once.
    """
    if stop - first == len(tree.episodes):
        return tree
    repeated = tree.extras.get(REPEATED, np.zeros(tree.rows, dtype=bool)).copy()
    if first:
        repeated[tree.rows_of(range(first))] = True
    return tree.with_extras(**{REPEATED: repeated}).take(range(first, stop))


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRows:
    """Maps rows of a stream, or of a part of a stream, to features of ``items``; each item occurs once.

    Row ``rows[i]`` gets feature ``features[i]``. Both arrays are int64, and ``rows`` ascends. Features are numbered
    item by item.
    """

    items: tuple[MediaItem, ...]
    rows: np.ndarray
    features: np.ndarray

    def taken(self, kept: np.ndarray, towers: Towers) -> MediaRows:
        """Returns the entries at the indexes ``kept`` and their items, with renumbered features."""
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
    """Returns the media of concatenated trees, at their rows in the concatenation."""
    first, found = 0, list[Media]()
    for tree in trees:
        found += [
            msgspec.structs.replace(medium, start=medium.start + first, end=medium.end + first) for medium in tree.media
        ]
        first += tree.rows
    return found


def media_rows(media: Sequence[Media], towers: Towers, *, computed: np.ndarray) -> MediaRows:
    """Returns the stream's rows that get features of ``media``, which is in the order of the rows.

    ``computed`` is bool ``[rows]`` and True at the rows that are in the stream.
    """
    stream_row = np.cumsum(computed) - 1
    items: dict[str, MediaItem] = {}
    first_feature: dict[str, int] = {}
    count = 0
    for medium in media:
        if medium.item.digest not in items:
            items[medium.item.digest], first_feature[medium.item.digest] = medium.item, count
            count += towers.features(medium.item)
    rows, features = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for medium in media:
        own = medium.start + np.flatnonzero(towers.feature_rows(medium.item.ids))
        inside = computed[own]
        rows.append(stream_row[own[inside]])
        features.append(first_feature[medium.item.digest] + np.flatnonzero(inside))
    return MediaRows(items=tuple(items.values()), rows=np.concatenate(rows), features=np.concatenate(features))


# A CPU uses attention without a mask if this saves at least this many pairs of token rows.
MASKLESS_SAVES_PAIRS = 2**17


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLayout:
    """Holds some trees as one stream of ``rows`` token rows; ``end`` defines visibility as in a `TokenTree`.

    ``chosen`` has the row numbers of the chosen sampled rows of each tree, int64, ascending. The output layer is
    computed only at the rows that predict the chosen rows. ``token_positions`` is the index of each token among the
    chosen rows, or -1 for a token that was not chosen. It is None if tokens and chosen rows are identical.
    """

    token_ids: np.ndarray  # int64 [rows]
    end: np.ndarray  # int64 [rows]
    chosen: Sequence[np.ndarray]  # one array for each tree
    positions: np.ndarray  # int64 [rows], position of each row in its path
    predicting_rows: np.ndarray  # int64 [chosen], for each chosen row the row that predicts it
    targets: np.ndarray  # int64 [chosen], token ids of the chosen rows
    token_positions: np.ndarray | None  # int64 [tokens]
    sample_ids: np.ndarray  # int64 [tokens], the episode of each token
    num_samples: int
    rotary: np.ndarray | None = None  # int64 or float64 [3, rows], the rotary positions (time, height, width)
    media: MediaRows | None = None  # the rows that get features of a tower


def pack_tree(trees: Sequence[TokenTree], *, trained_only: bool = False, towers: Towers | None = None) -> TreeLayout:
    """Lays out one or more trees as one stream.

    All sampled rows are chosen. If ``trained_only`` is True and any row is trained, only trained rows are chosen.
    ``towers`` are the model's towers. Raises ValueError if a tree has media and there is no tower.
    """
    sizes = np.array([tree.rows for tree in trees])
    before = (np.cumsum(sizes) - sizes).tolist()
    end = np.concatenate([tree.end + first for tree, first in zip(trees, before, strict=True)])
    inner = np.concatenate([tree.computed for tree in trees])
    stream_row = np.concatenate(([0], np.cumsum(inner)))  # the number of stream rows before each row
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
            f"group {group} has {media[0].item.description}, but this model reads text only. Use a multimodal model."
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
    """Returns each token row's index in the ascending ``chosen``, or -1 if absent; None if both arrays are equal."""
    if np.array_equal(chosen, token_rows):
        return None
    indexes = np.minimum(np.searchsorted(chosen, token_rows), len(chosen) - 1)
    return np.where(chosen[indexes] == token_rows, indexes, -1)


def tree_starts(end: np.ndarray) -> np.ndarray:
    """Returns the first row of each tree in a stream, int64 ``[trees]``, ascending; ``end`` is int64 ``[rows]``."""
    reach = np.maximum.accumulate(end)
    return np.append(0, np.flatnonzero(reach[:-1] == np.arange(1, len(end))) + 1)


class RankClock:
    """Adds up the times of the parts of one update; processor time is measured for the calling thread."""

    def __init__(self) -> None:
        self._began_s = time.time()
        self._rows = 0
        self._core_wait_ms = 0.0
        self.wall_ms: dict[str, float] = {}
        self.cpu_ms: dict[str, float] = {}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the block's time in milliseconds to ``part``."""
        clock = clock_and_core_wait_s if part in OWN_PARTS else _clock_alone
        (began_s, waited_s), cpu_s = clock(), time.thread_time()
        yield
        cpu_now_s, (ended_s, wait_s) = time.thread_time(), clock()
        self.wall_ms[part] = self.wall_ms.get(part, 0.0) + 1e3 * (ended_s - began_s)
        self.cpu_ms[part] = self.cpu_ms.get(part, 0.0) + 1e3 * (cpu_now_s - cpu_s)
        self._core_wait_ms += 1e3 * (wait_s - waited_s)

    def add_rows(self, rows: int) -> None:
        """Counts token rows of this rank's passes."""
        self._rows += rows

    def times(self) -> RankTimes:
        """Returns the times so far."""
        return RankTimes(
            began_s=self._began_s,
            ended_s=time.time(),
            wall_ms=dict(self.wall_ms),
            cpu_ms=dict(self.cpu_ms),
            rows=self._rows,
            core_wait_ms=self._core_wait_ms,
        )


def _clock_alone() -> tuple[float, float]:
    return time.perf_counter(), 0.0


def times_of_step(updates: Sequence[RankTimes]) -> RankTimes:
    """Returns the total times of one rank over all updates of a step; there must be at least one update."""
    return RankTimes(
        began_s=min(update.began_s for update in updates),
        ended_s=max(update.ended_s for update in updates),
        wall_ms=_sums([update.wall_ms for update in updates]),
        cpu_ms=_sums([update.cpu_ms for update in updates]),
        rows=sum(update.rows for update in updates),
        core_wait_ms=sum(update.core_wait_ms for update in updates),
    )


def _sums(times: Sequence[dict[str, float]]) -> dict[str, float]:
    parts = dict.fromkeys(part for timings in times for part in timings)
    return {part: sum(timings.get(part, 0.0) for timings in times) for part in parts}


MOMENTS = ("return", "return_squared", "error", "error_squared")


def moment_sums(*, returns: np.ndarray, values: np.ndarray, loss_mask: np.ndarray) -> dict[str, tuple[float, float]]:
    """Returns (sum, count) of R, R², R - V and (R - V)² over trained tokens, in float64; inputs are ``[tokens]``."""
    trained = returns[loss_mask].astype(np.float64)
    error = trained - values[loss_mask]
    sums = (trained.sum(), np.square(trained).sum(), error.sum(), np.square(error).sum())
    return {name: (float(total), float(trained.size)) for name, total in zip(MOMENTS, sums, strict=True)}


def explained_variance(means: Mapping[str, float]) -> float | None:
    """Returns 1 - Var(R - V) / Var(R) from the means of the moments, or None if all returns are equal up to rounding.

    The value is 1 for a perfect critic and 0 for a critic that predicts the mean.
    """
    variance = means["return_squared"] - means["return"] ** 2
    if variance <= 1e-9 * means["return_squared"]:
        return None
    return 1.0 - (means["error_squared"] - means["error"] ** 2) / variance


@dataclass(frozen=True, kw_only=True)
class UpdateMetrics:
    """Holds the metrics of one update, or of all updates of a step; ``critic`` is None without a critic.

    ``ranks`` has the times of the policy's ranks in order. It is empty if the times are unknown.
    """

    policy: StepMetrics
    critic: StepMetrics | None = None
    ranks: tuple[RankTimes, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Holds a step's metrics and number of updates; a mini-batch without trained tokens makes no update.

    ``skipped_groups`` counts the first epoch's groups that were not computed, and ``skipped_rows`` counts their rows.
    """

    metrics: UpdateMetrics
    updates: int
    skipped_groups: int = 0
    skipped_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """Describes how a train step is split: in each of ``epochs`` epochs, ``groups`` groups form ``mini_batches`` parts.

    ``budget_tokens`` is the maximum work of a micro-batch on each of ``ranks`` data-parallel ranks, in rows: packed
    token rows plus ``tower``'s work for media. ``seed`` seeds the shuffles. If ``skips`` is True, groups without an
    advantage are counted and not computed; an update always computes at least one group.
    """

    groups: int
    mini_batches: int
    epochs: int
    budget_tokens: int
    ranks: int
    seed: int
    tower: TowerWork = NO_TOWER
    skips: bool = False


class Trainer(Protocol):
    """Defines the interface of a trainer, which runs all ranks of the policy and of the critic, if any."""

    def begin_step(self, step: int) -> None:
        """Starts an update of train step ``step``."""

    def accumulate(self, groups: Sequence[TokenTree]) -> None:
        """Adds the gradient of one micro-batch."""

    def count(self, groups: Sequence[TokenTree]) -> None:
        """Adds groups without a gradient to the update's counts."""

    def finish_step(self) -> UpdateMetrics:
        """Applies the update and returns its metrics."""


class StepUpdates:
    """Runs one train step.

    The first epoch trains on groups as they arrive, micro-batch by micro-batch, while later groups are still generated.
    Each later epoch shuffles all groups with the seed (seed, step, epoch).
    """

    def __init__(self, trainer: Trainer, plan: UpdatePlan, *, step: int) -> None:
        assert plan.groups % plan.mini_batches == 0, "validation checks rollout.prompts_per_step, algo.mini_batches"
        self._trainer, self._plan, self._step = trainer, plan, step
        self._batcher = MicroBatcher(plan.budget_tokens, ranks=plan.ranks, tower=plan.tower)
        self._groups: list[TokenTree] = []
        self._left = plan.mini_batches * plan.epochs
        self._done: list[UpdateMetrics] = []
        self._skipped_groups = self._skipped_rows = 0  # in the first epoch
        self._begin()

    @property
    def made(self) -> int:
        """Returns the number of updates so far.

        After the first update no checkpoint can be written until the step ends.
        """
        return len(self._done)

    def add(self, groups: Sequence[TokenTree]) -> None:
        """Trains on the next groups of the first epoch."""
        self._groups += groups
        self._train(groups)

    def finish(self) -> StepResult:
        """Runs the later epochs and returns the step's result.

        Raises ValueError if the step has no trained token; also raises the errors of the trainer.
        """
        plan = self._plan
        assert len(self._groups) == plan.groups, "all groups of a step arrive before it ends"
        first_epoch, skipped_groups, skipped_rows = len(self._done), self._skipped_groups, self._skipped_rows
        for epoch in range(1, plan.epochs):
            order = np.random.default_rng((plan.seed, self._step, epoch)).permutation(plan.groups)
            self._train([self._groups[index] for index in order])
        if not self._done:
            raise ValueError(f"train step {self._step}: every token is masked, so there is nothing to train on.")
        critics = [update.critic for update in self._done if update.critic is not None]
        metrics = UpdateMetrics(
            policy=over_updates([update.policy for update in self._done], first_epoch=first_epoch),
            critic=over_updates(critics, first_epoch=first_epoch) if critics else None,
            ranks=tuple(
                times_of_step(updates) for updates in zip(*(update.ranks for update in self._done), strict=True)
            ),
        )
        return StepResult(
            metrics=metrics, updates=len(self._done), skipped_groups=skipped_groups, skipped_rows=skipped_rows
        )

    def _train(self, groups: Sequence[TokenTree]) -> None:
        for group in groups:
            if self._plan.skips and not has_advantage(group):
                self._skipped.append(group)
            else:
                self._add(group)
            self._in_update += 1
            self._tokens += int(np.count_nonzero(group.loss_mask))
            if self._in_update == self._plan.groups // self._plan.mini_batches:
                self._end()

    def _begin(self) -> None:
        self._trainer.begin_step(self._step)
        self._in_update, self._tokens = 0, 0
        self._skipped: list[TokenTree] = []

    def _add(self, group: TokenTree) -> None:
        for batch in self._batcher.add([group]):
            self._trainer.accumulate(batch)

    def _end(self) -> None:
        # A mini-batch without trained tokens has no gradient, but Adam's momentum would still move the weights.
        if self._tokens:
            # The backward pass's collectives and the token metrics need at least one group.
            if len(self._skipped) == self._in_update:
                shown = next(index for index, group in enumerate(self._skipped) if group.loss_mask.any())
                self._add(self._skipped.pop(shown))
            self._trainer.accumulate(self._batcher.flush())
            self._trainer.count(self._skipped)
            self._done.append(self._trainer.finish_step())
            self._skipped_groups += len(self._skipped)
            self._skipped_rows += sum(group.computed_rows for group in self._skipped)
        else:
            self._batcher.flush()
        self._left -= 1
        if self._left:
            self._begin()


def has_advantage(group: TokenTree) -> bool:
    """Returns whether any trained token of a group has a nonzero advantage."""
    advantages = group.of_tokens(ADVANTAGES)
    assert advantages is not None, "the trainer leases groups with advantages"
    return bool(advantages[group.loss_mask[group.tokens[1]]].any())


def over_updates(metrics: Sequence[StepMetrics], *, first_epoch: int) -> StepMetrics:
    """Returns the updates of a step as one record: sums of timings and means of the other values.

    Each metric of the algorithm is weighted by its own counts, so groups that are not computed have no weight. Experts'
    loads are weighted by computed rows. The loss and the gradient norm are plain means over the updates. Tokens and
    samples are summed over the ``first_epoch`` updates of the first epoch only. The log-prob gap to the engine comes
    from the first update, because later updates have other weights than the engine's.
    """
    first = metrics[0]
    if len(metrics) == 1:
        return first
    counts: dict[str, float] = {}
    sums: dict[str, float] = {}
    for metric in metrics:
        for name, mean in metric.algorithm.items():
            counts[name] = counts.get(name, 0.0) + metric.algorithm_counts[name]
            sums[name] = sums.get(name, 0.0) + mean * metric.algorithm_counts[name]
    rows = sum(metric.rows for metric in metrics)
    parts = dict.fromkeys(part for metric in metrics for part in metric.timings_ms)
    return replace(
        first,
        loss=sum(metric.loss for metric in metrics) / len(metrics),
        grad_norm=sum(metric.grad_norm for metric in metrics) / len(metrics),
        tokens=sum(metric.tokens for metric in metrics[:first_epoch]),
        samples=sum(metric.samples for metric in metrics[:first_epoch]),
        rows=sum(metric.rows for metric in metrics[:first_epoch]),
        algorithm={name: total / counts[name] for name, total in sums.items()},
        algorithm_counts=counts,
        moe={name: sum(metric.moe[name] * metric.rows for metric in metrics) / rows for name in first.moe},
        timings_ms={part: sum(metric.timings_ms.get(part, 0.0) for metric in metrics) for part in parts},
    )
