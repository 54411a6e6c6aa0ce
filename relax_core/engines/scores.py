"""Scoring of given tokens through SGLang's /generate: the body that asks for it, and what is read of the reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from relax_core.contracts.kept_tokens import KeptTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensToScore:
    """``input_ids`` from place ``first`` on are scored; 1 or more, since nothing says how likely the very first is.
    ``kept``: the set of tokens that each of them was sampled from; None: the whole vocabulary."""

    input_ids: list[int]
    first: int
    kept: KeptTokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """One entry a scored token. ``top_ids``, ``top_logprobs``: the likeliest tokens at its place, likeliest first;
    fewer where its kept set has no more."""

    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


_Entry = tuple[float | None, int, str | None]


class _Meta(msgspec.Struct):
    input_token_logprobs: list[_Entry]
    input_top_logprobs: list[list[_Entry] | None] | None = None


class _Reply(msgspec.Struct):
    meta_info: _Meta


_decoder = msgspec.json.Decoder(list[_Reply])


def score_body(
    rows: Sequence[TokensToScore], *, top_k: int, temperature: float, banned_token_ids: Sequence[int]
) -> dict[str, Any]:
    """SGLang scores from ``logprob_start_len`` on, whose own entry is empty: hence the place before the first. It knows
    neither kept sets nor banned tokens here: they are the embedded engine's."""
    truncated: dict[str, Any] = {"banned_token_ids": list(banned_token_ids)} if banned_token_ids else {}
    if any(row.kept is not None for row in rows):
        truncated["kept_tokens"] = [row.kept for row in rows]
    return truncated | {
        "input_ids": [row.input_ids for row in rows],
        "sampling_params": {"max_new_tokens": 0, "temperature": temperature},
        "return_logprob": True,
        "logprob_start_len": [row.first - 1 for row in rows],
        "top_logprobs_num": [top_k for _ in rows],
    }


def read_scores(data: bytes, rows: Sequence[TokensToScore], *, top_k: int, fewer: bool = False) -> list[TokenScores]:
    """Raises ValueError for a reply that has not a number for every token asked for. ``fewer``: where tokens were left
    out there may be less than ``top_k`` likeliest ones."""
    replies = _decoder.decode(data)
    if len(replies) != len(rows):
        raise ValueError(f"{len(replies)} replies to {len(rows)} prompts")
    fewer = fewer and top_k > 0
    return [_scores(reply.meta_info, row, top_k=top_k, fewer=fewer) for reply, row in zip(replies, rows, strict=True)]


def _scores(meta: _Meta, row: TokensToScore, *, top_k: int, fewer: bool) -> TokenScores:
    expected = len(row.input_ids) - row.first
    logprobs = [logprob for logprob, _, _ in meta.input_token_logprobs[1:] if logprob is not None]
    tops = [top or [] for top in (meta.input_top_logprobs or [])[1:]] if top_k else [[]] * expected
    found = [len(top) for top in tops]
    fits = (
        len(found) == expected and all(1 <= size <= top_k for size in found) if fewer else found == [top_k] * expected
    )
    if len(logprobs) != expected or not fits:
        raise ValueError(f"{len(logprobs)} log-probs and {len(tops)} lists of likeliest tokens for {expected} tokens")
    values = [[logprob for logprob, _, _ in top if logprob is not None] for top in tops]
    return TokenScores(logprobs=logprobs, top_ids=[[token for _, token, _ in top] for top in tops], top_logprobs=values)
