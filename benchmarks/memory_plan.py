"""Compares the planned peak memory with the measured peak memory of every process of real runs on CPU cores.

    python -m benchmarks.memory_plan [--media] [--only NAME …] [--json FILE]

The prediction comes from the plan (docs/plan.md). The measurement is the peak resident memory of each process (VmHWM of
Linux), read until the process ends. There are three runs: the demo; a model of 29M parameters; and long responses,
where activations, the attention mask and the KV cache dominate. With --media the runs use images and videos:
tiny_qwen3_vl; tiny_qwen3_vl_moe with recomputation and a frozen tower; a model of 11M parameters with images of 480 x
480 pixels; tiny_qwen3_5, with linear-attention states; and tiny_qwen3_omni, also with sounds. The benchmark also
measures the peak of the encoded items in /dev/shm. The runs take a few minutes. The results hardly depend on machine
load.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.random_vision_model import ROWS
from relax_core.config.compose import load_config
from relax_core.plan.build_plan import make_plan
from relax_core.plan.memory_terms import MIB

DEADLINE_S = 600.0
SAMPLE_S = 0.05
REACH = 0.2
MARK = "RELAX_MEMORY_PLAN"  # environment variable of every process of a run
QUIET = ("eval.every=0", "run.panel=false", "run.steps=8", "optimizer.lr=1e-5")
KINDS = {  # part of a process's name or command line → process name in the plan; the first match is used
    "encode_worker_main": "encode worker",
    "relax-control": "controller",
    "relax_core.engines.embedded": "engine",
    "relax_core.server": "gateway",
    "gcs_server": "Ray gcs",
    "raylet/raylet": "Ray raylet",
    "agent_on_demand": "stand-in of a Ray agent",
    "ServeController": "Serve controller",
    "ServeReplica": "Serve front of a role",
    "BusActor": "bus",
    "observe.trackers.tracker_process": "trackers",
    "AdvantagesWorker": "advantages",
    "RolloutWorker": "rollout",
    "EngineOwner": "owner of an engine",
    "PolicyTrainer": "actor",
    "reward_worker_main": "reward worker",
    "CriticTrainer": "critic",
    "ReferenceWorker": "reference",
    "ActorFwdWorker": "actor_fwd",
    "-m relax_core": "supervisor",
}
ITEMS = "items in /dev/shm"  # the plan's name for memory outside of processes
OF_TEXT, OF_MEDIA = ("actor", "engine"), ("actor", "engine", "rollout", "encode worker", ITEMS)  # rows of the table


@dataclass(frozen=True, kw_only=True)
class Model:
    """Holds the sizes of a random Qwen3 with the built-in tokenizer."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


RUNS: dict[str, tuple[Model | None, tuple[str, ...]]] = {
    "demo": (None, ()),
    "29M parameters": (
        Model(hidden=512, feed_forward=1536, layers=8, heads=8, kv_heads=4, head_dim=64, vocabulary=8192),
        (),
    ),
    "long responses": (
        Model(hidden=128, feed_forward=384, layers=2, heads=4, kv_heads=2, head_dim=32, vocabulary=4096),
        (
            "rollout.max_new_tokens=256",
            "rollout.prompts_per_step=4",
            "engine.context_length=1024",
            "parallel.micro_batch_tokens=8192",
        ),
    ),
}

