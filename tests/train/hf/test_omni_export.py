"""Tests import and export of Qwen3-Omni: talker and code2wav keep their bytes; a step changes trained tensors only."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_trainer import export_folder, make_backend, train_step

from benchmarks.parity_data import with_rollout
from benchmarks.parity_omni import OMNI, OmniItems, make_omni_case, make_omni_model
from relax_core.contracts.media_file import FolderReader
from relax_core.families.folder import folder_architecture
from relax_core.train.hf.stored_weights import weight_problems
from relax_core.train.optimizer import frozen_weights

FROZEN = ("audio", "projector")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a published folder. Its tensors outside the thinker have another dtype."""
    folder = tmp_path_factory.mktemp("omni") / "model"
    make_omni_model(folder)
    file = folder / "model.safetensors"
    weights = {
        name: tensor if name.startswith("thinker.") else tensor.bfloat16() for name, tensor in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def test_an_export_of_an_untouched_folder_equals_it(source: Path, tmp_path: Path) -> None:
    architecture = folder_architecture(source)
    assert weight_problems(source, architecture) == []
    backend = make_backend(source, family=OMNI)
    export_folder(backend, source, tmp_path / "hf")
    assert digest(tmp_path / "hf") == digest(source)
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (source / name).read_bytes()
    several = export_folder(backend, source, tmp_path / "parts", shard_bytes=200_000)
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 3
    assert several.keys() == load_file(source / "model.safetensors").keys()
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == several.keys()


def test_a_folder_without_the_talkers_file_is_refused(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("talker.")}
    save_file(weights, file, metadata={"format": "pt"})
    architecture = folder_architecture(tmp_path / "model")
    [problem] = weight_problems(tmp_path / "model", architecture)
    assert "config.json describes talker, and no file has its weights" in problem
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"enable_audio_output": False}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert weight_problems(tmp_path / "model", architecture) == []


def digest(folder: Path) -> str:
    return hashlib.blake2b((folder / "model.safetensors").read_bytes()).hexdigest()


def test_after_a_step_exactly_the_trained_tensors_differ(source: Path, tmp_path: Path) -> None:
    from transformers import Qwen3OmniMoeForConditionalGeneration

    media = FolderReader(tmp_path / "media")
    groups = make_omni_case("four kinds", OmniItems(source, tmp_path / "media"))
    backend = make_backend(source, family=OMNI, media=media, frozen=FROZEN)
    groups = with_rollout(groups, backend.logprobs(groups))
    train_step(backend, [groups])
    before, after = load_file(source / "model.safetensors"), export_folder(backend, source, tmp_path / "hf")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    kept = frozen_weights(folder_architecture(source), FROZEN)
    assert any(name.startswith("thinker.audio_tower.conv2d1") for name in kept)
    assert any(name.startswith("thinker.audio_tower.proj2") for name in kept)
    passed = {name for name in before if not name.startswith("thinker.")}
    unseen = {name for name in same - kept - passed if ".experts." not in name}  # some experts compute no row
    assert passed and same >= passed | kept and not unseen
    assert all(before[name].dtype == after[name].dtype for name in before)
    loaded: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tmp_path / "hf", output_loading_info=True)
    model, info = loaded
    assert not any(info.values())
    theirs, name = model.thinker.model.state_dict(), "layers.3.mlp.experts"
    assert torch.equal(theirs[f"{name}.down_proj"][1], after[f"thinker.model.{name}.1.down_proj.weight"])
