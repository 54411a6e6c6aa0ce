"""Samples tokens with separate random numbers per sample; returns exact log-probs of the sampling distribution.

The uniform random number of a token is a hash of (sampling_seed, sample, position). A sample therefore does not depend
on the other samples in its batch. The hash is splitmix64's finaliser (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.contracts.kept_tokens import KeptTokens

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)
_UNIT = 2.0**-48  # with 48 bits, u times a rounded total stays below the total
WIDE_FROM = 1 << 20  # from this number of logits on, parts that fit the processor's cache are faster (without a sort)
_WIDE_ELEMENTS = 1 << 18  # maximum logits of such a part
_BLOCK = 128  # tokens per block; `_sample_wide` first sums each block
_BELOW_ONE = 1.0 - 2.0**-50  # two sums of the same block may differ in their last bits
_CHUNK_ELEMENTS = 1 << 23  # maximum logits that are sampled together; their float64 temporary takes 64 MiB


class NonFiniteLogits(RuntimeError):
    """Reports that the current weights yield NaN: the samples in ``slots`` cannot be sampled or scored."""

    def __init__(self, slots: Sequence[int] = ()) -> None:
        super().__init__("the current weights yield logits that are not finite")
        self.slots = slots


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Holds the sampling settings of one sample.

    ``temperature`` 0 is greedy. ``top_k`` -1, ``top_p`` 1 and ``min_p`` 0 are off. ``reports_kept`` is True if the kept
    sets of tokens are requested.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]
    banned_token_ids: tuple[int, ...]
    min_p: float = 0.0
    reports_kept: bool = False

    @property
    def plain(self) -> bool:
        """Returns whether tokens are sampled from the model's unchanged distribution."""
        return self.temperature == 1.0 and not self.banned_token_ids and not self.truncates

    @property
    def truncates(self) -> bool:
        """Returns whether top-k, top-p or min-p excludes tokens."""
        return self.temperature > 0.0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """Holds the settings of a batch, with one entry per sample. A field is None if no sample uses the setting."""

    inverse_temperature: Tensor | None = None  # [batch, 1] float32
    greedy: Tensor | None = None  # [batch] bool
    top_k: Tensor | None = None  # [batch, 1] int64, 1..vocab
    top_p: Tensor | None = None  # [batch, 1] float64, 2 is off
    min_p: Tensor | None = None  # [batch, 1] float64, 0 is off
    banned: tuple[Tensor, Tensor] | None = None  # (indices of samples, banned token ids)
    kept: Tensor | None = None  # int64: ascending indices of the samples with requested kept sets

    def part(self, first: int, last: int) -> SamplingPlan:
        """Returns the plan of samples [first, last) of the batch."""

        def cut(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[first:last]

        banned = self.banned
        if banned is not None:
            inside = (banned[0] >= first) & (banned[0] < last)
            banned = (banned[0][inside] - first, banned[1][inside])
        kept = self.kept
        if kept is not None:
            kept = kept[(kept >= first) & (kept < last)] - first
        return SamplingPlan(
            inverse_temperature=cut(self.inverse_temperature),
            greedy=cut(self.greedy),
            top_k=cut(self.top_k),
            top_p=cut(self.top_p),
            min_p=cut(self.min_p),
            banned=banned,
            kept=kept,
        )


PLAIN = SamplingPlan()


def sampling_plan(settings: Sequence[SamplingSettings], *, vocab_size: int) -> SamplingPlan:
    """Returns the plan of a batch.

    For greedy samples, the token is the argmax, with its log-prob at temperature 1 without truncation, as in SGLang.
    """
    if all(setting.plain for setting in settings):
        return PLAIN
    temperatures = np.array([setting.temperature for setting in settings])
    greedy = temperatures == 0.0
    inverse = 1.0 / np.where(greedy, 1.0, temperatures)
    truncates = [setting.truncates for setting in settings]
    top_k = [
        setting.top_k if cut and setting.top_k > 0 else vocab_size
        for setting, cut in zip(settings, truncates, strict=True)
    ]
    top_p = [
        setting.top_p if cut and setting.top_p < 1.0 else 2.0 for setting, cut in zip(settings, truncates, strict=True)
    ]
    banned = [index for index, setting in enumerate(settings) for _ in setting.banned_token_ids]
    ids = [token for setting in settings for token in setting.banned_token_ids]
    min_p = [setting.min_p if cut else 0.0 for setting, cut in zip(settings, truncates, strict=True)]
    sorts = any(
        cut and (setting.top_k > 0 or setting.top_p < 1.0) for setting, cut in zip(settings, truncates, strict=True)
    )
    kept = [index for index, setting in enumerate(settings) if setting.reports_kept]
    return SamplingPlan(
        inverse_temperature=torch.from_numpy(inverse.astype(np.float32))[:, None] if (inverse != 1.0).any() else None,
        greedy=torch.from_numpy(greedy) if greedy.any() else None,
        top_k=torch.tensor(top_k).clamp_(max=vocab_size)[:, None] if sorts else None,
        top_p=torch.tensor(top_p, dtype=torch.float64)[:, None] if sorts else None,
        min_p=torch.tensor(min_p, dtype=torch.float64)[:, None] if any(min_p) else None,
        banned=(torch.tensor(banned), torch.tensor(ids)) if banned else None,
        kept=torch.tensor(kept) if kept else None,
    )


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> _S30)) * _MIX_1
    values = (values ^ (values >> _S27)) * _MIX_2
    return values ^ (values >> _S31)


