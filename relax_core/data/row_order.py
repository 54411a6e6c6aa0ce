"""Computes the endless order of training rows: epochs, each shuffled by the run's seed, without a list in memory.

With data.mix, each modality has a separate order, and prompts are drawn from the modalities by shares.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate

from relax_core.config.modality import MixOrder, mix_problem
from relax_core.contracts.data import DataRow, EvalSet, PromptSource

_ROUNDS = 4
BLOCK_PROMPTS = 1000  # length of a mixture's longest block; shares are exact to a thousandth


def row_of(index: int, *, rows: int, seed: int, shuffle: bool, stream: int = 0) -> int:
    """Returns the data row 0..rows-1 at ``index`` of the endless order.

    An epoch has ``rows`` successive indices and contains each data row once. The same arguments return the same row in
    any process and with any library version. ``stream`` selects one of several orders for the same seed.
    """
    assert index >= 0 and rows > 0
    epoch, position = divmod(index, rows)
    key = f"{seed}/{epoch}/{stream}" if stream else f"{seed}/{epoch}"
    return _permuted(position, rows=rows, key=key.encode()) if shuffle else position


class Mixture:
    """Orders prompts from several parts in fixed shares. The cursor is one integer.

    The endless order is divided into blocks of equal length. Each block contains the exact share of every part, in an
    order that depends on the seed and the block's number. So the prompt at any index is computed without the earlier
    indices. The block is as short as the weights allow: with weights 3:1 a block has 4 prompts. A block has at most
    `BLOCK_PROMPTS` prompts; for longer blocks the shares are rounded.
    """

    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        """Raises ValueError for a weight that is not above 0, or is too small in comparison with the sum."""
        self.shares = block_shares(weights)
        self._starts = [0, *accumulate(self.shares)]
        self._seed = seed

    def place(self, index: int) -> tuple[int, int]:
        """Returns the part of the prompt at ``index`` of the order, and the prompt's index in the order of the part."""
        length = self._starts[-1]
        block, slot = divmod(index, length)
        slot = _permuted(slot, rows=length, key=f"{self._seed}/mixture/{block}".encode())
        part = bisect_right(self._starts, slot) - 1
        return part, block * self.shares[part] + slot - self._starts[part]


def block_shares(weights: Sequence[float]) -> list[int]:
    """Returns the number of prompts from each part in a block.

    Raises ValueError for a weight below a thousandth of the sum of all weights.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact, start=Fraction(0))
    length = math.lcm(*(Fraction(weight, total).denominator for weight in exact))
    shares = apportion(min(length, BLOCK_PROMPTS), weights)
    for weight, share in zip(weights, shares, strict=True):
        if share == 0:
            raise ValueError(f"weight {weight:g} is less than a thousandth of all weights together. Raise it.")
    return shares


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Splits ``total`` into integers in proportion to ``weights``. Weights are 0 or more; at least one is above 0.

    Source: the method of largest remainders (Hamilton). Among equal remainders, the first parts get the additional
    units.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    quotas = [total * weight / sum(exact, start=Fraction(0)) for weight in exact]
    shares = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda part: shares[part] - quotas[part])
    for part in by_remainder[: total - sum(shares)]:
        shares[part] += 1
    return shares


def _permuted(position: int, *, rows: int, key: bytes) -> int:
    """Returns a keyed permutation of 0..rows-1 at ``position``.

    The permutation is a Feistel network on the next even power of two, repeated until the result is below ``rows``.
    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002), cycle walking.
    """
    half_bits = max(1, (max(rows - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = position >> half_bits, position & mask
        for number in range(_ROUNDS):
            message = b"%d/%d" % (number, right)
            digest = hashlib.blake2b(message, key=key[:64], digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        position = (left << half_bits) | right
        if position < rows:
            return position


class MixedSource:
    """Holds the rows of ``source`` in the order of a `MixOrder`.

    Rows of modalities that are not in the mix are never drawn.

    The rows of each modality are drawn epoch by epoch. The constructor reads the modality of every row once.

    Raises ValueError (key, value, fix) for invalid shares, and for a modality without rows.
    """

    def __init__(self, source: PromptSource, mix: Mapping[str, float], *, seed: int, shuffle: bool) -> None:
        if problem := mix_problem(mix):
            raise ValueError(problem)
        self._source, self._seed, self._shuffle = source, seed, shuffle
        self._order = MixOrder(mix)
        self._numbers = {name: array("q") for name in self._order.names}
        modalities: set[str] = set()
        for number in range(len(source)):
            modality = source.modality(number)
            if modality in self._numbers:
                self._numbers[modality].append(number)
            else:
                modalities.add(modality)
        there = sorted(modalities | {name for name, numbers in self._numbers.items() if numbers})
        for name, numbers in self._numbers.items():
            if not numbers:
                raise ValueError(
                    f"data.mix={dict(mix)}: none of the {len(source)} rows for training has modality {name}; they have "
                    f"{', '.join(there)}. Name only these (their shares sum to 1), or correct data.media_keys."
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
        """Returns the held-out split, which does not depend on the shares."""
        return self._source.held_out()
