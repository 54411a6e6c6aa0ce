"""Tests that the weight rules of every family keep each bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import make_model
from tiny_trainer import export_folder, make_backend, parallel_config

from benchmarks.family_models import VARIANTS, make_family_model
from relax_core.config.choices import Recompute
from relax_core.config.compose import load_config
from relax_core.train.hf.stored_weights import weight_problems
from relax_core.train.hf.weight_rules import tensor_shape, weight_rules
from relax_core.train.parallel_layout import check_layout


@pytest.mark.parametrize(
    ("variant", "dtype"), [*((variant, "float32") for variant in VARIANTS), ("qwen2, tied", "bfloat16")]
)
def test_import_then_export_gives_the_same_file(tmp_path: Path, variant: str, dtype: str) -> None:
    """The export has the names, shapes, dtypes and bytes of the file that transformers wrote."""
    folder, out = tmp_path / "folder", tmp_path / "out"
    make_family_model(None, variant).to(getattr(torch, dtype)).save_pretrained(folder)
    backend = make_backend(folder, family=VARIANTS[variant][0], dtype=dtype)
    shapes = {name: tuple(tensor.shape) for name, tensor in backend.export()}
    assert weight_problems(folder, backend.architecture) == []
    assert shapes == {rule.hf: tensor_shape(rule, backend.architecture) for rule in weight_rules(backend.architecture)}
    export_folder(backend, folder, out)
    assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("variant", "cut_tensors"), [("qwen3", 9), ("qwen2", 12)])
def test_shards_are_those_of_megatron(tmp_path: Path, variant: str, cut_tensors: int) -> None:
    """Megatron marks sharded parameters only when it initializes them. Our marks must be equal."""
    from relax_core.train.model.gpt import TreeGPTModel, block_spec, transformer_config

    make_family_model(tmp_path, variant)
    backend = make_backend(tmp_path, family=variant)
    config = transformer_config(backend.architecture, parallel_config(), dtype=torch.float32)
    config.perform_initialization = True
    spec = block_spec(config, backend.architecture, recompute=Recompute.none)
    tied = backend.architecture.tie_word_embeddings
    stock = TreeGPTModel(
        config, spec, 51, 512, position_embedding_type="rope", share_embeddings_and_output_weights=tied
    )
    ours = dict(backend.model.named_parameters())
    cut = 0
    for name, parameter in stock.named_parameters():
        for mark in ("tensor_model_parallel", "partition_dim"):
            assert getattr(ours[name], mark, None) == getattr(parameter, mark, None), (name, mark)
        cut += hasattr(parameter, "partition_dim")
    assert cut == cut_tensors  # four matrices and a bias per layer, the embedding and the output weight


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    make_model(tmp_path)
    backend = make_backend(tmp_path)
    good = [(name, tensor.clone()) for name, tensor in backend.export()]
    name, tensor = good[3]
    with pytest.raises(ValueError, match=r"1 weight\(s\) missing: model.norm.weight"):
        backend.load_weights(iter(good[:-1]))
    with pytest.raises(ValueError, match=r"weight model.nonsense is not a weight of family qwen3"):
        backend.load_weights(iter([*good, ("model.nonsense", tensor)]))
    with pytest.raises(ValueError, match=f"weight {name} comes twice"):
        backend.load_weights(iter([*good, (name, tensor)]))
    with pytest.raises(ValueError, match=rf"weight {name} has shape \(2, 64\); the model's is \(32, 64\)"):
        backend.load_weights(iter([(name, tensor[:2])]))
    backend.load_weights(iter([*good, ("lm_head.weight", good[0][1])]))


def test_names_of_a_build_with_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine's linear layers include the preceding norm; routers do not. One module has all experts."""
    from relax_core.train.model import gpt as specs

    norm, mlp = "decoder.layers.3.input_layernorm.weight", "decoder.layers.3.pre_mlp_layernorm.weight"
    expert = "decoder.layers.3.mlp.experts.local_experts.11.linear_fc2.weight"
    assert [specs.parameter_name(name, experts=True) for name in (norm, mlp, expert)] == [norm, mlp, expert]
    monkeypatch.setattr(specs, "has_transformer_engine", lambda: True)
    assert specs.parameter_name(norm, experts=True) == "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"
    assert specs.parameter_name(mlp, experts=True) == mlp
    assert specs.parameter_name(mlp, experts=False) == "decoder.layers.3.mlp.linear_fc1.layer_norm_weight"
    assert specs.parameter_name(expert, experts=True) == "decoder.layers.3.mlp.experts.linear_fc2.weight11"


def test_a_layout_that_does_not_fill_its_ranks_is_refused() -> None:
    parallel = load_config(["parallel=tp2_sp"]).parallel
    check_layout(parallel, 2)
    with pytest.raises(ValueError, match=r"parallel.dp=1 x tp=2 x pp=1 x cp=1 = 2 ranks, but there are 3"):
        check_layout(parallel, 3)
