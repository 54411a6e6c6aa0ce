"""Tests which rows of a stream get features, their rotary positions, and the budget and balance of patches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.tree import TokenTree
from relax_core.families.folder import folder_architecture
from relax_core.families.towers import Towers
from relax_core.families.vision_tower import image_rows
from relax_core.tools.make_tiny import tiny_model_folder
from relax_core.train.micro_batches import NO_TOWER, MicroBatcher, TowerWork, split_over_ranks
from relax_core.train.tree_packing import TreeLayout, pack_tree
from tests import media_items
from tests.trees import answers_tree

IMAGE = media_items.IMAGE
TOWER = replace(media_items.TOWER, deepstack_layers=0, hidden_size=8, num_heads=1, intermediate_size=8)


def image(name: str, height: int, width: int) -> MediaItem:
    """Makes an image of ``height`` times ``width`` rows."""
    grid = [1, 2 * height, 2 * width]
    rows = image_rows(TOWER, grid=grid)
    return MediaItem(
        kind="image",
        digest=name,
        token_ids=rows.token_ids.tobytes(),
        offsets=rows.offsets.tobytes(),
        advance=rows.advance,
        placeholder=rows.placeholder,
        grid=grid,
        width=8 * width,
        height=8 * height,
    )


def tree(uid: str, *answers: int, items: list[MediaItem], last: list[MediaItem] | None = None) -> TokenTree:
    """Makes a prompt of a token before each item and one behind; ``last`` is shown where the last answer ends."""
    prompt, media = list[int](), list[Media]()
    for item in items:
        prompt.append(1)
        media.append(Media(item, len(prompt), len(prompt) + item.rows))
        prompt += item.ids.tolist()
    prompt.append(1)
    lengths, ids = list(answers), [2] * sum(answers)
    for item in last or []:
        start = len(prompt) + len(ids)
        media.append(Media(item, start, start + item.rows))
        ids += item.ids.tolist()
        lengths[-1] += item.rows
    return replace(answers_tree(uid, prompt, lengths, ids), media=media)


def always(rows: float) -> Callable[[MediaItem], float]:
    """Returns the work of towers for which every item is ``rows``."""
    return lambda item: rows


def entries(layout: TreeLayout) -> list[tuple[int, str, int]]:
    """Returns the row, the item and the number of the feature within the item of each entry."""
    assert layout.media is not None
    owners = [(item.digest, number) for item in layout.media.items for number in range(item.rows)]
    features, rows = layout.media.features.tolist(), layout.media.rows.tolist()
    return [(row, *owners[feature]) for row, feature in zip(rows, features, strict=True)]


def test_every_computed_row_of_an_item_gets_its_feature_and_an_item_is_there_once() -> None:
    small, large = image("small", 1, 2), image("large", 2, 2)
    # Rows: 1 small small 1 large×4 1 | 2 2 small small, whose last row ends its branch | 1 small small 1 | 2.
    layout = pack_tree(
        [tree("a", 1, 1, items=[small, large], last=[small]), tree("b", 2, items=[small])], towers=Towers(vision=TOWER)
    )
    assert layout.media is not None
    assert [item.digest for item in layout.media.items] == ["small", "large"]
    expected = [(1, "small", 0), (2, "small", 1), *((4 + number, "large", number) for number in range(4))]
    # The first answer has one token, so it has no computed row; the second has its token and all but one image row.
    expected += [(10, "small", 0), (12, "small", 0), (13, "small", 1)]
    assert entries(layout) == expected
    assert (layout.token_ids[layout.media.rows] == IMAGE).all()


def test_a_part_has_the_items_that_it_needs() -> None:
    one, two, three = image("one", 1, 2), image("two", 2, 2), image("three", 1, 1)
    layout = pack_tree([tree("a", 2, items=[one, two, three])], towers=Towers(vision=TOWER))
    assert layout.media is not None
    part = layout.media.taken(np.flatnonzero(layout.media.rows >= 5), Towers(vision=TOWER))
    assert [item.digest for item in part.items] == ["two", "three"]
    whole = entries(layout)
    assert entries(replace(layout, media=part)) == [entry for entry in whole if entry[0] >= 5]


def test_rotary_positions_are_those_of_the_items_along_each_path() -> None:
    layout = pack_tree([tree("a", 2, 3, items=[image("one", 2, 3)])], towers=Towers(vision=TOWER))
    assert layout.rotary is not None
    time = [0, *[1] * 6, 4, 5, 5, 6]
    height = [0, 1, 1, 1, 2, 2, 2, 4, 5, 5, 6]
    width = [0, 1, 2, 3, 1, 2, 3, 4, 5, 5, 6]
    assert layout.rotary.tolist() == [time, height, width]
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9]


def test_text_alone_has_no_rotary_positions_of_its_own() -> None:
    layout = pack_tree([tree("a", 2, 3, items=[])], towers=Towers(vision=TOWER))
    assert layout.rotary is None and layout.media is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_micro_batch_keeps_the_budget_of_patches(ranks: int) -> None:
    found = [tree(f"g{place}", 2, 2, items=[image(f"image {place}", 2, 2)]) for place in range(5)]
    batcher = MicroBatcher(1000, ranks=ranks, tower=TowerWork(most_patches=32))  # An image has 16 patches.
    batches = [*batcher.add(found), batcher.flush()]
    per_rank = [
        sum(one.media[0].item.patches for one in share)
        for batch in batches
        for share in split_over_ranks(batch, ranks, tower=TowerWork(most_patches=32))
    ]
    assert sum(len(batch) for batch in batches) >= 5
    assert max(per_rank) <= 32
    assert len(batches) == (3 if ranks == 1 else 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_equal_images_of_a_micro_batch_count_once_on_one_rank(ranks: int) -> None:
    """Each tree has 7 rows that are computed, and the tower's work for the image is 50 rows."""
    found = [tree(f"g{place}", 2, items=[image("same", 2, 2)]) for place in range(4 * ranks)]
    tower = TowerWork(rows=always(50.0), most_patches=16)
    for budget, expected in ((50 + 4 * 7, [4 * ranks]), (50 + 4 * 7 - 1, [3 * ranks, ranks])):
        batcher = MicroBatcher(budget, ranks=ranks, tower=tower)
        assert [len(batch) for batch in (*batcher.add(found), batcher.flush())] == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_micro_batch_ends_where_rows_and_the_towers_work_reach_the_budget(ranks: int) -> None:
    """Three trees of 7 rows fit 24, and with the tower's work of 5.6 rows each, which is rounded, one does."""
    found = [tree(f"g{place}", 2, items=[image(f"image {place}", 2, 2)]) for place in range(6)]
    for rows, expected in ((0.0, 3 * ranks), (5.6, ranks)):
        batcher = MicroBatcher(24, ranks=ranks, tower=TowerWork(rows=always(rows)))
        batches = [len(batch) for batch in (*batcher.add(found), batcher.flush())]
        assert batches == [expected] * (6 // expected)


def test_ranks_are_balanced_by_the_work_of_the_towers() -> None:
    groups = [tree("image", 2, items=[image("one", 2, 2)]), *(tree(f"g{place}", 9, items=[]) for place in range(3))]
    by_rows = split_over_ranks(groups, 2)
    by_work = split_over_ranks(groups, 2, tower=TowerWork(rows=always(24.0)))
    assert [len(share) for share in by_rows] == [2, 2]
    assert [len(share) for share in by_work] == [1, 3]


def test_a_model_without_towers_has_no_work_for_items() -> None:
    folder = tiny_model_folder("tiny_qwen3", task="reverse_digits")
    assert TowerWork.of(folder_architecture(folder), most_patches=7) is NO_TOWER
