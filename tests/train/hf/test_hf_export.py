"""Tests that transformers loads an exported folder without warnings and computes the same logits."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, make_model
from tiny_trainer import export_folder, make_backend
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from benchmarks.parity_media import make_model as make_tiny_vision_model
from relax_core.train.hf.hf_export import export_hf_folder


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Makes a model folder with a tokenizer. Its embeddings are tied unless a test parametrizes the fixture."""
    folder = tmp_path / "source"
    make_model(folder, tied=getattr(request, "param", True))
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder)
    (folder / "old.safetensors.index.json").write_text("{}")
    (folder / "modeling_own.py").write_text("")
    return folder


def load_silently(folder: Path) -> torch.nn.Module:
    """Loads a folder, and fails on warnings and on warning log lines of transformers."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    ear = Ear(level=logging.WARNING)
    transformers_logging.add_handler(ear)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    finally:
        transformers_logging.remove_handler(ear)
    assert not heard
    assert not any(info.values()), info
    return model  # type: ignore[no-any-return]


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(2, 14)[None]).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("source", [True, False], ids=["tied", "untied"], indirect=True)
@pytest.mark.parametrize("shard_bytes", [4_000_000_000, 50_000])
def test_untouched_weights_give_identical_logits(source: Path, tmp_path: Path, shard_bytes: int) -> None:
    (source / "adapter_config.json").write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    target = tmp_path / "hf"
    export_folder(make_backend(source), source, target, shard_bytes=shard_bytes)
    (source / "adapter_config.json").unlink()  # otherwise transformers would load the adapter's weights
    ours, theirs = load_silently(target), load_silently(source)
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in ours.state_dict().items())
    # The memory address of weights may change the order of a sum.
    torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-5, rtol=0)
    files = {path.name for path in target.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= files
    assert not {"old.safetensors.index.json", "modeling_own.py", "adapter_config.json"} & files
    assert (target / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    assert AutoTokenizer.from_pretrained(target)("w7 w3", add_special_tokens=False).input_ids
    weights = [name for name in files if name.endswith(".safetensors")]
    if shard_bytes > 1_000_000:
        assert weights == ["model.safetensors"]
    else:
        assert len(weights) > 3
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(weights)
        sizes = [path.stat().st_size for path in target.glob("*.safetensors")]
        assert max(sizes) < 55_000  # the limit includes a file's header; no tensor here is larger than a shard
        assert index["metadata"]["total_size"] == sum(
            tensor.numel() * tensor.element_size() for _, tensor in make_backend(source).export()
        )


@pytest.mark.parametrize("shard_bytes", [4_000_000_000, 50_000])
def test_one_tensor_is_in_memory_at_a_time(source: Path, tmp_path: Path, shard_bytes: int) -> None:
    backend = make_backend(source)
    made: list[StorageWeakRef] = []

    def copies() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in backend.export():
            assert all(ref.expired() for ref in made), "an earlier tensor is still in memory"
            copy = tensor.clone()
            made.append(StorageWeakRef(copy.untyped_storage()))
            yield name, copy
            del copy

    export_folder(backend, source, tmp_path / "hf", tensors=copies(), shard_bytes=shard_bytes)
    assert len(made) == len(backend.weight_shapes)


def test_each_tensor_keeps_the_dtype_of_the_source_folder(tmp_path: Path) -> None:
    """The model has a vision tower and fused experts. Its matrices are bfloat16, and its vectors are float32."""
    source = tmp_path / "source"
    make_tiny_vision_model(source, "qwen3_vl_moe")
    weights = {
        name: tensor.bfloat16() if tensor.ndim > 1 else tensor
        for path in source.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    for path in source.glob("*.safetensors*"):
        path.unlink()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    export_folder(make_backend(source, family="qwen3_vl_moe"), source, tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_a_tied_output_weight_is_not_written_twice(tmp_path: Path) -> None:
    make_model(tmp_path / "source", tied=True)
    backend = make_backend(tmp_path / "source")
    tensors = list(backend.export())
    tensors.append(("lm_head.weight", dict(tensors)["model.embed_tokens.weight"]))
    shapes = {name: tensor.shape for name, tensor in tensors}
    export_folder(backend, tmp_path / "source", tmp_path / "hf", tensors=iter(tensors), shapes=shapes)
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - safe_open is no mapping
    load_silently(tmp_path / "hf")


def test_a_broken_export_leaves_the_old_one(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "hf"
    backend = make_backend(source)
    export_folder(backend, source, target)

    def dies() -> Iterator[tuple[str, Tensor]]:
        yield from list(backend.export())[:3]
        raise RuntimeError("rank 0 was lost")

    with pytest.raises(RuntimeError, match="rank 0 was lost"):
        export_folder(backend, source, target, tensors=dies())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "source"]
    torch.testing.assert_close(logits(load_silently(target)), logits(load_silently(source)), atol=1e-5, rtol=0)


def test_a_full_disk_is_told(source: Path, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("200k")
    with pytest.raises(OSError, match=r"hf was not written: .*No space left.* bytes are free in"):
        export_folder(make_backend(source), source, disk / "hf")
    assert not list(disk.iterdir())


def test_a_source_without_config_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"model\.path={tmp_path}: no config\.json"):
        export_hf_folder(iter([]), shapes={}, own_dtype="float32", source_folder=tmp_path, target=tmp_path / "hf")
