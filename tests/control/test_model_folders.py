"""Tests the model folders of teachers and judges: their checks, and the timeout for making built-in models."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.config.schema import RelaxConfig
from relax_core.control.model_folders import judge_folders, judge_problems, made_in_time, teacher_folders
from relax_core.families.hf_config import read_hf_config
from relax_core.plan.build_plan import as_text, make_plan
from relax_core.plan.data_check import summarize_data
from relax_core.plan.memory_plan import judge_holders
from relax_core.preflight import CHECKS
from relax_core.roles.process_placement import roles_of
from relax_core.tools.make_tiny import tiny_model_folder


@pytest.fixture(scope="module")
def student() -> Path:
    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


@pytest.fixture
def student_copy(student: Path, tmp_path: Path) -> Path:
    """Copies the student model. A test may change the copy."""
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


def test_the_builtin_teacher_and_a_folder_of_ones_own(student: Path, student_copy: Path) -> None:
    config = load_config(
        [
            "algo=distill",
            f"algo.teachers={{default: tiny_qwen3_teacher, mine: {student_copy}}}",
            "algo.teacher_key=prompt",
        ],
        checks=[check for check in CHECKS if check.__name__ != "teacher_problems"],
    )
    folders = teacher_folders(config, student=student)
    assert list(folders) == ["default", "mine"] and folders["mine"] == student_copy
    assert folders["default"].name.startswith("tiny_qwen3_teacher-reverse_digits-")
    assert teacher_folders(load_config(), student=student) == {}


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert problems(f"algo.teachers.default={tmp_path}/none") == [
        f"algo.teachers.default={tmp_path}/none: no such folder."
    ]


def test_another_family_teaches_where_it_is_known(student_copy: Path, student: Path) -> None:
    keys = ("model=qwen3", f"model.path={student}", f"algo.teachers.default={student_copy}")
    change(student_copy / "config.json", model_type="llama")
    load_config(["algo=distill", *keys], checks=CHECKS)
    change(student_copy / "config.json", model_type="phi3")
    (text,) = problems(*keys)
    assert text.startswith("algo.teachers.default: ") and "'phi3', which is not a family of Relax" in text


def test_another_tokenizer(student_copy: Path, student: Path) -> None:
    swap_two_tokens(student_copy)
    (text,) = problems("model=qwen3", f"model.path={student}", f"algo.teachers.default={student_copy}")
    assert "its token ids differ from those of the trained model" in text
    assert "'7' is 16 in the first (56 tokens) and 17 in the second (56)" in text
    # The built-in student is made first. The check then finds the problem with this student.
    with pytest.raises(ValueError, match="A teacher must have the student's tokenizer"):
        teacher_folders(load_config(["algo=distill", f"algo.teachers.default={student_copy}"]), student=student)


def test_another_size_of_vocabulary_matters_to_the_top_k_tokens_alone(student_copy: Path, student: Path) -> None:
    change(student_copy / "config.json", vocab_size=64)
    keys = ["algo=distill", f"algo.teachers.default={student_copy}"]
    assert teacher_folders(load_config(keys), student=student) == {"default": student_copy}
    with pytest.raises(ValueError, match="vocab_size 64, the trained model has"):
        teacher_folders(load_config([*keys, "algo.form=topk_jsd"]), student=student)
    with pytest.raises(ValueError, match=r"algo.top_k=5000: the vocabulary has \d+ tokens"):
        teacher_folders(load_config(["algo=distill", "algo.form=topk_jsd", "algo.top_k=5000"]), student=student)


@pytest.mark.parametrize("word", ["algo.teachers={mine: FOLDER}", "algo.teachers.mine=FOLDER"])
def test_who_names_a_teacher_gets_no_other(student: Path, student_copy: Path, word: str) -> None:
    config = load_config(["algo=distill", word.replace("FOLDER", str(student_copy))], checks=CHECKS)
    assert teacher_folders(config, student=student) == {"mine": student_copy}


def test_a_builtin_teacher_of_an_unknown_task(student: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": str(i)}) + "\n" for i in range(300)))
    found = problems("model=qwen3", f"model.path={student}", "data=file", f"data.path={rows}", "data.eval_size=256")
    assert any(
        "algo.teachers.default=tiny_qwen3_teacher: the task that it was trained on is not known" in problem
        for problem in found
    )


def test_a_row_that_names_no_teacher_is_found_with_its_line(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"rev {10000 + i}", "answer": "1", "source": "default"} for i in range(300)]
    lines[41]["source"] = "art"
    lines[280]["source"] = "held out, so nobody asks"
    rows.write_text("\n" + "".join(json.dumps(line) + "\n" for line in lines))
    keys = ("data=file", f"data.path={rows}", "model.task=reverse_digits", "data.eval_size=256", "eval.rows=10")
    # The run trains on 300 - 256 rows. The file's first line is blank.
    line = f"row 41: {rows}, line 43: source='art' is not a teacher: default."
    config = load_config(["algo=distill", *keys, "algo.teacher_key=source"], checks=CHECKS)
    assert [text[: len(line)] for text in summarize_data(config).named] == [line]
    (text,) = problems(*keys, "algo.teacher_key=source", "data.max_bad_rows=0")
    assert f"1 of the 44 checked rows cannot be used, more than data.max_bad_rows=0. The first: {line}" in text
    (text,) = problems(*keys, "algo.teacher_key=topic")
    assert f"The first: row 0: {rows}, line 2: no key 'topic', which algo.teacher_key names" in text
    (text,) = problems("algo.teacher_key=topic")
    assert text == "algo.teacher_key=topic: data=reverse_digits has only prompt, answer. Use data=file."


@pytest.mark.parametrize("served_by", ["forward", "engine"])
@pytest.mark.parametrize("form", ["pure", "topk_forward"])
def test_truncated_sampling_and_a_teacher_go_together(form: str, served_by: str) -> None:
    """The teacher normalizes over the same kept tokens as the student."""
    keys = ["algo=distill", f"algo.form={form}", f"algo.served_by={served_by}"]
    load_config([*keys, "rollout.top_p=0.9", "rollout.top_k=20"], checks=CHECKS)


def test_a_teacher_with_other_media_tokens(student_copy: Path, student: Path) -> None:
    change(student_copy / "config.json", image_token_id=30)
    (text,) = problems("model=qwen3", f"model.path={student}", f"algo.teachers.default={student_copy}")
    assert f"algo.teachers.default={student_copy}: its media tokens are [30], but the trained model has []" in text
    assert "so a teacher needs the same media tokens in tokenizer.json and config.json" in text


def test_a_teacher_of_pictures_must_cut_them_as_the_student_does(student: Path, tmp_path: Path) -> None:
    sees = tiny_model_folder("tiny_qwen3_vl", task="see")
    other_folder = tmp_path / "other"
    shutil.copytree(sees, other_folder)
    config = read_hf_config(other_folder)
    change(other_folder / "config.json", vision_config=config["vision_config"] | {"patch_size": 4, "hidden_size": 48})
    keys = ("model=qwen3_vl", f"model.path={sees}", "data=see", "algo.teachers.default=")
    (found,) = problems(*keys[:3], f"{keys[3]}{other_folder}")
    assert found.startswith(
        f"algo.teachers.default={other_folder}: its vision tower has patch_size=4, but the trained model"
    )
    found = " ".join(problems(*keys[:3], f"{keys[3]}{student}"))
    assert f"algo.teachers.default={student}: it reads text only, and prompts may have images or video." in found
    load_config(["algo=distill", *keys[:3], f"{keys[3]}{sees}"], checks=CHECKS)


# -- Unusable judges are refused before anything starts, with key, value and fix --------------------------------------


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    file = tmp_path / "prompt.jinja"
    file.write_text("{{ response }}")
    return file


def config_of(prompt: Path, *overrides: str) -> RelaxConfig:
    return load_config(["reward=genrm", f"reward.judges.main.prompt={prompt}", *overrides])


def test_judges_have_engines_and_memory_of_their_own(model: Path, prompt: Path) -> None:
    config = config_of(prompt, "reward.judges.main.model=tiny_qwen3", "reward.judges.main.count=2")
    assert list(judge_problems(config)) == []
    assert judge_folders(config) == {"main": model}
    assert roles_of(config)["judge_engine"] == 2
    (holder,) = judge_holders(config)
    assert (holder.name, holder.count) == ("judge main", 2)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert holder.peak.terms["weights"] == pytest.approx(weights, rel=0.05)
    plan = make_plan(config)
    assert plan.roles["judge_engine"] == 2 and holder in plan.memory and "judge main" in as_text(plan)
    remote = config_of(prompt, "reward.judges.main.model=m", "reward.judges.main.url=http://127.0.0.1:1/v1")
    assert "judge_engine" not in roles_of(remote) and judge_holders(remote) == []
    assert "judge_engine" not in roles_of(load_config())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("reward.judges.main.model=/nowhere",), "reward.judges.main.model=/nowhere: no such folder"),
        (("reward.judges.main.model={model}", "reward.judges.main.engine=x"), "reward.judges.main.engine: engine"),
        (("reward.judges.main.model={model}", "reward.judges.main.prompt=/no.jinja"), "reward.judges.main.prompt: /no"),
        (("reward.judges.main.model={model}", "reward.judges.main.parse=x"), "reward.judges.main.parse: 'x' has no"),
        (("reward.judges.main.model={model}", "reward.route=kind"), "reward.route=kind: data=reverse_digits has only"),
        (("reward.judges.main.model={model}", "reward.check.path=/no"), "reward.check.path=/no cannot be read"),
        (
            ("reward.judges.main.model={model}", "reward.judges.main.max_new_tokens=100000"),
            "its prompt template alone has",
        ),
        (
            ("reward.judges.main.model=m", "reward.judges.main.url=http://h/v1", "reward.judges.main.token_file=/no"),
            "reward.judges.main.token_file=/no: no such file",
        ),
    ],
)
def test_what_cannot_work_is_told(model: Path, prompt: Path, overrides: tuple[str, ...], message: str) -> None:
    found = list(judge_problems(config_of(prompt, *(override.format(model=model) for override in overrides))))
    assert len(found) == 1 and message in found[0], found


def test_a_row_with_an_unknown_judge_is_named_with_its_line(model: Path, prompt: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "1", "answer": "1", "judge": judge} for judge in ("main", "mian")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(
        prompt,
        f"reward.judges.main.model={model}",
        "reward.route=judge",
        "data=file",
        f"data.path={file}",
        "data.eval_size=0",
        "eval.every=0",
        "model.task=arithmetic",
    )
    refused = summarize_data(config).refused
    assert refused is not None and f"{file}, line 2: " in refused
    assert "judge='mian' is none of the judges: main" in refused


# -- A start waits for the builtin model as long as for its services, and its error names the model -------------------

CONFIG = load_config(["run.start_timeout_s=0.05"])


def test_what_is_made_is_returned(tmp_path: Path) -> None:
    made: Future[Path] = Future()
    made.set_result(tmp_path)
    assert made_in_time(made, CONFIG, what="the model") == tmp_path


def test_a_model_that_is_still_being_made_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"run.start_timeout_s=0.05: the model tiny is still being made"):
        made_in_time(Future(), CONFIG, what="the model tiny")


def test_a_deadline_within_the_making_keeps_its_words() -> None:
    made: Future[Path] = Future()
    made.set_exception(TimeoutError("the lock of the tiny model"))
    with pytest.raises(TimeoutError, match="the lock of the tiny model"):
        made_in_time(made, CONFIG, what="the model")
