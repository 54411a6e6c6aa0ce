"""Tests the arguments of `relax eval`, and evaluations of a built-in model, of a folder, and with several engines."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from relax_core.cli.eval_command import eval_command
from relax_core.config.compose import load_config
from relax_core.config.saved_config import to_yaml
from relax_core.control.host.run_paths import SHARED_MEMORY
from relax_core.data.eval_sets import eval_sets_alone
from relax_core.data.media_tasks import files_folder
from relax_core.preflight import EVAL_CHECKS, settle_evaluation
from relax_core.tools.make_tiny import tiny_model_folder
from relax_core.train.checkpoints.checkpoint_store import CheckpointStore
from tests.house_vl import HOUSE_VL, of_the_house


def evaluated(*words: str) -> int:
    return eval_command(words, checks=EVAL_CHECKS, settle=settle_evaluation)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert evaluated(*words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("arguments", [(), ("eval.rows=3",), ("--nope",)])
def test_without_a_target_the_usage_is_told(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> None:
    assert "relax eval MODEL|CHECKPOINT|RUN [key=value ...]" in refused(capsys, *arguments)


def test_what_is_no_target_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = refused(capsys, str(tmp_path / "nothing"))
    assert "neither a run's folder, a checkpoint, a Hugging Face folder, nor one of the models" in printed
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "bloom"}')
    printed = refused(capsys, str(tmp_path / "model"))
    assert "model_type='bloom'" in printed and "family" in printed
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(load_config()))
    assert f"{run} has no checkpoint" in refused(capsys, str(run))


def test_a_checkpoint_that_is_damaged_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(folder: Path) -> None:
        (folder / "config.yaml").write_text(to_yaml(load_config()))
        (folder / "train").mkdir()
        (folder / "train" / "weights").write_bytes(b"w" * 100)

    folder = CheckpointStore(tmp_path / "checkpoints", keep_last=1).write(3, writers=write, meta={})
    (folder / "train" / "weights").write_bytes(b"x" * 100)
    assert f"{folder / 'train' / 'weights'} is corrupt" in refused(capsys, str(folder), f"run.dir={tmp_path / 'out'}")


@pytest.mark.parametrize(
    ("override", "printed"),
    [
        ("eval.samples=3", "eval.samples=3 with eval.temperature=0"),
        ("eval.rowss=3", "eval.rowss is not a key. Nearest: eval.rows"),
        ("eval.rows=999", "eval.rows=999, but data.eval_size=256 holds out 256 rows"),
        ("eval.sets.gsm=/nowhere.jsonl", "/nowhere.jsonl: no such file"),
    ],
)
def test_settings_that_cannot_be_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, printed: str
) -> None:
    assert printed in refused(capsys, "tiny_qwen3", f"run.dir={tmp_path / 'out'}", override)


@pytest.mark.parametrize(
    ("count", "more", "asked"),
    [
        (5, (), range(5)),
        (5, ("eval.rows=3",), range(3)),
        (5, ("eval.sets={own: null}",), range(5)),
        (5, ("data.eval_size=2", "eval.rows=2"), (3, 4)),  # a run would hold out these rows
        (300, ("eval.rows=2",), (44, 45)),
    ],
)
def test_a_file_with_too_few_rows_to_hold_some_out_is_evaluated_whole(
    tmp_path: Path, count: int, more: Sequence[str], asked: Sequence[int]
) -> None:
    lines = [json.dumps({"prompt": f"What is 0 + {number}?", "answer": str(number)}) for number in range(count)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    words = (f"data.path={tmp_path}/rows.jsonl", "model.task=arithmetic", *more)
    (eval_set,) = eval_sets_alone(load_config(words, checks=EVAL_CHECKS, settle=settle_evaluation))
    assert [int(row["answer"]) for row in eval_set.rows] == list(asked) and not eval_set.bad


def test_a_model_by_name_and_by_folder_give_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two engines share the prompts of the second evaluation. The result must be the same as with one engine."""
    sampled = ("eval.rows=12", "eval.samples=4", "eval.temperature=1.0")
    results = {}
    folder = tiny_model_folder("tiny_qwen3", task="reverse_digits")
    for target, more in (
        ("tiny_qwen3", ()),
        (str(folder), ("engine.count=2", "model.dtype=float32", "rollout.max_new_tokens=8")),
    ):
        out = tmp_path / Path(target).name
        if more:  # a folder with a user's file is not changed
            out.mkdir()
            (out / "answers.jsonl").write_text("precious")
        assert evaluated(target, f"run.dir={out}", *sampled, *more) == 0
        if more:
            assert [(path.name, path.read_text()) for path in out.iterdir()] == [("answers.jsonl", "precious")]
            out = out.with_name(f"{out.name}-2")
        results[target] = json.loads((out / "evaluation.json").read_text())
        answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
        assert [len(answer["responses"]) for answer in answers] == [4] * 12
        assert not list(out.glob(".weights-*"))
    first, second = results.values()
    assert first["sets"] == second["sets"]
    (eval_set,) = first["sets"]
    assert set(eval_set["figures"]) == {"exact", "pass@2", "pass@4", "maj@4", "reward"}
    assert "Wilson (1927)" in first["intervals"] and first["step"] is None
    assert "held-out rows, 12 prompts" in capsys.readouterr().out


def test_images_and_videos_are_evaluated_and_bad_ones_are_no_wrong_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluates a plug-in family on a set in the folder of its media files. Two prompts have the same image."""
    shown = tmp_path / "shown"
    shutil.copytree(files_folder() / "train", shown)
    (shown / "cut.png").write_bytes((shown / "red-00.png").read_bytes()[:60])
    video = [{"type": "video", "video": "left-00.mp4"}, {"type": "text", "text": "which way?"}]
    asked = {"prompt": "<image>which colour?"}
    rows = [
        {**asked, "images": "red-00.png", "answer": "red"},
        {**asked, "images": {"path": "red-00.png"}, "answer": "red"},
        {"prompt": [{"role": "user", "content": video}], "answer": "left"},
        {"prompt": "say blue", "answer": "blue"},
        {**asked, "images": "cut.png", "answer": "red"},
        {**asked, "images": "../outside.png", "answer": "red"},
    ]
    (shown / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "outside.png").write_bytes((shown / "red-00.png").read_bytes())
    folder = of_the_house(tmp_path / "model")
    words = (
        f"model.family={HOUSE_VL}",
        *(f"eval.sets.shown={shown / 'rows.jsonl'}", "data.media_keys.image=images", "data.max_bad_rows=0.5"),
        *("eval.samples=2", "eval.temperature=1.0", "rollout.max_new_tokens=8", "reward=exact_match"),
    )
    before = set(SHARED_MEMORY.iterdir())
    assert evaluated(str(folder), f"run.dir={tmp_path / 'out'}", *words) == 0, capsys.readouterr().err
    assert {path for path in set(SHARED_MEMORY.iterdir()) - before if str(os.getpid()) in path.name} == set()
    (eval_set,) = json.loads((tmp_path / "out" / "evaluation.json").read_text())["sets"]
    assert eval_set["rows"] == 4 and eval_set["bad_rows"] == {"bad_media:truncated": 1, "bad_media:outside_root": 1}
    answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    prompts = [answer["prompt"] for answer in answers]
    assert prompts[0] == prompts[1] and re.fullmatch(r"\[image \d+×\d+\]which colour\?", prompts[0])
    assert re.fullmatch(r"\[video \d+×\d+, \d+ frames\]which way\?", prompts[2]) and prompts[3] == "say blue"
