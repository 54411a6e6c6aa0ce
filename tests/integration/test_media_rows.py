"""Tests whole runs with pictures: bad rows counted by reason, no base64 in files, an env that shows a picture."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from relax_core.data.media_tasks import files_folder
from tests.integration.live_run import ROOT, FinishedRun, LiveRun, run_to_end
from tests.integration.test_on_policy import assert_same_run
from tests.integration.training_gate import TrainingGate

pytestmark = pytest.mark.integration

TOLERANCE = 2e-5
GROUP_SIZE = 4
SMALL = (
    *("model=tiny_qwen3_vl", f"algo.group_size={GROUP_SIZE}", "run.save_every=0"),
    *("engine.context_length=256", "reward=exact_match"),
)
ENV = '''
"""Asks for the colour of a picture that it shows after the first answer."""

from dataclasses import dataclass
from pathlib import Path

from relax_core.contracts.env import BaseInteractionEnv, EnvSpec, InteractionConfig, StepResult
from relax_core.contracts.media import MediaSource


@dataclass(frozen=True)
class ShowConfig(InteractionConfig):
    """Holds the settings."""

    name: str = "show"


class Show(BaseInteractionEnv):
    """Is one episode of two turns."""

    def __init__(self, start, config):
        self._turn, self._answer = 0, start.row["answer"]
        self._picture = Path(FOLDER, f"{self._answer}-00.png").read_bytes()
        if start.row["prompt"] == "cut":
            self._picture = self._picture[:60]

    def reset(self):
        """Returns the opening."""
        return "which colour?"

    def step(self, action):
        """Shows the picture once."""
        self._turn += 1
        if self._turn == 2:
            return StepResult(reward=float(action.text == self._answer), done=True)
        source = MediaSource(kind="image", data=self._picture)
        parts = [{"type": "image", "image": source}, {"type": "text", "text": "<|image_pad|> which colour?"}]
        return StepResult(observation=[{"role": "user", "content": parts}])


SPEC = EnvSpec(name="show", summary="shows a picture", config=ShowConfig, open=Show)
'''


ROWS, EVAL_ROWS, STEPS, PROMPTS = 60, 8, 10, 8
OTHER = "other.jsonl"  # file of the evaluation set
BAD: dict[int, tuple[str, Any]] = {  # row → reason, and the value of the row's column
    3: ("missing_file", "files/nowhere.png"),
    4: ("missing_file", "files/nowhere.png"),
    9: ("outside_root", "files/link.png"),
    15: ("truncated", "files/cut.png"),
    16: ("remote_refused", "http://127.0.0.1/a.png"),
    22: ("placeholder_count", ["files/red-00.png", "files/red-01.png"]),
}


def write_rows(folder: Path) -> tuple[Path, dict[str, int]]:
    """Writes 60 rows: pictures by path and inline, videos, text, and bad media.

    Also returns the number of dropped samples by reason. The run draws rows in order until every step has its prompts.
    """
    shown = folder / "files"
    shutil.copytree(files_folder() / "train", shown)
    (shown / "cut.png").write_bytes((shown / "red-00.png").read_bytes()[:60])
    (folder.parent / "outside.png").write_bytes((shown / "red-00.png").read_bytes())
    (shown / "link.png").symlink_to(folder.parent / "outside.png")
    rows: list[dict[str, Any]] = []
    for number in range(ROWS):
        colour = ("red", "green", "blue", "yellow")[number % 4]
        file = f"files/{colour}-{number % 24:02d}.png"
        row: dict[str, Any] = {"prompt": "<image>which colour?", "answer": colour, "images": [file]}
        if number % 5 == 1:
            inline = base64.b64encode((folder / file).read_bytes()).decode()
            row["images"] = f"data:image/png;base64,{inline}"
        elif number % 5 == 2:
            row = {"prompt": f"say {colour}", "answer": colour}
        elif number % 5 == 3:
            way = ("left", "right", "up", "down")[number % 4]
            parts = [{"type": "video", "video": f"files/{way}-01.mp4"}, {"type": "text", "text": "which way?"}]
            row = {"prompt": [{"role": "user", "content": parts}], "answer": way}
        if number in BAD:
            row = {"prompt": "<image>which colour?", "answer": colour, "images": BAD[number][1]}
        rows.append(row)
    written = folder / "rows.jsonl"
    written.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    reasons: Counter[str] = Counter()
    drawn = itertools.cycle(range(ROWS - EVAL_ROWS))
    for _ in range(STEPS * PROMPTS):
        while (number := next(drawn)) in BAD:
            reasons[f"bad_media:{BAD[number][0]}"] += GROUP_SIZE
    return written, dict(reasons)


def good_sources(file: Path) -> set[str]:
    """Returns the images and videos of all valid rows, including the evaluation set."""
    found = {json.loads(line)["images"] for line in (file.parent / OTHER).read_text().splitlines()[:3]}
    for number, line in enumerate(file.read_text().splitlines()):
        row = json.loads(line)
        if number not in BAD and "images" in row:
            found.add(row["images"] if isinstance(row["images"], str) else row["images"][0])
        elif not isinstance(row["prompt"], str):
            found.add(row["prompt"][0]["content"][0]["video"])
    return found


def write_eval_set(folder: Path) -> None:
    """Writes an evaluation set of four rows. The last row has a truncated picture."""
    pictures = ("files/red-00.png", "files/blue-01.png", "files/green-02.png", "files/cut.png")
    rows = [
        {"prompt": "<image>which colour?", "answer": picture[6:-7] or "none", "images": picture} for picture in pictures
    ]
    written = folder / OTHER
    written.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def assert_relax_eval_finds_the_same(run: FinishedRun) -> None:
    """Evaluates the newest checkpoint with the run's own settings, and compares with the run's last evaluation."""
    words = [sys.executable, "-m", "relax_core", "eval", str(run.folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = run.folder.glob(f"evaluations/step_{STEPS}/*/evaluation.json")
    metrics = run.summary["eval"][-1]["figures"]
    found = json.loads(file.read_text())["sets"]
    assert [(eval_set["name"], eval_set["rows"], eval_set["bad_rows"]) for eval_set in found] == [
        ("held_out", 8, {}),
        ("other", 3, {"bad_media:truncated": 1}),
    ]
    assert (metrics["other/rows"], metrics["other/bad_rows"]) == (3, 1)
    for eval_set in found:
        assert eval_set["figures"]["reward"]["value"] == pytest.approx(metrics[f"{eval_set['name']}/reward"])


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """Returns the data file, and by reason the number of samples that its bad rows cost in `STEPS` steps."""
    folder = tmp_path_factory.mktemp("rows") / "data"
    folder.mkdir()
    made = write_rows(folder)
    write_eval_set(folder)
    return made


def strict_overrides(file: Path) -> tuple[str, ...]:
    return (
        *SMALL,
        *("data=file", f"data.path={file}", "data.media_keys.image=images", "data.shuffle=false"),
        *("data.max_bad_rows=0.3", f"data.eval_size={EVAL_ROWS}", f"eval.rows={EVAL_ROWS}", f"eval.every={STEPS // 2}"),
        *("mode.max_staleness=0", "run.export_hf=true", f"run.steps={STEPS}"),
        f"rollout.prompts_per_step={PROMPTS}",
        f"eval.sets={{held_out: null, other: {file.parent / OTHER}}}",
        "run.keep_best=eval/held_out/reward",
    )


@pytest.fixture(scope="module")
def straight(rows: tuple[Path, dict[str, int]], tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Returns a run of ten steps at staleness 0. One data row in ten is bad."""
    return run_to_end(tmp_path_factory.mktemp("straight") / "run", *strict_overrides(rows[0]))


