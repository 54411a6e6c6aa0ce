"""Tests a whole run with all kinds of media and one bad row in ten: exact counts by reason and modality."""

from __future__ import annotations

import itertools
import json
import shutil
import wave
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from relax_core.data.media_tasks import files_folder
from tests.integration.live_run import FinishedRun, run_to_end

pytestmark = pytest.mark.integration

GROUP_SIZE, PROMPTS, STEPS, ROWS = 2, 8, 10, 120
BAD: dict[int, tuple[str, dict[str, Any]]] = {  # row → reason in the ledger, and row content without the answer
    2: ("bad_media:missing_file", {"prompt": "<image>which colour?", "images": "nowhere.png"}),
    11: ("bad_media:truncated", {"prompt": "<image>which colour?", "images": "cut.png"}),
    23: ("bad_media:truncated", {"prompt": "<video>which way?", "videos": "cut.mp4"}),
    30: ("bad_media:unknown_format", {"prompt": "<video>which way?", "videos": "train/red-00.png"}),
    41: ("bad_media:too_short", {"prompt": "<audio>which tone?", "sounds": "short.wav"}),
    42: ("bad_media:placeholder_count", {"prompt": "<audio><audio>which tone?", "sounds": "tone.wav"}),
    55: ("bad_media:unknown_format", {"prompt": "<audio>which tone?", "sounds": "train/red-00.png"}),
    68: ("bad_row:prompt", {"prompt": 5}),
    77: ("bad_media:outside_root", {"prompt": "<image>which colour?", "images": "../rows.jsonl"}),
    86: ("bad_media:missing_file", {"prompt": "<image>?<audio>?", "images": "train/red-01.png", "sounds": "no.wav"}),
}
MODALITY = {2: "image", 11: "image", 23: "video", 30: "video", 41: "audio", 42: "audio", 55: "audio", 68: "text"}
MODALITY |= {77: "image", 86: "image_audio"}
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("image", {"prompt": "<image>which colour?", "answer": "red", "images": "train/red-03.png"}),
    ("text", {"prompt": "say north", "answer": "north"}),
    ("video", {"prompt": "<video>which way?", "answer": "left", "videos": "train/left-02.mp4"}),
    ("audio", {"prompt": "<audio>which tone?", "answer": "low", "sounds": "tone.wav"}),
    (
        "image_audio",
        {"prompt": "<image><audio>?", "answer": "yes", "images": "train/blue-01.png", "sounds": "tone.wav"},
    ),
]


def write_sound(file: Path, *, samples: int) -> None:
    with wave.open(str(file), "wb") as written:
        written.setparams((1, 2, 16_000, 0, "NONE", "not compressed"))
        written.writeframes(bytes(i * 37 % 251 for i in range(2 * samples)))


def write_rows(folder: Path) -> Path:
    media = folder / "media"
    media.mkdir()
    shutil.copytree(files_folder() / "train", media / "train")
    (media / "cut.png").write_bytes((media / "train/red-00.png").read_bytes()[:60])
    whole = (media / "train/left-00.mp4").read_bytes()
    (media / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    write_sound(media / "tone.wav", samples=8_000)
    write_sound(media / "short.wav", samples=160)
    rows = [{"answer": "x", **BAD[n][1]} if n in BAD else GOOD[n % len(GOOD)][1] for n in range(ROWS)]
    written = folder / "rows.jsonl"
    written.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return written


def expected() -> tuple[Counter[str], dict[str, Counter[str]]]:
    """Returns the expected dropped samples by reason, and the samples of each modality by their end."""
    reasons: Counter[str] = Counter()
    ends: dict[str, Counter[str]] = defaultdict(Counter)
    drawn = itertools.count()
    for _ in range(STEPS * PROMPTS):
        while (number := next(drawn)) in BAD:
            reasons[BAD[number][0]] += GROUP_SIZE
            ends[MODALITY[number]][BAD[number][0]] += GROUP_SIZE
        ends[GOOD[number % len(GOOD)][0]]["trained"] += GROUP_SIZE
    return reasons, ends


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("modalities")
    return run_to_end(
        folder / "run",
        *(
            "model=tiny_qwen3_omni",
            "data=file",
            f"data.path={write_rows(folder)}",
            f"data.media_root={folder / 'media'}",
        ),
        *("data.media_keys.image=images", "data.media_keys.video=videos", "data.media_keys.audio=sounds"),
        *("data.shuffle=false", "data.max_bad_rows=0.2", "data.eval_size=0", "eval.every=0", "reward=exact_match"),
        *("mode.max_staleness=0", f"algo.group_size={GROUP_SIZE}", f"rollout.prompts_per_step={PROMPTS}"),
        *(f"run.steps={STEPS}", "run.save_every=0", "run.export_hf=false", "rollout.max_new_tokens=8"),
        *("engine.start_timeout_s=600", "run.start_timeout_s=600"),
    )


def test_bad_rows_of_all_kinds_are_counted_by_reason_and_nothing_is_lost(run: FinishedRun) -> None:
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    reasons, _ = expected()
    assert len(reasons) == 7 and sum(reasons.values()) == GROUP_SIZE * len(BAD)
    books = run.summary["ledger"]
    assert books["dropped"] == reasons and books["trained"] == STEPS * PROMPTS * GROUP_SIZE
    assert books["lost"] == books["open"] == books["trained_twice"] == 0


def test_the_counts_of_the_modalities_add_up_to_those_of_the_run(run: FinishedRun) -> None:
    _, ends = expected()
    found, books = run.summary["modalities"], run.summary["ledger"]
    assert set(found) == set(ends) == {"text", "image", "video", "audio", "image_audio"}
    for name, modality in found.items():
        assert {"trained": modality["trained"], **modality["dropped"]} == ends[name]
        assert modality["issued"] == modality["trained"] + sum(modality["dropped"].values()) + modality["open"]
        assert modality["staleness"] == {"0": modality["trained"]} and modality["prefill_ms"] > 0.0
        assert (modality["encode_ms"] is None) == (name == "text")
    assert sum(modality["issued"] for modality in found.values()) == books["issued"]
    assert sum(modality["trained_share"] for modality in found.values()) == pytest.approx(1.0)
    rewards = sum(modality["reward"] * modality["trained"] for modality in found.values()) / books["trained"]
    assert rewards == pytest.approx(sum(values["reward"] for values in run.steps()) / STEPS)
    assert " trained (" in run.output and "image + audio" in run.output
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    newest = [record["values"] for record in records if record["source"] == "ledger"][-1]
    assert newest["modality/video/dropped/bad_media:truncated"] == GROUP_SIZE
