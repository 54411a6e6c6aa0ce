"""Tests that a GGUF file becomes the Hugging Face folder that it was made from, or an error without new files."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from relax_core.__main__ import main as relax
from relax_core.tools.import_gguf import FAMILIES, import_gguf
from tests.tools.gguf_files import CLASSES, TEMPLATE, TOKENS, made_model, metadata, read_json, stored, write_gguf


def made_file(folder: Path, architecture: str = "qwen3", *, tied: bool = False, **changed: Any) -> Path:
    """Writes the file of a generated model. ``changed`` replaces metadata; the value None removes a key."""
    model = made_model(architecture, tied=tied)
    values = metadata(model, architecture) | {key.replace("__", "."): value for key, value in changed.items()}
    values = {key: value for key, value in values.items() if value is not None}
    return write_gguf(folder / f"{architecture}.gguf", stored(model, architecture), values)


def assert_refused(file: Path, *words: str, match: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Asserts that the command exits with status 2 and a message that contains ``match``, and writes nothing."""
    before = sorted(file.parent.iterdir())
    assert relax(["import-gguf", str(file), str(file.parent / "out"), *words]) == 2
    output = capsys.readouterr().err
    assert all(word in output for word in match) and "Traceback" not in output, output
    assert sorted(file.parent.iterdir()) == before


