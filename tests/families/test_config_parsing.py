"""Tests how config.json is parsed, refused files, and the choice of a folder's weight files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from relax_core.contracts.family import Experts
from relax_core.families.builtin_families import read_architecture
from relax_core.families.folder import folder_architecture, weight_files
from relax_core.families.rope import Llama3Scaling, Rope, read_rope
from relax_core.registry import find_family, names

SIZES: dict[str, Any] = {
    "vocab_size": 51,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# The settings of Meta's Llama 3.1 and 3.2, in the format of transformers 4 (3.2 has factor 32).
LLAMA_3_1 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
NO_WINDOW = {"sliding_window": None}


@pytest.mark.parametrize(
    ("family", "bias", "norm"),
    [("qwen2", True, False), ("llama", False, False), ("mistral", False, False), ("qwen3", False, True)],
)
def test_a_layer_has_what_transformers_gives_it(family: str, bias: bool, norm: bool) -> None:
    """Compares the description from our table with the parameter names of transformers."""
    from transformers import AutoModelForCausalLM

    values = SIZES | NO_WINDOW
    architecture = read_architecture(find_family(family), values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values))
    names = {name for name, _ in model.named_parameters()}
    assert architecture.qkv_bias is bias is all(f"model.layers.1.self_attn.{part}_proj.bias" in names for part in "qkv")
    assert architecture.qk_norm is norm is ("model.layers.1.self_attn.q_norm.weight" in names)
    assert not architecture.tie_word_embeddings and "lm_head.weight" in names
    assert not any(name.endswith(("o_proj.bias", "gate_proj.bias")) for name in names)


@pytest.mark.parametrize("family", [name for name in names("family") if find_family(name).vision is None])
def test_either_spelling_is_the_same(family: str) -> None:
    """Version 4 of transformers writes rope_theta, rope_scaling and num_experts.

    Version 5 writes rope_parameters and num_local_experts.
    """
    old = SIZES | NO_WINDOW | {"rope_theta": 5e5, "rope_scaling": LLAMA_3_1, "tie_word_embeddings": True}
    if family == "qwen3_moe":
        old |= EXPERTS
    config = AutoConfig.for_model(family, **old)
    new = {**config.to_dict(), "rope_theta": None}
    assert "rope_parameters" in new and not new.get("rope_scaling")
    architecture = read_architecture(find_family(family), old | {"head_dim": new.get("head_dim")})
    assert architecture == read_architecture(find_family(family), new)
    assert architecture.rope == Rope(theta=5e5, scaling=Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4,
                                                              original_positions=8192))  # fmt: skip
    if family == "qwen3_moe":
        assert architecture.experts == Experts(count=4, per_token=2, width=32, normalized=True)
        assert "num_local_experts" in new and "num_experts" in old


def test_what_an_old_config_leaves_out() -> None:
    """Llama 2's config.json lacks rope_theta and head_dim. The first Llama's config.json lacks num_key_value_heads."""
    architecture = read_architecture(
        find_family("llama"), {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    )
    assert (architecture.num_kv_heads, architecture.head_dim, architecture.rope, architecture.rms_norm_eps) == (
        4,
        16,
        Rope(theta=10000.0),
        1e-6,
    )
    assert not architecture.tie_word_embeddings


@pytest.mark.parametrize(
    ("scaling", "theta", "head_dim", "positions"),
    [
        (LLAMA_3_1, 5e5, 128, 131072),
        ({**LLAMA_3_1, "factor": 32.0}, 5e5, 64, 131072),
        ({**LLAMA_3_1, "factor": 3.0, "original_max_position_embeddings": 64}, 1e4, 16, 512),
        ({k: v for k, v in LLAMA_3_1.items() if not k.startswith("original")}, 5e5, 128, 4096),
        ({"type": "linear", "factor": 2.5}, 1e4, 128, 8192),
        ({}, 1e6, 128, 32768),
    ],
    ids=["llama-3.1", "llama-3.2", "another", "original-derived", "linear", "plain"],
)
def test_frequencies_are_those_of_transformers(
    scaling: dict[str, Any], theta: float, head_dim: int, positions: int
) -> None:
    values = {"rope_theta": theta, "rope_scaling": scaling or None, "max_position_embeddings": positions}
    config = AutoConfig.for_model("llama", **values, hidden_size=4 * head_dim, num_attention_heads=4)
    kind = config.rope_parameters["rope_type"]
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    expected = plain if kind == "default" else ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]
    found = read_rope(values, family="llama").scaled(plain)
    torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)
    if kind == "llama3":  # there are unchanged, divided and interpolated frequencies
        ratio = plain / found
        assert (ratio == 1).any() and (ratio == scaling["factor"]).any()
        assert ((ratio > 1.01) & (ratio < scaling["factor"] * 0.99)).any()


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("qwen2", {"use_sliding_window": True}, "qwen2 computes use_sliding_window=False only"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has .*sliding_attention"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type=yarn: qwen2 computes"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act=gelu: qwen2 computes hidden_act=silu only"),
        ("qwen3", {"use_sliding_window": True}, "qwen3 computes use_sliding_window=False only"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type=dynamic"),
        ("llama", {"attention_bias": True}, "no bias of the attention's output projection is"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True: llama computes mlp_bias=False only"),
        ("llama", {"attention_dropout": 0.1}, "nothing is dropped while training"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no low_freq_factor, which"),
        ("llama", {"rope_scaling": {**LLAMA_3_1, "low_freq_factor": 4.0}}, "low_freq_factor=4.0: must be less than"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters differ"),
        ("llama", {"hidden_size": None}, "has no hidden_size, which family llama needs"),
        ("mistral", {"sliding_window": 256}, "sliding_window=256 with max_position_embeddings=512"),
        ("mistral", {"max_position_embeddings": 8192}, r"sliding_window=4096 \(transformers' default"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "experts in every layer only"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "experts in every layer only"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok=5: must be 1 to 4"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "the router learns nothing"),
        ("qwen3_moe", {"num_experts_per_tok": None}, "has no num_experts_per_tok, which family qwen3_moe needs"),
    ],
)  # fmt: skip
def test_what_would_need_other_code_is_refused(family: str, changes: dict[str, Any], problem: str) -> None:
    values = SIZES | (EXPERTS if family == "qwen3_moe" else {})
    read_architecture(find_family(family), values)
    changed = {key: value for key, value in {**values, **changes}.items() if value is not None}
    with pytest.raises(ValueError, match=problem):
        read_architecture(find_family(family), changed)


@pytest.mark.parametrize(
    ("family", "harmless"),
    [
        ("qwen2", {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}),
        ("mistral", {"sliding_window": None, "max_position_embeddings": 32768}),
        ("mistral", {"sliding_window": 4096, "max_position_embeddings": 4096}),
        ("llama", {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 2, "attention_dropout": 0.0}),
    ],
)
def test_what_changes_nothing_is_taken(family: str, harmless: dict[str, Any]) -> None:
    read_architecture(find_family(family), SIZES | harmless)


def write_config(folder: Path, **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SIZES | values))
    return folder


def test_a_wrong_family_names_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.family=phi3 is not known. What exists: llama, mistral, qwen2,"):
        find_family("phi3")
    with pytest.raises(ValueError, match=r"no config\.json there"):
        folder_architecture(tmp_path, family="qwen3")
    write_config(tmp_path, model_type="llama")
    with pytest.raises(ValueError, match=r"model_type is 'llama', and model.family=qwen3. Use model=llama\."):
        folder_architecture(tmp_path, family="qwen3")
    assert folder_architecture(tmp_path) == folder_architecture(tmp_path, family="llama")
    write_config(tmp_path, model_type="phi3")
    with pytest.raises(ValueError, match=r"model_type is 'phi3', which is not a family of Relax. What exists: llama"):
        folder_architecture(tmp_path, family="qwen3")


def test_weights_that_stand_twice_in_a_folder_are_read_once(tmp_path: Path) -> None:
    """Mistral's folders also contain consolidated.safetensors: the same weights with Mistral's names."""
    assert weight_files(tmp_path) == []
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).touch()
    assert [path.name for path in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]
    for name in ("consolidated.safetensors", "model.safetensors"):
        (tmp_path / name).touch()
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}))
    assert [path.name for path in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]
    index.write_text("[]")
    with pytest.raises(ValueError, match=r"index\.json cannot be read"):
        weight_files(tmp_path)


def test_families_import_nothing_heavy() -> None:
    script = (
        "import sys; import relax_core.families.folder, relax_core.train.hf.stored_weights;"
        "import relax_core.train.parallel_layout;"
        "import relax_core.train.hf.weight_rules, relax_core.train.micro_batches;"
        "print([m for m in ('torch', 'megatron', 'transformers', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"
