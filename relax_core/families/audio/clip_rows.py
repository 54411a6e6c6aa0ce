"""The rows that a sound, or a video with its sound, stands for (Qwen3-Omni's rules). It imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_core.families.architecture import AudioSettings, PatchSettings
from relax_core.families.vision.item_rows import ItemRows, step_times, timed_offsets


def clip_rows(audio: AudioSettings, *, frames: int) -> ItemRows:
    """Returns the rows of a sound with ``frames`` frames of features.

    They take the place of one token; the tokens that begin and end a sound stay around it, as the chat template sets
    them.
    """
    rows = audio.rows_of_frames(frames)
    offsets = np.repeat(np.arange(rows, dtype=np.int32)[None], 3, axis=0)
    return ItemRows(np.full(rows, audio.audio_token_id, np.int32), offsets, rows, [audio.audio_token_id])


def audible_feature_rows(audio: AudioSettings, token_ids: np.ndarray) -> np.ndarray:
    """Returns which rows of an item get a feature of the audio tower, bool ``[rows]``."""
    found: np.ndarray = token_ids == audio.audio_token_id
    return found


def heard_video_rows(
    tower: PatchSettings, audio: AudioSettings, *, grid: Sequence[int], seconds: float, frames: int
) -> ItemRows:
    """Returns the rows of a video whose grid is (time, height, width) in patches, together with its sound.

    ``seconds`` is the time between two steps of the grid, and ``frames`` counts the frames of the sound's features. A
    row of the video precedes a row of the sound if its time is the same or earlier; what is left of the longer one
    follows, and alone decides how far the item moves the positions. The tokens that begin and end a sound stand around
    the rows. All of them take the place of one token inside the pair of vision tokens.
    """
    seen = timed_offsets(tower, grid=grid, seconds=seconds)
    heard = np.repeat(np.arange(audio.rows_of_frames(frames), dtype=np.float32)[None], 3, axis=0)
    times = np.concatenate([step_times(tower, grid=grid, seconds=seconds), heard[0].astype(np.float64)])
    order = np.argsort(times, kind="stable")  # it merges two ordered lists, and the video is the first of them
    is_heard = order >= seen.shape[1]
    offsets = 1 + np.concatenate([seen, heard], axis=1)[:, order]  # behind the token that begins the sound
    left = np.flatnonzero(is_heard != is_heard[-1])[-1] + 1  # the first row behind the shorter one's last
    end = offsets[:, left:].max() + 1
    ids = np.where(is_heard, audio.audio_token_id, tower.video_token_id)
    return ItemRows(
        np.array([audio.audio_start_token_id, *ids, audio.audio_end_token_id], np.int32),
        np.concatenate([np.zeros((3, 1), np.float32), offsets, np.full((3, 1), end, np.float32)], axis=1),
        float(end) + 1,
        [tower.video_token_id],
    )