@pytest.mark.parametrize(("tied", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_folder_computes_what_the_model_of_the_file_computes(
    architecture: str, tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = made_model(architecture, tied=tied)
    file = write_gguf(tmp_path / "model.gguf", stored(model, architecture), metadata(model, architecture))
    assert import_gguf(file, tmp_path / "out", dtype=str(dtype).removeprefix("torch.")) == []
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded).__name__ == f"{CLASSES[architecture]}ForCausalLM"
    rounded = {name: value.to(dtype) for name, value in model.state_dict().items()}
    found = loaded.state_dict()
    assert found.keys() == rounded.keys() and all(torch.equal(found[name], value) for name, value in rounded.items())
    ids = torch.arange(40).reshape(2, 20)
    model.load_state_dict(rounded)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert relax(["check-model", str(tmp_path / "out")]) == 0


def test_quantised_weights_are_dequantised_and_the_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = made_model("qwen3")
    kind = gguf.GGMLQuantizationType.Q8_0
    tensors = stored(model, "qwen3")
    file = write_gguf(
        tmp_path / "model.gguf",
        tensors,
        metadata(model, "qwen3"),
        quantise=lambda name, values: kind if values.ndim == 2 and values.shape[1] % 32 == 0 else None,
    )
    assert relax(["import-gguf", str(file), str(tmp_path / "out")]) == 0
    assert "Q8_0" in capsys.readouterr().out
    # The definition of Q8_0: 32 weights share the float16 scale max|w| / 127.
    blocks = tensors["blk.0.attn_q.weight"].reshape(-1, 32)
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float32)
    rounded = np.round(blocks / scale)
    expected = torch.from_numpy(rounded * scale.astype(np.float16).astype(np.float32)).reshape(32, 32)
    found = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2", "smollm"])
def test_a_tokenizer_splits_as_the_one_that_llama_cpp_names(pre: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    import_gguf(made_file(tmp_path, tokenizer__ggml__pre=pre), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def pieces(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))

    one_number = {"qwen2": ["1", "2", "3", "4"], "llama-bpe": ["123", "4"], "gpt-2": ["123", "4"]}
    assert pieces("1234") == one_number.get(pre, ["1", "2", "3", "4"])
    # Llama 3 splits numbers after every three digits from the left, GPT-2 does not. The merge 12+3 spans the split.
    assert pieces("9123") == (
        ["9", "123"] if pre == "gpt-2" else ["9", "12", "3"] if pre == "llama-bpe" else list("9123")
    )
    assert pieces("ab the") == ["ab", "Ġthe"]
    assert tokenizer.decode(tokenizer.encode("Ärger, 漢字  \n x")) == "Ärger, 漢字  \n x"
    assert tokenizer.encode("<|end|>ab<|user|>") == [0, TOKENS.index("ab"), 1]
    assert tokenizer.eos_token == "<|end|>" and tokenizer.chat_template == TEMPLATE
    assert read_json(folder / "generation_config.json")["eos_token_id"] == [0]


def test_the_first_token_of_a_file_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    changed = {"tokenizer__ggml__bos_token_id": 1, "tokenizer__ggml__add_bos_token": True}
    import_gguf(made_file(tmp_path, tokenizer__ggml__pre="llama-bpe", **changed), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("ab") == [1, TOKENS.index("ab")]
    assert tokenizer.encode("ab", add_special_tokens=False) == [TOKENS.index("ab")]


def test_the_original_tokenizer_replaces_one_that_is_not_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_gguf(made_file(tmp_path), tmp_path / "first")
    file = made_file(tmp_path, "llama", tokenizer__ggml__model="llama")
    assert_refused(file, match=("tokenizer.ggml.model='llama'", "--tokenizer"), capsys=capsys)
    assert_refused(file, "--tokenizer", str(tmp_path), match=("--tokenizer=", "tokenizer.json"), capsys=capsys)
    import_gguf(file, tmp_path / "out", tokenizer=tmp_path / "first")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("ab") == [TOKENS.index("ab")]
    assert AutoConfig.from_pretrained(tmp_path / "out").model_type == "llama"


REFUSED = {
    "another architecture": ({"general__architecture": "gemma3"}, ("general.architecture='gemma3'", "qwen3")),
    "scaled frequencies": ({"qwen3__rope__scaling__type": "yarn"}, ("rope.scaling.type=yarn", "Hugging Face")),
    "a key is missing": ({"qwen3__context_length": None}, ("qwen3.context_length",)),
    "a part of a head turns": ({"qwen3__rope__dimension_count": 4}, ("rotary",)),
    "a width of billions": ({"qwen3__embedding_length": 1 << 31}, ("hidden_size",)),
    "no heads": ({"qwen3__attention__head_count": 0}, ("0 heads",)),
    "a text for a number": ({"qwen3__block_count": "two"}, ("qwen3.block_count='two'",)),
    "more layers than tensors": ({"qwen3__block_count": 3}, ("blk.2.", "missing")),
    "fewer layers than tensors": ({"qwen3__block_count": 1}, ("does not use", "blk.1.")),
    "an unknown splitter": ({"tokenizer__ggml__pre": "deepseek-llm"}, ("deepseek-llm", "--tokenizer")),
    "a merge of no tokens": ({"tokenizer__ggml__merges": ["a b", "q zz"]}, ("tokenizer.ggml.merges", "q zz")),
    "an end that is no token": ({"tokenizer__ggml__eos_token_id": 9999}, ("eos_token_id=9999",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_not_such_a_model_is_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed, match = REFUSED[case]
    assert_refused(made_file(tmp_path, **changed), match=match, capsys=capsys)


def test_a_missing_or_a_scaling_tensor_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = made_model("qwen3")
    tensors, values = stored(model, "qwen3"), metadata(model, "qwen3")
    without = {name: array for name, array in tensors.items() if name != "blk.1.ffn_up.weight"}
    file = write_gguf(tmp_path / "without.gguf", without, values)
    assert_refused(file, match=("blk.1.ffn_up.weight", "missing"), capsys=capsys)
    file = write_gguf(tmp_path / "scaled.gguf", tensors | {"rope_freqs.weight": np.ones(4, np.float32)}, values)
    assert_refused(file, match=("rope_freqs.weight",), capsys=capsys)
    file = write_gguf(tmp_path / "narrow.gguf", tensors | {"output_norm.weight": np.ones(8, np.float32)}, values)
    assert_refused(file, match=("output_norm.weight", "(8,)", "(32,)"), capsys=capsys)


@pytest.mark.parametrize("experts", [3, 8])
def test_another_number_of_experts_than_the_tensors_have_is_refused(
    experts: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = made_file(tmp_path, "qwen3moe", qwen3moe__expert_count=experts)
    assert_refused(file, match=("ffn_gate", "(4,", f"({experts},"), capsys=capsys)


@pytest.mark.parametrize("left", [0, 3, 40, 4_000, 60_000])
def test_a_truncated_file_is_refused(left: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = made_file(tmp_path)
    content = file.read_bytes()
    assert len(content) > left
    file.write_bytes(content[:left])
    assert_refused(file, match=("cannot be read as GGUF",), capsys=capsys)


def test_what_is_no_gguf_file_and_a_taken_folder_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGML" + bytes(1000))
    assert_refused(tmp_path / "x.gguf", match=("cannot be read as GGUF",), capsys=capsys)
    assert_refused(tmp_path / "missing.gguf", match=("missing.gguf", "no such file"), capsys=capsys)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    assert_refused(made_file(tmp_path), match=("OUT=", "not empty"), capsys=capsys)


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = made_file(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        assert_refused(file, match=("OUT=", "1,000 are free"), capsys=capsys)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("relax_core.train.hf.hf_export.write_safetensors", full)
    assert_refused(file, match=("No space left",), capsys=capsys)
