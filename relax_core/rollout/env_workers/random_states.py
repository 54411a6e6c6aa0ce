"""Isolates Python's and NumPy's global random states of each episode."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_NUMPY_SEEDS = 2**32


class RandomStates:
    """Stores the random states of one episode while other episodes of the process run."""

    def __init__(self, seed: int) -> None:
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Seeds both states with ``seed``."""
        self._python = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed % _NUMPY_SEEDS).get_state()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes the episode's states the global states while the context is open; draws advance these states."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python = random.getstate()
            self._numpy = np.random.get_state()
