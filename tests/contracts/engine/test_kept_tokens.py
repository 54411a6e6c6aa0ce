"""Compares the kept set of each token with transformers' logits and warpers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from relax_core.contracts.engine import EngineError, Generated, SamplingParams
from relax_core.contracts.kept_tokens import OUTSIDE, KeptTokens
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import TokensToScore
from tests.contracts.engine.harness import (
    EOS,
    VOCAB,
    Engine,
    embedded_only,
    long_request,
    make_model,
    prompts_of,
    publish,
    random_prompt,
    sglang_only,
)

TOLERANCE = 2e-5
CLEAR = 1e-5  # tokens closer than this to the edge of a set may be inside or outside
PROMPTS = [random_prompt(length, seed=length) for length in (1, 5, 16, 33)]
WANTED = SamplingParams(n=4, max_new_tokens=12, return_kept_tokens=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(None, seed=0)


def tempered_logits(model: Any, prompt: list[int], ids: list[int], params: SamplingParams) -> torch.Tensor:
    """Returns the logits before each response token, float64 ``[tokens, vocab]``."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()
    logits[:, params.banned_token_ids] = float("-inf")
    return logits / params.temperature


def expected_sets(logits: torch.Tensor, params: SamplingParams, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns kept sets ``[tokens, vocab]``, and a mask ``[tokens]`` of the sets that rounding cannot change."""
    warped = TopKLogitsWarper(params.top_k)(None, logits) if params.top_k > 0 else logits
    before = logits if kind == "sglang" else warped  # SGLang's top_p uses the probabilities before top_k
    clear = torch.ones(len(logits), dtype=torch.bool)
    if params.top_p < 1.0:
        sums = before.softmax(-1).sort(descending=True).values.cumsum(-1)
        clear = ((sums - params.top_p).abs() > CLEAR).all(-1)
        by_p = TopPLogitsWarper(params.top_p)(None, before)
        warped = warped.masked_fill(by_p.isneginf(), float("-inf"))
    if params.min_p > 0.0:
        ratios = warped.softmax(-1) / warped.softmax(-1).amax(-1, keepdim=True)
        clear &= ((ratios - params.min_p).abs() > CLEAR).all(-1)
        warped = MinPLogitsWarper(params.min_p)(None, warped)
    return (~warped.isneginf()).numpy(), clear.numpy()


def check(model: Any, response: Generated, params: SamplingParams, kind: str) -> int:
    """Compares the sets and returns the number of compared tokens."""
    assert response.kept is not None and response.kept.vocab_size == VOCAB
    assert response.kept.fault(response.output_ids) is None
    logits = tempered_logits(model, PROMPTS[response.prompt], response.output_ids.tolist(), params)
    mask, clear = expected_sets(logits, params, kind)
    assert np.array_equal(response.kept.mask()[clear], mask[clear])
    assert response.kept.tokens * (4 + 4 * 2) >= response.kept.nbytes  # a bitmask of 50 tokens has 2 words
    own = logits.masked_fill(torch.from_numpy(~response.kept.mask()), float("-inf")).log_softmax(-1)
    gap = own.gather(-1, torch.tensor(response.output_ids.tolist())[:, None])[:, 0] - torch.tensor(response.logprobs)
    assert float(gap.abs().max()) <= TOLERANCE
    return int(clear.sum())


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 5},
        {"top_p": 0.9},
        {"top_p": 0.6, "temperature": 0.7},
        {"top_k": 8, "top_p": 0.8, "temperature": 1.3},
        {"top_k": VOCAB, "top_p": 0.95, "banned_token_ids": [EOS, 7, 8, 9]},
        {"top_k": 30, "temperature": 5.0},
    ],
    ids=lambda changes: ",".join(f"{key}={value}" for key, value in changes.items()),
)
def test_kept_sets_are_those_of_transformers(engine: Engine, model: Any, changes: dict[str, Any]) -> None:
    params = msgspec.structs.replace(WANTED, **changes)
    if engine.kind == "sglang" and params.top_k == -1:
        params = msgspec.structs.replace(params, top_k=VOCAB)
    responses = engine.generate(prompts_of(*PROMPTS), params)
    tokens = sum(len(response.output_ids) for response in responses)
    assert sum(check(model, response, params, engine.kind) for response in responses) > 0.9 * tokens


MIN_P = [{"min_p": 0.1}, {"min_p": 0.05, "top_p": 0.9, "top_k": 20, "temperature": 1.5}]


@embedded_only
@pytest.mark.parametrize("changes", MIN_P, ids=["min_p", "all three"])
def test_min_p_comes_behind_the_others(engine: Engine, model: Any, changes: dict[str, Any]) -> None:
    params = msgspec.structs.replace(WANTED, **changes)
    responses = engine.generate(prompts_of(*PROMPTS), params)
    tokens = sum(len(response.output_ids) for response in responses)
    assert sum(check(model, response, params, engine.kind) for response in responses) > 0.9 * tokens


def test_requests_without_the_option_return_no_extra_data(engine: Engine) -> None:
    for params in (SamplingParams(n=2, max_new_tokens=4), SamplingParams(n=2, max_new_tokens=4, top_k=5)):
        assert all(response.kept is None for response in engine.generate(prompts_of(*PROMPTS), params))


@embedded_only
def test_rows_that_ask_and_rows_that_do_not_share_a_batch(engine: Engine, model: Any) -> None:
    params = msgspec.structs.replace(WANTED, top_p=0.8, max_new_tokens=40)
    with engine.stream(long_request("beside", tokens=400)) as events:
        next(events)
        responses = engine.generate(prompts_of(*PROMPTS), params)
    assert sum(check(model, response, params, engine.kind) for response in responses) > 100


TRUNCATED = SamplingParams(top_k=6, top_p=0.9)


def truncated_request(rid: str, **fields: Any) -> dict[str, Any]:
    body = long_request(rid, return_sampling_mask=True, **fields)
    body["sampling_params"] |= {"top_k": TRUNCATED.top_k, "top_p": TRUNCATED.top_p}
    return body


def test_sglangs_field_has_the_same_sets(engine: Engine, model: Any) -> None:
    body = truncated_request("whole", tokens=9)
    meta = engine.post("/generate", body)["meta_info"]
    rows = meta["output_token_sampling_mask"]
    assert len(rows) == len(meta["output_token_sampling_logprobs"]) == 9
    with engine.stream({**body, "rid": "stream"}) as events:
        streamed = [row for event in events for row in event["meta_info"].get("output_token_sampling_mask", [])]
    assert [sorted(row) for row in streamed] == [sorted(row) for row in rows]
    assert 1 <= min(map(len, rows)) <= max(map(len, rows)) <= 6


def test_kept_sets_stay_with_their_tokens_when_the_weights_change(
    start_engine: Any, model: Any, tmp_path: Path
) -> None:
    engine, other_model = start_engine(), make_model(None, seed=1)
    for version, mode in ((1, "retract"), (3, "in_place")):
        other_weights = publish(other_model, tmp_path / f"{version}.bin", version=version)
        first_weights = publish(model, tmp_path / f"{version + 1}.bin", version=version + 1)
        tokens: list[int] = []
        rows: list[list[int]] = []
        with engine.stream(truncated_request(mode)) as events:
            for event in events:
                tokens += event["output_ids"]
                rows += event["meta_info"]["output_token_sampling_mask"]
                spans = event["meta_info"]["weight_versions"]
                if len(spans) == 1 and len(tokens) >= 10:
                    engine.client.pause(mode)
                    engine.client.update_weights(other_weights)
                    engine.client.resume()
                if len(spans) == 2 and spans[1]["end"] - spans[1]["start"] >= 10:
                    engine.client.abort(mode)
        engine.client.update_weights(first_weights)
        kept, change = KeptTokens.of_lists(rows, vocab_size=VOCAB), spans[0]["end"]
        assert kept.fault(tokens) is None
        parts = [(model, slice(0, change))]
        if mode == "retract":  # recomputed cache; "in_place" mixes weights, so there is no reference
            parts.append((other_model, slice(change, None)))
        for weights, part in parts:
            logits = tempered_logits(weights, [5, 6, 7], tokens, TRUNCATED)[part]
            mask, clear = expected_sets(logits, TRUNCATED, "embedded")
            assert clear.sum() >= 9 and np.array_equal(kept.mask()[part][clear], mask[clear])


@embedded_only
@pytest.mark.parametrize("top_k", [0, 3, VOCAB])
def test_given_tokens_are_scored_over_their_sets(engine: Engine, model: Any, top_k: int) -> None:
    """Some tokens in the batch were sampled from the complete vocabulary. There are no banned tokens."""
    params = msgspec.structs.replace(WANTED, top_p=0.8, temperature=0.8, banned_token_ids=[7, 8])
    responses = engine.generate(prompts_of(*PROMPTS), params)
    rows = [
        TokensToScore(
            input_ids=PROMPTS[response.prompt] + response.output_ids.tolist(),
            first=len(PROMPTS[response.prompt]),
            kept=response.kept if index % 3 else None,
        )
        for index, response in enumerate(responses)
    ]
    scores = engine.client.score(rows, top_k=top_k, temperature=0.8, banned_token_ids=[7, 8])
    for index, (response, scored) in enumerate(zip(responses, scores, strict=True)):
        logits = tempered_logits(model, PROMPTS[response.prompt], response.output_ids.tolist(), params)
        if index % 3:
            assert scored.logprobs == pytest.approx(response.logprobs, abs=TOLERANCE)
            assert response.kept is not None
            logits = logits.masked_fill(torch.from_numpy(~response.kept.mask()), float("-inf"))
        expected = logits.log_softmax(-1)
        chosen = expected.gather(-1, torch.tensor(response.output_ids.tolist())[:, None])[:, 0]
        assert scored.logprobs == pytest.approx(chosen.tolist(), abs=TOLERANCE)
        for row, ids, values in zip(expected, scored.top_ids, scored.top_logprobs, strict=True):
            left = min(top_k, int(row.isfinite().sum()))
            assert (ids[left:] == -1).all() and (values[left:] == np.float32(OUTSIDE)).all()
            assert values[:left] == pytest.approx(row.sort(descending=True).values[:left].tolist(), abs=TOLERANCE)
            assert values[:left] == pytest.approx(row[ids[:left].tolist()].tolist(), abs=TOLERANCE)


SETS = KeptTokens.of_lists([[4, 6]], vocab_size=VOCAB)


@embedded_only
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"return_sampling_mask": True}, "return_sampling_mask=true: every token is kept"),
        ({"sampling_params": {"top_k": 5, "temperature": 0.0}, "return_sampling_mask": True}, "every token is kept"),
        ({"sampling_params": {"min_p": 1.0}}, "sampling_params.min_p: 1.0; give 0 (off) or more, below 1"),
        ({"sampling_params": {"min_p": -0.1}}, "sampling_params.min_p: -0.1"),
        ({"kept_tokens": [SETS]}, "scores tokens only in requests that generate"),
        (
            {
                "input_ids": [[5]] * 65536,
                "sampling_params": {"top_p": 0.9, "max_new_tokens": 6},
                "return_sampling_mask": True,
            },
            "up to 19660800 kept tokens, at most 16777216 are returned",
        ),
    ],
)
def test_impossible_kept_sets_are_refused_with_a_message(engine: Engine, changes: dict[str, Any], message: str) -> None:
    body = msgspec.json.encode({"input_ids": [5, 6], **changes})
    status, answer = engine.call("/generate", body=body)
    assert status == 400 and message in answer["error"]["message"], answer


@embedded_only
@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([SETS, SETS], "kept_tokens: 2 entries for 1 prompts"),
        ([KeptTokens.joined([SETS, SETS])], "kept_tokens[0]: 2 kept sets came for 1 tokens"),
        ([KeptTokens.of_lists([[4, 5]], vocab_size=VOCAB)], "its token 0, id 6, is not in the set"),
        ([KeptTokens(VOCAB, SETS.counts, SETS.words * 2)], "they do not fit"),
        ([KeptTokens(VOCAB, b"\xff" * 4, b"")], "they do not fit"),
        ([KeptTokens(10**9, SETS.counts, SETS.words)], "vocabularies of [1000000000] tokens, the model has 50"),
    ],
)
def test_sets_that_do_not_belong_to_the_tokens_are_refused(
    engine: Engine, kept: list[KeptTokens], message: str
) -> None:
    score = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    body = msgspec.json.encode({**score, "logprob_start_len": 0, "kept_tokens": kept})
    status, answer = engine.call("/generate", body=body)
    assert status == 400 and message in answer["error"]["message"], answer


@sglang_only
def test_sglang_scores_over_the_whole_vocabulary_only(engine: Engine) -> None:
    for changes in ({"kept": SETS}, {}):
        row = TokensToScore(input_ids=[5, 6], first=1, **changes)
        with pytest.raises(EngineError, match=r"over the whole vocabulary only. Use algo\.served_by=forward"):
            engine.client.score([row], top_k=0, temperature=1.0, banned_token_ids=[] if changes else [7])


@pytest.fixture
def random_sglang(sglang_launch: EngineLaunch) -> Iterator[Engine]:
    """Yields a non-deterministic server."""
    process = EngineProcess.start(replace(sglang_launch, engine=replace(sglang_launch.engine, deterministic=False)))
    yield Engine(process, "sglang")
    process.stop(timeout_s=5.0)


@pytest.mark.sglang
def test_sglang_takes_min_p_where_it_is_not_deterministic(random_sglang: Engine, model: Any) -> None:
    for changes in MIN_P:
        params = msgspec.structs.replace(WANTED, **{"top_k": VOCAB, **changes})
        responses = random_sglang.generate(prompts_of(*PROMPTS), params)
        tokens = sum(len(response.output_ids) for response in responses)
        assert sum(check(model, response, params, "sglang") for response in responses) > 0.9 * tokens
