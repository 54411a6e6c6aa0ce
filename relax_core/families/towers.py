"""Says which rows of an item get features of a model's towers, and which tower gives each of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relax_core.contracts.media import MediaItem
from relax_core.families.architecture import Architecture, AudioTower, VisionTower
from relax_core.families.audio.clip_rows import audible_feature_rows
from relax_core.families.vision.item_rows import feature_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Towers:
    """Holds the towers of a model that sees, hears or does both."""

    vision: VisionTower | None = None
    audio: AudioTower | None = None

    @staticmethod
    def of(architecture: Architecture) -> Towers | None:
        """Returns the towers of a model, None if it reads text only."""
        if architecture.vision is None and architecture.audio is None:
            return None
        return Towers(vision=architecture.vision, audio=architecture.audio)

    def heard(self, token_ids: np.ndarray) -> np.ndarray:
        """Returns which rows get a feature of the audio tower, bool ``[rows]``."""
        if self.audio is None:
            return np.zeros(len(token_ids), dtype=bool)
        return audible_feature_rows(self.audio, token_ids)

    def feature_rows(self, token_ids: np.ndarray) -> np.ndarray:
        """Returns which rows get a feature of a tower, bool ``[rows]``; time stamps are text."""
        found = self.heard(token_ids)
        return found if self.vision is None else found | feature_rows(self.vision, token_ids)

    def features(self, item: MediaItem) -> int:
        """Returns the number of features that the towers give for an item."""
        seen = 0 if self.vision is None else item.patches // self.vision.merge_size**2
        return seen + (0 if self.audio is None else self.audio.rows_of_frames(item.audio_frames))

    def order(self, items: Sequence[MediaItem]) -> np.ndarray | None:
        """Returns where the features of items stand among all that are seen, followed by all that are heard.

        The result is int64 ``[features]``, item by item in the order of their rows, or None if nothing is heard, so
        that the features stand in this order already.
        """
        if not any(item.audio_frames for item in items):
            return None
        rows = [self.heard(item.ids)[self.feature_rows(item.ids)] for item in items]
        heard = np.concatenate(rows)
        return np.where(heard, np.count_nonzero(~heard) + np.cumsum(heard), np.cumsum(~heard)) - 1
