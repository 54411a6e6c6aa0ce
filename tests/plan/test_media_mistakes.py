"""Tests that mistakes with images and videos are refused before the start, on one screen with key, value and fix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.data.media_tasks import files_folder
from relax_core.families.folder import folder_architecture
from relax_core.families.tiny_configs import tiny_omni_config, tiny_omni_files
from relax_core.plan.data_check import summarize_data
from relax_core.preflight import CHECKS, settle
from relax_core.tools.make_tiny import tiny_model_folder
from relax_core.tools.tiny_media import write_settings
from relax_core.train.hf.stored_weights import stored_weights

SCREEN_LINES, SCREEN_COLUMNS = 24, 160
VISION = (
    "model=tiny_qwen3_vl",
    "data=file",
    "reward=exact_match",
    "data.eval_size=4",
    "eval.rows=4",
    "engine.context_length=256",
)
IMAGES = "data.media_keys.image=images"
ASK = "<image>which colour?"


def rows_of(folder: Path, row: dict[str, Any], *, count: int = 20) -> str:
    """Writes rows, all equal to ``row``, with their images in the same folder."""
    for name in ("red-00.png", "left-00.mp4"):
        shutil.copy(files_folder() / "train" / name, folder / name)
    (folder / "rows.jsonl").write_text((json.dumps({"answer": "red", **row}) + "\n") * count)
    return f"data.path={folder / 'rows.jsonl'}"


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(words, checks=CHECKS, settle=settle)
    report = caught.value.report()
    lines = sum(1 + len(line) // SCREEN_COLUMNS for line in report.splitlines())
    assert lines <= SCREEN_LINES and "Traceback" not in report, report
    return report


def url_row(scheme: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": scheme}}]}]}


SOUND = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
ROWS: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    # row, further overrides, parts of the error
    (
        {"prompt": ASK, "images": "red-00.png"},
        ("model=tiny_qwen3", IMAGES),
        ("data.media_keys.image=images", "reads text only", "Choose a model that sees, e.g. model=qwen3_vl"),
    ),
    (
        {"prompt": ASK, "images": "red-00.png"},
        ("modality=text", IMAGES),
        ("data.media_keys.image=images", "modality=text reads none", "or drop the key"),
    ),
    (
        {"prompt": ASK, "images": "red-00.png"},
        ("data.media_keys.image=pictures",),
        ("no column pictures, only answer, images, prompt", "data.media_keys.image"),
    ),
    (
        {"prompt": "which colour?", "images": "red-00.png"},
        ("data.media_keys.image=pictures",),
        ("data.media_keys.image=pictures", "no checked row has this column", "answer, images, prompt"),
    ),
    (
        {"prompt": ASK, "images": "mnt/red-00.png"},
        (IMAGES,),
        (
            "16 of the 16 checked rows",
            "mnt/red-00.png: No such file",
            "Are the files mounted? Name their folder in data.media_root",
        ),
    ),
    (
        url_row("https://example.org/a.png"),
        (),
        (
            "16 of the 16 checked rows",
            "https://example.org/a.png: only files below data.media_root are read",
            "Download",
        ),
    ),
    (
        {"prompt": [{"role": "user", "content": [SOUND, {"type": "text", "text": "what is it?"}]}]},
        (),
        ("rows.jsonl, line 1: it has media of kind audio", "the model reads image, video only"),
    ),
    (
        {"prompt": ASK, "images": "red-00.png"},
        (IMAGES, "modality.image_tokens=[300,400]"),
        ("modality.image_tokens=[300, 400]", "engine.context_length=256", "no image fits into the context"),
    ),
    (
        {"prompt": ASK, "images": "red-00.png"},
        (IMAGES, "engine.context_length=24", "rollout.max_new_tokens=16"),
        ("rollout.max_new_tokens", "engine.context_length=", "or null, which derives it"),
    ),
    (
        {"prompt": ASK, "images": "red-00.png"},
        (IMAGES, "model.freeze=[router]"),
        ("model.freeze=[router]", "has no router", "Use model.freeze=[]"),
    ),
    (
        {"prompt": "<video>which way?", "videos": "left-00.mp4"},
        ("data.media_keys.video=videos", "engine=sglang", "engine.urls=[http://127.0.0.1:9]"),
        ("data.media_keys.video=videos with engine.urls", "takes images only", "Drop engine.urls, or drop the key"),
    ),
    ({"prompt": ASK, "images": ["red-00.png"]}, (), ("in column images", "Add data.media_keys.image=images;")),
    (
        {"prompt": "which colour?", "picture": {"bytes": None, "path": "red-00.png"}},
        (),
        ("Add data.media_keys.image=picture data.media_place=first;", "modality=text"),
    ),
    ({"prompt": f"x<video> and {ASK}", "videos": ["left-00.mp4"], "images": "a"}, (IMAGES,), ("in column videos",)),
    ({"prompt": "Which way?\n<video>"}, (), ("a place <video>", "data.media_keys.video=COLUMN")),
    ({"prompt": ASK, "images": ["red-00.png"]}, ("model=tiny_qwen3",), ("column images", "does not read", "qwen3_vl")),
    ({"prompt": "Hi", "images": "red-00.png"}, ("data.media_place=first",), ("data.media_place=first: no column",)),
    (
        {"prompt": "Hi", "images": "red-00.png"},
        (IMAGES, "data.media_place=first", "data.mix={image: 1.0}"),
        ("data.media_place",),
    ),
]


@pytest.mark.parametrize(("row", "words", "messages"), ROWS, ids=lambda value: None)
def test_a_mistake_is_one_screen_with_key_value_and_fix(
    tmp_path: Path, row: dict[str, Any], words: tuple[str, ...], messages: tuple[str, ...]
) -> None:
    report = refused(*VISION, rows_of(tmp_path, row), *words)
    for words in messages:
        assert words in report, report


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "What does the tag <video> of HTML do?"},
        {"prompt": "which colour?", "image_caption": "a red disc", "photo": "none", "source": "a/b.png", "video": None},
        {"prompt": [{"role": "user", "content": [{"type": "image", "path": "red-00.png"}]}], "images": "red-00.png"},
    ],
)
def test_rows_of_text_are_not_taken_for_rows_with_media(tmp_path: Path, row: dict[str, Any]) -> None:
    load_config((*VISION, rows_of(tmp_path, row)), checks=CHECKS, settle=settle)


def test_rows_train_on_text_alone_where_modality_says_so(tmp_path: Path) -> None:
    words = (*VISION, rows_of(tmp_path, {"prompt": ASK, "images": ["red-00.png"]}), "modality=text")
    load_config(words, checks=CHECKS, settle=settle)


def test_rows_with_a_place_and_no_item_are_left_out_and_other_media_get_a_note(tmp_path: Path) -> None:
    rows_of(tmp_path, {"prompt": ASK, "images": "red-00.png", "clip": "left-00.mp4"}, count=60)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.writelines(json.dumps({"answer": "up", "prompt": text}) + "\n" for text in ("Which way?\n<video>", "up"))
    words = (*VISION, f"data.path={tmp_path / 'rows.jsonl'}", "data.eval_size=0", "eval.every=0", IMAGES)
    look = summarize_data(load_config(words, checks=CHECKS, settle=settle))
    assert look.rows == 62 and dict(look.bad) == {"bad_media:placeholder_count": 1}
    assert "line 61" in look.named[0] and "data.media_keys.video" in look.named[0]
    notes = [note for note in look.notes if "column clip" in note]
    assert len(notes) == 1 and "data.media_keys.video=clip data.media_place=first" in notes[0]


def test_a_plan_refuses_media_that_the_chat_template_leaves_out(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder("tiny_qwen3_vl", task="see"), folder)
    template = folder / "chat_template.jinja"
    shown = template.read_text().replace("{% if part['type'] in", "{% if message.role == 'user' and part['type'] in", 1)
    template.write_text(shown.replace("{% else %}{{ part['text'] }}", "{% else %}{{ part['text'] or '' }}"))
    parts = [{"type": "image", "path": "red-00.png"}, {"type": "text", "text": "S"}]
    row = {"prompt": [{"role": "system", "content": parts}, {"role": "user", "content": "x"}]}
    report = refused(*VISION[1:-1], "model=qwen3_vl", f"model.path={folder}", rows_of(tmp_path, row))
    assert "the chat template shows no item, but the conversation has image" in report


def test_a_folder_without_its_processor_files_is_told(tmp_path: Path) -> None:
    shutil.copytree(tiny_model_folder("tiny_qwen3_vl", task="see"), tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").unlink()
    report = refused("model=qwen3_vl", f"model.path={tmp_path / 'model'}", "data=see")
    assert f"model.path={tmp_path / 'model'}: no preprocessor_config.json there" in report
    assert "Fetch the folder again, with its processor files." in report


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.media_keys.audio=sounds", "data.media_keys.audio=sounds: model=tiny_qwen3_vl reads images and videos"),
        ("data.mix={audio: 0.5, text: 0.5}", "so no prompt has modality audio. Choose a model that reads it, or drop"),
    ],
)
def test_a_kind_of_media_that_is_not_there_is_told(word: str, message: str) -> None:
    assert message in refused("model=tiny_qwen3_vl", "data=see", word)


def thinker_alone(config: dict[str, Any]) -> dict[str, Any]:
    return dict(config["thinker_config"])


def another_omni(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"model_type": "qwen2_5_omni"}


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (thinker_alone, ("the folder has only the thinker. Use the published folder, with model_type",)),
        (another_omni, ("Qwen2.5-Omni has other towers", "Use a folder of Qwen3-Omni, with model=qwen3_omni.")),
        (dict, ("config.json describes talker, and no file has its weights", "Fetch the folder again, or set")),
    ],
)
def test_a_folder_of_another_omni_is_told(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], messages: tuple[str, ...]
) -> None:
    """The folder has the weights of a thinker without the other parts."""
    config = tiny_omni_config()
    write_settings(tmp_path, config, tiny_omni_files())
    stored = stored_weights(folder_architecture(tmp_path))
    save_file({weight.name: torch.zeros(weight.shape) for weight in stored}, tmp_path / "model.safetensors")
    write_settings(tmp_path, change(config), tiny_omni_files())
    report = refused("model=qwen3_omni", f"model.path={tmp_path}")
    for words in (str(tmp_path), *messages):
        assert words in report, report
