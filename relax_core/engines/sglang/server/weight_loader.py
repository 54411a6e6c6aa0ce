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
NAMED = 5  # parameters that an error names
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


def load_file(model: Any, manifest: WeightManifest) -> Outcome:
    """Loads a published file after comparing all its digests; returns why nothing or too little was loaded."""
    try:
        model.load_weights(emptied(model, with_tied_head(model, read_weights(manifest))))
    except (DigestMismatch, OSError) as error:
        return Outcome(str(error))
    missing = never_written(model)
    return Outcome(missing, changed=missing is not None)


def with_tied_head(model: Any, named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors, and the embedding again as the head for SGLang's Qwen3-MoE, which has a separate head."""
    head_apart = getattr(model, "lm_head", None) is not getattr(model.model, "embed_tokens", None)
    for name, tensor in named_tensors:
        yield name, tensor
        if name.endswith(".embed_tokens.weight") and head_apart and model.config.tie_word_embeddings:
            yield "lm_head.weight", tensor


def watch(model: Any) -> None:
    """Adds every tensor that the model loads to a digest, until `attest`."""
    load = type(model).load_weights
    digest = _watched[id(model)] = TensorsDigest()
    first = True

    def counted(named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        nonlocal first
        named_tensors, first = (emptied(model, named_tensors) if first else named_tensors), False
        for name, tensor in named_tensors:
            digest.add(name, tensor)
            yield name, tensor

    model.load_weights = lambda named_tensors, *more, **named: load(model, counted(named_tensors), *more, **named)


def attest(model: Any, digest: str) -> Outcome:
    """Returns whether the tensors since `watch` are the published ones, and whether the model has taken them all."""
    if id(model) not in _watched:
        return Outcome("no digest was kept of the tensors that came in")
    del model.load_weights
    found = _watched.pop(id(model)).hexdigest()
    if found != digest:
        return Outcome(f"the tensors that came in have digest {found}, published as {digest}", changed=True)
    missing = never_written(model)
    return Outcome(missing, changed=missing is not None)


def emptied(model: Any, named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors, and fills the model's parameters with NaN before the first of them.

    SGLang's models skip tensors whose names they do not know, in silence. What has no value after a load is then seen
    by `never_written`. A version always has all tensors.
    """
    filled = False
    for name, tensor in named_tensors:
        if not filled:
            for _, parameter in _from_weights(model):
                parameter.data.fill_(torch.nan)
            filled = True
        yield name, tensor


def never_written(model: Any) -> str | None:
    """Returns which parameters have elements that no tensor has set since `emptied`, or None if there is none."""
    missing = [name for name, parameter in _from_weights(model) if bool(torch.isnan(parameter.data).any())]
    if not missing:
        return None
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return (
        f"SGLang took no weights, or not all, for {len(missing)} of its parameters: {', '.join(missing[:NAMED])}{more}"
    )


def _from_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters that come from weights; scales of quantization are SGLang's own."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not name.endswith("_scale"):
            yield name, parameter


def write_outcome(outcome: str, found: Outcome) -> None:
    """Writes this rank's outcome atomically."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    path = Path(f"{outcome}.{rank}")
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(msgspec.json.encode(found))
    partial.replace(path)
