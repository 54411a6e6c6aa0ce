"""Holds the load of an engine at one time, and counts its decode steps by their number of samples."""

from __future__ import annotations

import time
from dataclasses import dataclass

from relax_core.contracts.host.core_wait import clock_and_core_wait_s

EXACT_SIZES = 16  # decode steps with more samples are counted together with those of nearly as many
COARSE = 8
GAP_S = 2e-4  # after a longer gap, such as a prefill, the wait for a core is read anew before a decode step
DecodeTimes = tuple[tuple[int, int, float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Holds the engine's load at one time.

    ``running``, ``queued`` and ``held`` count samples that decode, wait for slots, and wait for a weight version.
    ``busy_s`` is the time spent in prefill and decoding since the start, in seconds. ``prefill_tokens`` and
    ``cached_tokens`` count the tokens that prefills have computed since the start, and those that they have not,
    because they were kept; ``prefix_cache_bytes`` is the part of ``kv_cache_bytes`` that keeps them. ``token_usage`` is
    the share of engine.max_total_tokens that running samples may come to need. ``tower_passes`` counts the images and
    videos that have passed the vision tower since the start. ``decode_times`` has for each number of samples, coarse
    from `EXACT_SIZES` on, how many decode steps there were since the start, their seconds, and how many of these the
    decode thread was ready to run and got no core. ``decode_columns`` has for the same numbers of samples the columns
    of the KV cache that these steps have read in a layer (`DecodeAttention.columns`).
    """

    running: int
    queued: int
    held: int
    busy_s: float
    decode_steps: int
    generated_tokens: int
    kv_cache_bytes: int
    token_usage: float = 0.0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    prefix_cache_bytes: int = 0
    tower_passes: int = 0
    media_feature_bytes: int = 0
    decode_times: DecodeTimes = ()
    decode_columns: tuple[tuple[int, int], ...] = ()


class DecodeMeter:
    """Counts decode steps, their wall time, their waits for a core and their columns by the number of samples.

    A larger step takes longer. One thread uses it.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._seconds: dict[int, float] = {}
        self._waits: dict[int, float] = {}
        self._columns: dict[int, int] = {}
        self._began_s = self._ended_s = self._waited_s = 0.0

    def begin(self) -> None:
        """Begins a decode step."""
        self._began_s = time.perf_counter()
        if self._began_s - self._ended_s > GAP_S:
            self._began_s, self._waited_s = clock_and_core_wait_s()

    def end(self, samples: int, *, columns: int) -> None:
        """Ends a decode step with so many samples, which has read so many columns."""
        before_s = self._waited_s
        self._ended_s, self._waited_s = clock_and_core_wait_s()
        took_s = self._ended_s - self._began_s
        size = samples if samples <= EXACT_SIZES else samples - samples % COARSE
        self._counts[size] = self._counts.get(size, 0) + 1
        self._seconds[size] = self._seconds.get(size, 0.0) + took_s
        self._waits[size] = self._waits.get(size, 0.0) + min(took_s, self._waited_s - before_s)
        self._columns[size] = self._columns.get(size, 0) + columns

    def times(self) -> DecodeTimes:
        """Returns (number of samples, steps, seconds, seconds of waits) since the start."""
        return tuple(
            (size, count, round(self._seconds[size], 6), round(self._waits[size], 6))
            for size, count in sorted(self._counts.items())
        )

    def columns(self) -> tuple[tuple[int, int], ...]:
        """Returns (number of samples, columns that attention has read) since the start."""
        return tuple(sorted(self._columns.items()))
