"""Seeds belong to samples and not to processes, so that a group sampled again after a crash gets the same tokens."""

from __future__ import annotations

import hashlib


def sampling_seed(run_seed: int, *, index: int, purpose: str = "train") -> int:
    """Returns a 63-bit seed for the prompt at ``index`` in the order of issue; the engine adds sample and position."""
    digest = hashlib.blake2b(f"{purpose}:{run_seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
