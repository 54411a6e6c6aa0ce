"""Compares a mixture of experts with transformers: log-probs, and the experts of every token."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_core.contracts.engine import Generated, SamplingParams
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.weights.folder_stream import read_safetensors
from relax_core.weights.version_file import write_weights
from tests.contracts.engine.harness import (
    ENGINES,
    Engine,
    embedded_only,
    long_request,
    make_moe_model,
    prompts_of,
    random_prompt,
)

LAYERS, TOP_K = 3, 2
TOLERANCE = 2e-5
PROMPTS = [random_prompt(length, seed=length) for length in (1, 5, 16, 200)]
WANTED = SamplingParams(n=3, max_new_tokens=12, return_routed_experts=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny-moe")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return make_moe_model(folder, seed=0)


@pytest.fixture(scope="module", params=ENGINES)
def moe(request: pytest.FixtureRequest, model: Any, folder: Path) -> Iterator[Engine]:
    launch: EngineLaunch = request.getfixturevalue("launch" if request.param == "embedded" else "sglang_launch")
    process = EngineProcess.start(replace(launch, model_folder=folder, return_routed_experts=True))
    yield Engine(process, request.param)
    process.stop(timeout_s=5.0)


embedded_moe = pytest.mark.parametrize("moe", ["embedded"], indirect=True)


def transformers_view(model: Any, prompt: Sequence[int], response: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns transformers' log-probs of the response, sorted experts ``[prompt + response - 1, layers, top_k]``."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        output = model(ids, output_router_logits=True)
    logprobs = output.logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
    chosen = torch.stack([logits.topk(TOP_K, -1).indices for logits in output.router_logits], 1)[:-1]
    return logprobs.numpy(), chosen.sort(-1).values.numpy()


def experts_of(response: Generated) -> np.ndarray:
    assert response.prompt_experts is not None and response.response_experts is not None
    return np.concatenate([response.prompt_experts, response.response_experts])


def test_logprobs_and_experts_are_those_of_transformers(moe: Engine, model: Any) -> None:
    responses = moe.generate(prompts_of(*PROMPTS), WANTED)
    assert len(responses) == len(PROMPTS) * WANTED.n
    for response in responses:
        prompt = PROMPTS[response.prompt]
        logprobs, chosen = transformers_view(model, prompt, response.output_ids.tolist())
        assert np.abs(logprobs - response.logprobs).max() < TOLERANCE
        found = experts_of(response).reshape(len(prompt) + len(response.output_ids) - 1, LAYERS, TOP_K)
        assert found.dtype == np.uint8
        assert response.prompt_experts is not None and len(response.prompt_experts) == len(prompt)
        assert np.array_equal(np.sort(found, -1), chosen)


def test_requests_without_the_option_return_no_extra_data(moe: Engine) -> None:
    responses = moe.generate(prompts_of(*PROMPTS), SamplingParams(n=2, max_new_tokens=4))
    assert all(response.prompt_experts is None and response.response_experts is None for response in responses)


def test_sglangs_field_has_the_same_experts(moe: Engine, model: Any) -> None:
    body = {
        "input_ids": PROMPTS[1],
        "sampling_params": {"max_new_tokens": 9, "ignore_eos": True, "sampling_seed": 4},
        "return_routed_experts": True,
    }
    whole = moe.post("/generate", body)
    text = whole["meta_info"]["routed_experts"]
    rows = len(PROMPTS[1]) + len(whole["output_ids"]) - 1
    found = np.frombuffer(base64.b64decode(text), dtype="<i4").reshape(rows, LAYERS, TOP_K)
    assert np.array_equal(np.sort(found, -1), transformers_view(model, PROMPTS[1], whole["output_ids"])[1])
    with moe.stream(body) as events:
        last = list(events)[-1]
    assert last["meta_info"]["routed_experts"] == text
    assert "routed_experts" not in moe.post("/generate", {**body, "return_routed_experts": False})["meta_info"]


@embedded_moe
def test_tokens_keep_their_experts_when_the_cache_is_computed_anew_under_other_weights(
    moe: Engine, model: Any, tmp_path: Path
) -> None:
    other_model = make_moe_model(tmp_path, seed=1)
    body = long_request("experts", return_routed_experts=True)
    with moe.stream(body) as events:
        tokens: list[int] = []
        while len(tokens) < 10:
            tokens += next(events)["output_ids"]
        moe.client.pause("retract")
        moe.client.update_weights(write_weights(tmp_path / "1.bin", version=1, tensors=read_safetensors(tmp_path)))
        moe.client.resume()
        for event in events:
            tokens += event["output_ids"]
            meta = event["meta_info"]
            if meta["weight_versions"][-1]["end"] - meta["weight_versions"][0]["end"] >= 10:
                moe.client.abort("experts")
    change = meta["weight_versions"][0]["end"]  # tokens [0, change) were sampled with the first weights
    prompt = body["input_ids"]
    rows = len(prompt) + len(tokens) - 1
    found = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype="<i4").reshape(rows, LAYERS, TOP_K)
    first = transformers_view(model, prompt, tokens)[1]
    second = transformers_view(other_model, prompt, tokens)[1]
    fed_first = len(prompt) + change - 1  # the second weights compute the last token that the first weights sampled
    assert 10 <= change <= len(tokens) - 10
    assert np.array_equal(np.sort(found[:fed_first], -1), first[:fed_first])
    assert np.array_equal(np.sort(found[fed_first:], -1), second[fed_first:])
    assert not np.array_equal(first[:fed_first], second[:fed_first])
    moe.client.update_weights(_first_weights(model, tmp_path))


def _first_weights(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder / "first")
    return write_weights(folder / "2.bin", version=2, tensors=read_safetensors(folder / "first"))


def test_what_is_aborted_tells_the_experts_that_it_had(moe: Engine, model: Any) -> None:
    body = long_request("aborted", return_routed_experts=True)
    with moe.stream(body) as events:
        tokens = list(next(events)["output_ids"])
        moe.client.abort("aborted")
        for event in events:
            tokens += event["output_ids"]
            meta = event["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    rows = len(body["input_ids"]) + len(tokens) - 1
    found = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype="<i4").reshape(rows, LAYERS, TOP_K)
    assert np.array_equal(np.sort(found, -1), transformers_view(model, body["input_ids"], tokens)[1])


@embedded_only
def test_a_dense_model_has_none_to_tell(engine: Engine) -> None:
    status, answer = engine.call("/generate", {"input_ids": [5, 6], "return_routed_experts": True})
    assert status == 400
    assert answer["error"]["message"] == "return_routed_experts=true: the model has no experts; leave it out"


@embedded_moe
def test_an_engine_may_compute_in_half_precision(moe: Engine, model: Any, folder: Path, start_engine: Any) -> None:
    """The log-probs are close to the exact values, but not equal."""
    half = start_engine(model_folder=folder, dtype="bfloat16")
    gaps = []
    for response in half.generate(prompts_of(*PROMPTS), WANTED):
        logprobs, _ = transformers_view(model, PROMPTS[response.prompt], response.output_ids.tolist())
        gaps.append(np.abs(logprobs - response.logprobs).max())
    assert 1e-4 < np.median(gaps) < 0.3
