"""Bounds the numbers and lists of a /generate body, because larger ones would slow or end other requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relax_core.contracts.engine import MAX_TEMPERATURE, MIN_TEMPERATURE
from relax_core.engines.http_server.asgi import HttpError

MAX_SAMPLES = 65536  # samples of one request: prompts times n
MAX_CONTAINERS = 4 * MAX_SAMPLES  # lists and objects of one body; each takes many times its bytes once it is decoded
MAX_STOPS = 1024  # stop tokens of one sample; each step of a batch compares with all of them
MAX_RID = 1024  # characters
MAX_TOPS = 1 << 24  # top-k tokens in one reply
MAX_KEPT = 1 << 24  # kept tokens in one reply that lists their ids
SEEDS = range(-(1 << 63), 1 << 64)  # 64 bits, signed or unsigned
VERSIONS = range(-1, 1 << 63)
TEMPERATURES = f"0 (greedy), or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Holds the engine's sizes that bound a request, in tokens and samples.

    ``state_tokens`` is what the states of a sample's gated delta nets take of the cache, 0 for other models.
    """

    context_length: int
    max_running_samples: int
    max_total_tokens: int
    state_tokens: int


def is_temperature(value: float) -> bool:
    """Is True if the engine samples at this temperature; 0 stands for greedy decoding."""
    return value == 0.0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE


def check_within(key: str, values: Sequence[int], allowed: range, *, words: str) -> None:
    """Raises HttpError 400 for the first value that is not ``allowed``."""
    bad = next((value for value in values if value not in allowed), None)
    if bad is not None:
        raise HttpError(400, f"{key}: {bad}; give {words}")


def check_rids(given: str | list[str]) -> None:
    """Raises HttpError 400 for a rid that is too long."""
    longest = len(given) if isinstance(given, str) else max(map(len, given), default=0)
    if longest > MAX_RID:
        raise HttpError(400, f"rid: {longest} characters; give {MAX_RID} at most")


def token_set(key: str, ids: Sequence[int], *, vocab_size: int, limit: int) -> tuple[int, ...]:
    """Returns the distinct ids in order. Raises HttpError 400 for more than ``limit`` ids or an unknown token."""
    different = sorted(set(ids))
    if len(different) > limit:
        raise HttpError(400, f"{key}: {len(different)} token ids; give {limit} at most")
    bad = next((token for token in different if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise HttpError(400, f"{key}: token id {bad} is not in the vocabulary; ids go from 0 to {vocab_size - 1}")
    return tuple(different)


def same_length(key: str, found: int, count: int) -> None:
    """Raises HttpError 400 if a list has not one entry for each of the ``count`` prompts."""
    if found != count:
        raise HttpError(400, f"{key}: {found} entries for {count} prompts; give one for each, or a single value")


def per_prompt(key: str, value: int | list[int], count: int) -> list[int]:
    """Returns one value for each prompt. Raises HttpError 400 for a list of another length."""
    if isinstance(value, int):
        return [value] * count
    same_length(key, len(value), count)
    return value


def check_lengths(index: int, prompt: int, new: int, *, n: int, limits: RequestLimits) -> None:
    """Raises HttpError 400 for a prompt whose ``n`` samples of up to ``new`` new tokens have no room."""
    total = prompt + new
    if total > limits.context_length:
        raise HttpError(
            400,
            f"input_ids[{index}]: prompt of {prompt} tokens + max_new_tokens {new} = {total} is longer than the "
            f"context of {limits.context_length}; shorten one of them or raise engine.context_length",
        )
    if n > limits.max_running_samples:
        raise HttpError(
            400,
            f"sampling_params.n: {n} samples of one prompt, at most {limits.max_running_samples} run at one time; "
            f"lower n or raise engine.max_running_samples",
        )
    needed = n * (total + limits.state_tokens)
    if needed > limits.max_total_tokens:
        states = f", each with states of {limits.state_tokens} more," if limits.state_tokens else ""
        raise HttpError(
            400,
            f"input_ids[{index}]: n={n} samples of up to {total} tokens{states} need {needed} cache tokens, there are "
            f"{limits.max_total_tokens}; lower n or max_new_tokens, or raise engine.max_total_tokens",
        )
