"""The order of training rows: epochs without end, each shuffled by the run's seed, and nothing kept in memory."""

from __future__ import annotations

import hashlib

_ROUNDS = 4


def row_of(index: int, *, rows: int, seed: int, shuffle: bool) -> int:
    """The row 0..rows-1 that stands at place ``index`` of the endless order.

    Every ``rows`` places in a row are an epoch and hold each row once. The same arguments give the same row in any
    process and with any library version.
    """
    assert index >= 0 and rows > 0
    epoch, place = divmod(index, rows)
    return _permuted(place, rows=rows, key=f"{seed}/{epoch}".encode()) if shuffle else place


def _permuted(place: int, *, rows: int, key: bytes) -> int:
    """A keyed permutation of 0..rows-1: a Feistel network on the next even power of two, walked until it lands inside.

    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002), cycle walking.
    """
    half_bits = max(1, (max(rows - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = place >> half_bits, place & mask
        for number in range(_ROUNDS):
            message = b"%d/%d" % (number, right)
            digest = hashlib.blake2b(message, key=key[:64], digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        place = (left << half_bits) | right
        if place < rows:
            return place
