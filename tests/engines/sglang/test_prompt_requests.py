"""Tests SGLang's request body for several prompts."""

from __future__ import annotations

from relax_core.contracts.engine import PromptRequest, SamplingParams
from relax_core.engines.sglang.sglang_client import sample_requests, sample_seed, sglang_body

PROMPTS = [
    PromptRequest(rid="a", input_ids=[5, 6], sampling_seed=1),
    PromptRequest(rid="b", input_ids=[7, 8, 9], sampling_seed=2, samples=[2], generated=1),
]


def body_of(params: SamplingParams, *, seeds: bool = True) -> dict:
    return sglang_body(PROMPTS, sample_requests(PROMPTS, n=params.n), params, version=4, seeds=seeds)


def test_each_sample_is_a_request_with_a_name_of_its_own() -> None:
    first, second = sample_requests(PROMPTS, n=3), sample_requests(PROMPTS, n=3)
    assert [(request.prompt, request.sample) for request in first] == [(0, 0), (0, 1), (0, 2), (1, 2)]
    assert len({request.rid for request in first + second}) == 8
    assert [request.rid.rsplit("/", 2)[0] for request in first] == ["a", "a", "a", "b"]


def test_a_response_that_goes_on_has_its_own_seed_and_what_is_left_of_its_length() -> None:
    body = body_of(SamplingParams(n=3, max_new_tokens=8))
    assert body["input_ids"] == [[5, 6]] * 3 + [[7, 8, 9]]
    assert [params["max_new_tokens"] for params in body["sampling_params"]] == [8, 8, 8, 7]
    seeds = [params["sampling_seed"] for params in body["sampling_params"]]
    assert seeds == [sample_seed(1, 0), sample_seed(1, 1), sample_seed(1, 2), sample_seed(2, 2)]
    assert len(set(seeds)) == 4 and all(0 <= seed < 2**63 for seed in seeds)
    assert all("sampling_seed" not in params for params in body_of(SamplingParams(), seeds=False)["sampling_params"])


def test_a_prefix_is_shared_under_one_version_only() -> None:
    assert body_of(SamplingParams())["extra_key"] == "weights-4"


def test_truncated_sampling_asks_for_the_log_probs_of_what_was_left() -> None:
    assert body_of(SamplingParams(top_k=5))["return_sampling_mask"]
    assert body_of(SamplingParams(top_k=50, top_p=0.9))["return_sampling_mask"]
    body = body_of(SamplingParams(top_k=50, min_p=0.1))
    assert body["return_sampling_mask"] and body["sampling_params"][0]["min_p"] == 0.1
    assert not body_of(SamplingParams(temperature=0.5))["return_sampling_mask"]


def test_a_ban_is_a_probability_of_zero() -> None:
    import torch

    (bias, *_) = [params["logit_bias"] for params in body_of(SamplingParams(banned_token_ids=[3]))["sampling_params"]]
    logits = torch.tensor([0.5, 1e4, -2.0, 3e4])
    logits[3] += bias["3"]
    for temperature in (0.01, 1.0, 100.0):
        assert torch.softmax(logits / temperature, -1)[3] == 0.0
