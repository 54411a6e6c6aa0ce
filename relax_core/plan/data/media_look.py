"""Tells from the headers of a few rows' media how large those of a prompt are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_core.data.media.media_headers import PlannedItem

FIRST_ROWS = 256  # data rows whose media are counted


@dataclass(frozen=True, kw_only=True)
class PromptMedia:
    """Describes the media of the first ``prompts`` rows that can be used.

    ``items``, ``rows`` of the language model, ``patches`` of the vision tower, ``audio_frames`` of the audio tower and
    ``nbytes`` of tensors are means over these prompts; ``most_rows``, ``most_patches``, ``most_audio_frames`` and
    ``most_bytes`` are those of the prompt that has most, and
    ``item_patches`` those of the largest item. ``source_pixels`` is the largest size of an image or a frame before its
    resize. ``videos`` and ``sounds`` say whether there are any, because videos need the tokenizer and sounds more
    memory. ``prompts`` is 0 if the figures are what the limits allow because there are no rows yet.
    """

    prompts: int
    items: float
    rows: float
    patches: float
    nbytes: float
    most_rows: int
    most_patches: int
    most_bytes: int
    item_patches: int
    source_pixels: int
    videos: bool
    sounds: bool = False
    audio_frames: float = 0.0
    most_audio_frames: int = 0


def summed_up(prompts: Sequence[Sequence[PlannedItem]]) -> PromptMedia | None:
    """Returns the description of some prompts, None if there is no prompt."""
    if not prompts:
        return None
    items = [one for prompt in prompts for one in prompt]
    return PromptMedia(
        prompts=len(prompts),
        items=len(items) / len(prompts),
        rows=sum(one.rows for one in items) / len(prompts),
        patches=sum(one.patches for one in items) / len(prompts),
        nbytes=sum(one.nbytes for one in items) / len(prompts),
        most_rows=max(sum(one.rows for one in prompt) for prompt in prompts),
        most_patches=max(sum(one.patches for one in prompt) for prompt in prompts),
        most_bytes=max(sum(one.nbytes for one in prompt) for prompt in prompts),
        item_patches=max((one.patches for one in items), default=0),
        source_pixels=max((one.source_pixels for one in items), default=0),
        videos=any(one.kind == "video" for one in items),
        sounds=any(one.audio_frames for one in items),
        audio_frames=sum(one.audio_frames for one in items) / len(prompts),
        most_audio_frames=max(sum(one.audio_frames for one in prompt) for prompt in prompts),
    )
