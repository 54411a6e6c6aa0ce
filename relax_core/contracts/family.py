"""Defines a model family: how the models of one config.json model_type differ from the decoder that Relax computes.

That decoder has RMSNorms, grouped-query attention with rotary embedding, and a gated MLP or experts. A family is data:
the trainer, the embedded engine, the memory plan and the export all use the same description
(relax_core/families/architecture.py), so a family needs no code in any of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.media import MediaKind

HfConfig = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Is the mixture of experts of a model.

    Every layer has ``count`` experts of ``width`` hidden units each, and routes a token to ``per_token`` of them.
    ``normalized`` says whether the weights of the chosen experts are scaled to a sum of 1.
    """

    count: int
    per_token: int
    width: int
    normalized: bool


@dataclass(frozen=True, slots=True)
class Only:
    """Is a key of config.json of which Relax computes one ``value`` only. ``why`` is the last clause of the refusal."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Is the vision tower of a family: Hugging Face's own modules, which trainer and engine run as they are.

    ``prefix`` begins the Hugging Face names of the tower's weights. ``model`` and ``config`` are the tower's classes as
    "module:class"; the tower is built from the part ``config_key`` of config.json. ``shapes`` returns the shapes of its
    weights from that part, by their names behind ``prefix``. ``projector`` lists how the names of those weights begin
    that belong to the projector, which maps patches to the language model.
    """

    prefix: str
    model: str
    config: str
    shapes: Callable[[HfConfig], Mapping[str, tuple[int, ...]]]
    config_key: str = "vision_config"
    projector: tuple[str, ...] = ()
    kinds: tuple[MediaKind, ...] = ("image", "video")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Is the record of one model family.

    ``name`` is config.json's model_type, and ``summary`` says in one line which models have it. With ``qkv_bias`` the
    query, key and value projections have a bias; with ``qk_norm`` the query and key heads are normalised.
    ``tied_by_default`` says whether the embedding is also the output weight if config.json has no tie_word_embeddings.
    The family accepts the values in ``only`` besides those that all families share (relax_core/families/table.py).
    ``experts`` reads the mixture of experts of a family that has one. ``check`` raises ValueError for a combination
    that no single key shows.

    ``text_key`` names the part of config.json that describes the language model, if it is not the whole, and ``prefix``
    begins the names of its weights. ``vision`` is the tower of a family that sees. With ``fused_experts`` a layer's
    experts are two tensors on disk, ``experts.gate_up_proj`` ``[experts, hidden, 2 * width]`` and
    ``experts.down_proj`` ``[experts, width, hidden]``, as Qwen3-VL-MoE is published.
    """

    name: str
    summary: str = ""
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_by_default: bool = False
    only: tuple[Only, ...] = ()
    experts: Callable[[HfConfig], Experts] | None = None
    check: Callable[[HfConfig], None] | None = None
    text_key: str | None = None
    prefix: str = "model."
    vision: Vision | None = None
    fused_experts: bool = False


def checked_family(family: Family) -> Family:
    """Returns the family with functions whose results are checked.

    Raises ValueError for a field of another type.
    """
    if not family.name or not all(isinstance(one, str) for one in (family.name, family.summary)):
        raise ValueError(f"SPEC.name={family.name!r}: a family's name is config.json's model_type.")
    if not isinstance(family.only, tuple) or not all(isinstance(one, Only) for one in family.only):
        raise ValueError(f"SPEC.only={family.only!r}: give a tuple of Only(key, value, why).")
    for name in ("qkv_bias", "qk_norm", "tied_by_default"):
        if not isinstance(value := getattr(family, name), bool):
            raise ValueError(f"SPEC.{name}={value!r}: give True or False.")
    read = family.experts
    if read is None:
        return family

    def experts(config: HfConfig) -> Experts:
        found = read(config)
        if not isinstance(found, Experts):
            raise ValueError(f"family {family.name}: experts(config) returned {found!r}. Return Experts(...).")
        return found

    return dataclasses.replace(family, experts=experts)
