"""Tests `python -m relax_core.tools.export` and `check_model`: transformers loads an exported checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import make_models
from tiny_trainer import dp_groups, make_backend, make_critic, train_step
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.families.folder import folder_architecture
from relax_core.families.hf_config import read_hf_config
from relax_core.preflight import CHECKS, settle
from relax_core.tools import check_model, export
from relax_core.train.checkpoints.checkpoint_store import CheckpointStore
from relax_core.train.hf.stored_weights import stored_shapes, stored_weights, weight_problems
from tests.data.chat_templates import write_two_words


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


def save_run(backend: Any, folder: Path, *, model: Path, part: str = "train") -> Path:
    """Writes a checkpoint after one step, like a run."""
    train_step(backend, dp_groups())

    def write(partial: Path) -> None:
        (partial / "config.yaml").write_text(yaml.safe_dump({"model": {"path": str(model), "builtin": None}}))
        backend.save(partial / part)

    return CheckpointStore(folder, keep_last=1).write(1, writers=write, meta={})


@pytest.fixture(scope="module")
def trained(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Returns a checkpoint of the MoE model, and the model's weights."""
    backend = make_backend(models / "moe", family="qwen3_moe")
    checkpoint = save_run(backend, tmp_path_factory.mktemp("run"), model=models / "moe")
    return checkpoint, {name: tensor.clone() for name, tensor in backend.export()}


def test_export_is_what_was_trained(trained: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    checkpoint, weights = trained
    assert export.main([str(checkpoint), str(tmp_path / "hf"), "--shard-gb", "1e-4"]) == 0
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 3 and max(file.stat().st_size for file in files) < 120_000
    exported = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert exported.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in exported.items())
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    model, info = loaded
    assert not any(info.values())
    assert torch.equal(model.model.layers[3].mlp.gate.weight, weights["model.layers.3.mlp.gate.weight"])


def test_a_model_that_sees_is_exported_as_published(models: Path, tmp_path: Path) -> None:
    """The checkpoint has a tensor per expert. The folder has a tensor per layer of experts, and processor files."""
    source = models / "sees_moe"
    backend = make_backend(source, family="qwen3_vl_moe")
    checkpoint = save_run(backend, tmp_path / "run", model=source)
    weights = dict(backend.export())
    assert export.main([str(checkpoint), str(tmp_path / "hf")]) == 0
    exported, published = load_file(tmp_path / "hf" / "model.safetensors"), load_file(source / "model.safetensors")
    assert {name: tensor.shape for name, tensor in exported.items()} == {
        n: tensor.shape for n, tensor in published.items()
    }
    assert all(torch.equal(tensor, weights[name]) for name, tensor in exported.items())
    experts = "model.language_model.layers.1.mlp.experts.down_proj"
    assert not torch.equal(exported[experts], published[experts])
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (source / name).read_bytes()
    loaded: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf", output_loading_info=True)
    model, info = loaded
    assert not any(info.values())
    theirs = model.state_dict()[experts]  # transformers transposes the experts' tensors
    assert torch.equal(theirs, exported[experts].mT)


