"""What a long run with media accumulates: ``python -m benchmarks.media_soak [--four] [--steps 2000] [--json FILE]``.

One real run of tiny_qwen3_vl at staleness 1 with four prompts a step: a third are images that come only once, a third
are other images, and a third are videos. With --four it is tiny_qwen3_omni, and a step has an image that comes only
once, a video, a sound that comes only once, and text. The cache of encoded items keeps 1 MB, so items are encoded,
stored and removed all the time. Read every five seconds, from outside: resident memory and open files of each process
of the run, the bytes of its folders in /dev/shm, and what of Ray's object store was ever touched (the shared memory of
its raylet).
The table compares the median of the samples in the tenth of the run after step ``--after`` (200) with that of its last
tenth. Exit code 1 if the run fails or a figure grew by more than 5% and by more than its grain.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import sys
import tempfile
import time
import wave
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.chaos_runs import Training
from benchmarks.memory_plan import KINDS as PROCESSES
from relax_core.data.tasks.see_task import files_folder
from tests.integration.live_run import LiveRun

REACH = 0.05
SAMPLE_S = 5.0
PROMPTS, GROUP_SIZE = 4, 4
MEMORY_GRAIN = 4 << 20  # bytes; what allocators keep moves by some MiB
FILES_GRAIN = 4  # connections come and go
OVERRIDES = (
    "data=file",
    f"data.media_root={files_folder() / 'train'}",
    "data.eval_size=16",
    "eval.rows=16",
    "eval.every=200",
    "reward=exact_match",
    "modality.cache_mb=1",
    "mode.max_staleness=1",
    f"rollout.prompts_per_step={PROMPTS}",
    f"algo.group_size={GROUP_SIZE}",
    "engine.context_length=256",
    "run.save_every=500",
    "run.export_hf=false",
)
Figures = dict[str, float]  # "memory of actor" and the like → bytes or files


def new_image(random: np.random.Generator) -> str:
    """Returns a picture of random pixels as a data URL of a PNG."""
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (48, 48, 3), dtype=np.uint8)).save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def new_sound(random: np.random.Generator) -> str:
    """Returns half a second of noise of 16,000 samples a second as a data URL of a WAV."""
    content = io.BytesIO()
    with wave.open(content, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes(random.integers(-8000, 8000, 8000, dtype=np.int16).tobytes())
    return "data:audio/wav;base64," + base64.b64encode(content.getvalue()).decode()


def asked(kind: str, item: str, question: str) -> list[dict[str, object]]:
    """Returns a prompt of one item and a question, as messages."""
    return [{"role": "user", "content": [{"type": kind, kind: item}, {"type": "text", "text": question}]}]


def write_rows(file: Path, *, rows: int, four: bool) -> None:
    """Writes the rows of the run."""
    random = np.random.default_rng(0)
    kinds = ("new image", "video", "new sound", "text") if four else ("new image", "video", "image")
    with file.open("w", encoding="utf-8") as out:
        for number in range(rows):
            which = number // len(kinds) % 4
            answer = colour = ("red", "green", "blue", "yellow")[which]
            prompt: object = f"say {colour}"
            match kinds[number % len(kinds)]:
                case "new image":
                    prompt = asked("image", new_image(random), "which colour?")
                case "image":
                    prompt = asked("image", f"{colour}-{number % 24:02d}.png", "which colour?")
                case "video":
                    answer = ("left", "right", "up", "down")[which]
                    prompt = asked("video", f"{answer}-01.mp4", "which way?")
                case "new sound":
                    prompt = asked("audio", new_sound(random), "which tone?")
            out.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")


def read_figures(live: LiveRun) -> Figures:
    """Returns the figures of this moment; processes of one kind count together."""
    figures: Figures = defaultdict(float)
    for pid, line in live.processes().items():
        kind = next((name for part, name in PROCESSES.items() if part in line), None)
        if kind is None:
            continue
        with suppress(OSError, KeyError):
            status = dict(one.split(":", 1) for one in Path(f"/proc/{pid}/status").read_text().splitlines())
            files = len(os.listdir(f"/proc/{pid}/fd"))
            figures[f"memory of {kind}"] += 1024 * int(status["VmRSS"].split()[0])
            figures[f"open files of {kind}"] += files
            if kind == "Ray raylet":
                figures["object store"] += 1024 * int(status["RssShmem"].split()[0])
    for folder in live.places():
        if folder.is_relative_to("/dev/shm"):
            for inside, _, names in os.walk(folder):  # it goes on where a folder vanishes
                for one in names:
                    with suppress(OSError):
                        figures["/dev/shm"] += (Path(inside) / one).stat().st_size
    return dict(figures)


def watch(live: LiveRun, training: Training, kept: Path | None) -> list[tuple[int, Figures]]:
    """Returns (newest train step, figures) of each moment until the run ends, and writes all to the file ``kept``."""
    samples = []
    while live.running():
        samples.append((training.newest(), read_figures(live)))
        if kept is not None:
            kept.write_text(json.dumps(samples))
        time.sleep(SAMPLE_S)
    return samples


def growth(samples: Sequence[tuple[int, Figures]], *, after: int) -> dict[str, tuple[float, float]]:
    """Returns for each figure the medians of the tenth after step ``after`` and of the last tenth, in steps."""
    last = max(step for step, _ in samples)
    tenth = max(1, (last - after) // 10)
    found = {}
    for name in sorted({name for step, figures in samples if step >= after for name in figures}):
        early = [figures.get(name, 0.0) for step, figures in samples if after <= step <= after + tenth]
        late = [figures.get(name, 0.0) for step, figures in samples if last - tenth <= step < last]
        if early and late:
            found[name] = median(early), median(late)
    return found


def grew(name: str, early: float, late: float) -> bool:
    """Returns whether a figure grew by more than `REACH` and its grain."""
    grain = FILES_GRAIN if name.startswith("open files") else MEMORY_GRAIN
    return late > early * (1 + REACH) and late - early > grain


def table(found: dict[str, tuple[float, float]]) -> str:
    """Returns the figures as a table; memory is in MiB."""
    lines = ["| figure | early | late | growth |", "|---|---|---|---|"]
    for name, (early, late) in found.items():
        unit = 1 if name.startswith("open files") else 1 << 20
        change = f"{100 * (late / early - 1):+.1f}%" if early else ""
        over = " (over)" if grew(name, early, late) else ""
        lines.append(f"| {name} | {early / unit:.1f} | {late / unit:.1f} | {change}{over} |")
    return "\n".join(lines)


def main() -> int:
    """Runs the soak and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--four", action="store_true", help="images, videos, sounds and text")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--after", type=int, default=200)
    parser.add_argument("--json", type=Path, help="the samples")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relax-soak-") as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", rows=PROMPTS * arguments.steps + 64, four=arguments.four)
        model = f"model={'tiny_qwen3_omni' if arguments.four else 'tiny_qwen3_vl'}"
        data = (f"data.path={folder / 'rows.jsonl'}", f"run.steps={arguments.steps}")
        with LiveRun(folder / "run", model, *OVERRIDES, *data) as live:
            samples = watch(live, Training(folder / "run"), arguments.json)
            finished = live.finish()
    books = finished.summary.get("ledger", {})
    print(f"exit code {finished.code}, {finished.summary.get('steps')} steps, {len(samples)} samples; ledger: {books}")
    if finished.code:
        print(finished.output[-4000:])
        return 1
    found = growth(samples, after=arguments.after)
    print(table(found))
    return int(any(grew(one, *both) for one, both in found.items()))


if __name__ == "__main__":
    sys.exit(main())
