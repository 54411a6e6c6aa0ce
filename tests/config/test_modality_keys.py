"""Tests that every invalid setting of images and videos is refused with key, value and fix."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from relax_core.config import modality
from relax_core.config.compose import compose, typed_config
from relax_core.config.modality import modality_problems
from relax_core.config.schema import MediaKeys, ModalityConfig, RelaxConfig
from relax_core.config.validate import problems_of


@pytest.fixture(scope="module")
def sees() -> RelaxConfig:
    return typed_config(compose(["model=tiny_qwen3_vl", "data=see"]))


def _with(config: RelaxConfig, section: str, **values: Any) -> RelaxConfig:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image_tokens", [0, 64]),
        ("image_tokens", [64, 4]),
        ("image_tokens", [4]),
        ("video_frames", [0, 64]),
        ("video_frames", [8, 4]),
        ("video_fps", 0.0),
        ("frame_tokens", 0),
        ("audio_seconds", [0.05, 30.0]),
        ("audio_seconds", [3.0, 1.0]),
        ("audio_seconds", [1.0]),
        ("audio_seconds", [0.1, 601.0]),
        ("workers", 0),
    ],
)
def test_a_value_without_meaning_is_refused(sees: RelaxConfig, key: str, value: Any) -> None:
    assert list(problems_of(sees, ())) == []
    (told,) = problems_of(_with(sees, "modality", **{key: value}), ())
    assert told.startswith(f"modality.{key}={value}"), told


def test_every_key_is_in_the_list_above() -> None:
    marks = test_a_value_without_meaning_is_refused.pytestmark  # type: ignore[attr-defined]
    tested = {key for key, _ in marks[0].args[1]}
    assert tested | {"name", "audio_in_video"} == {field.name for field in dataclasses.fields(ModalityConfig)}


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("data", {"media_root": "/nowhere/at/all"}, "data.media_root=/nowhere/at/all: no such folder. Mount it"),
        ("parallel", {"micro_batch_patches": 0}, "parallel.micro_batch_patches=0: must be at least 1"),
        ("optimizer", {"tower_lr": 0.0}, "optimizer.tower_lr=0.0: must be more than 0"),
        ("modality", {"name": "text"}, "data.task=see has images and videos: modality=text reads none."),
    ],
)
def test_the_other_keys_are_refused(sees: RelaxConfig, section: str, values: dict[str, Any], message: str) -> None:
    (told,) = problems_of(_with(sees, section, **values), ())
    assert told.startswith(message), told


def test_columns_of_a_model_that_reads_text_are_refused() -> None:
    text = _with(typed_config(compose([])), "data", media_keys=MediaKeys(video="clips"))
    (told,) = modality_problems(text)
    assert told.startswith("data.media_keys.video=clips: model=tiny_qwen3 reads text only. Choose a model that sees")


def test_sounds_are_refused_for_a_model_that_only_sees(sees: RelaxConfig) -> None:
    (told,) = modality_problems(_with(sees, "data", media_keys=MediaKeys(audio="clips")))
    assert told == (
        "data.media_keys.audio=clips: model=tiny_qwen3_vl reads images and videos. Choose a model that hears, e.g. "
        "model=qwen3_omni, with modality=auto; or drop the key."
    )
    (told,) = modality_problems(_with(sees, "modality", audio_in_video=True))
    assert told.startswith("modality.audio_in_video=true: model=tiny_qwen3_vl reads images and videos. Choose a model")
    (told,) = modality_problems(_with(sees, "data", task="four_modalities"))
    assert told.startswith("data.task=four_modalities has images, videos and sounds: model=tiny_qwen3_vl reads images")
    assert told.endswith("Choose model=tiny_qwen3_omni with modality=auto.")


@pytest.mark.parametrize("control", ["", "_image_exchanged", "_audio_exchanged"])
def test_the_question_of_two_kinds_needs_a_warm_start_for_it(control: str) -> None:
    hears = typed_config(compose(["model=tiny_qwen3_omni", "data=four_modalities"]))
    asked = _with(hears, "data", task=f"tone_of_picture{control}")
    (told,) = problems_of(asked, ())
    assert told == (
        f"data.task=tone_of_picture{control} with model.task=four_modalities: a model with that warm start never "
        "answers yes or no. Use model.task=tone_of_picture."
    )
    assert list(problems_of(_with(asked, "model", task="tone_of_picture"), ())) == []
    (told,) = problems_of(_with(hears, "model", task="tone_of_picture"), ())
    assert told == (
        "model.task=tone_of_picture with data.task=four_modalities: a model with that warm start answers only yes or "
        "no. Use data.task=tone_of_picture, or another model.task, e.g. model.task=four_modalities."
    )


def test_a_missing_library_is_named_with_its_command(sees: RelaxConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modality, "LIBRARIES", {"no_such_library": "PyAV"})
    (told,) = modality_problems(sees)
    assert "PyAV not installed. Run pip install 'relax-core[omni]', or train it on text with modality=text." in told


def test_a_folder_of_media_that_exists_is_taken(sees: RelaxConfig, tmp_path: Path) -> None:
    assert list(modality_problems(_with(sees, "data", media_root=str(tmp_path)))) == []
