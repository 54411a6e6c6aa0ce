"""Compares the operation counts of `benchmarks.real_model` with torch's counts, and checks the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import Comparison
from benchmarks.last_number_reward import LastNumberConfig, score
from benchmarks.real_model import (
    MATRIX,
    Result,
    decode_counts,
    endless_copy,
    forward_flops,
    size_of,
    spread,
)
from benchmarks.train_step_trees import Counts
from benchmarks.train_step_ways import SIZES, write_model
from relax_core.contracts.reward import RewardInput

torch.set_num_threads(1)
SIZE = replace(SIZES["demo"], head_dim=24)  # makes the attention's width differ from the hidden size


def model_of(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model


def test_a_pass_has_as_many_operations_as_torch_counts(tmp_path: Path) -> None:
    """Torch counts all pairs of rows. Backward is twice forward, minus the gradient of the embedded rows."""
    folder = write_model(tmp_path / "model", SIZE)
    assert size_of(folder) == SIZE
    ids = torch.randint(0, SIZE.vocabulary, (3, 11))
    counts = Counts(rows=33, pairs=3 * 11 * 11, predicted=33)
    model = model_of(folder)
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids, use_cache=False).logits.sum()
        forward = counter.get_total_flops()
        loss.backward()
    assert forward == pytest.approx(forward_flops(SIZE, counts), rel=2e-3)  # torch also counts rotary angles
    assert counter.get_total_flops() == pytest.approx(3 * forward_flops(SIZE, counts), rel=2e-3)


def test_decoding_has_as_many_operations_as_torch_counts(tmp_path: Path) -> None:
    """Torch counts all pairs of prompt rows. A decoder needs half of the pairs."""
    prompt, new_tokens, samples = 9, 7, 2
    model = model_of(write_model(tmp_path / "model", SIZE))
    model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    ids = torch.randint(0, SIZE.vocabulary, (samples, prompt))
    with FlopCounterMode(display=False) as counter:
        drawn = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)  # type: ignore[operator]
    assert drawn.shape == (samples, prompt + new_tokens)
    counts = decode_counts(samples, prompt=prompt, new_tokens=new_tokens)
    unseen = replace(counts, rows=0, predicted=0, pairs=samples * prompt * (prompt - 1) // 2)
    assert counter.get_total_flops() == pytest.approx(
        forward_flops(SIZE, counts) + forward_flops(SIZE, unseen), rel=5e-3
    )


def test_a_row_has_the_ratio_of_each_round_and_the_share_of_the_machine() -> None:
    found = Comparison("x")
    for speed, other_speed, peak in ((10.0, 30.0, 100.0), (20.0, 40.0, 100.0), (10.0, 10.0, 50.0)):
        found.add("first", {"tokens/s": speed, "GFLOP/s": speed})
        found.add("second", {"tokens/s": other_speed, "GFLOP/s": other_speed})
        found.add(MATRIX, {"GFLOP/s": peak})
    lines = list(Result(found=found, figures=["tokens/s"], base="first").lines())
    assert lines == [
        "| x | first | 10 (10 to 20) tokens/s |  | 0.2 (0.1 to 0.2) |",
        "| x | second | 30 (10 to 40) tokens/s | 2 (1 to 3) | 0.3 (0.2 to 0.4) |",
    ]
    assert spread([1234.5]) == "1,234"


@pytest.mark.parametrize(
    ("message", "right", "near"),
    [("17 + 21 = 38", 1.0, 1.0), ("38 is not 40.", 0.0, 1 / 3), ("-38", 0.0, 1 / 77), ("none", 0.0, 0.0)],
)
def test_the_last_number_counts(message: str, right: float, near: float) -> None:
    given = RewardInput(response=message, stopped=True, answer="38", row={})
    assert score(given, LastNumberConfig()).reward == right
    assert score(given, LastNumberConfig(near=True)).reward == pytest.approx(near)


def test_a_copy_without_an_end_links_the_weights(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"eos_token_id": 2, "model_type": "llama"}')
    (model / "model.safetensors").write_bytes(b"weights")
    copy = endless_copy(model, tmp_path / "copy")
    assert json.loads((copy / "config.json").read_text()) == {"eos_token_id": None, "model_type": "llama"}
    assert (copy / "model.safetensors").resolve() == model / "model.safetensors"