def sample_keys(sampling_seeds: Sequence[int], n: int) -> np.ndarray:
    """Returns a key for each of the ``n`` samples of each prompt, uint64 ``[prompts, n]``."""
    seeds = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in sampling_seeds], dtype=np.uint64)
    samples = np.arange(n, dtype=np.uint64)
    return _mix(_mix(seeds + _GOLDEN)[:, None] ^ _mix(samples * _GOLDEN + _MIX_1))


def keys_after(keys: np.ndarray, tokens: int) -> np.ndarray:
    """Returns the keys of samples that continue after the first ``tokens`` tokens of their response.

    `uniforms` of the new keys at position 0 equal `uniforms` of ``keys`` at position ``tokens``. No random number is
    drawn twice.
    """
    return keys + np.array([tokens], dtype=np.uint64) * _GOLDEN


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns uniform float64 numbers in [0, 1), ``[batch]``, from uint64 ``keys`` and positions in the response."""
    bits = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(16)).astype(np.float64) * _UNIT


def sample(
    logits: Tensor, plan: SamplingPlan, random: Tensor, *, kept: list[KeptTokens] | None = None
) -> tuple[Tensor, Tensor]:
    """Samples one token per sample. Returns token ids, int64 ``[batch]``, and log-probs, float32 ``[batch]``.

    ``logits`` is float32 ``[batch, vocab]`` and is overwritten. ``random`` is float64 ``[batch]`` in [0, 1). A log-prob
    is NaN if the sample's logits are not finite. The kept sets of the samples in ``plan.kept`` are appended to
    ``kept``, part by part.
    """
    batch, vocab = logits.shape
    wide = batch * vocab >= WIDE_FROM and plan.top_k is None
    if wide and plan.min_p is None and plan.kept is None:
        return _sample_wide(logits, plan, random)
    elements = _WIDE_ELEMENTS if wide else _CHUNK_ELEMENTS
    if batch * vocab <= elements:
        return _sample_part(logits, plan, random, kept)
    step = max(1, elements // vocab)
    parts = [
        _sample_part(logits[at : at + step], plan.part(at, min(at + step, batch)), random[at : at + step], kept)
        for at in range(0, batch, step)
    ]
    return torch.cat([ids for ids, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def _sample_part(
    logits: Tensor, plan: SamplingPlan, random: Tensor, kept: list[KeptTokens] | None
) -> tuple[Tensor, Tensor]:
    if plan.banned is not None:
        logits[plan.banned] = float("-inf")
    if plan.inverse_temperature is not None:
        logits.mul_(plan.inverse_temperature)
    if plan.top_k is not None and plan.top_p is not None:
        _truncate(logits, plan.top_k, plan.top_p, plan.min_p)
    elif plan.min_p is not None:
        return _sample_min_p(logits, plan, plan.min_p, random, kept)
    logprobs = logits.log_softmax(-1)
    if plan.kept is not None and kept is not None:
        # The mask comes from log-probs, which are NaN for non-finite logits. So the set is not empty.
        kept.append(KeptTokens.of_mask((logprobs[plan.kept] != float("-inf")).numpy()))
    ids = _draw(logprobs, plan, random)
    return ids.squeeze(1), logprobs.gather(-1, ids).squeeze(1)


def _draw(logprobs: Tensor, plan: SamplingPlan, random: Tensor) -> Tensor:
    """Returns for each sample the index of the token that its random number selects, int64 ``[batch, 1]``."""
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    target = random.unsqueeze(1) * cumulative.narrow(1, logprobs.shape[1] - 1, 1)
    # The first token with a cumulative probability above the target never has probability 0.
    ids = torch.searchsorted(cumulative, target, right=True).clamp_(max=logprobs.shape[1] - 1)
    if plan.greedy is not None:
        ids = torch.where(plan.greedy[:, None], logprobs.argmax(-1, keepdim=True), ids)
    return ids


def _sample_min_p(
    logits: Tensor, plan: SamplingPlan, min_p: Tensor, random: Tensor, kept: list[KeptTokens] | None
) -> tuple[Tensor, Tensor]:
    """Does the work of `_sample_part` for min-p alone, without sorting the vocabulary.

    Softmax and sums cover only the kept tokens, in the order of their ids. min-p keeps few tokens.
    """
    floor = logits.max(-1, keepdim=True).values.double() + min_p.log()  # logits with p >= min_p * p_max
    least = floor.float()
    # ``least`` is rounded up. Then float32 comparisons with ``least`` equal float64 comparisons with ``floor``. -inf is
    # never kept.
    least = torch.where(least < floor, least.nextafter(torch.tensor(float("inf"))), least)
    mask = logits >= least.clamp_(min=torch.finfo(torch.float32).min)
    counts = mask.sum(-1)
    broken = counts == 0  # samples with non-finite logits: their log-prob becomes NaN
    mask[broken, 0] = True
    counts.clamp_(min=1)
    rows, tokens = mask.nonzero(as_tuple=True)
    places = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    most = int(counts.max())
    ids = torch.zeros(len(logits), most, dtype=torch.int64)
    values = torch.full((len(logits), most), float("-inf"))
    ids[rows, places] = tokens
    values[rows, places] = logits[rows, tokens]
    values[broken] = float("nan")
    logprobs = values.log_softmax(-1)
    if plan.kept is not None and kept is not None:
        kept.append(KeptTokens.of_mask(mask[plan.kept].numpy()))
    drawn = _draw(logprobs, plan, random)
    return ids.gather(1, drawn).squeeze(1), logprobs.gather(1, drawn).squeeze(1)


def _sample_wide(logits: Tensor, plan: SamplingPlan, random: Tensor) -> tuple[Tensor, Tensor]:
    """Does the work of `_sample_part` for many logits, in parts that fit the processor's cache.

    Probabilities are summed in float64, first per block of tokens, then over the tokens of the block with the target.
    """
    if plan.banned is not None:
        logits[plan.banned] = float("-inf")
    batch, vocab = logits.shape
    rows = min(batch, max(1, _WIDE_ELEMENTS // vocab))
    blocks = -(-vocab // _BLOCK)
    weights = torch.zeros(rows, blocks, _BLOCK, dtype=torch.float64)  # zero after the last token
    flat = weights.view(rows, -1)
    ids, logprobs = torch.empty(batch, dtype=torch.int64), torch.empty(batch, dtype=torch.float32)
    for start in range(0, batch, rows):
        part = slice(start, start + rows)
        some = logits[part]
        if plan.inverse_temperature is not None:
            some.mul_(plan.inverse_temperature[part])
        every = some.log_softmax(-1)
        count = len(some)
        flat[:count, :vocab].copy_(every.exp())
        cumulative = weights[:count].sum(-1).cumsum_(-1)
        target = random[part, None] * cumulative[:, -1:]
        block = torch.searchsorted(cumulative, target, right=True).clamp_(max=blocks - 1)
        before = cumulative.gather(1, (block - 1).clamp_(min=0)).mul_(block > 0)
        inside = weights[torch.arange(count)[:, None], block].squeeze(1).cumsum_(-1).add_(before)
        target = torch.minimum(target, inside[:, -1:] * _BELOW_ONE)
        # The first token with a cumulative probability above the target never has probability 0.
        place = torch.searchsorted(inside, target, right=True).clamp_(max=_BLOCK - 1)
        found = (block * _BLOCK).add_(place).clamp_(max=vocab - 1)
        if plan.greedy is not None:
            found = torch.where(plan.greedy[part, None], every.argmax(-1, keepdim=True), found)
        ids[part] = found[:, 0]
        logprobs[part] = every.gather(1, found)[:, 0]
    return ids, logprobs


def _truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None) -> None:
    """Sets logits that top-k excludes to -inf, then applies top-p to the rest, then min-p."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ordered.masked_fill_(ordered < ordered.gather(-1, top_k - 1), float("-inf"))
    probabilities = F.softmax(ordered, -1, dtype=torch.float64)
    before = probabilities.cumsum(-1) - probabilities
    ordered.masked_fill_(before >= top_p, float("-inf"))
    if min_p is not None:
        ordered.masked_fill_(probabilities < min_p * probabilities[:, :1], float("-inf"))
    logits.scatter_(-1, order, ordered)


