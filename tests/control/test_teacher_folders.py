"""Teachers are found, and those that do not fit the student are refused before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.control.model_folders import teacher_folders
from relax_core.families.hf_config import read_hf_config
from relax_core.plan.data_check import look_at_data
from relax_core.preflight import CHECKS
from relax_core.tools.make_tiny import tiny_model_folder


@pytest.fixture(scope="module")
def student() -> Path:
    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


@pytest.fixture
def other(student: Path, tmp_path: Path) -> Path:
    """Copies the student, so that a test can change the copy."""
    folder = tmp_path / "other"
    shutil.copytree(student, folder)
    return folder


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def swap_two_tokens(folder: Path) -> None:
    file = folder / "tokenizer.json"
    text = json.loads(file.read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    file.write_text(json.dumps(text))


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(["algo=distill", *overrides], checks=CHECKS)
    return caught.value.problems


def test_the_builtin_teacher_and_a_folder_of_ones_own(student: Path, other: Path) -> None:
    config = load_config(
        ["algo=distill", f"algo.teachers.mine={other}", "algo.teacher_key=prompt"],
        checks=[check for check in CHECKS if check.__name__ != "teacher_problems"],
    )
    folders = teacher_folders(config, student=student)
    assert list(folders) == ["default", "mine"] and folders["mine"] == other
    assert folders["default"].name.startswith("tiny_qwen3_teacher-reverse_digits-")
    assert teacher_folders(load_config(), student=student) == {}


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert problems(f"algo.teachers.default={tmp_path}/none") == [
        f"algo.teachers.default={tmp_path}/none: no such folder."
    ]


def test_another_family_teaches_where_it_is_known(other: Path, student: Path) -> None:
    keys = ("model=qwen3", f"model.path={student}", f"algo.teachers.default={other}")
    change(other / "config.json", model_type="llama")
    load_config(["algo=distill", *keys], checks=CHECKS)
    change(other / "config.json", model_type="phi3")
    (text,) = problems(*keys)
    assert text.startswith("algo.teachers.default: ") and "'phi3', which is no family of Relax" in text


def test_another_tokenizer(other: Path, student: Path) -> None:
    swap_two_tokens(other)
    (text,) = problems("model=qwen3", f"model.path={student}", f"algo.teachers.default={other}")
    assert "its token ids are not those of the model that learns" in text
    assert "'7' is 16 in the one (56 tokens) and 17 in the other (56)" in text
    # The built-in student is made first, so the problem is found then.
    with pytest.raises(ValueError, match="A teacher must have the student's tokenizer"):
        teacher_folders(load_config(["algo=distill", f"algo.teachers.default={other}"]), student=student)


def test_another_size_of_vocabulary_matters_to_the_top_k_tokens_alone(other: Path, student: Path) -> None:
    change(other / "config.json", vocab_size=64)
    keys = ["algo=distill", f"algo.teachers.default={other}"]
    assert teacher_folders(load_config(keys), student=student) == {"default": other}
    with pytest.raises(ValueError, match="vocab_size 64, the model that learns has"):
        teacher_folders(load_config([*keys, "algo.form=topk_jsd"]), student=student)
    with pytest.raises(ValueError, match=r"algo.top_k=5000: the vocabulary has \d+ tokens"):
        teacher_folders(load_config(["algo=distill", "algo.form=topk_jsd", "algo.top_k=5000"]), student=student)


def test_a_builtin_teacher_of_an_unknown_task(student: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": str(i)}) + "\n" for i in range(300)))
    found = problems("model=qwen3", f"model.path={student}", "data=file", f"data.path={rows}", "data.eval_size=256")
    assert any(
        "algo.teachers.default=tiny_qwen3_teacher: the task that it was trained on is not known" in one for one in found
    )


def test_a_row_that_names_no_teacher_is_found_with_its_line(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"rev {10000 + i}", "answer": "1", "source": "default"} for i in range(300)]
    lines[41]["source"] = "art"
    lines[280]["source"] = "held out, so nobody asks"
    rows.write_text("\n" + "".join(json.dumps(line) + "\n" for line in lines))
    keys = ("data=file", f"data.path={rows}", "model.task=reverse_digits", "data.eval_size=256", "eval.rows=10")
    # 300 - 256 rows are trained on; the file's first line is blank.
    line = f"row 41: {rows}, line 43: source='art' is none of the teachers: default."
    config = load_config(["algo=distill", *keys, "algo.teacher_key=source"], checks=CHECKS)
    assert [text[: len(line)] for text in look_at_data(config).named] == [line]
    (text,) = problems(*keys, "algo.teacher_key=source", "data.max_bad_rows=0")
    assert (
        f"1 of the 44 rows that were looked at cannot be used, more than data.max_bad_rows=0. The first: {line}" in text
    )
    (text,) = problems(*keys, "algo.teacher_key=topic")
    assert f"The first: row 0: {rows}, line 2: no key 'topic', which algo.teacher_key names" in text
    (text,) = problems("algo.teacher_key=topic")
    assert text == "algo.teacher_key=topic: data=reverse_digits has only prompt, answer. Use data=file."


@pytest.mark.parametrize("served_by", ["forward", "engine"])
@pytest.mark.parametrize("form", ["pure", "topk_forward"])
def test_truncated_sampling_and_a_teacher_go_together(form: str, served_by: str) -> None:
    """The teacher normalises over the same kept tokens as the student."""
    keys = ["algo=distill", f"algo.form={form}", f"algo.served_by={served_by}"]
    load_config([*keys, "rollout.top_p=0.9", "rollout.top_k=20"], checks=CHECKS)


def test_a_teacher_with_other_media_tokens(other: Path, student: Path) -> None:
    change(other / "config.json", image_token_id=30)
    (text,) = problems("model=qwen3", f"model.path={student}", f"algo.teachers.default={other}")
    assert f"algo.teachers.default={other}: its media tokens are [30], those of the model that learns are []" in text
    assert "so a teacher must name the same ones in tokenizer.json and config.json" in text


def test_a_teacher_of_pictures_must_cut_them_as_the_student_does(student: Path, tmp_path: Path) -> None:
    sees = tiny_model_folder("tiny_qwen3_vl", task="see")
    other = tmp_path / "other"
    shutil.copytree(sees, other)
    config = read_hf_config(other)
    change(other / "config.json", vision_config=config["vision_config"] | {"patch_size": 4, "hidden_size": 48})
    keys = ("model=qwen3_vl", f"model.path={sees}", "data=see", "algo.teachers.default=")
    (found,) = problems(*keys[:3], f"{keys[3]}{other}")
    assert found.startswith(f"algo.teachers.default={other}: its vision tower has patch_size=4, that of the model that")
    found = " ".join(problems(*keys[:3], f"{keys[3]}{student}"))
    assert f"algo.teachers.default={student}: it reads text only, and prompts may have images or video." in found
    load_config(["algo=distill", *keys[:3], f"{keys[3]}{sees}"], checks=CHECKS)
