"""The rows of an image or a video: token ids, rotary offsets and advance (rules of Qwen3-VL and Qwen3-Omni).

It imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from relax_core.families.architecture import PatchSettings


class ItemRows(NamedTuple):
    """Holds the rows of an item: ids int32 ``[rows]``, offsets ``[3, rows]``, and how far it moves positions.

    Offsets are int32, or float32 where some may be fractions.
    """

    token_ids: np.ndarray
    offsets: np.ndarray
    advance: float
    placeholder: list[int]


def image_rows(tower: PatchSettings, *, grid: Sequence[int]) -> ItemRows:
    """Returns the rows of an image whose grid is (1, height, width) in patches."""
    offsets, advance = _grid_offsets(tower, grid)
    ids = np.full(offsets.shape[1], tower.image_token_id, dtype=np.int32)
    return ItemRows(ids, offsets, advance, [tower.image_token_id])


def feature_rows(tower: PatchSettings, token_ids: np.ndarray) -> np.ndarray:
    """Returns which rows of an item get a feature of the tower, bool ``[rows]``; time stamps are text."""
    found: np.ndarray = (token_ids == tower.image_token_id) | (token_ids == tower.video_token_id)
    return found


def _grid_offsets(tower: PatchSettings, grid: Sequence[int]) -> tuple[np.ndarray, int]:
    """Returns the offsets of one frame's rows and how far they move the positions: its longer side."""
    height, width = grid[1] // tower.merge_size, grid[2] // tower.merge_size
    rows = np.zeros((3, height, width), dtype=np.int32)
    rows[1] = np.arange(height)[:, None]
    rows[2] = np.arange(width)
    return rows.reshape(3, -1), max(height, width)


def video_rows(tower: PatchSettings, *, grid: Sequence[int], stamps: Sequence[Sequence[int]]) -> ItemRows:
    """Returns the rows of a video whose grid is (time, height, width) in patches.

    ``stamps`` has the token ids of each step's time stamp, such as those of "<0.2 seconds>"; each step is the stamp,
    the token that begins vision, the rows of the frame, and the token that ends vision. All of them take the place of
    one token: the pair of vision tokens that the chat template sets around a video stays around its steps, as in
    transformers' Qwen3VLProcessor and in SGLang.
    """
    frame, advance = _grid_offsets(tower, grid)
    ids: list[np.ndarray] = []
    offsets: list[np.ndarray] = []
    position = 0
    for stamp in stamps:
        before = [*stamp, tower.vision_start_token_id]
        ids += [np.array(before), np.full(frame.shape[1], tower.video_token_id), np.array([tower.vision_end_token_id])]
        offsets.append(np.repeat(position + np.arange(len(before))[None], 3, axis=0))
        position += len(before)
        offsets.append(frame + position)
        position += advance
        offsets.append(np.full((3, 1), position))
        position += 1
    assert len(stamps) == grid[0], "a video has one time stamp for each step of its grid"
    return ItemRows(
        np.concatenate(ids).astype(np.int32),
        np.concatenate(offsets, axis=1).astype(np.int32),
        position,
        [tower.video_token_id],
    )


def timed_video_rows(tower: PatchSettings, *, grid: Sequence[int], seconds: float) -> ItemRows:
    """Returns the rows of a video without time stamps; ``seconds`` is the time between two steps of its grid.

    The first rotary position tells the time of a row, so the offsets are float32, and fractions if ``seconds`` does not
    fit the positions. The rows take the place of one token inside the pair of vision tokens.
    """
    offsets = timed_offsets(tower, grid=grid, seconds=seconds)
    ids = np.full(offsets.shape[1], tower.video_token_id, dtype=np.int32)
    return ItemRows(ids, offsets, float(offsets.max()) + 1, [tower.video_token_id])


def timed_offsets(tower: PatchSettings, *, grid: Sequence[int], seconds: float) -> np.ndarray:
    """Returns the offsets of a timed video's rows, float32 ``[3, rows]``, with the rounding of transformers."""
    assert tower.positions_per_second is not None, "the videos of this family have time stamps"
    frame, _ = _grid_offsets(tower, grid)
    offsets = np.tile(frame.astype(np.float32), (1, grid[0]))
    steps = np.arange(grid[0], dtype=np.float32) * np.float32(seconds) * np.float32(tower.positions_per_second)
    offsets[0] = np.repeat(steps, frame.shape[1])
    return offsets


def step_times(tower: PatchSettings, *, grid: Sequence[int], seconds: float) -> np.ndarray:
    """Returns the time of each row of a timed video in positions, float64 ``[rows]``.

    Their order among the rows of a sound is decided in this precision, as by transformers' processor.
    """
    assert tower.positions_per_second is not None, "the videos of this family have time stamps"
    times: np.ndarray = np.repeat(np.arange(grid[0]) * seconds * tower.positions_per_second, _frame_rows(tower, grid))
    return times


def _frame_rows(tower: PatchSettings, grid: Sequence[int]) -> int:
    return grid[1] // tower.merge_size * (grid[2] // tower.merge_size)
