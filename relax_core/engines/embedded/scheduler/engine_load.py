"""Holds the load of an engine at one time, and counts its decode steps by their number of samples."""

from __future__ import annotations

from dataclasses import dataclass

EXACT_SIZES = 16  # decode steps with more samples are counted together with those of nearly as many
COARSE = 8


@dataclass(frozen=True, kw_only=True)
class Load:
    """Holds the engine's load at one time.

    ``running``, ``queued`` and ``held`` count samples that decode, wait for slots, and wait for a weight version.
    ``busy_s`` is the time spent in prefill and decoding since the start, in seconds. ``prefill_tokens`` and
    ``cached_tokens`` count the tokens that prefills have computed since the start, and those that they have not,
    because they were kept; ``prefix_cache_bytes`` is the part of ``kv_cache_bytes`` that keeps them. ``tower_passes``
    counts the images and videos that have passed the vision tower since the start. ``decode_times`` has for each number
    of samples, coarse from `EXACT_SIZES` on, how many decode steps there were since the start, and their seconds.
    ``core_wait_s`` is the time since the start in which the decode thread was ready to run and got no core.
    """

    running: int
    queued: int
    held: int
    busy_s: float
    decode_steps: int
    generated_tokens: int
    kv_cache_bytes: int
    prefill_tokens: int = 0
    cached_tokens: int = 0
    prefix_cache_bytes: int = 0
    tower_passes: int = 0
    media_feature_bytes: int = 0
    decode_times: tuple[tuple[int, int, float], ...] = ()
    core_wait_s: float = 0.0


class DecodeMeter:
    """Counts decode steps and their wall time by the number of samples, because a larger step takes longer."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._seconds: dict[int, float] = {}

    def add(self, samples: int, seconds: float) -> None:
        """Counts one decode step with so many samples."""
        size = samples if samples <= EXACT_SIZES else samples - samples % COARSE
        self._counts[size] = self._counts.get(size, 0) + 1
        self._seconds[size] = self._seconds.get(size, 0.0) + seconds

    def times(self) -> tuple[tuple[int, int, float], ...]:
        """Returns (number of samples, steps, seconds) since the start."""
        return tuple((size, count, round(self._seconds[size], 6)) for size, count in sorted(self._counts.items()))
