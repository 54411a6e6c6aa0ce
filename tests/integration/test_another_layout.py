"""A run that goes on in another layout than that of its checkpoint, and the export of what it saves then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from relax_core.tools import export
from tests.integration.live_run import run_to_end

pytestmark = [pytest.mark.integration, pytest.mark.slow]

QUIET = ("eval.every=0", "run.save_every=4")
OTHER = ("parallel.tp=2", "parallel.dp=2", "parallel.distributed_optimizer=true")


def test_a_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    first = run_to_end(tmp_path / "run", *QUIET, "run.steps=8", "run.export_hf=false")
    assert first.code == 0, first.output
    run = run_to_end(tmp_path / "run", *QUIET, *OTHER, "run.steps=14", "resume=auto")
    assert run.code == 0, run.output
    assert run.summary["steps"] == 14
    assert run.summary["ledger"]["lost"] == run.summary["ledger"]["trained_twice"] == 0
    assert run.summary["logprob_gap"]["max"] < 1e-4  # trainer and engine have the same weights
    made_by = json.loads((run.folder / "checkpoints/step_00000014/train/made_by.json").read_text())
    assert (made_by["world_size"], made_by["layout"]["tp"], made_by["step"]) == (4, 2, 14)
    assert export.main([str(run.folder / "checkpoints/step_00000014"), str(tmp_path / "hf")]) == 0
    exported, of_run = load_file(tmp_path / "hf/model.safetensors"), load_file(run.folder / "hf/model.safetensors")
    assert exported.keys() == of_run.keys()
    assert all(torch.equal(tensor, of_run[name]) for name, tensor in exported.items())
