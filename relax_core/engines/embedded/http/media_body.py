"""Checks the images, videos and sounds of a request, which come as digests and never as paths or bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from relax_core.contracts.media import Media, MediaItem, MediaTensor
from relax_core.contracts.media_file import FolderReader
from relax_core.engines.embedded.http.request_bounds import same_length
from relax_core.engines.embedded.model.model_config import ModelConfig
from relax_core.engines.http_server.asgi import HttpError, clipped
from relax_core.families.towers import Towers

# The items of one prompt: each with its digest and the index of its first row in the prompt's token ids.
PlacedDigests = list[tuple[str, int]]


class RequestMedia:
    """Finds the items that requests name in the folder that ``--media-folder`` gives."""

    def __init__(self, reader: FolderReader | None, model: ModelConfig) -> None:
        self._reader = reader
        self._towers = Towers.of(model)

    def of_prompts(
        self, given: Sequence[PlacedDigests | None] | None, prompts: Sequence[Sequence[int]]
    ) -> list[list[Media]]:
        """Returns the items of each prompt, in order of their rows.

        Raises HttpError 400 for an item that is not in the folder or does not fit the prompt's tokens, and for tokens
        of an item that nothing explains, because the model would be blind or deaf there.
        """
        entries = [None] * len(prompts) if given is None else list(given)
        same_length("media", len(entries), len(prompts))
        if self._towers is None:
            if any(entries):
                raise HttpError(400, "media: the model reads text only; leave it out, or serve a model with a tower")
            return [[] for _ in prompts]
        placed = zip(entries, prompts, strict=True)
        return [self._of_prompt(index, one or [], ids, self._towers) for index, (one, ids) in enumerate(placed)]

    def _of_prompt(self, index: int, entries: PlacedDigests, token_ids: Sequence[int], towers: Towers) -> list[Media]:
        ids = np.array(token_ids, dtype=np.int64)
        blind = towers.feature_rows(ids)
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
            _check_item(item, towers, where)
            blind[start:end] = False
            media.append(Media(item, start, end))
            done = end
        if blind.any():
            first = int(np.flatnonzero(blind)[0])
            raise HttpError(
                400,
                f"input_ids[{index}]: token {int(ids[first])} at {first} stands for an image, video or sound, and no "
                "item of media is there; send the prompt's media",
            )
        return media

    def _item(self, digest: str, where: str) -> MediaItem:
        if self._reader is None:
            raise HttpError(400, f"{where}: the engine was started without --media-folder; start it with one")
        try:
            return self._reader.open(digest)[0]
        except (ValueError, OSError) as error:
            raise HttpError(400, f"{where}: {clipped(str(error), length=500)}") from error


def _check_item(item: MediaItem, towers: Towers, where: str) -> None:
    """Raises HttpError 400 for an item that was encoded for another model, because the towers could not take it."""
    if len(item.grid) != 3:
        raise HttpError(
            400,
            f"{where}: a grid of {item.grid}, where time, height and width are meant; the item was encoded for another "
            "model",
        )
    ids = item.ids
    rows, heard = int(towers.feature_rows(ids).sum()), int(towers.heard(ids).sum())
    tensors = {one.name: one for one in item.tensors}
    frames, sound = _shape(tensors, "frames", "uint8"), _shape(tensors, "features", "float32")
    fits = rows == towers.features(item) and _moves_on(item, towers)
    if item.kind != "audio":
        tower, (time, height, width) = towers.vision, item.grid
        fits = fits and tower is not None and not (height % tower.merge_size or width % tower.merge_size)
        if fits and tower is not None:
            cells = [height * tower.patch_size, width * tower.patch_size, 3]
            fits = frames[1:] == cells and -(-frames[0] // tower.temporal_patch_size) == time
    if item.kind == "audio" or item.audio_frames:
        fits = fits and towers.audio is not None and sound == [towers.audio.mel_bins, item.audio_frames]
        fits = fits and towers.audio is not None and heard == towers.audio.rows_of_frames(item.audio_frames)
    if not fits:
        raise HttpError(
            400,
            f"{where}: {rows} rows that move positions by {item.advance:g}, frames {frames} and sound {sound} for a "
            f"grid of {item.grid}, of which this model's towers make {towers.features(item)} features; the item was "
            "encoded for another model",
        )


def _moves_on(item: MediaItem, towers: Towers) -> bool:
    """Is True if an item's rotary offsets are those of its rows, and it moves the positions no further than it may.

    A video without time stamps moves them by its seconds, as far as its offsets reach; others by their rows at most.
    """
    if not item.rows or len(item.offsets) != 3 * len(item.token_ids):
        return False
    offsets = item.rotary_offsets
    timed = item.kind == "video" and towers.vision is not None and towers.vision.positions_per_second is not None
    most = float(offsets.max()) + 1 if timed else item.rows
    return bool(np.isfinite(offsets).all()) and offsets.min() >= 0 and 0 < item.advance <= most


def _shape(tensors: Mapping[str, MediaTensor], name: str, dtype: str) -> list[int]:
    """Returns the shape of an item's tensor, [0] if it has none of this dtype."""
    one = tensors.get(name)
    return one.shape if one is not None and one.dtype == dtype else [0]
