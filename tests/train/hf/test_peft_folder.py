"""Tests that LoRA factors survive a PEFT folder, and that folders of other adapters and other models are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from relax_core.families.folder import folder_architecture
from relax_core.tools import export
from relax_core.train.checkpoints.checkpoint_shards import WEIGHTS, Block, Pieces, write_pieces
from relax_core.train.checkpoints.checkpoint_store import CheckpointStore
from relax_core.train.checkpoints.provenance import Provenance, model_numbers, write_provenance
from relax_core.train.hf.peft_folder import ADAPTER_WEIGHTS, read_peft, target_modules, write_peft
from relax_core.weights.lora_merge import LoraFactors
from tests.contracts.engine.harness import hf_weights, make_model
from tests.contracts.engine.test_lora_weights import factors_of, merged_model

SHAPES = {
    "model.embed_tokens.weight": (50, 8),
    "model.layers.0.self_attn.q_proj.weight": (12, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 16),
    "model.layers.1.self_attn.q_proj.weight": (12, 8),
    "model.layers.1.mlp.down_proj.weight": (8, 16),
    "model.norm.weight": (8,),
}
ADAPTED = [name for name in SHAPES if "_proj" in name]
RANK, ALPHA = 4, 6.0


def factors(scale: float) -> list[LoraFactors]:
    generator = torch.Generator().manual_seed(3)
    return [
        LoraFactors(
            name,
            torch.randn(RANK, SHAPES[name][1], generator=generator),
            torch.randn(SHAPES[name][0], RANK, generator=generator),
            scale,
        )
        for name in ADAPTED
    ]


def written(folder: Path, *, rslora: bool = False) -> list[LoraFactors]:
    given = factors(ALPHA / 2.0 if rslora else ALPHA / 4.0)
    write_peft(folder, given, alpha=ALPHA, rslora=rslora, base_model="/models/base", names=SHAPES)
    return given


@pytest.mark.parametrize("rslora", [False, True])
def test_factors_and_scale_survive(tmp_path: Path, rslora: bool) -> None:
    given = written(tmp_path / "peft", rslora=rslora)
    found = read_peft(tmp_path / "peft", shapes=SHAPES)
    assert [(factor.name, factor.scale) for factor in found] == [(factor.name, factor.scale) for factor in given]
    for mine, theirs in zip(given, found, strict=True):
        assert torch.equal(mine.a, theirs.a) and torch.equal(mine.b, theirs.b)


def test_the_files_have_the_names_of_peft(tmp_path: Path) -> None:
    written(tmp_path / "peft", rslora=True)
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    wanted = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "use_rslora": True,
        "target_modules": ["down_proj", "q_proj"],
        "base_model_name_or_path": "/models/base",
    }
    assert wanted.items() <= config.items()
    stored = load_file(tmp_path / "peft" / ADAPTER_WEIGHTS)
    assert stored["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"].shape == (RANK, 16)
    assert stored["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"].shape == (8, RANK)
    assert len(stored) == 2 * len(ADAPTED)


def test_modules_are_named_whole_if_their_ending_is_not_enough() -> None:
    some = [name for name in ADAPTED if "layers.0.mlp" not in name]
    assert target_modules(some, names=SHAPES) == ["model.layers.1.mlp.down_proj", "q_proj"]


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    written(tmp_path / "peft")
    with pytest.raises(OSError, match="peft"):
        written(tmp_path / "peft")


def test_a_model_without_factors_has_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--adapter"):
        write_peft(tmp_path / "peft", [], alpha=1.0, rslora=False, base_model="x", names=SHAPES)
    assert not (tmp_path / "peft").exists()


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda config, _: config.update(peft_type="IA3"), "peft_type=IA3"),
        (lambda config, _: config.update(use_dora=True), "use_dora=True"),
        (lambda config, _: config.update(modules_to_save=["lm_head"]), "modules_to_save=.*lm_head"),
        (lambda config, _: config.update(rank_pattern={"q_proj": 2}), "rank_pattern="),
        (lambda config, _: config.update(bias="all"), "bias=all"),
        (lambda config, _: config.update(r=0), "r=0"),
        (lambda config, _: config.pop("lora_alpha"), "lora_alpha"),
        (lambda config, _: config.update(r=8), r"factors of the shapes.*r=8.*/models/base.*give the folder"),
        (lambda _, stored: stored.pop(FIRST), "only lora_B"),
        (lambda _, stored: stored.update({FIRST: torch.ones(RANK, 9)}), r"q_proj.*\(12, 8\).*give the folder"),
        (lambda _, stored: stored.update({"base_model.model.lm_head.weight": torch.ones(1)}), "lm_head.weight is not"),
        (
            lambda _, stored: stored.update({FIRST.replace("layers.0", "layers.9"): torch.ones(RANK, 8)}),
            "layers.9.*not a weight of the model.*/models/base",
        ),
        (lambda _, stored: stored.clear(), "no factors"),
    ],
)
def test_other_adapters_and_other_models_are_refused(tmp_path: Path, change: Change, problem: str) -> None:
    folder = tmp_path / "peft"
    written(folder)
    config, stored = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / ADAPTER_WEIGHTS)
    change(config, stored)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(stored, folder / ADAPTER_WEIGHTS)
    with pytest.raises(ValueError, match=problem):
        read_peft(folder, shapes=SHAPES)


@pytest.mark.parametrize("missing", ["adapter_config.json", ADAPTER_WEIGHTS])
def test_missing_files_are_named(tmp_path: Path, missing: str) -> None:
    written(tmp_path / "peft")
    (tmp_path / "peft" / missing).unlink()
    with pytest.raises(ValueError, match=missing):
        read_peft(tmp_path / "peft", shapes=SHAPES)


def test_empty_fields_and_names_of_a_loaded_adapter_are_accepted(tmp_path: Path) -> None:
    """PEFT writes null for unset fields, and some tools keep the adapter's name ``default``."""
    folder = tmp_path / "peft"
    given = written(folder)
    config, stored = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / ADAPTER_WEIGHTS)
    config |= {"modules_to_save": None, "rank_pattern": {}, "layers_pattern": None, "eva_config": None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    renamed = {name.replace(".weight", ".default.weight"): tensor for name, tensor in stored.items()}
    save_file(renamed, folder / ADAPTER_WEIGHTS)
    assert len(read_peft(folder, shapes=SHAPES)) == len(given)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Returns a PEFT folder of the tiny model, and the model with merged weights."""
    folder: Path = tmp_path_factory.mktemp("adapter")
    model = make_model(folder / "base", seed=0)
    given = factors_of(model, seed=1)
    names = [name for name, _ in hf_weights(model)]
    write_peft(folder / "peft", given, alpha=8.0, rslora=False, base_model=str(folder / "base"), names=names)
    return folder / "peft", merged_model(model, given)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_relax_export_merges_a_peft_folder(adapter: tuple[Path, Any], tmp_path: Path, dtype: str | None) -> None:
    from transformers import AutoModelForCausalLM

    folder, model = adapter
    asked = [] if dtype is None else ["--dtype", dtype]
    assert export.main([str(folder), str(tmp_path / "hf"), "--shard-gb", "1e-4", *asked]) == 0
    assert not (tmp_path / "hf/adapter_config.json").exists()
    both: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    loaded, info = both
    assert not any(info.values())
    expected = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == getattr(torch, dtype or "float32")
        atol, rtol = (1e-6, 1e-6) if dtype is None else (0.0, 2**-8)
        torch.testing.assert_close(tensor.float(), expected[name], atol=atol, rtol=rtol)


def test_a_base_model_that_is_not_a_folder_is_asked_for(
    adapter: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = adapter
    written(tmp_path / "peft")
    assert export.main([str(tmp_path / "peft"), str(tmp_path / "hf")]) == 2
    assert re.search("base_model_name_or_path=/models/base.*--model", capsys.readouterr().err)
    assert export.main([str(tmp_path / "peft"), str(tmp_path / "hf"), "--model", str(folder.parent / "base")]) == 2
    assert re.search("factors of the shapes.*/models/base.*give the folder", capsys.readouterr().err)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("rslora", [False, True])
def test_a_checkpoint_of_factors_is_exported_merged_and_as_an_adapter(
    adapter: tuple[Path, Any], tmp_path: Path, rslora: bool
) -> None:
    """The checkpoint has the factors only, under the names of PEFT."""
    base = adapter[0].parent / "base"
    given = factors_of(make_model(None, seed=0), seed=5)
    alpha = 2.0 * (2 if rslora else 4)  # rank 4, scale 2
    checkpoint = save_factors(tmp_path / "run", given, base=base, alpha=alpha, rslora=rslora)
    assert export.main([str(checkpoint), str(tmp_path / "peft"), "--adapter"]) == 0
    shapes = {name: tuple(tensor.shape) for name, tensor in hf_weights(make_model(None, seed=0))}
    for mine, theirs in zip(given, read_peft(tmp_path / "peft", shapes=shapes), strict=True):
        assert (mine.name, mine.scale) == (theirs.name, theirs.scale)
        assert torch.equal(mine.a, theirs.a) and torch.equal(mine.b, theirs.b)
    assert json.loads((tmp_path / "peft/adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert export.main([str(checkpoint), str(tmp_path / "hf")]) == 0
    expected = merged_model(make_model(None, seed=0), given).state_dict()
    for name, tensor in load_file(tmp_path / "hf/model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)


def save_factors(run: Path, given: list[LoraFactors], *, base: Path, alpha: float, rslora: bool) -> Path:
    """Writes a checkpoint like a rank that has only factors."""
    tensors = {
        f"{WEIGHTS}{name.removesuffix('.weight')}.lora_{side}.weight": tensor
        for name, a, b, _ in given
        for side, tensor in (("A", a), ("B", b))
    }
    architecture = folder_architecture(base)
    provenance = Provenance(
        family=architecture.family,
        head="policy",
        dtype="float32",
        model=model_numbers(architecture),
        layout={},
        world_size=1,
        step=1,
        updates=1,
        time="",
        libraries={},
        lora={"rank": 4, "alpha": alpha, "targets": ["q_proj"], "rslora": rslora},
    )

    def write(partial: Path) -> None:
        (partial / "config.yaml").write_text(yaml.safe_dump({"model": {"path": str(base), "builtin": None}}))
        (partial / "train").mkdir()
        pieces = {name: Pieces(tuple(value.shape), [Block((0, 0), value)]) for name, value in tensors.items()}
        one_process: Any = None
        write_pieces(partial / "train", pieces, group=one_process)
        write_provenance(provenance, partial / "train")

    return CheckpointStore(run, keep_last=1).write(1, writers=write, meta={})