def test_export_in_another_dtype(trained: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    checkpoint, weights = trained
    assert export.main([str(checkpoint), str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor.bfloat16()) for name, tensor in weights.items())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_cannot_be_exported_is_told(
    models: Path, trained: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, _ = trained

    def says(*words: str) -> str:
        assert export.main([*words[:1], str(tmp_path / "hf"), *words[1:]]) == 2
        assert not (tmp_path / "hf").exists()
        return capsys.readouterr().err

    assert "no meta.json there" in says(str(tmp_path))
    assert "num_moe_experts=4 there, None here" in _refusal_of_other_family(checkpoint, models)
    critic = save_run(make_critic(models / "untied"), tmp_path / "critic", model=models / "untied")
    assert "is of a critic" in says(str(critic))
    broken = critic / "train" / "__0_0.distcp"
    broken.write_bytes(broken.read_bytes()[:100])
    assert f"{broken} has 100 bytes" in says(str(critic))


def _refusal_of_other_family(checkpoint: Path, models: Path) -> str:
    from relax_core.train.checkpoints.provenance import check_same_numbers, model_numbers, read_provenance

    here = model_numbers(folder_architecture(models / "untied"))
    with pytest.raises(ValueError, match="is of another model") as error:
        check_same_numbers(read_provenance(checkpoint / "train").model, here, folder=checkpoint)
    return str(error.value)


@pytest.mark.parametrize("name", ["untied", "tied", "moe", "biased", "sees", "sees_moe"])
def test_shapes_are_those_of_transformers(
    models: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    architecture = folder_architecture(models / name)
    wanted = {weight.name: weight.shape for weight in stored_weights(architecture)}
    assert wanted == {tensor: shape for tensor, shape, _ in stored_shapes(models / name)}
    folder = write_two_words(shutil.copytree(models / name, tmp_path / "model"))
    assert check_model.main([str(folder)]) == 0
    parameters = sum(tensor.numel() for tensor in load_file(models / name / "model.safetensors").values())
    message = f"{len(wanted)} weights, {parameters:,} parameters; model={architecture.family} trains it."
    assert message in capsys.readouterr().out


def test_a_wrong_folder_is_told_in_words(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    architecture = folder_architecture(models / "moe")
    assert "has no *.safetensors file" in weight_problems(tmp_path, architecture)[0]
    weights = load_file(models / "moe" / "model.safetensors")
    first, second, third = sorted(weights)[:3]
    wrong = {name: tensor for name, tensor in weights.items() if name != third}
    wrong[first] = wrong[first][:7].contiguous()
    save_file(wrong | {"model.nonsense": wrong[first].clone()}, tmp_path / "a.safetensors")
    save_file({second: weights[second]}, tmp_path / "b.safetensors")
    (write_two_words(tmp_path) / "config.json").write_text((models / "moe" / "config.json").read_text())
    assert check_model.main([str(tmp_path)]) == 2
    output = capsys.readouterr().err
    assert f"{first} has shape (7, 64); config.json requires (51, 64)" in output
    assert "model.nonsense is not a weight of family qwen3_moe" in output
    assert f"{second} is also in {tmp_path / 'a.safetensors'}" in output
    assert f"1 of {len(weights)} weights are missing: {third}" in output
    (tmp_path / "b.safetensors").write_bytes(b"no header")
    assert check_model.main([str(tmp_path)]) == 2 and "b.safetensors cannot be read" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({**read_hf_config(models / "moe"), "model_type": "phi3"}))
    assert check_model.main([str(tmp_path)]) == 2 and "its model_type is 'phi3'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenizer_config.json", "has no chat template"),
        ("adapter_config.json", "it has adapter_config.json"),
        ("model.safetensors.index.json", "two sets of weights, model.safetensors, .* and 1 files"),
        ("config.json", "its tokenizer has token ids up to 1, its weights only 1 rows"),
    ],
)
def test_what_a_run_refuses_is_refused_by_check_model_in_the_same_words(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    folder = write_two_words(shutil.copytree(models / "untied", tmp_path / "model"))
    content: dict[str, Any] = {"eos_token": "</s>"} if name == "tokenizer_config.json" else {}
    if name == "model.safetensors.index.json":
        shutil.copyfile(folder / "model.safetensors", folder / "stale.safetensors")
        content["weight_map"] = dict.fromkeys(load_file(folder / "stale.safetensors"), "stale.safetensors")
    if name == "config.json":
        content = json.loads((folder / name).read_text()) | {"vocab_size": 1}
        weights = load_file(folder / "model.safetensors")
        cut = {
            key: tensor[:1].clone() if "embed" in key or "head" in key else tensor for key, tensor in weights.items()
        }
        save_file(cut, folder / "model.safetensors")
    (folder / name).write_text(json.dumps(content))
    assert check_model.main([str(folder)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert re.search(message, told)
    line = ["model=qwen3", f"model.path={folder}", "data=file", f"data.path={tmp_path / 'rows.jsonl'}"]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "a"}\n')
    with pytest.raises(ConfigError) as error:
        load_config([*line, "data.eval_size=0", "eval.every=0"], checks=CHECKS, settle=settle)
    assert told.removeprefix("relax: ") in error.value.problems


def test_checking_reads_no_tensor(models: Path, tmp_path: Path) -> None:
    """A folder with only headers passes the check, so the check does not read tensor bytes."""
    whole = (models / "untied" / "model.safetensors").read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    (tmp_path / "model.safetensors").write_bytes(whole[:size] + b"\xff" * (len(whole) - size))
    assert not weight_problems(tmp_path, folder_architecture(models / "untied"))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.get_tensor("model.norm.weight").isnan().all()
