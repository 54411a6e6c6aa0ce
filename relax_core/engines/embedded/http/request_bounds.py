"""How large the numbers and lists of a /generate body may be: beyond these they would harm other requests."""

from __future__ import annotations

from collections.abc import Sequence

from relax_core.contracts.engine import MAX_TEMPERATURE, MIN_TEMPERATURE
from relax_core.engines.embedded.http.asgi import HttpError

MAX_SAMPLES = 65536  # of one request: prompts times n
MAX_CONTAINERS = 4 * MAX_SAMPLES  # lists and objects of a body: each takes many times its bytes when it is read
MAX_STOPS = 1024  # stop tokens of a sample, and
MAX_BANNED = 16384  # banned tokens of a request: each step of a batch looks at them all
MAX_RID = 1024  # characters
MAX_TOPS = 1 << 24  # top-k tokens that one reply tells, and
MAX_KEPT = 1 << 24  # kept ones, where it lists their ids
SEEDS = range(-(1 << 63), 1 << 64)  # 64 bits, signed or not
VERSIONS = range(-1, 1 << 63)
TEMPERATURES = f"0 (greedy), or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"


def is_temperature(value: float) -> bool:
    return value == 0.0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE


def check_within(key: str, values: Sequence[int], allowed: range, *, words: str) -> None:
    """Raises HttpError 400 for the first value that is not ``allowed``."""
    bad = next((value for value in values if value not in allowed), None)
    if bad is not None:
        raise HttpError(400, f"{key}: {bad}; give {words}")


def check_rids(given: str | list[str]) -> None:
    """Raises HttpError 400 for one that is too long."""
    longest = len(given) if isinstance(given, str) else max(map(len, given), default=0)
    if longest > MAX_RID:
        raise HttpError(400, f"rid: {longest} characters; give {MAX_RID} at most")


def token_set(key: str, ids: Sequence[int], *, vocab_size: int, limit: int) -> tuple[int, ...]:
    """The different ids in order. Raises HttpError 400 for more than ``limit`` of them, or one that is no token."""
    different = sorted(set(ids))
    if len(different) > limit:
        raise HttpError(400, f"{key}: {len(different)} token ids; give {limit} at most")
    bad = next((token for token in different if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise HttpError(400, f"{key}: token id {bad} is not in the vocabulary; ids go from 0 to {vocab_size - 1}")
    return tuple(different)
