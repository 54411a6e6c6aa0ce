"""Tests the list of banned tokens: its sources, and tokens that it must not contain."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from relax_core.config.compose import config_from_yaml, load_config
from relax_core.config.errors import ConfigError
from relax_core.config.model_checks import media_token_ids
from relax_core.config.saved_config import to_yaml, to_yaml_with_secrets
from relax_core.config.schema import RelaxConfig
from relax_core.families.tiny_configs import tiny_config
from relax_core.plan.batch import context_notes
from relax_core.preflight import CHECKS, banned_token_problems


@pytest.fixture
def with_media(model_folder: Path) -> list[str]:
    """Returns overrides of a model with media tokens in its tokenizer and config.json."""
    added = [{"id": 7, "content": "<|image_pad|>"}, {"id": 5, "content": "<|im_end|>"}]
    vocabulary = {f"word {number}": number for number in range(100) if number not in (5, 7)}
    (model_folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": vocabulary}}))
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps(config | {"video_token_id": 9}))
    return ["model=qwen3", f"model.path={model_folder}", "model.task=reverse_digits"]


def test_they_are_the_media_tokens_of_the_model_and_stand_in_the_record(with_media: list[str]) -> None:
    config = load_config(with_media, checks=CHECKS)
    assert config.rollout.banned_token_ids == [7, 9]
    assert yaml.safe_load(to_yaml(config))["rollout"]["banned_token_ids"] == [7, 9]
    assert config_from_yaml(to_yaml_with_secrets(config)).rollout.banned_token_ids == [7, 9]
    assert load_config().rollout.banned_token_ids == []


def test_a_builtin_model_that_sees_has_its_own() -> None:
    ids = tiny_config("tiny_qwen3_vl")
    keys = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = load_config(["model=tiny_qwen3_vl"])
    assert config.rollout.banned_token_ids == sorted(ids[key] for key in keys) and len(config.rollout.banned()) == 4


def test_an_omni_model_names_them_in_its_part_for_language(with_media: list[str], model_folder: Path) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    omni = {"image_token_id": 11, "audio_start_token_id": 12, "audio_token_index": 13, "text_token_id": 14}
    (model_folder / "config.json").write_text(json.dumps(config | {"thinker_config": omni}))
    assert load_config(with_media).rollout.banned_token_ids == [7, 9, 11, 12, 13]


@pytest.mark.parametrize("name", ["vision_start", "vision_pad", "video_pad", "audio_bos", "AUDIO", "audio_start"])
def test_every_media_special_of_a_tokenizer_is_found(model_folder: Path, name: str) -> None:
    added = [
        {"id": 7, "content": f"<|{name}|>"},
        {"id": 8, "content": "<|box_start|>"},
        {"id": 9, "content": "<think>"},
    ]
    (model_folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert media_token_ids(model_folder) == [7]


def test_a_configured_list_replaces_the_default(with_media: list[str]) -> None:
    for given, found in (("[9,3,3]", [3, 9]), ("[]", [])):
        assert load_config([*with_media, f"rollout.banned_token_ids={given}"]).rollout.banned_token_ids == found


@pytest.mark.parametrize("token", [-1, 100])
def test_a_token_that_the_model_does_not_have_is_refused(with_media: list[str], token: int) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([*with_media, f"rollout.banned_token_ids=[4,{token}]"], checks=CHECKS)
    assert f"rollout.banned_token_ids names {token}, and the model has the tokens 0 to 99." in str(caught.value)
    (problem,) = banned_token_problems(load_config(["rollout.banned_token_ids=[56]"]))
    assert "names 56, and the model has the tokens 0 to 55" in problem


@pytest.mark.parametrize("text", [None, "no JSON"])
def test_a_folder_that_does_not_tell_its_media_tokens_is_refused(
    with_media: list[str], model_folder: Path, text: str | None
) -> None:
    (model_folder / "tokenizer_config.json").write_text("{}")
    if text is None:
        (model_folder / "tokenizer.json").unlink()
    else:
        (model_folder / "tokenizer.json").write_text(text)
    (problem,) = banned_token_problems(load_config(with_media))
    assert "its media tokens are not known (" in problem and problem.endswith("Write tokenizer.json again.")
    assert list(banned_token_problems(load_config([*with_media, "rollout.banned_token_ids=[]"]))) == []


@pytest.mark.parametrize("as_list", [False, True])
def test_ids_for_which_the_tokenizer_has_no_text_are_banned(
    with_media: list[str], model_folder: Path, as_list: bool
) -> None:
    """Of 100 rows, the tokenizer lacks the last rows. If its vocabulary is a mapping, it lacks some more rows."""
    added = [{"id": 7, "content": "<|image_pad|>"}, {"id": 90, "content": "<|im_end|>"}]
    vocabulary: Any = {f"word {number}": number for number in range(90) if number not in (7, 30, 31)}
    if as_list:
        vocabulary = [[f"word {number}", -1.0] for number in range(90)]
    (model_folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": vocabulary}}))
    holes = [] if as_list else [30, 31]
    config = load_config(with_media, checks=CHECKS)
    assert config.rollout.banned_token_ids == [7, 9, *holes, *range(91, 100)]
    textless = len(holes) + 9
    (line,) = [word for word in context_notes(settled(config), None) if "banned_token_ids" in word]  # type: ignore[arg-type]
    assert f"has {textless + 2} tokens" in line and f"no text for {textless} token ids" in line
    own = settled(load_config([*with_media, "rollout.banned_token_ids=[30]"]))
    (line,) = [word for word in context_notes(own, None) if "banned_token_ids" in word]  # type: ignore[arg-type]
    assert "has 1 token," in line and f"no text for {textless} token ids of the model, and {len(holes[:1])} of" in line


def settled(config: RelaxConfig) -> RelaxConfig:
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, context_length=64))


def test_a_tokenizer_that_lacks_most_ids_is_refused(with_media: list[str], model_folder: Path) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps(config | {"vocab_size": 151_936}))
    (problem,) = banned_token_problems(load_config(with_media))
    assert "more than 16384" in problem and "tokenizer that belongs to the weights" in problem
