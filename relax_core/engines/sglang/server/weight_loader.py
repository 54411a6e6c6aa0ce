"""Loads weights inside SGLang as its --custom-weight-loader, and compares digests before they are served."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from relax_core.contracts.engine import WeightManifest
from relax_core.engines.sglang.client.weight_orders import Attest, LoadFile, Outcome, Watch, read_order
from relax_core.weights.version_file import DigestMismatch, TensorsDigest, read_weights

NamedTensors = Iterable[tuple[str, Tensor]]
_watched: dict[int, TensorsDigest] = {}  # id of a model → digest of the tensors that it has loaded since `watch`


def follow(model: Any, named_tensors: NamedTensors) -> None:
    """Follows the orders that are sent as the tensors' names (weight_orders.py)."""
    for name, _ in named_tensors:
        match read_order(name):
            case LoadFile(manifest=manifest, outcome=outcome):
                write_outcome(outcome, load_file(model, manifest))
            case Watch():
                watch(model)
            case Attest(digest=digest, outcome=outcome):
                write_outcome(outcome, attest(model, digest))


def load_file(model: Any, manifest: WeightManifest) -> str | None:
    """Loads a published file after comparing all its digests; returns why nothing was loaded, or None."""
    try:
        model.load_weights(with_tied_head(model, read_weights(manifest)))
    except (DigestMismatch, OSError) as error:
        return str(error)
    return None


def with_tied_head(model: Any, named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors, and the embedding again as the head for SGLang's Qwen3-MoE, which has a separate head."""
    head_apart = getattr(model, "lm_head", None) is not getattr(model.model, "embed_tokens", None)
    for name, tensor in named_tensors:
        yield name, tensor
        if name == "model.embed_tokens.weight" and head_apart and model.config.tie_word_embeddings:
            yield "lm_head.weight", tensor


def watch(model: Any) -> None:
    """Adds every tensor that the model loads to a digest, until `attest`."""
    load = type(model).load_weights
    digest = _watched[id(model)] = TensorsDigest()

    def counted(named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named_tensors:
            digest.add(name, tensor)
            yield name, tensor

    model.load_weights = lambda named_tensors, *more, **named: load(model, counted(named_tensors), *more, **named)


def attest(model: Any, digest: str) -> str | None:
    """Returns why the tensors since `watch` are not the published ones, or None if they are."""
    if id(model) not in _watched:
        return "no digest was kept of the tensors that came in"
    del model.load_weights
    found = _watched.pop(id(model)).hexdigest()
    return None if found == digest else f"the tensors that came in have digest {found}, published as {digest}"


def write_outcome(outcome: str, error: str | None) -> None:
    """Writes this rank's outcome atomically."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    path = Path(f"{outcome}.{rank}")
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(msgspec.json.encode(Outcome(error)))
    partial.replace(path)
