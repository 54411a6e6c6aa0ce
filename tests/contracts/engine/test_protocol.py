"""Tests the formats of SGLang's protocol: responses, order, stop tokens, server-sent events, status routes."""

from __future__ import annotations

import msgspec

from relax_core.contracts.engine import Generated, SamplingParams
from relax_core.engines.protocol.server_sent_events import EventReader
from relax_core.engines.sglang.sglang_client import sample_requests, sglang_body
from relax_core.engines.sglang.sglang_process import TESTED
from tests.contracts.engine.harness import (
    EOS,
    Engine,
    embedded_only,
    prompts_of,
    random_prompt,
    sglang_only,
)


def test_reply_has_sglangs_fields(engine: Engine) -> None:
    body = {
        "rid": "one",
        "input_ids": random_prompt(7),
        "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
    }
    reply = engine.post("/generate", body)
    meta = reply["meta_info"]
    assert set(reply) - {"text"} == {"output_ids", "meta_info"}
    assert len(reply["output_ids"]) == meta["completion_tokens"] == 5
    assert meta["id"] == "one" and meta["prompt_tokens"] == 7
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    version = str(engine.version)
    assert meta["weight_version"] == version
    assert meta["weight_versions"] == [{"version": version, "start": 0, "end": 5}]
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in reply["output_ids"]]
    assert all(entry[0] <= 0.0 for entry in meta["output_token_logprobs"])
    assert meta["e2e_latency"] > 0.0


@embedded_only
def test_many_prompts_and_samples_come_prompt_by_prompt(engine: Engine) -> None:
    prompts = [random_prompt(6, seed=1), random_prompt(9, seed=2)]
    body = {
        "input_ids": prompts,
        "rid": ["a", "b"],
        "sampling_params": {"n": 3, "max_new_tokens": 6},
        "sampling_seed": [11, 12],
    }
    replies = engine.post("/generate", body)
    assert [reply["meta_info"]["id"] for reply in replies] == ["a"] * 3 + ["b"] * 3
    expected = engine.generate(prompts_of(*prompts, seed=11), SamplingParams(n=3, max_new_tokens=6))
    assert [reply["output_ids"] for reply in replies] == [response.output_ids.tolist() for response in expected]
    assert "output_token_logprobs" not in replies[0]["meta_info"]


def test_stop_tokens_end_a_response_and_stay_in_it(engine: Engine) -> None:
    greedy = SamplingParams(max_new_tokens=12, temperature=0.0, banned_token_ids=[EOS])
    prompts = prompts_of(random_prompt(8))
    whole = engine.generate(prompts, greedy)[0].output_ids.tolist()
    stop = whole[4]
    stopped = engine.generate(prompts, msgspec.structs.replace(greedy, stop_token_ids=[stop]))[0]
    assert stopped.output_ids.tolist() == whole[: whole.index(stop) + 1]
    assert stopped.finish_reason == "stop"


def test_eos_ends_a_response_unless_it_is_ignored(engine: Engine) -> None:
    responses = engine.generate(prompts_of([5], seed=3), SamplingParams(n=16, max_new_tokens=200))
    stopped = [response for response in responses if response.finish_reason == "stop"]
    assert stopped
    for response in stopped:
        assert response.output_ids.tolist().index(EOS) == len(response.output_ids) - 1
    sampling = {"max_new_tokens": 200, "n": 4, "temperature": 1.0}
    replies = engine.post("/generate", {"input_ids": [5], "sampling_params": sampling})
    for reply in replies:
        if reply["meta_info"]["finish_reason"]["type"] == "stop":
            assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    ignoring = {"input_ids": [5], "sampling_params": {**sampling, "ignore_eos": True}}
    assert all(len(reply["output_ids"]) == 200 for reply in engine.post("/generate", ignoring))


@sglang_only
def test_sglangs_events_are_incremental(engine: Engine) -> None:
    prompts, params = prompts_of(random_prompt(6, seed=1), random_prompt(9, seed=2)), SamplingParams(max_new_tokens=64)
    samples = sample_requests(prompts, n=1)
    body = sglang_body(prompts, samples, params, version=engine.version, seeds=True)
    for sampling in body["sampling_params"]:
        sampling["stream_interval"] = 4
    tokens: dict[int, list[int]] = {}
    received = 0
    with engine.stream(body) as events:
        for event in events:
            received += 1
            tokens.setdefault(event["index"], []).extend(event["output_ids"])
            assert len(tokens[event["index"]]) == event["meta_info"]["completion_tokens"]
    # SGLang joins unread events, so an event may have more than stream_interval tokens.
    assert received > len(tokens)
    expected = engine.generate(prompts, params)
    assert [tokens[index] for index in sorted(tokens)] == [response.output_ids.tolist() for response in expected]


@embedded_only
def test_server_sent_events_are_incremental(engine: Engine) -> None:
    prompts = prompts_of(random_prompt(6, seed=1), random_prompt(9, seed=2))
    body = {
        "input_ids": [prompt.input_ids for prompt in prompts],
        "sampling_seed": [prompt.sampling_seed for prompt in prompts],
        "sampling_params": {"n": 2, "max_new_tokens": 10, "stream_interval": 4},
        "return_logprob": True,
    }
    tokens: dict[int, list[int]] = {}
    raw = b""
    with engine.stream(body) as events:
        for event in events:
            tokens.setdefault(event["index"], []).extend(event["output_ids"])
            meta = event["meta_info"]
            assert len(tokens[event["index"]]) == meta["completion_tokens"]
            assert len(event["output_ids"]) == 4 or meta["finish_reason"] is not None
            raw += b"data: " + msgspec.json.encode(event) + b"\n\n"
    expected = engine.generate(prompts, SamplingParams(n=2, max_new_tokens=10))
    assert [tokens[index] for index in sorted(tokens)] == [response.output_ids.tolist() for response in expected]
    reader = EventReader(prompts, samples=[(0, 0), (0, 1), (1, 0), (1, 1)])
    found = [event for cut in range(0, len(raw), 100) for event in reader.feed(raw[cut : cut + 100])]
    generated = sorted(
        (event for event in found if isinstance(event, Generated)),
        key=lambda response: (response.prompt, response.sample),
    )
    assert [(response.output_ids.tolist(), response.finish_reason) for response in generated] == [
        (response.output_ids.tolist(), response.finish_reason) for response in expected
    ]


@sglang_only
def test_sglangs_status_routes_tell(engine: Engine) -> None:
    """If a key is set, all routes except health and readiness need the key."""
    for path in ("/ready", "/health", "/health_generate"):
        assert engine.call(path, method="GET", token=None)[0] == 200
    for path in ("/model_info", "/server_info", "/v1/loads"):
        assert engine.call(path, method="GET", token=None)[0] == 401
        assert engine.call(path, method="GET")[0] == 200
    assert engine.client.server_info()["version"] == TESTED
    load = engine.client.loads()
    assert (load["running"], load["queued"], load["held"]) == (0, 0, 0)


@embedded_only
def test_status_routes_are_open_and_tell(engine: Engine) -> None:
    for path in ("/ready", "/health", "/health_generate", "/model_info", "/server_info", "/v1/loads"):
        status, answer = engine.call(path, method="GET", token=None)
        assert status == 200, (path, answer)
    assert engine.client.model_info()["weight_version"] == "0"
    load = engine.client.loads()
    assert (load["running"], load["queued"], load["held"]) == (0, 0, 0)
    assert load["decode_steps"] > 0 and load["busy_s"] > 0.0
