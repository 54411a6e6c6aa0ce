"""Averages what prompts of each modality cost the rollout: their encoding and their prefill."""

from __future__ import annotations

from collections import Counter, defaultdict


class ModalityFigures:
    """Sums milliseconds by modality and figure, until `take` gives the means since it was called last."""

    def __init__(self) -> None:
        self._sums: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._prompts: Counter[tuple[str, str]] = Counter()

    def add(self, modality: str, figure: str, milliseconds: float) -> None:
        """Adds the time of one prompt."""
        self._sums[modality, figure] += milliseconds
        self._prompts[modality, figure] += 1

    def take(self) -> dict[str, float]:
        """Returns each mean as "modality/video/encode_ms", with its number of prompts, and begins anew."""
        values: dict[str, float] = {}
        for (modality, figure), prompts in sorted(self._prompts.items()):
            values[f"modality/{modality}/{figure}_ms"] = self._sums[modality, figure] / prompts
            values[f"modality/{modality}/{figure}_prompts"] = prompts
        self._sums.clear()
        self._prompts.clear()
        return values