MEDIA_RUNS: dict[str, tuple[str, ...]] = {
    "tiny_qwen3_vl": ("model=tiny_qwen3_vl", "data=see"),
    "tiny_qwen3_vl_moe": (
        "model=tiny_qwen3_vl_moe",
        "data=see",
        "parallel.recompute=full",
        "model.freeze=[vision]",
    ),
    "11M parameters": (
        "model=qwen3_vl",
        "model.path={folder}",
        "model.dtype=float32",
        "data.path={folder}/" + ROWS,
        "data.media_keys.image=images",
        "reward=exact_match",
        "rollout.max_new_tokens=16",
    ),
    "tiny_qwen3_5": ("model=tiny_qwen3_5", "data=see"),
    "tiny_qwen3_omni": ("model=tiny_qwen3_omni", "data=four_modalities"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--media", action="store_true", help="the runs on images, videos and sounds")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these runs alone")
    parser.add_argument("--json", type=Path, help="file for the results of every kind of process, as JSON")
    arguments = parser.parse_args()
    known = MEDIA_RUNS if arguments.media else RUNS
    if unknown := set(arguments.only or ()) - set(known):
        parser.error(f"--only: no such run: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    figures, every = {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        runs = _media_runs(Path(scratch)) if arguments.media else _text_runs(Path(scratch))
        for name, overrides in runs:
            if arguments.only and name not in arguments.only:
                continue
            words = [*QUIET, *overrides, f"run.dir={scratch}/{name.split()[0]}"]
            plan, truth = predicted(words), measured(words)
            figures[name] = compare(plan, truth, named=OF_MEDIA if arguments.media else OF_TEXT)
            every[name] = {"predicted": plan, "measured": truth}
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(every, indent=2))
    print(table(figures))


def _text_runs(scratch: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields name and overrides of each run on text. Makes the model of a run just before yielding the run."""
    for name, (model, overrides) in RUNS.items():
        if model is not None:
            sizes = map(str, vars(model).values())
            folder = _make("benchmarks.random_model", scratch / "model", *sizes)
            # This is the demo's answer length; a run may override it.
            own: tuple[str, ...] = (
                "model=qwen3",
                "model.dtype=float32",
                f"model.path={folder}",
                "rollout.max_new_tokens=8",
            )
            own += ("rollout.banned_token_ids=[]",)  # the model has more rows than the tokenizer has tokens
            overrides = (*own, *overrides)
        yield name, overrides


def _media_runs(scratch: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields name and overrides of each run on images and videos."""
    folder = _make("benchmarks.random_vision_model", scratch / "model")
    for name, overrides in MEDIA_RUNS.items():
        yield name, tuple(override.format(folder=folder) for override in overrides)


def predicted(overrides: Sequence[str]) -> dict[str, float]:
    """Returns the planned MiB of all processes of each kind together."""
    plan = make_plan(load_config(overrides))
    return {holder.name: holder.count * holder.peak.bytes / MIB for holder in plan.memory}


def measured(overrides: Sequence[str]) -> dict[str, float]:
    """Returns the measured MiB of each kind in a real run. Raises RuntimeError if it fails."""
    mark, items = secrets.token_hex(8), 0
    peaks: dict[int, tuple[str, float]] = {}
    with tempfile.TemporaryFile() as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "relax_core", *overrides],
            env={**os.environ, MARK: mark},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        ours: dict[int, bool] = {}
        deadline = time.monotonic() + DEADLINE_S
        while run.poll() is None and time.monotonic() < deadline:
            peaks |= _peaks(f"{MARK}={mark}".encode(), ours)
            items = max(items, _item_bytes(run.pid))
            time.sleep(SAMPLE_S)
        if run.poll() != 0:
            run.terminate()
            log.seek(0)
            raise RuntimeError(f"the run ended with {run.wait(DEADLINE_S)}:\n{log.read().decode()[-2000:]}")
    sums: dict[str, float] = defaultdict(float)
    for kind, peak in peaks.values():
        sums[kind] += peak
    if items:
        sums[ITEMS] = items / MIB
    return dict(sums)


def compare(
    plan: Mapping[str, float], truth: Mapping[str, float], *, named: Sequence[str] = OF_TEXT
) -> dict[str, dict[str, float]]:
    """Returns rows for the kinds in ``named``, all other kinds and the sum: both sizes in MiB and their ratio."""
    rows = {}
    for name in named:
        rows[name] = {"predicted": plan[name], "measured": truth[name]}
    remainders = [sum(size for name, size in terms.items() if name not in rows) for terms in (plan, truth)]
    rows["others"] = dict(zip(("predicted", "measured"), remainders, strict=True))
    rows["all"] = {"predicted": sum(plan.values()), "measured": sum(truth.values())}
    for row in rows.values():
        row["ratio"] = row["predicted"] / row["measured"]
    return rows


def table(figures: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Returns a Markdown table. "(!)" marks ratios further than `REACH` from 1."""
    lines = ["| Run | Process | Predicted, MiB | Measured, MiB | Ratio |", "|---|---|---|---|---|"]
    for run, rows in figures.items():
        for name, row in rows.items():
            mark = "" if abs(row["ratio"] - 1) <= REACH else " (!)"
            sizes = f"{row['predicted']:.0f} | {row['measured']:.0f}"
            lines.append(f"| {run} | {name} | {sizes} | {row['ratio']:.2f}{mark} |")
    return "\n".join(lines)


def _peaks(mark: bytes, ours: dict[int, bool]) -> dict[int, tuple[str, float]]:
    """Returns by pid the kind and the peak in MiB of the run's processes. ``ours`` caches the pids of the run."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        pid = int(entry.name)
        try:
            if pid not in ours:
                environment = (entry / "environ").read_bytes()
                if not environment:  # a process in the middle of exec is read again later
                    continue
                ours[pid] = mark in environment
            if not ours[pid]:
                continue
            status = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines() if ":" in line)
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # the process has ended, or belongs to another user
            continue
        if "VmHWM" in status:
            message = f"{status['Name'].strip()} {command}"
            kind = next((kind for part, kind in KINDS.items() if part in message), message)
            found[pid] = (kind, int(status["VmHWM"].split()[0]) / 1024)
    return found


def _item_bytes(pid: int) -> int:
    """Returns the bytes of the encoded items of the run of process ``pid``."""
    found = 0
    with suppress(OSError):  # a file or the run's folder was removed meanwhile
        for file in Path("/dev/shm").glob(f"relax-{pid}-*/*/media/*"):
            found += file.stat().st_size
    return found


def _make(module: str, folder: Path, *sizes: str) -> Path:
    """Makes a model folder with random weights in a separate process, because transformers needs much memory."""
    subprocess.run([sys.executable, "-m", module, str(folder), *sizes], check=True)
    return folder


if __name__ == "__main__":
    main()
