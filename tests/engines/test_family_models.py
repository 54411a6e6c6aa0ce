"""Compares the embedded engine's model of every family with transformers: prefill, decode and bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.families import logprobs_of, random_ids
from benchmarks.family_models import VARIANTS, make_family_model
from relax_core.engines.embedded.decoder import Decoder, Prefix, ScoreItem, score
from relax_core.engines.embedded.decoder_model import LanguageModel
from relax_core.engines.embedded.fused_weights import FusedWeights
from relax_core.engines.embedded.model_config import read_model_config
from relax_core.engines.embedded.token_sampler import SamplingSettings, sample_keys
from relax_core.weights.folder_stream import read_safetensors

TOLERANCE = 2e-5
CONTEXT = 400
LENGTHS = (2, 40, 390)
SETTINGS = SamplingSettings(
    max_new_tokens=24, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(), banned_token_ids=()
)


def read_model(folder: Path, dtype: torch.dtype = torch.float32) -> LanguageModel:
    config = read_model_config(folder)
    weights = FusedWeights(config, dtype)
    weights.apply(weights.checked(read_safetensors(folder)))
    return LanguageModel(config, weights, context_length=CONTEXT)


def scored(model: LanguageModel, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    items = [ScoreItem(token_ids=random_ids(length), start=0, top_k=1, temperature=1.0) for length in LENGTHS]
    return torch.cat([torch.tensor(scores.logprobs) for scores in score(model, items, dtype=dtype)])


def expected(model: Any) -> torch.Tensor:
    return torch.cat([logprobs_of(model, random_ids(length)).float() for length in LENGTHS])


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_prefill_and_every_decoded_token(tmp_path: Path, variant: str) -> None:
    reference = make_family_model(tmp_path, variant)
    model = read_model(tmp_path)
    torch.testing.assert_close(scored(model), expected(reference), atol=TOLERANCE, rtol=0)
    decoder = Decoder(model, dtype=torch.float32, max_samples=4, max_tokens=4 * CONTEXT, context_length=CONTEXT)
    prompts = [random_ids(length) for length in LENGTHS[:2]]
    prefixes = [
        Prefix(token_ids=prompt, settings=SETTINGS, keys=sample_keys([index], 2)[0])
        for index, prompt in enumerate(prompts)
    ]
    done = decoder.admit(prefixes)
    while not len(done):
        done = decoder.step()
    for slot in range(4):
        ids, logprobs = decoder.slots.output(slot)
        assert len(ids) == 24
        wanted = logprobs_of(reference, [*prompts[slot // 2], *ids])[-24:]
        torch.testing.assert_close(torch.tensor(logprobs), wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_bfloat16_is_no_further_off_than_that_of_transformers(tmp_path: Path, variant: str) -> None:
    """The reference is float32 with the same weights rounded to bfloat16. The mean is over about 400 tokens."""
    reference = make_family_model(None, variant).bfloat16()
    reference.save_pretrained(tmp_path)
    ours = scored(read_model(tmp_path, torch.bfloat16), torch.bfloat16)
    theirs = expected(reference)
    exact = expected(reference.float())
    assert 0 < float((ours - exact).abs().mean()) <= float((theirs - exact).abs().mean())


def test_frequencies_that_old_folders_store_are_left_out(tmp_path: Path) -> None:
    """The first Llama folders store frequencies in addition to the weights, and a tied output weight twice."""
    from safetensors.torch import load_file, save_file

    make_family_model(tmp_path, "llama, tied, linear rope")
    weights = load_file(tmp_path / "model.safetensors")
    twice = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(12) for layer in range(2)}
    save_file(weights | twice | frequencies, tmp_path / "model.safetensors")
    read_model(tmp_path)
    save_file(
        weights | {"model.layers.2.self_attn.rotary_emb.inv_freq": torch.ones(12)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"unknown: model\.layers\.2\.self_attn\.rotary_emb\.inv_freq"):
        read_model(tmp_path)
