"""Finds a configuration's dimensions: in a model folder, the built-in model, or a published shape of this folder."""

from __future__ import annotations

import json
from pathlib import Path

from relax_core.config.errors import nearest
from relax_core.config.schema import RelaxConfig
from relax_core.families.hf_config import read_hf_config
from relax_core.families.tiny_configs import MODEL_NAMES, tiny_config
from relax_core.plan.model.dimensions import ModelDimensions, read_dimensions
from relax_core.train.parallel_layout import LayoutShape

SHAPES = Path(__file__).parent / "shapes"


def shape_names() -> list[str]:
    """Returns the published models whose dimensions are stored here."""
    return sorted(file.stem for file in SHAPES.glob("*.json"))


def find_dimensions(config: RelaxConfig) -> ModelDimensions:
    """Returns the dimensions of the trained model. Raises ValueError if there is nothing that can be planned."""
    model = config.model
    if model.path is not None:
        return folder_dimensions(Path(model.path), family=model.family)
    if model.builtin is not None:
        return builtin_dimensions(model.builtin)
    if model.shape is not None:
        return shape_dimensions(model.shape)
    raise ValueError(
        f"model.path is not set, so there are no dimensions to plan with. Add model.path=<a Hugging Face folder>, or "
        f"model.shape=<one of: {', '.join(shape_names())}>."
    )


def folder_dimensions(folder: Path, *, family: str | None) -> ModelDimensions:
    """Returns the dimensions of a Hugging Face folder. ``family`` is model.family, which may be a file."""
    return read_dimensions(read_hf_config(folder), name=folder.name, family=family)


def builtin_dimensions(name: str) -> ModelDimensions:
    """Returns the dimensions of a built-in model."""
    assert name in MODEL_NAMES, "validated"
    return read_dimensions(tiny_config(name), name=name)


def shape_dimensions(name: str) -> ModelDimensions:
    """Returns the dimensions of a published model. Raises ValueError for an unknown name."""
    if name not in shape_names():
        near = nearest(name, shape_names(), count=1)
        hint = f" Nearest: {near[0]}." if near else ""
        raise ValueError(f"model.shape={name}: not among the shapes kept: {', '.join(shape_names())}.{hint}")
    return read_dimensions(json.loads((SHAPES / f"{name}.json").read_text(encoding="utf-8")), name=name)


def teacher_dimensions(model: str, *, family: str | None) -> ModelDimensions:
    """Returns the dimensions of a distillation's teacher, a built-in one's name or a folder."""
    if model in MODEL_NAMES:
        return builtin_dimensions(model)
    return folder_dimensions(Path(model).expanduser().absolute(), family=family)


def layout_shape(model: ModelDimensions) -> LayoutShape:
    """Returns what a parallel layout must divide."""
    widths = {"hidden units": model.hidden}
    if model.feed_forward:
        widths["feed-forward units"] = model.feed_forward
    return LayoutShape(
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        linear_heads=model.delta_net.key_heads if model.delta_net else 0,
        experts=model.experts.count if model.experts else 0,
        expert_width=model.experts.width if model.experts else 0,
        widths=widths,
        deepstack_layers=model.deepstack_layers,
        has_tower=bool(model.towers),
    )
