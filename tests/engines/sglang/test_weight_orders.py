"""Tests the commands for Relax's weight loader inside SGLang: their encoding and their effects."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from relax_core.engines.sglang.weight_loader import follow
from relax_core.engines.sglang.weight_orders import (
    Attest,
    Confirm,
    LoadFile,
    Outcome,
    Watch,
    order_payload,
    read_order,
)
from relax_core.weights.version_file import tensors_digest, write_weights

TENSORS = {"model.embed_tokens.weight": torch.arange(12.0).view(3, 4), "model.norm.weight": torch.ones(4)}


class Model:
    """Loads weights like SGLang's models: skips unknown names."""

    def __init__(self, *, tied: bool = False, own: Iterable[str] = TENSORS) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.own = {name: torch.zeros(1) for name in own}
        self.config = SimpleNamespace(tie_word_embeddings=tied)
        self.model = SimpleNamespace(embed_tokens=object())
        self.lm_head = object()

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named_tensors:
            self.loaded[name] = tensor.clone()
            if name in self.own:
                self.own[name].fill_(1.0)

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        return self.own.items()


class OneGlobal(pickle.Unpickler):
    """Unpickles with one allowed global, which the payload needs. SGLang's unpickler allows few globals."""

    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) == ("torch", "Tensor")
        return torch.Tensor


def follow_order(order: Any, model: Model) -> None:
    ((name, tensor),) = OneGlobal(io.BytesIO(base64.b64decode(order_payload(order)))).load()
    assert tensor.numel() == 0
    follow(model, [(name, tensor)])


def outcome(path: Path) -> str | None:
    return msgspec.json.decode(Path(f"{path}.0").read_bytes(), type=Outcome).error


@pytest.fixture
def manifest(tmp_path: Path) -> Any:
    return write_weights(tmp_path / "w.safetensors", version=3, tensors=TENSORS.items())


def test_orders_survive_the_wire(manifest: Any) -> None:
    for order in (LoadFile(manifest, "/x"), Watch(), Attest("d", "/x"), Confirm()):
        assert read_order(msgspec.json.encode(order).decode()) == order


def test_a_good_file_is_loaded_and_a_damaged_one_is_not_touched(manifest: Any, tmp_path: Path) -> None:
    model = Model()
    follow_order(LoadFile(manifest, str(tmp_path / "good")), model)
    assert outcome(tmp_path / "good") is None
    assert {name: value.tolist() for name, value in model.loaded.items()} == {
        name: value.tolist() for name, value in TENSORS.items()
    }
    data = bytearray(Path(manifest.path).read_bytes())
    data[-1] ^= 1
    Path(manifest.path).write_bytes(data)
    on_policy = Model()
    follow_order(LoadFile(manifest, str(tmp_path / "bad")), on_policy)
    assert "version 3, bucket 0: digest" in (outcome(tmp_path / "bad") or "")
    assert on_policy.loaded == {}


def test_a_model_that_takes_less_than_it_has_is_refused_by_the_names(manifest: Any, tmp_path: Path) -> None:
    own = [*TENSORS, "visual.merger.norm.weight", "visual.attn.k_scale"]  # SGLang computes the scales itself
    for order in ("load", "attest"):
        model = Model(own=own)
        if order == "load":
            follow_order(LoadFile(manifest, str(tmp_path / order)), model)
        else:
            follow_order(Watch(), model)
            model.load_weights(TENSORS.items())
            follow_order(Attest(tensors_digest(TENSORS.items()), str(tmp_path / order)), model)
        found = msgspec.json.decode(Path(f"{tmp_path / order}.0").read_bytes(), type=Outcome)
        assert (found.error or "").endswith("for 1 of its parameters: visual.merger.norm.weight") and found.changed


def test_a_tied_head_is_loaded_where_the_model_has_one_apart(manifest: Any, tmp_path: Path) -> None:
    model = Model(tied=True)
    follow_order(LoadFile(manifest, str(tmp_path / "o")), model)
    assert torch.equal(model.loaded["lm_head.weight"], TENSORS["model.embed_tokens.weight"])
    model.lm_head = model.model.embed_tokens
    model.loaded = {}
    follow_order(LoadFile(manifest, str(tmp_path / "o")), model)
    assert "lm_head.weight" not in model.loaded


def test_what_comes_in_otherwise_is_attested_at_its_end(tmp_path: Path) -> None:
    digest, names = tensors_digest(TENSORS.items()), list(TENSORS.items())
    for sent, expected in ((names, None), (names[:1], "published as")):
        model = Model()
        follow_order(Watch(), model)
        for weight in sent:
            model.load_weights([weight])
        follow_order(Attest(digest, str(tmp_path / "o")), model)
        found = outcome(tmp_path / "o")
        assert found is None if expected is None else expected in (found or "")
        model.load_weights(names)  # the digest is no longer stored
    follow_order(Attest(digest, str(tmp_path / "o")), Model())
    assert outcome(tmp_path / "o") == "no digest was kept of the tensors that came in"
