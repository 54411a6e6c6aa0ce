"""Builds the body of a /generate that scores given tokens, and reads its reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np

from relax_core.contracts.kept_tokens import OUTSIDE, KeptTokens
from relax_core.contracts.media import Media
from relax_core.engines.protocol.reply_checks import MOST_LOGPROB, decoded, version_number
from relax_core.engines.protocol.request_body import media_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensToScore:
    """Holds a sequence whose tokens from position ``first`` on are scored.

    ``first`` is 1 or more, because nothing predicts the token at position 0. ``kept`` holds the set that each scored
    token was sampled from; None stands for the whole vocabulary. ``media`` places the sequence's images and videos.
    """

    input_ids: list[int]
    first: int
    kept: KeptTokens | None = None
    media: Sequence[Media] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenScores:
    """Holds the scores of one sequence.

    ``logprobs`` is float32 ``[tokens]``, one for each scored token. ``top_ids`` int32 and ``top_logprobs`` float32,
    ``[tokens, top_k]``, are the top-k tokens at its position, most likely first. If its kept set has fewer tokens, the
    ids end in -1 and the log-probs in `OUTSIDE`. ``version`` is that of the weights that scored, -1 if the engine does
    not tell a number.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    version: int = -1


class _Entry(msgspec.Struct, array_like=True, gc=False):
    """Holds a given token's log-prob, None for the first one; SGLang's id and text after it are not read."""

    logprob: float | None


class _TopEntry(msgspec.Struct, array_like=True, gc=False):
    logprob: float
    token_id: Annotated[int, msgspec.Meta(ge=0, le=np.iinfo(np.int32).max)]


class _Meta(msgspec.Struct):
    input_token_logprobs: list[_Entry]
    prompt_tokens: int = 0
    weight_version: str = ""
    input_top_logprobs: list[list[_TopEntry] | None] | None = None


class _Reply(msgspec.Struct):
    meta_info: _Meta


_ENTRY_BYTES = 512  # of one scored token, or of one of its most likely tokens, with SGLang's text of it
_OTHER_BYTES = 1 << 20  # of the rest of a reply


def most_bytes(items: Sequence[TokensToScore], *, top_k: int) -> int:
    """Returns the most bytes that a reply with the scores of ``items`` may have."""
    return _OTHER_BYTES + _ENTRY_BYTES * (top_k + 1) * sum(len(item.input_ids) + 16 for item in items)


def score_body(
    items: Sequence[TokensToScore], *, top_k: int, temperature: float, banned_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Returns the JSON body that asks for the scores of ``items``.

    SGLang's entry for the token at ``logprob_start_len`` is empty, so that the position before the first scored token
    is sent. Only the embedded engine takes kept sets and banned tokens in such a request.
    """
    truncated: dict[str, Any] = {"banned_token_ids": list(banned_token_ids)} if banned_token_ids else {}
    if any(item.kept is not None for item in items):
        truncated["kept_tokens"] = [item.kept for item in items]
    return (
        truncated
        | media_fields([item.media for item in items])
        | {
            "input_ids": [item.input_ids for item in items],
            "sampling_params": {"max_new_tokens": 0, "temperature": temperature},
            "return_logprob": True,
            "logprob_start_len": [item.first - 1 for item in items],
            "top_logprobs_num": [top_k for _ in items],
        }
    )


def read_scores(
    data: bytes,
    items: Sequence[TokensToScore],
    *,
    top_k: int,
    vocab_size: int | None = None,
    fewer: bool = False,
) -> list[TokenScores]:
    """Reads the scores of ``items`` from a reply. Raises ValueError if a score is missing or impossible.

    ``vocab_size`` is the model's, None if it is not known.
    With ``fewer``, a position may have fewer than ``top_k`` most likely tokens, because tokens were left out.
    """
    replies = decoded(data, list[_Reply])
    if len(replies) != len(items):
        raise ValueError(f"{len(replies)} replies to {len(items)} prompts")
    fewer = fewer and top_k > 0
    found = [
        _scores(reply.meta_info, item, top_k=top_k, fewer=fewer) for reply, item in zip(replies, items, strict=True)
    ]
    for scores in found:
        for values in (scores.logprobs, scores.top_logprobs):
            if values.size and not (np.isfinite(values).all() and float(values.max()) <= MOST_LOGPROB):
                raise ValueError("a log-prob is not finite, or is above 0")
        if vocab_size is not None and scores.top_ids.size and int(scores.top_ids.max()) >= vocab_size:
            raise ValueError(f"token id {int(scores.top_ids.max())}, which the vocabulary does not have")
    return found


def _scores(meta: _Meta, item: TokensToScore, *, top_k: int, fewer: bool) -> TokenScores:
    if meta.prompt_tokens not in (0, len(item.input_ids)):
        raise ValueError(f"the engine saw {meta.prompt_tokens} tokens and the request has {len(item.input_ids)}")
    expected = len(item.input_ids) - item.first
    logprobs = [entry.logprob for entry in meta.input_token_logprobs[1:] if entry.logprob is not None]
    tops = [top or [] for top in (meta.input_top_logprobs or [])[1:]] if top_k else [[]] * expected
    found = np.array([len(top) for top in tops], dtype=np.int64)
    fits = len(found) == expected and bool(((found >= min(1, top_k)) if fewer else (found == top_k)).all())
    if len(logprobs) != expected or not fits or (found > top_k).any():
        raise ValueError(f"{len(logprobs)} log-probs and {len(tops)} lists of top-k tokens for {expected} tokens")
    entries = list(chain.from_iterable(tops))
    present = np.arange(top_k) < found[:, None]
    ids = np.full((expected, top_k), -1, dtype=np.int32)
    values = np.full((expected, top_k), OUTSIDE, dtype=np.float32)
    with np.errstate(over="ignore"):  # infinities are refused later
        given = np.array(logprobs, dtype=np.float32)
        values[present] = [entry.logprob for entry in entries]
    ids[present] = [entry.token_id for entry in entries]
    version = version_number(meta.weight_version)
    return TokenScores(
        logprobs=given,
        top_ids=ids,
        top_logprobs=values,
        version=-1 if version is None else version,
    )
