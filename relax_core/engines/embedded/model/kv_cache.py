"""Holds keys and values of the running samples: one tensor of slots by columns, which grows with need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from relax_core.engines.embedded.model.model_config import ModelConfig

FIRST_COLUMNS = 64


class KVCache:
    """Holds ``data`` [layers, 2, slots, kv_heads, columns, head_dim]; a token at position p is in column p.

    Slots times columns never exceed ``max_tokens``. All numbers are finite, because masked columns are multiplied by 0.
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
        shape = (len(config.attention_layers), 2, slots, config.num_kv_heads, columns, config.head_dim)
        return torch.zeros(shape, dtype=self._dtype)

    @property
    def slots(self) -> int:
        """Returns the number of slots."""
        return self.data.shape[2]

    @property
    def columns(self) -> int:
        """Returns the number of columns, in tokens."""
        return self.data.shape[4]

    @property
    def nbytes(self) -> int:
        """Returns the size in bytes."""
        return self.data.numel() * self.data.element_size()

    def reserve(self, slots: int, columns: int, *, used_slots: int) -> bool:
        """Makes room for ``slots`` by ``columns`` and keeps the first ``used_slots``; is True if ``data`` was replaced.

        The product of ``slots`` and ``columns`` must not exceed ``max_tokens``.
        """
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
        """Copies the first ``columns`` columns of slots ``sources`` to slots ``targets`` (int64, disjoint)."""
        part = self.data[:, :, :, :, :columns]
        part[:, :, targets] = part[:, :, sources]

    def fill(self, first_slot: int, prefix: Tensor, source: Tensor) -> None:
        """Copies prefix ``source[i]`` to slot ``first_slot`` + i.

        ``prefix`` is [layers, 2, prefixes, kv_heads, columns, head_dim], ``source`` int64 ``[slots]``.
        """
        width, count = prefix.shape[4], source.shape[0]
        self.data[:, :, first_slot : first_slot + count, :, :width] = prefix.index_select(2, source)

    def clear(self, slots: Sequence[int]) -> None:
        """Fills slots with zeros, so that numbers that are not finite do not reach the next sample in the slot."""
        self.data[:, :, torch.tensor(slots, dtype=torch.int64)] = 0

    def free(self) -> None:
        """Frees the memory."""
        self.data = self._allocate(0, 0)
