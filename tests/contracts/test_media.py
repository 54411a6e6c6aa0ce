"""Compares rotary positions with the published rule. Also tests an item's file, the short form, and refused trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.contracts.chains import chains_of
from relax_core.contracts.media import Media, MediaItem, MediaSource, short_form
from relax_core.contracts.media_file import FolderReader, item_digest, write_item
from relax_core.contracts.rotary import rotary_of_sequence, rotary_positions
from relax_core.contracts.tree import TokenTree, check_tree
from tests.media_items import END, IMAGE, START, VIDEO, image_item, video_item
from tests.trees import answers_tree


class Drawn(NamedTuple):
    """Holds a random tree, its paths and items, and for each row None (text) or (frame, y, x, height, width)."""

    rows: list[tuple[int, int, int, int, int] | None]
    ids: list[int]
    paths: list[list[int]]  # one path per leaf
    parents: list[int]
    media: list[Media]


@st.composite
def trees_with_media(draw: st.DrawFn) -> Drawn:
    """Draws a forest with segments of text, images and videos."""
    tree = Drawn([], [], [], [], [])
    frame = iter(range(10_000))

    def add(row: tuple[int, int, int, int, int] | None, token: int, above: int) -> int:
        tree.rows.append(row)
        tree.ids.append(token)
        tree.parents.append(above)
        return len(tree.rows) - 1

    def add_frame(height: int, width: int, token: int, above: int) -> int:
        name = next(frame)
        for y in range(height):
            for x in range(width):
                above = add((name, y, x, height, width), token, above)
        return above

    def segment(path: list[int], depth: int) -> None:
        above = path[-1] if path else -1
        for _ in range(draw(st.integers(1, 3))):
            what = draw(st.sampled_from(["text", "text", "image", "video"]))
            first = len(tree.rows)
            height, width = draw(st.integers(1, 3)), draw(st.integers(1, 4))
            if what == "text":
                for _ in range(draw(st.integers(1, 4))):
                    above = add(None, 7, above)
            elif what == "image":
                above = add_frame(height, width, IMAGE, above)
                tree.media.append(Media(image_item(height, width), first, len(tree.rows)))
            else:
                stamps = draw(st.lists(st.lists(st.integers(10, 20), min_size=1, max_size=3), min_size=1, max_size=3))
                for stamp in stamps:
                    for token in [*stamp, START]:
                        above = add(None, token, above)
                    above = add(None, END, add_frame(height, width, VIDEO, above))
                tree.media.append(Media(video_item(stamps, height, width), first, len(tree.rows)))
            path = [*path, *range(first, len(tree.rows))]
        for _ in range(draw(st.integers(0, 3)) if depth < 3 else 0):
            segment(path, depth + 1)
        tree.paths.append(path)

    for _ in range(draw(st.integers(1, 2))):
        segment([], 0)
    return tree


def published(rows: list[tuple[int, int, int, int, int] | None]) -> list[tuple[int, int, int]]:
    """Computes a path's positions by Qwen3-VL's published rule: rows after a frame start after its largest position."""
    found: list[tuple[int, int, int]] = []
    following, begin, frame = 0, 0, None
    for row in rows:
        if row is None:
            found.append((following,) * 3)
        else:
            if row[0] != frame:
                frame, begin = row[0], following
            found.append((begin, begin + row[1], begin + row[2]))
        following = max(following, max(found[-1]) + 1)
    return found


def ends_of(parents: list[int]) -> np.ndarray:
    end = np.arange(1, len(parents) + 1, dtype=np.int32)
    for row, above in enumerate(parents):
        while above >= 0:
            end[above] = row + 1
            above = parents[above]
    return end


@settings(max_examples=150, deadline=None)
@given(trees_with_media())
def test_positions_are_the_published_ones_on_every_path(tree: Drawn) -> None:
    positions = rotary_positions(chains_of(ends_of(tree.parents)), tree.media)
    assert positions.dtype == np.int64
    for path in tree.paths:
        assert positions[:, path].T.tolist() == [
            list(position) for position in published([tree.rows[row] for row in path])
        ]


@settings(max_examples=60, deadline=None)
@given(trees_with_media())
def test_a_sequence_is_a_tree_of_one_path_and_its_short_form_names_each_item_once(tree: Drawn) -> None:
    path = max(tree.paths, key=len)
    place = {row: number for number, row in enumerate(path)}
    media = [
        Media(medium.item, place[medium.start], place[medium.end - 1] + 1)
        for medium in tree.media
        if medium.start in place
    ]
    positions, following = rotary_of_sequence(len(path), media)
    wanted = published([tree.rows[row] for row in [*path]] + [None])
    assert positions.T.tolist() == [list(position) for position in wanted[:-1]] and following == wanted[-1][0]
    # The expected short form: every row outside items, and one placeholder at each item's first row.
    by_start = {medium.start: medium for medium in media}
    inside = {row for medium in media for row in range(medium.start, medium.end)}
    short: list[int] = []
    for number, row in enumerate(path):
        if number in by_start:
            short.append(IMAGE if by_start[number].item.kind == "image" else VIDEO)
        elif number not in inside:
            short.append(tree.ids[row])
    assert short_form([tree.ids[row] for row in path], media) == short


def test_an_item_s_file_gives_back_record_and_tensors_and_the_folder_takes_digests_only(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = {
        "frames": np.random.default_rng(0).integers(0, 256, (3, 8, 12, 3), dtype=np.uint8),
        "seconds": np.array([0.25, 1.5], dtype=np.float32),
    }
    item = msgspec.structs.replace(image_item(1, 1), digest=item_digest(b"a setting", tensors))
    written = write_item(tmp_path, item, tensors)
    assert [path.name for path in tmp_path.iterdir()] == [item.digest]
    record, found = FolderReader(tmp_path).open(item.digest)
    assert record == written
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and np.array_equal(found[name], tensor)
        assert not found[name].flags.writeable
    assert item_digest(b"another setting", tensors) != item.digest
    (tmp_path / "secret").write_bytes(b"x")
    for name in ("../secret", "secret", "0" * 31, "0" * 32, "A" * 32):
        with pytest.raises(ValueError, match=r"32 hexadecimal digits|no such item"):
            FolderReader(tmp_path).open(name)


def test_a_source_is_never_shown_with_its_bytes() -> None:
    source = MediaSource(kind="image", data=b"\x89PNG" * 1000)
    assert "PNG" not in repr(source) and "PNG" not in str([source]) and "4000 bytes of image" in repr(source)
    with pytest.raises(ValueError, match="a path or their bytes"):
        MediaSource(kind="image")


def picture_tree() -> tuple[TokenTree, MediaItem]:
    """Returns a tree with an image of 2 × 3 rows in rows 1 to 6, and two answers after row 7."""
    item = image_item(2, 3)
    tree = answers_tree("g00000001", [5, *item.ids.tolist(), 6], [2, 1], [1, 2, 3], logprobs=-1.0)
    return replace(tree, media=[Media(item, 1, 7)]), item


def test_a_tree_with_an_item_where_it_belongs_is_taken() -> None:
    tree, _ = picture_tree()
    check_tree(tree)
    check_tree(replace(tree, token_ids=np.full(tree.rows, -1, np.int32)))  # a tree that was decoded without token ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree, item: {"media": [Media(item, 0, 6)]}, "the ids of its rows are not those of the item"),
        (lambda tree, item: {"media": [Media(item, 1, 6)]}, "it stands for 6 rows"),
        (lambda tree, item: {"media": [Media(item, 8, 14)]}, "and its group has 11"),
        (lambda tree, item: {"media": [Media(item, -5, 1)]}, "and its group has 11"),
        (lambda tree, item: {"media": [Media(item, 1, 7), Media(item, 1, 7)]}, "it overlaps the item before it"),
        (lambda tree, item: {"media": [Media(image_item(1, 2), 8, 10)]}, "the ids of its rows"),
        (lambda tree, item: {"media": [Media(image_item(1, 2), 7, 9)]}, "a branch begins inside it"),
    ],
)
def test_items_that_do_not_fit_a_tree_are_refused(
    change: Callable[[TokenTree, MediaItem], dict[str, list[Media]]], message: str
) -> None:
    tree, item = picture_tree()
    with pytest.raises(ValueError, match=f"group g00000001: item .*{message}"):
        check_tree(replace(tree, **change(tree, item)))  # type: ignore[arg-type]


def test_an_item_whose_rows_were_sampled_is_refused() -> None:
    tree, _ = picture_tree()
    sampled = image_item(1, 2)
    ids = tree.token_ids.copy()
    ids[8:10] = sampled.ids
    with pytest.raises(ValueError, match="sampled one of its rows"):
        check_tree(replace(tree, token_ids=ids, media=[*tree.media, Media(sampled, 8, 10)]))
