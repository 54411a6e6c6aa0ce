"""SGLang's --custom-weight-loader: loads weights inside SGLang, and compares digests before the weights are served."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from relax_core.contracts.engine import WeightManifest
from relax_core.engines.sglang.weight_orders import Attest, LoadFile, Outcome, Watch, not_written, read_order
from relax_core.weights.version_file import DigestMismatch, TensorsDigest, read_weights

NamedTensors = Iterable[tuple[str, Tensor]]
_watched: dict[int, TensorsDigest] = {}  # id of a model → digest of the tensors that the model has loaded since `watch`


@dataclass(frozen=True)
class Frozen:
    """Holds the `WeightManifest.kept_key` of the frozen tensors in a model, and the parameters that they fill."""

    key: str
    parameters: frozenset[str]


_frozen: dict[int, Frozen] = {}  # id of a model → the model's frozen tensors


def follow(model: Any, named_tensors: NamedTensors) -> None:
    """Executes orders, which are sent as names of tensors (weight_orders.py)."""
    for name, _ in named_tensors:
        match read_order(name):
            case LoadFile(manifest=manifest, outcome=outcome):
                write_outcome(outcome, load_file(model, manifest))
            case Watch():
                watch(model)
            case Attest(digest=digest, outcome=outcome):
                write_outcome(outcome, attest(model, digest))


def load_file(model: Any, manifest: WeightManifest) -> Outcome:
    """Compares all digests of a published file, then loads it. The outcome has the reason of a failed or partial load.

    Frozen tensors are loaded only if the model does not have the same frozen tensors.
    """
    kept, held = len(manifest.kept), _frozen.pop(id(model), None)  # forgotten if the load fails
    if not kept or held is None or held.key != manifest.kept_key:
        held = None
    # On a GPU the sums of LoRA weights take much less time than on the CPU.
    device = next((parameter.device for _, parameter in _from_weights(model)), None)
    tensors = read_weights(manifest, with_frozen=held is None, merge_on=device)
    try:
        if kept and held is None:
            model.load_weights(emptied(model, with_tied_head(model, islice(tensors, kept))))
            held = _frozen_in(model, manifest.kept_key)
            model.load_weights(with_tied_head(model, tensors))
        else:
            keep = frozenset() if held is None else held.parameters
            model.load_weights(emptied(model, with_tied_head(model, tensors), keep=keep))
    except (DigestMismatch, OSError) as error:
        return Outcome(str(error))
    missing = never_written(model)
    if missing is None and held is not None:
        _frozen[id(model)] = held
    return Outcome(missing, changed=missing is not None)


def _frozen_in(model: Any, key: str) -> Frozen | None:
    """Returns the parameters that the frozen tensors have filled; call it right after their load.

    Returns None if a parameter is only partly filled: such a parameter needs frozen and trained tensors in one load.
    """
    empty = {name: torch.isnan(parameter.data) for name, parameter in _from_weights(model)}
    if any(bool(mask.any()) and not bool(mask.all()) for mask in empty.values()):
        return None
    return Frozen(key, frozenset(name for name, mask in empty.items() if not bool(mask.any())))


def with_tied_head(model: Any, named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors. For SGLang's Qwen3-MoE with its separate head, yields a tied embedding also as the head."""
    inner = getattr(model, "thinker", model)  # Qwen3-Omni's language model
    head_apart = getattr(inner, "lm_head", None) is not getattr(inner.model, "embed_tokens", None)
    for name, tensor in named_tensors:
        yield name, tensor
        if name.endswith(".embed_tokens.weight") and head_apart and model.config.tie_word_embeddings:
            yield "lm_head.weight", tensor


def watch(model: Any) -> None:
    """Starts a digest of every tensor that the model loads until `attest`."""
    _frozen.pop(id(model), None)
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
    """Checks that the tensors since `watch` are the published tensors, and that all parameters were written."""
    if id(model) not in _watched:
        return Outcome("no digest was kept of the tensors that came in")
    del model.load_weights
    found = _watched.pop(id(model)).hexdigest()
    if found != digest:
        return Outcome(f"the received tensors have digest {found}, published as {digest}", changed=True)
    missing = never_written(model)
    return Outcome(missing, changed=missing is not None)


def emptied(model: Any, named_tensors: NamedTensors, *, keep: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors. Before the first tensor, fills the model's parameters, except ``keep``, with NaN.

    SGLang's models silently skip tensors with unknown names. After a load, `never_written` finds the parameters that
    still have NaN. A version always has all tensors, except frozen tensors that the model already has.
    """
    filled = False
    for name, tensor in named_tensors:
        if not filled:
            for parameter_name, parameter in _from_weights(model):
                if parameter_name not in keep:
                    parameter.data.fill_(torch.nan)
            filled = True
        yield name, tensor


def never_written(model: Any) -> str | None:
    """Returns an error text with the parameters that still have elements of `emptied`, or None."""
    missing = [name for name, parameter in _from_weights(model) if bool(torch.isnan(parameter.data).any())]
    return not_written(missing) if missing else None


def _from_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters that are loaded from weights. SGLang computes scales of quantization."""
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
