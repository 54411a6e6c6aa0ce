"""Checks `model.freeze` and `optimizer.tower_lr` against the parts that the model's family has."""

from __future__ import annotations

from collections.abc import Iterator

from relax_core.config.checks.model_folder import family_of_run
from relax_core.config.choices import AUDIO, LANGUAGE, MODEL_PARTS, PROJECTOR, ROUTER, TEXT, VISION
from relax_core.config.schema import RelaxConfig


def frozen_parts(config: RelaxConfig) -> tuple[str, ...]:
    """Returns the parts of the model that do not train, in the order of `MODEL_PARTS`.

    A run on text does not train the towers of a model, because no prompt reaches it.
    """
    parts = _model_parts(config)
    frozen = set(config.model.freeze)
    if config.modality.name == TEXT:
        frozen |= {VISION, AUDIO, PROJECTOR} & set(parts)
    return tuple(part for part in MODEL_PARTS if part in frozen)


def freeze_problems(config: RelaxConfig) -> Iterator[str]:
    """Returns one sentence for everything about frozen parts and the towers' learning rate that cannot work."""
    asked, parts, name = config.model.freeze, _model_parts(config), config.model.name
    written = f"model.freeze=[{','.join(asked)}]"
    for part in dict.fromkeys(asked):
        if part not in MODEL_PARTS:
            yield f"{written}: {part} is no part of a model. What exists: {', '.join(MODEL_PARTS)}."
        elif parts and part not in parts:
            left = ",".join(one for one in asked if one != part)
            yield f"{written}: model={name} has no {part}; it has {', '.join(parts)}. Use model.freeze=[{left}]."
    frozen = frozen_parts(config)
    if parts and set(parts) <= set(frozen):
        also = f" with modality={TEXT}" if set(frozen) - set(asked) else ""
        yield f"{written}{also}: nothing of model={name} would train. Take one of {', '.join(asked)} out of the list."
    rate = config.optimizer.tower_lr
    towers = {VISION, AUDIO} & set(parts)
    if rate is not None and parts and towers <= set(frozen):
        words = "the vision tower" if AUDIO not in towers else "the towers"
        why = f"modality={TEXT} does not train {words}"
        if not towers:
            why = f"model={name} has no vision tower"
        elif towers <= set(asked):
            why = f"{written} freezes {words}"
        yield f"optimizer.tower_lr={rate:g}: {why}. Use optimizer.tower_lr=null."


def _model_parts(config: RelaxConfig) -> tuple[str, ...]:
    """Returns the parts that the family has; none if it cannot be found, which the checks of the model report."""
    family = family_of_run(config)
    if family is None:
        return ()
    has = {
        VISION: family.vision,
        AUDIO: family.audio,
        PROJECTOR: family.vision or family.audio,
        LANGUAGE: True,
        ROUTER: family.experts,
    }
    return tuple(part for part in MODEL_PARTS if has[part])
