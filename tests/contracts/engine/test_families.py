"""Compares model families other than Qwen3 on real engines with transformers, at the start and after an update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.families import CONTEXT, REACH, engine_gaps
from benchmarks.family_models import make_family_model
from relax_core.engines.build_client import build_client
from tests.contracts.engine.harness import ENGINES, Engine, Started, publish

# Biases and a tied head, like Qwen2.5-0.5B. Scaled rotary embedding and an untied head, like Llama-3.1-8B. A head size
# that is not the hidden size divided by the number of heads, like Mistral-Nemo.
VARIANTS = ("qwen2, tied", "llama, llama3 rope", "mistral")


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_are_those_of_transformers(
    kind: str, variant: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Compares every token of given sequences (prefill) and of sampled sequences (decode)."""
    given = request.getfixturevalue("launch" if kind == "embedded" else "sglang_launch")
    settings = replace(given.engine, context_length=CONTEXT, max_total_tokens=64 * CONTEXT)
    models = [make_family_model(tmp_path, variant), make_family_model(None, variant, seed=1)]
    with Started() as started:
        process = started.start(replace(given, engine=settings, model_folder=tmp_path, log_file=tmp_path / "log"))
        try:
            client = build_client(settings, process.url, model_folder=tmp_path, token_file=given.token_file)
            assert max(engine_gaps(client, models[0])) <= REACH
            client.update_weights(publish(models[1], tmp_path / "w1", version=1))
            Engine(process, kind).flush()  # score requests have no version
            assert client.model_info()["weight_version"] == "1"
            assert max(engine_gaps(client, models[1])) <= REACH
        finally:
            process.stop(timeout_s=5.0)
