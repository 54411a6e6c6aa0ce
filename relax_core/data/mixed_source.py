"""Gives the rows of a data source by shares of modalities (data.mix), with one order for each modality."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from relax_core.config.modality_shares import MixOrder, mix_problem
from relax_core.contracts.data import DataRow, EvalSet, PromptSource
from relax_core.data.order import row_of


class MixedSource:
    """Holds the rows of ``source`` in the order of a `MixOrder`; rows of other modalities are never drawn.

    Each modality goes through its own rows, epoch by epoch. The modality of every row is found once, here.

    Raises ValueError (key, value, fix) for shares that cannot be kept, and for a modality that no row has.
    """

    def __init__(self, source: PromptSource, mix: Mapping[str, float], *, seed: int, shuffle: bool) -> None:
        if problem := mix_problem(mix):
            raise ValueError(problem)
        self._source, self._seed, self._shuffle = source, seed, shuffle
        self._order = MixOrder(mix)
        self._numbers = {name: array("q") for name in self._order.names}
        others: set[str] = set()
        for number in range(len(source)):
            modality = source.modality(number)
            if modality in self._numbers:
                self._numbers[modality].append(number)
            else:
                others.add(modality)
        there = sorted(others | {name for name, numbers in self._numbers.items() if numbers})
        for name, numbers in self._numbers.items():
            if not numbers:
                raise ValueError(
                    f"data.mix={dict(mix)}: none of the {len(source)} rows for training has modality {name}; they have "
                    f"{', '.join(there)}. Name those, or correct data.media_keys, so that the shares sum to 1."
                )

    def __len__(self) -> int:
        return len(self._source)

    def number(self, index: int) -> int:
        """Returns the number of the data row at ``index`` of the order."""
        modality, place = self._order.at(index)
        numbers, stream = self._numbers[modality], self._order.names.index(modality)
        return numbers[row_of(place, rows=len(numbers), seed=self._seed, shuffle=self._shuffle, stream=stream)]

    def row(self, index: int) -> DataRow:
        """Returns the data row at ``index`` of the order. Raises `BadRow` if it cannot be used."""
        return self.numbered(self.number(index))

    def numbered(self, number: int) -> DataRow:
        """Returns the data row with this number. Raises `BadRow` if it cannot be used."""
        return self._source.numbered(number)

    def where(self, number: int) -> str:
        """Returns file and line of a data row."""
        return self._source.where(number)

    def modality(self, number: int) -> str:
        """Returns the modality of a data row."""
        return self._source.modality(number)

    def held_out(self) -> EvalSet:
        """Returns the held-out split, which no share changes."""
        return self._source.held_out()
