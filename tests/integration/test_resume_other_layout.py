"""Tests a run of a Qwen2 folder: it learns, resumes a checkpoint in another layout, and exports the saved model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from relax_core.families.tiny_configs import tiny_config
from relax_core.tools import export
from relax_core.tools.tiny_text import WarmStart, build_tokenizer, train_warm_start
from tests.integration.live_run import run_to_end

pytestmark = [pytest.mark.integration, pytest.mark.soak]

STEPS = 64
DEMO = ("optimizer.lr=8e-4", "optimizer.beta2=0.999", "rollout.max_new_tokens=8")
QUIET = ("eval.every=0", "run.save_every=32", "model=qwen2", "model.dtype=float32", *DEMO)
OTHER = ("parallel.tp=2", "parallel.dp=2", "parallel.distributed_optimizer=true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of a Qwen2 with an untied head, and the size and warm start of the built-in model."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    path: Path = tmp_path_factory.mktemp("qwen2")
    torch.manual_seed(8)
    tokenizer = build_tokenizer()
    sizes = {key: value for key, value in tiny_config().items() if key not in ("model_type", "head_dim")}
    config = Qwen2Config(**sizes | {"tie_word_embeddings": False, "eos_token_id": tokenizer.eos_token_id})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    train_warm_start(model, tokenizer, WarmStart(steps=58, seed=8), task="reverse_digits")
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)
    return path


def test_a_run_goes_on_in_another_layout(folder: Path, tmp_path: Path) -> None:
    keys = (*QUIET, f"model.path={folder}")
    first = run_to_end(tmp_path / "run", *keys, f"run.steps={STEPS}", "run.export_hf=false")
    assert first.code == 0, first.output
    reward = first.summary["reward"]
    assert reward["last"] >= reward["first"] + 0.1
    assert first.summary["logprob_gap"]["max"] <= 2e-5
    run = run_to_end(tmp_path / "run", *keys, *OTHER, f"run.steps={STEPS + 6}", "resume=auto")
    assert run.code == 0, run.output
    assert run.summary["steps"] == STEPS + 6
    assert run.summary["ledger"]["lost"] == run.summary["ledger"]["trained_twice"] == 0
    assert run.summary["logprob_gap"]["max"] < 1e-4  # trainer and engine have the same weights
    checkpoint = run.folder / f"checkpoints/step_{STEPS + 6:08d}"
    provenance = json.loads((checkpoint / "train/provenance.json").read_text())
    assert (provenance["family"], provenance["world_size"], provenance["layout"]["tp"]) == ("qwen2", 4, 2)
    assert provenance["step"] == STEPS + 6
    assert export.main([str(checkpoint), str(tmp_path / "hf")]) == 0
    exported, of_run = load_file(tmp_path / "hf/model.safetensors"), load_file(run.folder / "hf/model.safetensors")
    assert exported.keys() == of_run.keys() == load_file(folder / "model.safetensors").keys()
    assert all(torch.equal(tensor, of_run[name]) for name, tensor in exported.items())
