"""Tests that an engine serves a version with LoRA factors like transformers with merged weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_core.config.choices import WeightTransportName
from relax_core.contracts.engine import EngineError, SamplingParams
from relax_core.weights.lora_merge import LoraFactors
from relax_core.weights.publisher import SyncReport, WeightPublisher
from relax_core.weights.transport_choice import build_transport
from relax_core.weights.version_writer import FROZEN, FROZEN_FOLDER, VersionWriter
from tests.contracts.engine.harness import (
    Engine,
    hf_weights,
    make_model,
    prompts_of,
    random_prompt,
    sglang_client,
    sglang_only,
)
from tests.contracts.engine.test_tokens_and_logprobs import transformers_logprobs

RANK, SCALE, TIMEOUT_S, TOLERANCE = 4, 2.0, 60.0, 1e-5
PROMPTS = [random_prompt(length, seed=length) for length in (5, 33)]


def factors_of(model: Any, *, seed: int, targets: str = "_proj.") -> list[LoraFactors]:
    """Returns random factors whose product is about a tenth of each weight."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for name, weight in hf_weights(model):
        if targets in name:
            a = torch.randn(RANK, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
            b = torch.randn(weight.shape[0], RANK, generator=generator) * 0.02
            found.append(LoraFactors(name, a, b, SCALE))
    return found


def merged_model(model: Any, factors: list[LoraFactors]) -> Any:
    """Returns a copy of the model with the sums computed in float64."""
    changed = copy.deepcopy(model)
    state = changed.state_dict()
    for name, a, b, scale in factors:
        state[name].copy_((state[name].double() + scale * (b.double() @ a.double())).float())
    return changed


def gap(engine: Engine, model: Any, version: int) -> float:
    params = SamplingParams(n=2, max_new_tokens=12)
    responses = engine.generate(prompts_of(*PROMPTS), params)
    largest = 0.0
    for response in responses:
        assert set(response.versions.tolist()) == {version}
        expected = transformers_logprobs(model, PROMPTS[response.prompt], response, params)
        largest = max(largest, float((expected - torch.tensor(response.logprobs)).abs().max()))
    return largest


@pytest.mark.parametrize("name", ["shared_memory", "disk"])
def test_log_probs_are_those_of_merged_weights(
    engine_back: Engine, name: str, tmp_path: Path, model_folder: Path
) -> None:
    engine, version, model = engine_back, engine_back.version, make_model(None, seed=0)
    weights = hf_weights(model)
    publisher = WeightPublisher(
        tmp_path,
        lambda: [engine.client],
        transport=build_transport(WeightTransportName(name), host="127.0.0.1", timeout_s=TIMEOUT_S),
        model_folder=model_folder,
        frozen=[weight for weight, _ in weights],
    )

    def send(factors: list[LoraFactors]) -> SyncReport:
        nonlocal version
        version += 1
        tensors = [] if publisher.has_frozen else weights
        return publisher.publish(version, tensors, factors=factors).result(timeout=2 * TIMEOUT_S)

    for seed in (1, 2, 3):  # each version begins with the base, not with the previous version
        factors = factors_of(model, seed=seed)
        report = send(factors)
        assert report.refused == {}
        assert report.bytes == sum(a.nbytes + b.nbytes for _, a, b, _ in factors)
        found = gap(engine, merged_model(model, factors), version)
        assert found <= TOLERANCE
        assert gap(engine, model, version) > 100 * TOLERANCE  # the test would notice missing factors

    few = factors_of(model, seed=4, targets="q_proj.")
    assert send(few).refused == {}
    assert gap(engine, merged_model(model, few), version) <= TOLERANCE  # the other weights are those of the base again

    file = tmp_path / FROZEN_FOLDER / FROZEN
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (why,) = send(few).refused.values()
    assert "digest" in why and engine.version == version - 1
    publisher.close()


@sglang_only
def test_a_server_without_the_loader_refuses_factors(engine: Engine, tmp_path: Path) -> None:
    """SGLang's loader of folders would load the base model and report the new version."""
    model, before = make_model(None, seed=0), engine.version
    weights = hf_weights(model)
    (tmp_path / "1").mkdir()
    writer = VersionWriter(tmp_path, frozen=[name for name, _ in weights], model_folder=None)
    manifest = writer.write(tmp_path / "1", before + 1, weights, factors=factors_of(model, seed=1))
    client = sglang_client(engine.process.url)
    client.has_loader = False  # as for a server that the run did not start
    with pytest.raises(EngineError, match="LoRA factors"):
        client.update_weights(manifest)
    assert engine.version == before
