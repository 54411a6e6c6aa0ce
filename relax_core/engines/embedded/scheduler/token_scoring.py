"""Computes log-probs of given tokens by a prefill that returns the logits of every position to be scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media
from relax_core.engines.embedded.model.decoder_model import LanguageModel
from relax_core.engines.embedded.model.prefill import SequenceMedia, Wanted, empty_kv, empty_states, prefill_passes
from relax_core.engines.embedded.scheduler.token_sampler import NonFiniteLogits

_CHUNK_ELEMENTS = 1 << 22  # logits that exist at one time, which bounds them and their log-softmax to 16 MiB each


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreItem:
    """Holds a sequence whose tokens from position ``start`` + 1 on are scored under softmax(logits / ``temperature``).

    The ``top_k`` most likely tokens at each of these positions are returned with the score. The softmax leaves out
    ``banned`` tokens, and the tokens outside of the scored token's set in ``kept``. ``media`` places the sequence's
    images and videos.
    """

    token_ids: Sequence[int]
    start: int
    top_k: int
    temperature: float
    banned: Sequence[int] = ()
    kept: KeptTokens | None = None
    media: Sequence[Media] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Holds the log-probs of the scored tokens, and the most likely tokens at their positions.

    Each entry of ``top_ids`` and ``top_logprobs`` has ``top_k`` numbers, most likely first; it has fewer if fewer
    tokens are left in the softmax.
    """

    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


def score(
    model: LanguageModel,
    items: Sequence[ScoreItem],
    *,
    dtype: torch.dtype,
    media: Sequence[SequenceMedia | None] = (),
) -> list[Scores]:
    """Scores ``items``, which share their banned tokens; returns the scores in their order.

    One call is fastest with items of similar length (`like_lengths`). ``media`` holds what each item's images and
    videos change. Raises NonFiniteLogits if the weights yield
    logits that are not finite.
    """
    # The logits of the last token are not computed, because they score no token of the item.
    sequences = [item.token_ids[:-1] or item.token_ids for item in items]
    kv = empty_kv(model, count=len(sequences), width=max(map(len, sequences)), dtype=dtype)
    inverse = torch.tensor([1.0 / item.temperature for item in items])
    top_k = max(item.top_k for item in items)
    parts = []
    asked, targets = _asked(items)
    kept, banned = _kept(items), torch.tensor(items[0].banned, dtype=torch.int64)
    step = max(1, _CHUNK_ELEMENTS // model.config.vocab_size)
    states = empty_states(model, count=len(sequences), dtype=dtype)
    for these, hidden in prefill_passes(model, sequences, kv, wanted=asked, states=states, media=media):
        for at in range(0, len(these), step):
            some = these[at : at + step]
            owners = asked.sequences[some]
            logits = model.logits(hidden[at : at + step])
            logits.mul_(inverse[owners, None]).index_fill_(1, banned, float("-inf"))
            if kept is not None:
                _leave_out(logits, kept.take(some.numpy()))
            logprobs = F.log_softmax(logits, -1)
            chosen = logprobs.gather(-1, targets[some, None])[:, 0]
            if bool(chosen.isnan().any()):
                raise NonFiniteLogits
            top = logprobs.topk(top_k, -1)
            parts.append((owners, chosen, top.indices, top.values))
    if not parts:
        return [Scores(logprobs=[], top_ids=[], top_logprobs=[]) for _ in items]
    owner, *columns = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
    found = []
    for index, item in enumerate(items):
        logprobs, ids, values = (column[owner == index] for column in columns)
        left = np.isfinite(values[:, : item.top_k]).sum(1).tolist()
        tops = [[line[:some] for line, some in zip(top.tolist(), left, strict=True)] for top in (ids, values)]
        found.append(Scores(logprobs=logprobs.tolist(), top_ids=tops[0], top_logprobs=tops[1]))
    return found


def _kept(items: Sequence[ScoreItem]) -> KeptTokens | None:
    """Returns the kept sets of all tokens to be scored, item after item; None if no item has any."""
    vocab_size = next((item.kept.vocab_size for item in items if item.kept is not None), None)
    if vocab_size is None:
        return None
    wholes = [len(item.token_ids) - 1 - item.start for item in items]
    return KeptTokens.joined(
        [
            KeptTokens.whole(tokens, vocab_size=vocab_size) if item.kept is None else item.kept
            for item, tokens in zip(items, wholes, strict=True)
        ]
    )


def _leave_out(logits: Tensor, kept: KeptTokens) -> None:
    """Sets to -inf the logits of the tokens outside of ``kept``, which has one set for each position.

    The vocabulary of the sets may be padded to another size than that of the logits.
    """
    mask = torch.from_numpy(kept.mask()[:, : logits.shape[1]])
    logits[:, : mask.shape[1]].masked_fill_(~mask, float("-inf"))
    logits[:, mask.shape[1] :] = float("-inf")


def _asked(items: Sequence[ScoreItem]) -> tuple[Wanted, Tensor]:
    """Returns the positions that predict a token to be scored, and these tokens."""
    sequences: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    for index, item in enumerate(items):
        last = len(item.token_ids) - 1
        sequences += [index] * (last - item.start)
        positions += range(item.start, last)
        targets += item.token_ids[item.start + 1 :]
    wanted = Wanted(torch.tensor(sequences, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64))
    return wanted, torch.tensor(targets, dtype=torch.int64)