def test_bad_pictures_cost_their_prompts_alone_and_no_file_holds_base64(
    straight: FinishedRun, rows: tuple[Path, dict[str, int]]
) -> None:
    run, (file, reasons) = straight, rows
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    books = run.summary["ledger"]
    assert books["trained"] == STEPS * PROMPTS * GROUP_SIZE and books["dropped"] == reasons
    named = run.summary["bad_rows"]
    assert [bad_row["row"] for bad_row in named] == [str(number) for number in sorted(BAD)[:5]]
    assert [bad_row["reason"] for bad_row in named] == [f"bad_media:{BAD[number][0]}" for number in sorted(BAD)[:5]]
    assert "files/nowhere.png" in named[0]["text"] and "files/cut.png" in named[3]["text"]
    gap = run.summary["logprob_gap"]
    # The largest gap is the gap of one token of 1,550. It depends on the processor that trained the model's warm start:
    # gaps between 2e-6 and 2.9e-5 were observed. tests/train/test_parity_media.py checks 2e-5 for models with random
    # weights.
    assert gap["tokens"] > 0 and gap["mean"] <= TOLERANCE / 20 and gap["max"] <= 5 * TOLERANCE
    assert any(values["grad_norm"] > 0.0 for values in run.steps())
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [record["values"] for record in records if record["source"] == "rollout"]
    last = metrics[-1]
    assert last["tower_passes"] > 0 < max(values["feature_mb"] for values in metrics)
    assert last["bad_media"] == sum(reasons.values()) / GROUP_SIZE
    for reason, samples in reasons.items():
        assert last[reason.replace(":", "/")] == samples / GROUP_SIZE
    # Each source is encoded once, although the run uses every row several times and evaluations request it again.
    assert last["encoded"] == len(good_sources(file))
    assert len(list((run.folder / "thumbnails").glob("*.png"))) == 16
    for path in run.folder.rglob("*"):
        if path.suffix in (".log", ".jsonl", ".json", ".yaml", ".html", ".txt") and "hf" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="replace")
            assert "base64" not in text and not re.search("iVBORw0KGgo", text), path
    assert "base64" not in run.output
    assert_relax_eval_finds_the_same(run)


