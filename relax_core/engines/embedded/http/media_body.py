"""Checks the images and videos of a request, which come as digests and never as paths or bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.media_file import FolderReader
from relax_core.engines.embedded.http.asgi import HttpError, clipped
from relax_core.engines.embedded.http.request_bounds import same_length
from relax_core.engines.embedded.model.model_config import ModelConfig
from relax_core.families.architecture import VisionTower
from relax_core.families.vision.item_rows import feature_rows

# The items of one prompt: each with its digest and the index of its first row in the prompt's token ids.
PlacedDigests = list[tuple[str, int]]


class RequestMedia:
    """Finds the items that requests name in the folder that ``--media-folder`` gives."""

    def __init__(self, reader: FolderReader | None, model: ModelConfig) -> None:
        self._reader = reader
        self._tower = model.vision

    def of_prompts(
        self, given: Sequence[PlacedDigests | None] | None, prompts: Sequence[Sequence[int]]
    ) -> list[list[Media]]:
        """Returns the items of each prompt, in order of their rows.

        Raises HttpError 400 for an item that is not in the folder or does not fit the prompt's tokens, and for tokens
        of an image or video that no item explains, because the model would be blind there.
        """
        entries = [None] * len(prompts) if given is None else list(given)
        same_length("media", len(entries), len(prompts))
        if self._tower is None:
            if any(entries):
                raise HttpError(400, "media: the model reads text only; leave it out, or serve a model with a tower")
            return [[] for _ in prompts]
        placed = zip(entries, prompts, strict=True)
        return [self._of_prompt(index, one or [], ids, self._tower) for index, (one, ids) in enumerate(placed)]

    def _of_prompt(
        self, index: int, entries: PlacedDigests, token_ids: Sequence[int], tower: VisionTower
    ) -> list[Media]:
        ids = np.array(token_ids, dtype=np.int64)
        blind = feature_rows(tower, ids)
        media: list[Media] = []
        done = 0
        for digest, start in entries:
            where = f"media[{index}] {clipped(digest)} at {start}"
            item = self._item(digest, where)
            end = start + item.rows
            if start < done or end > len(ids):
                raise HttpError(
                    400, f"{where}: its {item.rows} rows do not fit the {len(ids)} input_ids behind row {done}"
                )
            if not np.array_equal(ids[start:end], item.ids):
                raise HttpError(400, f"{where}: input_ids {start} to {end - 1} are not the item's {item.rows} ids")
            _check_item(item, tower, where)
            blind[start:end] = False
            media.append(Media(item, start, end))
            done = end
        if blind.any():
            first = int(np.flatnonzero(blind)[0])
            raise HttpError(
                400,
                f"input_ids[{index}]: token {int(ids[first])} at {first} stands for an image or video, and no item of "
                "media is there; send the prompt's media",
            )
        return media

    def _item(self, digest: str, where: str) -> MediaItem:
        if self._reader is None:
            raise HttpError(400, f"{where}: the engine was started without --media-folder; start it with one")
        try:
            return self._reader.open(digest)[0]
        except (ValueError, OSError) as error:
            raise HttpError(400, f"{where}: {clipped(str(error), length=500)}") from error


def _check_item(item: MediaItem, tower: VisionTower, where: str) -> None:
    """Raises HttpError 400 for an item that was encoded for another model, because the tower could not take it."""
    rows = int(feature_rows(tower, item.ids).sum())
    features = item.patches // tower.merge_size**2
    time, height, width = item.grid
    cells = [height * tower.patch_size, width * tower.patch_size, 3]
    frames = next((one for one in item.tensors if one.name == "frames" and one.dtype == "uint8"), None)
    whole = not (height % tower.merge_size or width % tower.merge_size) and 0 < item.advance <= item.rows
    shape = [0] if frames is None else frames.shape
    if rows != features or not whole or shape[1:] != cells or -(-shape[0] // tower.temporal_patch_size) != time:
        raise HttpError(
            400,
            f"{where}: {rows} rows and frames {shape} for a grid of {item.grid}, of which this model's tower makes "
            f"{features} features; the item was encoded for another model",
        )
