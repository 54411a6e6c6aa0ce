"""Tests requests that an engine refuses. Each error names key, value and fix."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relax_core.contracts.engine import EngineError, SamplingParams
from relax_core.engines.protocol.engine_client import TokensToScore
from tests.contracts.engine.harness import CONTEXT, VOCAB, Engine, embedded_only, prompts_of, sglang_only

OK = {"input_ids": [5, 6]}


@embedded_only
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input_ids: missing"),
        ({"input_ids": []}, "input_ids: missing or empty"),
        ({"input_ids": [[5], []]}, "input_ids[1]: empty"),
        ({"input_ids": [5, [6]]}, "mixed"),
        ({"input_ids": [5, VOCAB]}, f"input_ids[0]: token id {VOCAB} at position 1 is not in the vocabulary"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"text": "hello", **OK}, "text='hello'"),
        ({"stram": True, **OK}, "stram"),
        ({"return_routed_experts": True, **OK}, "return_routed_experts=true: the model has no experts"),
        ({"sampling_params": {"temprature": 1.0}, **OK}, "temprature"),
        ({"sampling_params": {"temperature": -1.0}, **OK}, "sampling_params.temperature: -1.0"),
        ({"sampling_params": {"top_p": 0.0}, **OK}, "sampling_params.top_p: 0.0"),
        ({"sampling_params": {"top_k": 0}, **OK}, "sampling_params.top_k: 0"),
        ({"sampling_params": {"max_new_tokens": 0}, **OK}, "sampling_params.max_new_tokens: 0"),
        ({"sampling_params": {"n": 0}, **OK}, "sampling_params.n: 0"),
        ({"sampling_params": {"n": 129}, **OK}, "at most 128 run at one time"),
        ({"sampling_params": {"n": 128, "max_new_tokens": 30000}, **OK}, "cache tokens"),
        ({"sampling_params": {"stop_token_ids": [99]}, **OK}, "stop_token_ids: token id 99"),
        ({"sampling_params": {"frequency_penalty": 0.5}, **OK}, "sampling_params.frequency_penalty=0.5"),
        ({"sampling_params": [{}, {}], **OK}, "sampling_params: 2 entries for 1 prompts"),
        ({"banned_token_ids": list(range(VOCAB)), **OK}, "every token of the vocabulary is banned"),
        ({"min_version": [1, 2], **OK}, "min_version: 2 entries for 1 prompts"),
        ({"samples": [[1]], **OK}, "samples[0]: [1]; give different numbers from 0 to n - 1 = 0"),
        ({"samples": [[0, 0]], "sampling_params": {"n": 2}, **OK}, "samples[0]: [0, 0]"),
        ({"samples": [[]], **OK}, "samples[0]: []"),
        ({"samples": [[0], [0]], **OK}, "samples: 2 entries for 1 prompts"),
        ({"generated": 2, **OK}, "generated[0]: 2 of 2 input_ids; give 0 to 1"),
        (
            {"input_ids": [5] * 32700},
            "prompt of 32700 tokens + max_new_tokens 128 = 32828 is longer than the context of 32768",
        ),
    ],
)
def test_malformed_requests_are_refused_in_words(engine: Engine, body: dict[str, Any], message: str) -> None:
    status, answer = engine.call("/generate", body)
    assert status == 400
    assert message in answer["error"]["message"]


@sglang_only
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input_ids"),
        ({"input_ids": []}, "input_ids cannot be empty"),
        ({"sampling_params": {"temperature": -1.0}, **OK}, "temperature must be"),
        ({"sampling_params": {"top_p": 0.0}, **OK}, "top_p must be"),
        ({"sampling_params": {"logit_bias": {str(10**6): -1.0}}, **OK}, "logit_bias"),
        ({"input_ids": [5] * (CONTEXT + 8)}, "longer than the model's context length"),
        ({"rid": ["a", "a"], "input_ids": [[5], [6]]}, "Duplicate request ID"),
    ],
)
def test_sglangs_refusals_are_words_too(engine: Engine, body: dict[str, Any], message: str) -> None:
    status, answer = engine.call("/generate", body)
    assert status == 400 and message in json.dumps(answer), answer
    assert engine.client.ready()


@pytest.mark.parametrize("token", [VOCAB, -1])
def test_a_token_outside_of_the_vocabulary_is_refused_and_harms_nobody(engine: Engine, token: int) -> None:
    """SGLang's server would fail on such a token."""
    message = rf"token id {token} at position 2 is not in the vocabulary; ids go from 0 to {VOCAB - 1}"
    with pytest.raises(EngineError, match=rf"/generate: .*input_ids\[1\] of rid prompt-1: {message}"):
        engine.generate(prompts_of([5, 6], [7, 8, token]), SamplingParams(max_new_tokens=2))
    with pytest.raises(EngineError, match=rf"/generate: .*input_ids\[0\]: {message}"):
        engine.client.score([TokensToScore(input_ids=[7, 8, token], first=1)], top_k=0, temperature=1.0)
    assert len(engine.generate(prompts_of([5, 6]), SamplingParams(max_new_tokens=2))) == 1


@pytest.mark.parametrize("path", ["/generate", "/abort_request", "/pause_generation"])
@pytest.mark.parametrize("body", [b"{", b"[1,2]", b'"a"'])
def test_a_body_that_is_no_object_is_refused(engine: Engine, path: str, body: bytes) -> None:
    assert 400 <= engine.call(path, body=body)[0] < (401 if engine.kind == "embedded" else 500)


@embedded_only
def test_a_body_that_is_no_text_is_refused(engine: Engine) -> None:
    assert engine.call("/generate", body=b"\xff\xfe")[0] == 400


@embedded_only
def test_unknown_pause_mode_and_empty_abort(engine: Engine) -> None:
    assert engine.call("/pause_generation", {"mode": "softly"})[0] == 400
    status, answer = engine.call("/abort_request", {})
    assert status == 400 and "abort_all" in answer["error"]["message"]


CHANGING = [
    "/generate",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/update_weights_from_shared_memory",
    "/update_weights_from_disk",
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/end_weight_update",
    "/update_weight_version",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
]


@pytest.mark.parametrize("path", CHANGING)
@pytest.mark.parametrize("token", [None, "", "wrong", "token-of-the-ru"])
def test_routes_that_change_something_want_the_token(engine: Engine, path: str, token: str | None) -> None:
    status, answer = engine.call(path, OK, token=token)
    assert status == 401
    assert engine.kind == "sglang" or "bearer token" in answer["error"]["message"]


@embedded_only
def test_unknown_routes_list_the_known_ones(engine: Engine) -> None:
    status, answer = engine.call("/generat", OK)
    assert status == 404 and "/generate" in answer["error"]["message"]
    assert engine.call("/generate", method="GET")[0] == 404


@embedded_only
def test_an_oversize_body_is_refused_before_it_is_read(engine: Engine) -> None:
    for path in ("/generate", "/pause_generation"):
        connection = engine.connection()
        connection.putrequest("POST", path)
        connection.putheader("Authorization", "Bearer token-of-the-run")
        connection.putheader("Content-Length", str(1 << 40))
        connection.endheaders()
        response = connection.getresponse()
        assert response.status == 413
        assert b"limit" in response.read()
        connection.close()
