"""Weight maps to the bit, and families that do not exist."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_trainer import make_backend, make_model

from relax_core.config.schema import ParallelConfig
from relax_core.train.layout import check_layout
from relax_core.train.models.registry import FAMILIES, find_family, read_model


@pytest.mark.parametrize("tied", [True, False])
def test_import_then_export_is_bit_identical(tmp_path: Path, tied: bool) -> None:
    make_model(tmp_path, tied=tied)
    source = load_file(tmp_path / "model.safetensors")
    exported = dict(make_backend(tmp_path).export())
    assert exported.keys() == source.keys()
    for name, tensor in source.items():
        assert exported[name].shape == tensor.shape
        assert torch.equal(exported[name], tensor), name


def test_shards_are_those_of_megatron(tmp_path: Path) -> None:
    """Megatron marks parameters when it initialises them itself; ours must bear the same marks."""
    from relax_core.train.gpt import TreeGPTModel, transformer_config
    from relax_core.train.specs import block_spec

    make_model(tmp_path, tied=False)
    backend = make_backend(tmp_path)
    config = transformer_config(backend.family, backend.hf_config, dtype=torch.float32)
    config.perform_initialization = True
    stock = TreeGPTModel(config, block_spec(config), 50, 512, position_embedding_type="rope")
    ours = dict(backend.model.named_parameters())
    cut = 0
    for name, parameter in stock.named_parameters():
        for mark in ("tensor_model_parallel", "partition_dim"):
            assert getattr(ours[name], mark, None) == getattr(parameter, mark, None), (name, mark)
        cut += hasattr(parameter, "partition_dim")
    assert cut == 10  # four matrices a layer, embedding, output


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    make_model(tmp_path)
    backend = make_backend(tmp_path)
    good = [(name, tensor.clone()) for name, tensor in backend.export()]
    name, tensor = good[3]
    with pytest.raises(ValueError, match=r"1 weight\(s\) missing: model.norm.weight"):
        backend.load_weights(iter(good[:-1]))
    with pytest.raises(ValueError, match=r"weight model.nonsense is no weight of family qwen3"):
        backend.load_weights(iter([*good, ("model.nonsense", tensor)]))
    with pytest.raises(ValueError, match=f"weight {name} comes twice"):
        backend.load_weights(iter([*good, (name, tensor)]))
    with pytest.raises(ValueError, match=rf"weight {name} has shape \(2, 64\); the model's is \(32, 64\)"):
        backend.load_weights(iter([(name, tensor[:2])]))
    backend.load_weights(iter([*good, ("lm_head.weight", good[0][1])]))


def test_unknown_families_name_what_exists(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.family=llama: no such model family. What exists: qwen3\."):
        find_family("llama")
    with pytest.raises(ValueError, match=r"no config.json there"):
        read_model(tmp_path, "qwen3")
    make_model(tmp_path)
    edit_config(tmp_path, model_type="llama")
    with pytest.raises(ValueError, match=r"model_type is 'llama'.*What exists: qwen3 \(family qwen3\)"):
        read_model(tmp_path, "qwen3")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type=yarn"),
        ({"rope_scaling": {"type": "linear"}}, "plain rotary embeddings only"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
    ],
)
def test_settings_that_need_other_code_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    make_model(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=problem):
        read_model(tmp_path, "qwen3")


def layout(**sizes: int) -> ParallelConfig:
    return ParallelConfig(**({"dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1} | sizes))  # type: ignore[arg-type]


def test_layouts() -> None:
    check_layout(layout(dp=2), 2)
    with pytest.raises(ValueError, match=r"parallel.tp=2: not built yet; what exists: dp"):
        check_layout(layout(tp=2), 2)
    with pytest.raises(ValueError, match=r"parallel.dp=2: the trainer has 3 rank"):
        check_layout(layout(dp=2), 3)


def test_families_and_layouts_import_nothing_heavy() -> None:
    script = (
        "import sys; import relax_core.train.layout, relax_core.train.models.registry, relax_core.train.tree;"
        "print([m for m in ('torch', 'megatron', 'transformers', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_every_family_is_under_its_own_name() -> None:
    assert all(name == family.name for name, family in FAMILIES.items())
