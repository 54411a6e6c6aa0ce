"""Whole runs with pictures: bad ones are counted by reason, no file has base64, an env shows one in a later turn."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from relax_core.data.see_task import files_folder
from tests.integration.live_run import run_to_end

pytestmark = pytest.mark.integration

TOLERANCE = 2e-5
GROUP_SIZE = 4
SMALL = (
    *("model=tiny_qwen3_vl", f"algo.group_size={GROUP_SIZE}", "run.save_every=0", "run.export_hf=false"),
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


def write_rows(folder: Path) -> tuple[Path, dict[str, int]]:
    """Writes 60 rows: pictures by path and inline, videos, text, and bad ones, whose samples it counts by reason."""
    shown = folder / "files"
    shutil.copytree(files_folder() / "train", shown)
    (shown / "cut.png").write_bytes((shown / "red-00.png").read_bytes()[:60])
    (folder.parent / "outside.png").write_bytes((shown / "red-00.png").read_bytes())
    (shown / "link.png").symlink_to(folder.parent / "outside.png")
    bad: dict[int, tuple[str, Any]] = {
        3: ("missing_file", "files/nowhere.png"),
        4: ("missing_file", "files/nowhere.png"),
        9: ("outside_root", "files/link.png"),
        15: ("truncated", "files/cut.png"),
        16: ("remote_refused", "http://127.0.0.1/a.png"),
        22: ("placeholder_count", ["files/red-00.png", "files/red-01.png"]),
    }
    rows: list[dict[str, Any]] = []
    for number in range(60):
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
        if number in bad:
            row = {"prompt": "<image>which colour?", "answer": colour, "images": bad[number][1]}
        rows.append(row)
    written = folder / "rows.jsonl"
    written.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    reasons: dict[str, int] = {}
    for reason, _ in bad.values():
        reasons[f"bad_media:{reason}"] = reasons.get(f"bad_media:{reason}", 0) + GROUP_SIZE
    return written, reasons


def test_bad_pictures_cost_their_prompts_alone_and_no_file_holds_base64(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    file, reasons = write_rows(tmp_path / "data")
    run = run_to_end(
        tmp_path / "run",
        *SMALL,
        *(
            "data=file",
            f"data.path={file}",
            "data.media_keys.image=images",
            "data.shuffle=false",
            "data.max_bad_rows=0.3",
        ),
        *("data.eval_size=8", "eval.rows=8", "eval.every=2", "mode.max_staleness=0", "run.steps=4"),
    )
    assert run.code == 0, run.output
    run.assert_books_closed()
    books = run.summary["ledger"]
    assert {reason: count for reason, count in books["dropped"].items() if reason.startswith("bad")} == reasons
    named = run.summary["bad_rows"]
    assert (
        len(named) == 5 and "files/nowhere.png" in named[0]["text"] and named[0]["reason"] == "bad_media:missing_file"
    )
    gap = run.summary["logprob_gap"]
    assert gap["tokens"] > 0 and gap["max"] <= TOLERANCE
    assert any(values["grad_norm"] > 0.0 for values in run.steps())
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    last = [one["values"] for one in records if one["source"] == "rollout"][-1]
    assert last["bad_media"] == 6 and last["bad_media/missing_file"] == 2
    assert 0 < last["encoded"] <= 60  # each source once, although evaluations ask them again
    assert len(list((run.folder / "thumbnails").glob("*.png"))) == 16
    for path in run.folder.rglob("*"):
        if path.suffix in (".log", ".jsonl", ".json", ".yaml", ".html", ".txt"):
            text = path.read_text(encoding="utf-8", errors="replace")
            assert "base64" not in text and not re.search("iVBORw0KGgo", text), path
    assert "base64" not in run.output


def test_an_env_shows_a_picture_in_a_later_turn(tmp_path: Path) -> None:
    """Turns are aborted at weight changes and go on; the trees have the picture in their branches."""
    env = tmp_path / "show.py"
    env.write_text(ENV.replace("FOLDER", repr(str(files_folder() / "train"))))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "x", "answer": one}) + "\n" for one in ("red", "green") * 8))
    run = run_to_end(
        tmp_path / "run",
        *SMALL,
        *("data=file", f"data.path={rows}", f"env.name={env}", "eval.every=0", "data.eval_size=0"),
        *("mode.max_staleness=1", "rollout.partial=abort", "rollout.prompts_per_step=4", "run.steps=3"),
    )
    assert run.code == 0, run.output
    run.assert_books_closed()
    gap = run.summary["logprob_gap"]
    assert gap["tokens"] > 0 and gap["max"] <= TOLERANCE
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    figures = [one["values"] for one in records if one["source"] == "rollout"]
    assert figures[-1]["encoded"] == 2  # two pictures, in every episode of every group
    assert max(one["turns"] for one in figures) > 1
