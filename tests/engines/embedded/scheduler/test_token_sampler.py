"""Tests the sampler's distribution and determinism. Compares its truncation with transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.engines.embedded import token_sampler as sampler
from relax_core.engines.embedded.token_sampler import (
    SamplingSettings,
    sample,
    sample_keys,
    sampling_plan,
    uniforms,
)

VOCAB = 23


def sampling(**changes: object) -> SamplingSettings:
    fields: dict[str, object] = {
        "max_new_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": (),
        "banned_token_ids": (),
    }
    return SamplingSettings(**{**fields, **changes})  # type: ignore[arg-type]


def splitmix64(state: int) -> int:
    """Computes the splitmix64 finaliser in plain integers, like Steele, Lea and Flood's Java code."""
    mask = (1 << 64) - 1
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def test_uniforms_are_splitmix64s() -> None:
    keys = np.array([0, 1, 2**64 - 1, 12345], dtype=np.uint64)
    positions = np.array([0, 5, 9, 2**40])
    expected = [
        (splitmix64((int(key) + (int(position) + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 16) / 2**48
        for key, position in zip(keys, positions, strict=True)
    ]
    assert uniforms(keys, positions).tolist() == expected


def test_uniforms_are_uniform_and_uncorrelated_over_seeds_samples_and_positions() -> None:
    keys = sample_keys(range(40), 40).reshape(-1)
    assert len(set(keys.tolist())) == 1600
    drawn = np.stack([uniforms(keys, np.full(keys.shape, position)) for position in range(40)])
    assert drawn.min() >= 0.0 and drawn.max() < 1.0
    counts = np.histogram(drawn, bins=64, range=(0.0, 1.0))[0]
    expected = drawn.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120.0  # chi-square, 63 degrees: 120 has p = 2e-5
    for neighbours in (drawn[1:, :], np.roll(drawn, 1, axis=1)[1:, :]):
        assert abs(np.corrcoef(drawn[:-1].ravel(), neighbours.ravel())[0, 1]) < 0.02


def test_frequencies_are_the_probabilities() -> None:
    logits = torch.linspace(-2.0, 2.0, 8)
    draws = 40000
    random = torch.from_numpy(uniforms(sample_keys([3], draws)[0], np.zeros(draws, dtype=np.int64)))
    ids, _ = sample(logits.repeat(draws, 1), sampling_plan([sampling()], vocab_size=8), random)
    found = torch.bincount(ids, minlength=8) / draws
    assert float((found - logits.softmax(-1)).abs().max()) < 0.01


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.1, 3.0),
    top_p=st.floats(0.05, 1.0),
    top_k=st.sampled_from([-1, 1, 2, 7, VOCAB, VOCAB + 5]),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
)
def test_truncation_and_logprobs_are_those_of_transformers(
    seed: int, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    """The kept sets equal the kept sets of transformers' warpers."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3.0 * torch.randn(16, VOCAB, generator=generator)
    expected = logits / temperature
    if top_k > 0:
        expected = TopKLogitsWarper(top_k)(None, expected)  # type: ignore[arg-type]
    if top_p < 1.0:
        sums = expected.double().softmax(-1).sort(descending=True).values.cumsum(-1)
        clear = ((sums - top_p).abs() > 1e-5).all(-1)  # otherwise rounding decides whether a token is kept
        logits, expected = logits[clear], expected[clear]
        expected = TopPLogitsWarper(top_p)(None, expected)  # type: ignore[arg-type]
    if min_p > 0.0:
        ratios = expected.softmax(-1) / expected.softmax(-1).amax(-1, keepdim=True)
        clear = ((ratios - min_p).abs() > 1e-5).all(-1)
        logits, expected = logits[clear], MinPLogitsWarper(min_p)(None, expected[clear])
    expected = expected.log_softmax(-1)
    rows = len(logits)
    settings_ = sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, reports_kept=True)
    plan = sampling_plan([settings_] * rows, vocab_size=VOCAB)
    kept: list[KeptTokens] = []
    random = torch.rand(rows, dtype=torch.float64, generator=generator)
    ids, logprobs = sample(logits.clone(), plan, random, kept=kept)
    if rows:
        assert np.array_equal(KeptTokens.joined(kept).mask(), torch.isfinite(expected).numpy())
        assert KeptTokens.joined(kept).fault(ids.tolist()) is None
    assert torch.isfinite(expected.gather(-1, ids[:, None])).all()
    torch.testing.assert_close(logprobs, expected.gather(-1, ids[:, None])[:, 0], atol=1e-5, rtol=0.0)


def test_rows_with_different_settings_do_not_touch_each_other() -> None:
    kinds = [
        sampling(),
        sampling(temperature=0.0),
        sampling(temperature=0.5, top_k=3),
        sampling(top_p=0.5),
        sampling(banned_token_ids=(0, 4)),
        sampling(temperature=0.0, banned_token_ids=(1,)),
    ]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(kinds), VOCAB, generator=generator)
    random = torch.rand(len(kinds), dtype=torch.float64, generator=generator)
    ids, logprobs = sample(logits.clone(), sampling_plan(kinds, vocab_size=VOCAB), random)
    for row, kind in enumerate(kinds):
        alone = sample(logits[row : row + 1].clone(), sampling_plan([kind], vocab_size=VOCAB), random[row : row + 1])
        assert int(ids[row]) == int(alone[0]) and float(logprobs[row]) == pytest.approx(float(alone[1]), abs=1e-6)


def test_large_batches_are_sampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [
        sampling(
            temperature=0.5 + 0.1 * row, banned_token_ids=(row,), top_k=3 + row, min_p=0.01, reports_kept=row % 2 == 0
        )
        for row in range(10)
    ]
    plan = sampling_plan(kinds, vocab_size=VOCAB)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(10, VOCAB, generator=generator)
    random = torch.rand(10, dtype=torch.float64, generator=generator)
    kept: tuple[list[KeptTokens], list[KeptTokens]] = [], []
    whole = sample(logits.clone(), plan, random, kept=kept[0])
    monkeypatch.setattr(sampler, "_CHUNK_ELEMENTS", 3 * VOCAB)
    parts = sample(logits.clone(), plan, random, kept=kept[1])
    assert len(kept[1]) == 4 and KeptTokens.joined(kept[1]) == KeptTokens.joined(kept[0])
    assert KeptTokens.joined(kept[0]).tokens == 5
    assert torch.equal(whole[0], parts[0])
    torch.testing.assert_close(whole[1], parts[1])


def test_the_extremes_of_the_unit_interval_never_draw_an_impossible_token() -> None:
    logits = torch.zeros(2, 6)
    logits[:, [0, 5]] = float("-inf")
    random = torch.tensor([0.0, 1.0 - 2.0**-48], dtype=torch.float64)
    ids, logprobs = sample(logits, sampling_plan([sampling(), sampling()], vocab_size=6), random)
    assert ids.tolist() == [1, 4]
    assert torch.isfinite(logprobs).all()


def test_logits_that_are_not_finite_show_in_the_logprob() -> None:
    logits = torch.zeros(2, 6)
    logits[1, 2] = float("nan")
    _, logprobs = sample(
        logits, sampling_plan([sampling(), sampling()], vocab_size=6), torch.full((2,), 0.5, dtype=torch.float64)
    )
    assert torch.isnan(logprobs).tolist() == [False, True]


@pytest.mark.parametrize("truncation", [{"top_p": 0.6}, {"min_p": 0.5}])
@pytest.mark.parametrize("odd", ["nan", "inf", "-inf"])
def test_a_row_that_is_not_finite_leaves_the_kept_sets_of_others(odd: str, truncation: dict[str, float]) -> None:
    """Overflowed weights may give any of these values in a complete row of logits."""
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    random = torch.full((3,), 0.5, dtype=torch.float64)
    plan = sampling_plan([sampling(**truncation, reports_kept=True)] * 3, vocab_size=6)
    expected: list[KeptTokens] = []
    sample(logits.clone(), plan, random, kept=expected)
    logits[1] = float(odd)
    found: list[KeptTokens] = []
    _, logprobs = sample(logits, plan, random, kept=found)
    assert torch.isnan(logprobs).tolist() == [False, True, False]
    masks = [KeptTokens.joined(sets).mask() for sets in (found, expected)]
    assert np.array_equal(masks[0][[0, 2]], masks[1][[0, 2]])


@pytest.mark.parametrize("min_p", [0.0, 0.05])
@pytest.mark.parametrize("vocab", [300, 1024])
def test_parts_that_stay_in_the_cache_give_the_same_tokens(
    vocab: int, min_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    choices = (sampling(min_p=min_p), sampling(temperature=0.0), sampling(temperature=0.7, banned_token_ids=(3, 5)))
    plan = sampling_plan([choices[row % 3] for row in range(50)], vocab_size=vocab)
    logits, random = 4 * torch.randn(50, vocab), torch.rand(50, dtype=torch.float64)
    random[0] = 1 - 2.0**-48
    logits[0, -40:] = float("-inf")
    logits[1, 7] = float("nan")
    monkeypatch.setattr(sampler, "_WIDE_ELEMENTS", 8 * vocab)
    found = []
    for least in (0, 1 << 60):
        monkeypatch.setattr(sampler, "WIDE_FROM", least)
        found.append(sample(logits.clone(), plan, random))
    assert torch.equal(found[0][0][2:], found[1][0][2:]) and found[0][0][0] == found[1][0][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0, equal_nan=True)
    assert found[0][1][1].isnan() and int(found[0][1].isnan().sum()) == 1