class KeptTable:
    """Stores the kept sets of the running samples' response tokens. Samples have the same slots as in `SlotTable`."""

    def __init__(self, capacity: int, *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._sets = [(bytearray(), bytearray()) for _ in range(capacity)]  # counts and words of each slot

    def put(self, slot: int, kept: KeptTokens | None) -> None:
        """Starts a sample in a slot. ``kept`` has the sets of the sample's existing tokens, or is None."""
        self._sets[slot] = (
            (bytearray(), bytearray()) if kept is None else (bytearray(kept.counts), bytearray(kept.words))
        )

    def record(self, slots: Sequence[int], kept: KeptTokens) -> None:
        """Appends the kept set of one more token to each of ``slots``."""
        ends = kept.word_ends().tolist()
        start = 0
        for number, (slot, end) in enumerate(zip(slots, ends, strict=True)):
            counts, words = self._sets[slot]
            counts += kept.counts[4 * number : 4 * number + 4]
            words += kept.words[4 * start : 4 * end]
            start = end

    def of_slot(self, slot: int, start: int = 0) -> KeptTokens:
        """Returns the kept sets of a sample's tokens from token ``start`` on."""
        counts, words = self._sets[slot]
        kept = KeptTokens(self._vocab_size, bytes(counts), bytes(words))
        return kept.take(np.arange(start, kept.tokens)) if start else kept

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Moves samples between slots; ``moves`` lists (from, to)."""
        for source, target in moves:
            self._sets[target], self._sets[source] = self._sets[source], (bytearray(), bytearray())
