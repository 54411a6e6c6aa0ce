"""Tests a vision family in a plug-in file: all components read the same settings as from Qwen3-VL's own record."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.config.modality import media_kinds
from relax_core.families.folder import folder_architecture
from relax_core.preflight import CHECKS
from relax_core.tools.make_tiny import tiny_model_folder
from relax_core.train.hf.stored_weights import stored_weights
from tests.house_vl import HOUSE_VL, of_the_house


@pytest.fixture(scope="module")
def house_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return of_the_house(tmp_path_factory.mktemp("house") / "model")


def test_the_same_folder_gives_the_weights_and_the_rows_of_qwen3_vl(house_vl: Path) -> None:
    published = folder_architecture(tiny_model_folder("tiny_qwen3_vl", task="see"))
    own = folder_architecture(house_vl, family=str(HOUSE_VL))
    assert [(weight.name, tuple(weight.shape)) for weight in stored_weights(own)] == [
        (weight.name, tuple(weight.shape)) for weight in stored_weights(published)
    ]
    assert own.vision is not None and published.vision is not None
    assert own.vision.alone() == published.vision.alone()  # the encode workers have the same settings
    assert own.vision.vision.projector == published.vision.vision.projector
    assert dataclasses.replace(own, vision=None, family=published.family) == dataclasses.replace(published, vision=None)


def test_a_configuration_names_it_and_what_is_wrong_is_told(house_vl: Path, tmp_path: Path) -> None:
    words = ["model=folder", f"model.path={house_vl}", "data=see"]
    config = load_config([*words, f"model.family={HOUSE_VL}", "model.freeze=[projector]"], checks=CHECKS)
    assert media_kinds(config) == ("image", "video")
    with pytest.raises(ConfigError, match="its model_type is 'house_vl', which is not a family of Relax"):
        load_config(words, checks=CHECKS)
    with pytest.raises(ConfigError, match=r"model.freeze=\[router\]: model=folder has no router"):
        load_config([*words, f"model.family={HOUSE_VL}", "model.freeze=[router]"], checks=CHECKS)
    (of_the_house(tmp_path / "model") / "video_preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"no video_preprocessor_config.json there.*with its processor files"):
        load_config([words[0], f"model.path={tmp_path / 'model'}", f"model.family={HOUSE_VL}", words[2]], checks=CHECKS)
