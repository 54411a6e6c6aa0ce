"""Tests the prefix cache of engines over HTTP: reported cached tokens, and responses around a weight update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from relax_core.contracts.engine import SamplingParams
from relax_core.engines.engine_process import EngineLaunch
from tests.contracts.engine.harness import (
    Engine,
    embedded_only,
    make_model,
    prompts_of,
    publish,
    random_prompt,
    sglang_only,
)
from tests.contracts.engine.test_tokens_and_logprobs import TOLERANCE, transformers_logprobs

ANSWER = SamplingParams(max_new_tokens=9, banned_token_ids=[3])


def next_turn(engine: Engine, prompt: list[int]) -> list[int]:
    """Requests a response to a prompt and returns the prompt of the next turn."""
    (response,) = engine.generate(prompts_of(prompt), ANSWER)
    return [*prompt, *response.output_ids.tolist(), *random_prompt(6, seed=1)]


def test_the_embedded_engine_tells_what_it_did_not_compute(
    start_engine: Callable[..., Engine], launch: EngineLaunch, tmp_path: Path
) -> None:
    engine = start_engine(engine=replace(launch.engine, prefix_cache_tokens=4096))
    prompt = random_prompt(70)
    turn = next_turn(engine, prompt)
    before = engine.client.loads()
    assert (before["prefill_tokens"], before["cached_tokens"]) == (70, 0)
    (compact,) = engine.generate(prompts_of(turn), ANSWER)
    assert compact.cached_tokens == 78  # without the response's last token and later tokens
    status, reply = engine.call("/generate", {"input_ids": turn, "sampling_params": {"max_new_tokens": 1}})
    assert status == 200 and reply["meta_info"]["cached_tokens"] == 84  # without the prompt's last token
    load = engine.client.loads()
    assert (load["prefill_tokens"], load["cached_tokens"]) == (70 + 7 + 1, 78 + 84)
    engine.client.update_weights(publish(make_model(None, seed=5), tmp_path / "newer", version=1))
    assert engine.client.loads()["prefix_cache_bytes"] == 0
    (newer,) = engine.generate(prompts_of(turn), ANSWER)
    assert (newer.cached_tokens, int(newer.versions[0])) == (0, 1)


@embedded_only
def test_an_engine_without_a_prefix_cache_keeps_nothing(engine: Engine) -> None:
    (response,) = engine.generate(prompts_of(next_turn(engine, random_prompt(70))), ANSWER)
    assert response.cached_tokens == 0 and engine.client.loads()["prefix_cache_bytes"] == 0


@sglang_only
def test_sglang_tells_what_its_cache_gave(engine: Engine) -> None:
    turn = next_turn(engine, random_prompt(70, seed=2))
    (response,) = engine.generate(prompts_of(turn), ANSWER)
    assert 70 <= response.cached_tokens < len(turn)


def assert_turns_of_their_weights(engine: Engine, folder: Path, *, reuse: bool) -> None:
    """Plays two episodes across a weight change, and compares each turn with transformers.

    One version computes a turn's context and tokens. If an engine kept keys and values of the first version, its
    log-probs would be as wrong as the log-probs of the first version's model.
    """
    before, after = make_model(None, seed=0), make_model(None, seed=5)
    prompts, cached, far = [random_prompt(70, seed=3), random_prompt(90, seed=4)], 0, 0.0
    for turn in range(4):
        if turn == 2:
            engine.client.update_weights(publish(after, folder / "newer", version=engine.version + 1))
        version, model = engine.version, before if turn < 2 else after
        answers = sorted(engine.generate(prompts_of(*prompts, seed=turn), ANSWER), key=lambda response: response.prompt)
        for index, answer in enumerate(answers):
            assert answer.versions.tolist() == [version] * len(answer.output_ids)
            logprobs = torch.tensor(answer.logprobs)
            gap = (transformers_logprobs(model, prompts[index], answer, ANSWER) - logprobs).abs().max()
            assert float(gap) <= TOLERANCE, f"turn {turn}"
            if turn == 2:
                assert answer.cached_tokens == 0
                far = float((transformers_logprobs(before, prompts[index], answer, ANSWER) - logprobs).abs().max())
            cached += answer.cached_tokens
            prompts[index] = [*prompts[index], *answer.output_ids.tolist(), *random_prompt(6, seed=turn)]
    assert far > 100 * TOLERANCE, "the two versions are too similar for this test"
    assert (cached > 0) == reuse


@pytest.mark.parametrize("tokens", [4096, 0])
def test_turns_have_the_log_probs_of_the_weights_that_made_them(
    start_engine: Callable[..., Engine], launch: EngineLaunch, tmp_path: Path, tokens: int
) -> None:
    engine = start_engine(engine=replace(launch.engine, prefix_cache_tokens=tokens))
    assert_turns_of_their_weights(engine, tmp_path, reuse=tokens > 0)


@sglang_only
def test_sglangs_turns_have_the_log_probs_of_the_weights_that_made_them(engine: Engine, tmp_path: Path) -> None:
    engine.flush()
    try:
        assert_turns_of_their_weights(engine, tmp_path, reuse=True)
    finally:
        version = max(engine.version, 1000) + 1
        engine.client.update_weights(publish(make_model(None, seed=0), tmp_path / "back.bin", version=version))
        engine.flush()
