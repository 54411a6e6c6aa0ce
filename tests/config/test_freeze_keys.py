"""Tests that `model.freeze` and `optimizer.tower_lr` accept only parts that the model has."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.config.model_checks import freeze_problems, frozen_parts
from relax_core.config.saved_config import REFUSED, changes, plain
from relax_core.preflight import CHECKS
from relax_core.train.megatron_rank import rank_setup

VISION, SEES_EXPERTS = ("model=tiny_qwen3_vl", "modality=auto"), ("model=tiny_qwen3_vl_moe", "modality=auto")
OMNI = ("model=tiny_qwen3_omni", "data=four_modalities")


@pytest.mark.parametrize(
    ("keys", "frozen"),
    [
        ([], ()),
        (["model=tiny_qwen3_moe", "model.freeze=[router]"], ("router",)),
        (["model=tiny_qwen3_moe", "model.freeze=[language]"], ("language",)),
        ([*VISION, "model.freeze=[projector,vision,vision]"], ("vision", "projector")),
        ([*SEES_EXPERTS, "model.freeze=[router,language]", "optimizer.tower_lr=1e-5"], ("language", "router")),
        (["model=tiny_qwen3_vl", "modality=text"], ("vision", "projector")),
        (["modality=text"], ()),
        ([*OMNI, "model.freeze=[audio]"], ("audio",)),
        ([*OMNI, "model.freeze=[vision]", "optimizer.tower_lr=1e-5"], ("vision",)),
        (["model=tiny_qwen3_omni", "modality=text"], ("vision", "audio", "projector")),
    ],
)
def test_the_frozen_parts_reach_every_rank(keys: list[str], frozen: tuple[str, ...]) -> None:
    config = load_config(keys)
    assert (frozen_parts(config), list(freeze_problems(config))) == (frozen, [])
    setup = rank_setup(config, model_folder=Path("model"), rank=0, store_address="127.0.0.1:0")
    assert setup.frozen == frozen


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (["model.freeze=[language]"], "model.freeze=[language]: nothing of model=tiny_qwen3 would train. Take one"),
        (["model.freeze=[router]"], "model.freeze=[router]: model=tiny_qwen3 has no router; it has language. Use"),
        (["model=tiny_qwen3_moe", "model.freeze=[router,vision]"], "has no vision; it has language, router. Use"),
        (["model=tiny_qwen3_moe", "model.freeze=[embedding]"], "model.freeze=[embedding]: embedding is not a part of"),
        (
            ["model=tiny_qwen3_vl", "modality=text", "model.freeze=[language]"],
            "model.freeze=[language] with modality=text: nothing of model=tiny_qwen3_vl would train. Take one",
        ),
        (["optimizer.tower_lr=1e-5"], "optimizer.tower_lr=1e-05: model=tiny_qwen3 has no vision tower. Use"),
        ([*VISION, "model.freeze=[vision]", "optimizer.tower_lr=1e-5"], "1e-05: model.freeze=[vision] freezes the"),
        (
            ["model=tiny_qwen3_vl", "modality=text", "optimizer.tower_lr=1e-5"],
            "optimizer.tower_lr=1e-05: modality=text does not train the vision tower. Use",
        ),
        (
            [*OMNI, "model.freeze=[audio,vision]", "optimizer.tower_lr=1e-5"],
            "optimizer.tower_lr=1e-05: model.freeze=[audio,vision] freezes the towers. Use",
        ),
        (
            ["model=tiny_qwen3_vl", "data=see", "model.freeze=[audio]"],
            "has no audio; it has vision, projector, language",
        ),
        ([*VISION, "optimizer.tower_lr=0"], "optimizer.tower_lr=0.0: must be more than 0. null takes optimizer.lr;"),
    ],
)
def test_an_invalid_freeze_is_refused_with_key_value_and_fix(keys: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(keys, checks=CHECKS)
    assert text in str(caught.value)


def test_a_resumed_run_has_the_same_freeze_set() -> None:
    before, same, changed = (
        plain(load_config([*VISION, f"model.freeze=[{parts}]"]))
        for parts in ("vision,projector", "projector,vision", "vision")
    )
    assert changes(before, same, keys=REFUSED) == []
    (change,) = changes(before, changed, keys=REFUSED)
    assert change.describe() == "model.freeze was [projector,vision], is [vision]"