@pytest.mark.soak
def test_a_time_shared_run_that_stops_and_goes_on_is_the_same_to_the_bit(
    straight: FinishedRun, rows: tuple[Path, dict[str, int]], tmp_path: Path
) -> None:
    """The weights equal the weights of an asynchronous run without a stop: mode and resume change no bit."""
    held = TrainingGate(tmp_path, updates=5)
    overrides = (*strict_overrides(rows[0]), "mode=colocate", *held.overrides)
    with LiveRun(tmp_path / "run", *overrides) as live:
        live.wait_step(2)
        live.interrupt()
        live.wait_stop_received()
        held.let_go()
        stopped = live.finish()
    assert stopped.code == 130, stopped.output
    assert 3 <= stopped.summary["steps"] < STEPS
    resumed = run_to_end(tmp_path / "run", *overrides, "resume=auto")
    assert resumed.code == 0, resumed.output
    resumed.assert_all_samples_accounted()
    assert resumed.summary["ledger"]["dropped"] == rows[1]
    assert_same_run(resumed, straight)


def test_an_env_shows_a_picture_in_a_later_turn(tmp_path: Path) -> None:
    """Turns are aborted at weight changes and continue. The trees have the picture in their branches.

    Two rollout workers share the groups. One row in four has a truncated picture; only its episodes are dropped.
    """
    env = tmp_path / "show.py"
    env.write_text(ENV.replace("FOLDER", repr(str(files_folder() / "train"))))
    rows = tmp_path / "rows.jsonl"
    shown = [("x", "red"), ("x", "green"), ("cut", "red"), ("x", "red")] * 4
    rows.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in shown))
    run = run_to_end(
        tmp_path / "run",
        *SMALL,
        *("data=file", f"data.path={rows}", f"env.name={env}", "eval.every=0", "data.eval_size=0"),
        *("mode.max_staleness=1", "rollout.partial=abort", "rollout.prompts_per_step=4", "run.steps=4"),
        *("rollout.workers=2", "data.max_bad_rows=0.6", "run.export_hf=false"),
    )
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    gap = run.summary["logprob_gap"]
    assert gap["tokens"] > 0 and gap["max"] <= TOLERANCE
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [record["values"] for record in records if record["source"] == "rollout"]
    assert max(values["encoded"] for values in metrics) == 2  # two pictures, used in every episode of every group
    assert {values["worker"] for values in metrics} == {0.0, 1.0}
    assert run.summary["ledger"]["dropped"].get("bad_media:truncated", 0) > 0
    assert set(run.summary["ledger"]["dropped"]) <= {"bad_media:truncated", "stale"}
    assert run.summary["bad_rows"][0]["reason"] == "bad_media:truncated"
    assert max(values["turns"] for values in metrics) > 1
