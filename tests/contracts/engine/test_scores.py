"""Compares the scores of given tokens over SGLang's protocol with transformers. Also tests refused requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from relax_core.contracts.engine import EngineError, SamplingParams
from relax_core.engines.protocol.engine_client import TokensToScore
from tests.contracts.engine.harness import VOCAB, Engine, embedded_only, make_model, prompts_of, random_prompt

TOLERANCE = 2e-5
SCORE = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True}


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(None, seed=0)


def expected(model: Any, ids: list[int], *, temperature: float) -> torch.Tensor:
    """Returns log-probs ``[tokens - 1, vocab]``. Entry i predicts token i + 1."""
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("top_k", [0, 5, VOCAB])
def test_scores_are_those_of_transformers(engine: Engine, model: Any, top_k: int, temperature: float) -> None:
    """The sequences have different lengths, some longer than one prefill pass, and different first scored positions."""
    if engine.kind == "sglang" and temperature != 1.0:
        with pytest.raises(EngineError, match=r"scores at temperature 0\.6 are not possible, because SGLang"):
            engine.client.score([TokensToScore(input_ids=[5, 6], first=1)], top_k=top_k, temperature=temperature)
        return
    rows = [
        TokensToScore(input_ids=random_prompt(length, seed=length), first=first)
        for length, first in ((2, 1), (9, 4), (9, 8), (40, 1), (1300, 700), (1201, 1200), (600, 1))
    ]
    scores = engine.client.score(rows, top_k=top_k, temperature=temperature)
    assert len(scores) == len(rows)
    for row, score in zip(rows, scores, strict=True):
        wanted = expected(model, row.input_ids, temperature=temperature)[row.first - 1 :]
        targets = torch.tensor(row.input_ids[row.first :])
        chosen = wanted.gather(-1, targets[:, None])[:, 0]
        assert len(score.logprobs) == len(targets)
        assert float((torch.tensor(score.logprobs) - chosen).abs().max()) <= TOLERANCE
        if top_k:
            values = wanted.topk(top_k, -1).values
            assert float((torch.tensor(score.top_logprobs) - values).abs().max()) <= TOLERANCE
            by_id = wanted.gather(-1, torch.tensor(score.top_ids.tolist()))  # by id: ties have no order
            assert float((by_id - values).abs().max()) <= TOLERANCE


def test_what_was_generated_is_scored_as_it_was_sampled(engine: Engine) -> None:
    prompts = [random_prompt(7), random_prompt(30)]
    temperature = 1.0 if engine.kind == "sglang" else 0.8
    responses = engine.generate(prompts_of(*prompts), SamplingParams(n=3, max_new_tokens=12, temperature=temperature))
    rows = [
        TokensToScore(
            input_ids=prompts[response.prompt] + response.output_ids.tolist(), first=len(prompts[response.prompt])
        )
        for response in responses
    ]
    for response, scored in zip(responses, engine.client.score(rows, top_k=0, temperature=temperature), strict=True):
        assert scored.logprobs == pytest.approx(response.logprobs, abs=TOLERANCE)


@embedded_only
def test_the_reply_has_sglangs_shape(engine: Engine) -> None:
    body = {**SCORE, "input_ids": [5, 6, 7, 8], "logprob_start_len": 1, "top_logprobs_num": 2, "rid": "mine"}
    meta = engine.post("/generate", body)["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 4, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0} and meta["weight_version"] == "0"
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [6, 7, 8]
    assert meta["input_token_logprobs"][0][0] is None and meta["input_top_logprobs"][0] is None
    assert [len(top) for top in meta["input_top_logprobs"][1:]] == [2, 2]
    several = engine.post("/generate", {**SCORE, "input_ids": [[5, 6], [7]]})
    assert [len(reply["meta_info"]["input_token_logprobs"]) for reply in several] == [
        1,
        1,
    ]  # -1 means: from the last token on
    assert "input_top_logprobs" not in several[0]["meta_info"]


@embedded_only
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"return_logprob": False}, "max_new_tokens: 0 needs return_logprob=true"),
        ({"stream": True}, "stream=true with sampling_params.max_new_tokens: 0"),
        ({"logprob_start_len": 2}, "logprob_start_len: 2 for 2 tokens; give 0 to 1"),
        ({"logprob_start_len": [0, 0]}, "logprob_start_len: 2 entries for 1 prompts"),
        ({"top_logprobs_num": VOCAB + 1}, f"top_logprobs_num: {VOCAB + 1}; give 0 to {VOCAB}"),
        ({"sampling_params": {"max_new_tokens": 0, "n": 2}}, "sampling_params.n: 2 with max_new_tokens 0"),
        ({"sampling_params": {"max_new_tokens": 0, "top_p": 0.5}}, "sampling_params.top_p: 0.5"),
        ({"sampling_params": {"max_new_tokens": 0, "temperature": -1.0}}, "sampling_params.temperature: -1.0"),
        ({"input_ids": [5] * 32769}, "32769 tokens are longer than the context of 32768"),
        ({"sampling_params": {}, "logprob_start_len": 0}, "logprob_start_len=0"),
        ({"sampling_params": {}, "top_logprobs_num": 3}, "top_logprobs_num=3"),
        (
            {"sampling_params": [{"max_new_tokens": 0}, {"max_new_tokens": 4}], "input_ids": [[5], [6]]},
            "0 for some prompts",
        ),
    ],
)
def test_malformed_scores_are_refused_in_words(engine: Engine, changes: dict[str, Any], message: str) -> None:
    status, answer = engine.call("/generate", {**SCORE, "input_ids": [5, 6], **changes})
    assert status == 400 and message in answer["error"]["message"], answer


@embedded_only
def test_weights_that_are_not_in_score_nothing(engine: Engine, start_engine: Any) -> None:
    status, answer = engine.call("/generate", {**SCORE, "input_ids": [5, 6], "min_version": 7})
    assert status == 409 and "min_version 7: weights version 0 is in" in answer["error"]["message"]
    with pytest.raises(EngineError, match="weights version -1 is in"):
        start_engine(load_weights=False).client.score(
            [TokensToScore(input_ids=[5, 6], first=1)], top_k=0, temperature=1.0
        )
