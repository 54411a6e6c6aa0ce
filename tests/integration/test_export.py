"""Tests that the exported folder contains the trained model: transformers and the engine agree on it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from relax_core.config.compose import load_config
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.data.generated import REVERSED_DIGITS
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.preflight import settle
from tests.integration.live_run import FinishedRun

TOLERANCE = 2e-5
TOKEN = "token-of-the-test"


def test_the_engine_and_the_trainer_agree_in_the_run(strict: FinishedRun) -> None:
    gap = strict.summary["logprob_gap"]
    assert gap["tokens"] > 60 * 8 * 16
    assert 0.0 < gap["max"] <= TOLERANCE


def test_transformers_gives_the_exported_folder_the_engines_logprobs(strict: FinishedRun, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = strict.folder / "hf"
    tokenizer = PromptTokenizer(folder)
    texts = [f"rev {number:0{REVERSED_DIGITS}d}" for number in range(11, 99999, 7919)]
    prompts = [tokenizer.encode([{"role": "user", "content": text}]) for text in texts]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    hf_tokenizer = AutoTokenizer.from_pretrained(folder)
    rendered = hf_tokenizer.apply_chat_template(
        [{"role": "user", "content": texts[0]}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert rendered == prompts[0]

    responses = generate(folder, prompts, stop=tokenizer.stop_token_ids, scratch=tmp_path)
    assert len(responses) == 8 * len(prompts)
    gap = 0.0
    for response in responses:
        prompt = prompts[response.prompt]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response.output_ids.tolist()])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(response.output_ids.tolist())[:, None])[:, 0]
        gap = max(gap, float((expected - torch.tensor(response.logprobs)).abs().max()))
    assert gap <= TOLERANCE


def generate(folder: Path, prompts: list[list[int]], *, stop: list[int], scratch: Path) -> list[Generated]:
    """Starts an engine with the folder's weights and returns eight samples per prompt."""
    (scratch / "token").write_text(TOKEN)
    engine = EngineProcess.start(
        EngineLaunch(
            model_folder=folder,
            engine=load_config(settle=settle).engine,
            dtype="float32",
            token_file=scratch / "token",
            log_file=scratch / "engine.log",
            load_weights=True,
        )
    )

    async def collect() -> list[Generated]:
        client = EngineClient(engine.url, TOKEN, request_timeout_s=60.0, control_timeout_s=60.0)
        requests = [
            PromptRequest(rid=str(place), input_ids=ids, sampling_seed=place) for place, ids in enumerate(prompts)
        ]
        try:
            params = SamplingParams(n=8, max_new_tokens=8, stop_token_ids=stop)
            return [response async for response in client.generate(requests, params)]
        finally:
            await client.aclose()

    try:
        return asyncio.run(collect())
    finally:
        engine.stop(timeout_s=10.0)
