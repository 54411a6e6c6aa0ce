"""Weight maps to the bit, and families that do not exist."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gang_layouts import parallel_config
from safetensors.torch import load_file
from tiny_models import make_model, make_models
from tiny_trainer import make_backend, make_groups

from relax_core.config.compose import load_config
from relax_core.config.schema import Recompute
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
    config = transformer_config(backend.family, backend.hf_config, parallel_config(), dtype=torch.float32)
    config.perform_initialization = True
    stock = TreeGPTModel(config, block_spec(config, recompute=Recompute.none), 50, 512, position_embedding_type="rope")
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
    with pytest.raises(ValueError, match=r"model.family=llama: no such model family. What exists: qwen3, qwen3_moe\."):
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


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mlp_only_layers": [0]}, "experts in every layer only"),
        ({"decoder_sparse_step": 2}, "experts in every layer only"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5: must be 1 to 4"),
        ({"num_experts_per_tok": 1}, "the router learns nothing"),
        ({"use_sliding_window": True}, "qwen3_moe trains use_sliding_window=False only"),
    ],
)
def test_experts_that_need_other_code_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    make_models(tmp_path)
    edit_config(tmp_path / "moe", **changes)
    with pytest.raises(ValueError, match=problem):
        read_model(tmp_path / "moe", "qwen3_moe")


@pytest.mark.parametrize("normalised", [True, False])
def test_experts_compute_what_transformers_does(tmp_path: Path, normalised: bool) -> None:
    """Softmax over all experts and the best few of it, whether or not their weights are made to sum to 1."""
    from transformers import AutoModelForCausalLM

    from relax_core.train.tree import pack_tree
    from relax_core.train.tree_attention import TreeBatch

    make_models(tmp_path)
    edit_config(tmp_path / "moe", norm_topk_prob=normalised)
    backend = make_backend(tmp_path / "moe", family="qwen3_moe", trainable=False)
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    (group,) = make_groups([[1]], prompt_lengths=[40])
    with torch.no_grad():
        expected = reference(torch.from_numpy(group.prompt_ids).long()[None]).logits[0].log_softmax(-1)
        tree = TreeBatch.of(pack_tree([group]), device=torch.device("cpu"), dtype=torch.float32)
        logits = backend.model(tree) @ backend.model.output_weight().t()
    torch.testing.assert_close(logits.log_softmax(-1), expected, atol=1e-5, rtol=0)
    assert reference.config.norm_topk_prob is normalised


def test_names_of_a_build_with_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its linear layers hold the norm before them, but a router has none; a grouped GEMM has a layer's experts."""
    from relax_core.train import specs

    norm, mlp = "decoder.layers.3.input_layernorm.weight", "decoder.layers.3.pre_mlp_layernorm.weight"
    expert = "decoder.layers.3.mlp.experts.local_experts.11.linear_fc2.weight"
    assert [specs.parameter_name(name, experts=True) for name in (norm, mlp, expert)] == [norm, mlp, expert]
    monkeypatch.setattr(specs, "has_transformer_engine", lambda: True)
    assert specs.parameter_name(norm, experts=True) == "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"
    assert specs.parameter_name(mlp, experts=True) == mlp
    assert specs.parameter_name(mlp, experts=False) == "decoder.layers.3.mlp.linear_fc1.layer_norm_weight"
    assert specs.parameter_name(expert, experts=True) == "decoder.layers.3.mlp.experts.linear_fc2.weight11"


def test_experts_of_either_spelling(tmp_path: Path) -> None:
    make_models(tmp_path)
    family, new = read_model(tmp_path / "moe", "qwen3_moe")
    old = {key: value for key, value in new.items() if key != "num_local_experts"} | {"num_experts": 4}
    assert family.transformer_arguments(old) == family.transformer_arguments(new)
    moe = family.shape(old).moe
    assert moe is not None and (moe.experts, moe.top_k, moe.layers) == (4, 2, (0, 1, 2, 3))
    moe = family.shape(old).moe
    assert moe is not None and moe.layers == (0, 1, 2, 3)


def test_a_layout_that_does_not_fill_its_ranks_is_refused() -> None:
    parallel = load_config(["parallel=tp2_sp"]).parallel
    check_layout(parallel, 2)
    with pytest.raises(ValueError, match=r"parallel.dp=1 x tp=2 x pp=1 x cp=1 = 2 ranks, but there are 3"):
        check_layout(parallel, 3)


def test_families_and_layouts_import_nothing_heavy() -> None:
    script = (
        "import sys; import relax_core.train.layout, relax_core.train.models.registry, relax_core.train.tree;"
        "print([m for m in ('torch', 'megatron', 'transformers', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"


def test_every_family_is_under_its_own_name() -> None:
    assert all(name == family.name for name, family in FAMILIES.items())
