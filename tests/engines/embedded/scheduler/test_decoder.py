"""Tests slots and their cache while samples arrive, end and grow: each sample decodes as if it were alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from relax_core.engines.embedded.decoder import Decoder, Prefix
from relax_core.engines.embedded.decoder_model import LanguageModel
from relax_core.engines.embedded.fused_weights import FusedWeights
from relax_core.engines.embedded.kv_cache import KVCache
from relax_core.engines.embedded.model_config import ModelConfig, read_model_config
from relax_core.engines.embedded.prefill import like_lengths
from relax_core.engines.embedded.token_sampler import SamplingSettings, sample_keys
from relax_core.weights.folder_stream import read_safetensors
from tests.contracts.engine.harness import VOCAB, make_model, random_prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_model(path, seed=2)
    return path


@pytest.fixture(scope="module")
def config(folder: Path) -> ModelConfig:
    return read_model_config(folder)


@pytest.fixture(scope="module")
def model(folder: Path, config: ModelConfig) -> LanguageModel:
    weights = FusedWeights(config, torch.float32)
    weights.apply(weights.checked(read_safetensors(folder)))
    return LanguageModel(config, weights, context_length=256)


def decoder(model: LanguageModel, *, max_samples: int = 16, max_tokens: int = 1024) -> Decoder:
    return Decoder(model, dtype=torch.float32, max_samples=max_samples, max_tokens=max_tokens, context_length=256)


def prefix(length: int, *, new: int, n: int = 1, seed: int = 0) -> Prefix:
    settings = SamplingSettings(
        max_new_tokens=new, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(), banned_token_ids=()
    )
    return Prefix(token_ids=random_prompt(length, seed=seed), settings=settings, keys=sample_keys([seed], n)[0])


def alone(model: LanguageModel, asked: Prefix) -> tuple[list[int], list[float]]:
    single = decoder(model)
    done = single.admit([asked])
    while not len(done):
        done = single.step()
    return single.slots.output(0)


# Rounding differs by about 1e-6 between batch sizes and between CPUs. With these seeds, no random number is within
# 1.5e-5 of the boundary to another token.
@pytest.mark.parametrize("seed", [13, 21, 23, 28])
def test_arrivals_departures_and_growth(model: LanguageModel, seed: int) -> None:
    rng = random.Random(seed)
    waiting = [prefix(rng.randint(1, 60), new=rng.randint(1, 40), seed=100 * seed + number) for number in range(40)]
    expected = {id(late): alone(model, late) for late in waiting}
    shared = decoder(model, max_samples=8)
    running: list[Prefix] = []
    peak = 0
    with torch.inference_mode():
        while waiting or running:
            arriving = []
            for candidate in waiting[: rng.randint(0, 3)]:
                columns = max(arrived.columns for arrived in [*arriving, candidate])
                if shared.fits(samples=len(arriving) + 1, columns=columns):
                    arriving.append(candidate)
                else:
                    break
            waiting = waiting[len(arriving) :]
            if arriving:
                running += arriving
                leave(shared, running, shared.admit(arriving).tolist(), expected)
            if running:
                leave(shared, running, shared.step().tolist(), expected)
            peak = max(peak, shared.cache.slots * shared.cache.columns)
    assert peak <= 1024


def leave(
    shared: Decoder, running: list[Prefix], slots: list[int], expected: dict[int, tuple[list[int], list[float]]]
) -> None:
    for slot in slots:
        ids, logprobs = shared.slots.output(slot)
        assert ids == expected[id(running[slot])][0]
        assert logprobs == pytest.approx(expected[id(running[slot])][1], abs=1e-5)
    for source, target in shared.remove(slots):
        running[target] = running[source]
    del running[shared.slots.count :]


@torch.inference_mode()
def test_a_group_is_prefilled_once(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    hidden = LanguageModel.hidden

    def counted(self: LanguageModel, ids: torch.Tensor, *others: object, **more: object) -> torch.Tensor:
        rows.append(ids.shape[0])
        return hidden(self, ids, *others, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(LanguageModel, "hidden", counted)
    shared = decoder(model)
    shared.admit([prefix(20, new=4, n=8)])
    assert rows == [20]
    shared.step()
    assert rows == [20, 8]


def test_prefill_batches_hold_every_prefix_once_and_stay_small() -> None:
    rng = random.Random(0)
    lengths = [rng.choice([1, 5, 90, 700, 1500]) for _ in range(60)]
    batches = list(like_lengths(lengths))
    assert sorted(index for batch in batches for index in batch) == list(range(60))
    for batch in batches:
        width = max(lengths[index] for index in batch)
        assert len(batch) == 1 or len(batch) * width <= 512


def test_cache_grows_within_its_budget_and_keeps_what_it_holds(config: ModelConfig) -> None:
    cache = KVCache(config, torch.float32, max_tokens=1000, max_slots=20, max_columns=200)
    assert cache.reserve(2, 30, used_slots=0)
    cache.data.normal_()
    held = cache.data[:, :, :2, :, :30].clone()
    for slots, columns in ((3, 30), (3, 90), (10, 100), (5, 200)):
        cache.reserve(slots, columns, used_slots=2)
        assert cache.slots >= slots and cache.columns >= columns
        assert cache.slots * cache.columns <= 1000
        assert torch.equal(cache.data[:, :, :2, :, :30], held)
    assert not cache.reserve(1, 1, used_slots=1)
    cache.free()
    assert cache.nbytes == 0


def test_fused_weights_say_what_does_not_fit(folder: Path, config: ModelConfig) -> None:
    weights = FusedWeights(config, torch.float32)
    tensors = dict(read_safetensors(folder))
    tensors["model.embed_tokens.weight"] = torch.zeros(VOCAB, 64, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"wrong dtype: model.embed_tokens.weight is torch.int64"):
        weights.checked(tensors.items())
