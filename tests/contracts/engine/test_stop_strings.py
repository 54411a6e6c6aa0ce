"""Tests that a response ends with the token that completes a stop string, and is otherwise unchanged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tokenizers import Regex, Tokenizer, decoders, models

from relax_core.contracts.engine import EngineError, Generated, PromptRequest, SamplingParams
from relax_core.engines.engine_process import EngineLaunch
from relax_core.engines.protocol.stop_strings import StopTable
from tests.contracts.engine.harness import ENGINES, VOCAB, Engine, Started, make_model, prompts_of

LETTERS = "abcde"
STOP = ["ab", "cce", "dda"]
PARAMS = SamplingParams(n=8, max_new_tokens=40, stop_token_ids=[3])
STOPPING = msgspec.structs.replace(PARAMS, stop=STOP)


def text_of(ids: list[int]) -> str:
    """Returns the text of token ids by the tokenizer below. A token has one or two letters."""
    return "".join(LETTERS[token % 5] * (1 + token % 2) for token in ids)


def write_tokenizer(folder: Path) -> None:
    words = {f"{text_of([token])}\0{token}": token for token in range(VOCAB)}
    core = Tokenizer(models.WordLevel(words, unk_token=next(iter(words))))  # SGLang warms up with a text of its own
    core.decoder = decoders.Sequence([decoders.Replace(Regex(r"\x00\d+"), ""), decoders.Fuse()])
    core.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("letters")
    make_model(made, seed=0)
    write_tokenizer(made)
    return made


@pytest.fixture(scope="module", params=ENGINES)
def lettered(request: pytest.FixtureRequest, launch: EngineLaunch, folder: Path) -> Iterator[Engine]:
    kind = request.param
    base = launch if kind == "embedded" else request.getfixturevalue("sglang_launch")
    with Started() as started:
        process = started.start(replace(base, model_folder=folder, stop_strings=True))
        try:
            yield Engine(process, kind, StopTable(folder))
        finally:
            process.stop(timeout_s=5.0)


def first_end(ids: list[int]) -> int | None:
    return next(
        (count for count in range(1, len(ids) + 1) if any(string in text_of(ids[:count]) for string in STOP)), None
    )


def as_expected(whole: Generated, stopped: Generated) -> bool:
    """Checks that ``stopped`` is ``whole`` up to the first stop string. Returns whether ``whole`` has a stop string."""
    end = first_end(whole.output_ids.tolist())
    assert stopped.output_ids.tolist() == whole.output_ids[:end].tolist()
    assert stopped.logprobs == pytest.approx(whole.logprobs[:end], abs=2e-5)
    assert len(stopped.versions) == len(stopped.output_ids)
    assert stopped.finish_reason == (whole.finish_reason if end is None else "stop")
    return end is not None


def test_the_tokenizer_of_these_tests_writes_what_they_say(folder: Path) -> None:
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for ids in ([5, 6, 11], list(range(VOCAB))):
        assert core.decode(ids, skip_special_tokens=False) == text_of(ids)


def test_a_response_ends_with_the_token_that_completes_a_string(lettered: Engine) -> None:
    prompts = prompts_of([5, 6, 7], [9, 8], [20, 30, 40, 11])
    whole = lettered.generate(prompts, PARAMS)
    stopped = lettered.generate(prompts, STOPPING)
    ended = [as_expected(response, stopped_response) for response, stopped_response in zip(whole, stopped, strict=True)]
    assert sum(ended) >= 5 and not all(ended), ended  # the model samples stop strings at random


def test_a_string_across_the_place_where_a_response_goes_on_is_found(lettered: Engine) -> None:
    """An aborted sample is requested again and continues after its earlier tokens."""
    prompts = prompts_of([5, 6, 7], [9, 8], [20, 30, 40, 11])
    stopped = [response for response in lettered.generate(prompts, STOPPING) if response.finish_reason == "stop"]
    across = [
        response
        for response in stopped
        if len(response.output_ids) > 2
        and not any(text_of(response.output_ids.tolist()[-1:]).endswith(string) for string in STOP)
    ]
    asked = [
        PromptRequest(
            rid=f"again-{index}",
            input_ids=prompts[response.prompt].input_ids + response.output_ids[:-1].tolist(),
            sampling_seed=prompts[response.prompt].sampling_seed,
            samples=[response.sample],
            generated=len(response.output_ids) - 1,
        )
        for index, response in enumerate(across)
    ]
    assert asked
    again = lettered.generate(asked, STOPPING)
    assert [(response.output_ids.tolist(), response.finish_reason) for response in again] == [
        (response.output_ids[-1:].tolist(), "stop") for response in across
    ]


def test_greedy_answers_and_neighbours_without_strings_are_left_alone(lettered: Engine) -> None:
    """Samples with and without stop strings run in one batch."""
    prompts = prompts_of([5, 6, 7], [9, 8], [20, 30, 40, 11])
    alone = lettered.generate(prompts, PARAMS)

    async def together() -> tuple[list[Generated], list[Generated]]:
        client = lettered.new_client()

        async def collect(params: SamplingParams, mark: str) -> list[Generated]:
            asked = [msgspec.structs.replace(prompt, rid=f"{prompt.rid}{mark}") for prompt in prompts]
            return sorted(
                [response async for response in client.generate(asked, params)],
                key=lambda response: (response.prompt, response.sample),
            )

        try:
            return await asyncio.gather(collect(PARAMS, "a"), collect(STOPPING, "b"))  # type: ignore[return-value]
        finally:
            await client.aclose()

    plain, stopped = asyncio.run(together())
    assert [response.output_ids.tolist() for response in plain] == [response.output_ids.tolist() for response in alone]
    assert any(
        as_expected(response, stopped_response) for response, stopped_response in zip(plain, stopped, strict=True)
    )


@pytest.mark.parametrize("stop", [["x" * 2000], [""], ["a"] * 17])
def test_strings_that_make_no_sense_are_refused(lettered: Engine, stop: list[str]) -> None:
    if lettered.kind != "embedded":
        pytest.skip("config/ refuses them before SGLang is asked")
    status, answer = lettered.call("/generate", {"input_ids": [5, 6], "sampling_params": {"stop": stop}})
    assert status == 400 and "sampling_params.stop" in answer["error"]["message"]


def test_a_model_without_a_tokenizer_refuses_strings(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine()
    with pytest.raises(EngineError, match=r"sampling_params.stop: .* has no tokenizer.json"):
        engine.generate(prompts_of([5, 6]), SamplingParams(max_new_tokens=4, stop=["a"]))
