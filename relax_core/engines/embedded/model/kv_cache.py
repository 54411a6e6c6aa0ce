"""Keys and values of the running samples: one rectangle of slots by columns, grown with need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from relax_core.engines.embedded.model.model_config import ModelConfig

FIRST_COLUMNS = 64


class KVCache:
    """``data`` is [layers, 2, slots, kv_heads, columns, head_dim]; slot s's token at position p lies in column p.

    Never larger than ``max_tokens`` slots times columns. Always finite: masked columns are multiplied by 0.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, max_tokens: int, max_slots: int, max_columns: int
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._max_tokens = max_tokens
        self._max_slots = max_slots
        self._max_columns = max_columns
        self.data = self._allocate(0, 0)

    def _allocate(self, slots: int, columns: int) -> Tensor:
        config = self._config
        shape = (config.num_layers, 2, slots, config.num_kv_heads, columns, config.head_dim)
        return torch.zeros(shape, dtype=self._dtype)

    @property
    def slots(self) -> int:
        return self.data.shape[2]

    @property
    def columns(self) -> int:
        return self.data.shape[4]

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def reserve(self, slots: int, columns: int, *, used_slots: int) -> bool:
        """Makes room for ``slots`` by ``columns`` (their product within the budget), keeps the first ``used_slots``.
        True where the rectangle was replaced."""
        assert slots * columns <= self._max_tokens and columns <= self._max_columns
        if slots <= self.slots and columns <= self.columns:
            return False
        new_columns = self.columns
        if columns > new_columns:
            new_columns = min(self._max_columns, max(columns, 2 * new_columns, FIRST_COLUMNS))
        new_slots = self.slots
        if slots > new_slots:
            new_slots = min(self._max_slots, max(slots, 2 * new_slots))
        if new_slots * new_columns > self._max_tokens:
            new_slots, new_columns = slots, min(self._max_columns, self._max_tokens // slots)
        old, self.data = self.data, self._allocate(new_slots, new_columns)
        kept = min(old.shape[4], new_columns)
        self.data[:, :, :used_slots, :, :kept] = old[:, :, :used_slots, :, :kept]
        return True

    def move(self, sources: Tensor, targets: Tensor, *, columns: int) -> None:
        """Copies the first ``columns`` of slots ``sources`` to slots ``targets`` (int64, disjoint)."""
        part = self.data[:, :, :, :, :columns]
        part[:, :, targets] = part[:, :, sources]

    def fill(self, first_slot: int, prefix: Tensor, source: Tensor) -> None:
        """Slots ``first_slot`` + i take prefix number ``source[i]`` of ``prefix`` [layers, 2, prefixes, kv_heads,
        columns, head_dim]."""
        width, count = prefix.shape[4], source.shape[0]
        self.data[:, :, first_slot : first_slot + count, :, :width] = prefix.index_select(2, source)

    def clear(self, slots: Sequence[int]) -> None:
        """Fills slots with zeros: a number that is not finite would reach who has the slot next."""
        self.data[:, :, torch.tensor(slots, dtype=torch.int64)] = 0

    def free(self) -> None:
        """Gives the memory back."""
        self.data = self._allocate(0, 0)
