"""Makes one whole run for `benchmarks.long_tail`, watches it from outside, and reads its figures and its trace.

While it goes on, its trainer and its engine are bound to a core each, and the engine is asked for its load: how many
decode steps it has made with so many samples, and how long they took.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from benchmarks.countdown_task import model_folder
from benchmarks.long_tail_limit import PROMPT_TOKENS, Trace, check_trace
from relax_core.bus.state.settings import BusSettings
from relax_core.contracts.columns import decode_episodes
from relax_core.contracts.engine import EngineError
from relax_core.engines.embedded.scheduler.engine_load import COARSE, EXACT_SIZES
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.observe.samples.sample_reader import decode_numbers, numbers_files, read_frames
from relax_core.observe.samples.sample_records import SAMPLES_FOLDER, MadeRecord
from relax_core.observe.service.records import ACTOR, RANK, MetricRecord, by_step
from relax_core.observe.service.sinks import read_metrics

ENGINE, TRAINER = "relax_core.engines.embedded", "ray::PolicyTrai"  # in a command line; a process's name
REWARD = Path(__file__).with_name("countdown_reward.py")
LOOK_S = 0.5
ENGINE_S = 10.0  # an answer of the engine
FEWEST = 30  # decode steps behind each entry of the table of times
LAST_STEPS = 5  # of which the reward at the end is the mean
QUIET_RUN = ("eval.every=0", "run.save_every=0", "run.export_hf=false", "run.panel=false")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

Figures = dict[str, float]


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what all runs of a comparison have in common."""

    steps: int
    prompts: int
    group_size: int
    cap: int
    lr: float
    running: int  # samples decoded at one time at most
    skipped: int  # train steps at the start that no figure counts
    micro_batch_tokens: int  # a step of several micro-batches begins before all of its groups are there

    def words(self, rows: Path, *, seed: int) -> list[str]:
        """Returns the words of a run on the rows of a file, in their order."""
        return [
            *("model=qwen3", f"model.path={model_folder()}", "model.dtype=float32"),
            *("data=file", f"data.path={rows}", "data.shuffle=false", "data.eval_size=0", "data.max_bad_rows=0"),
            *("reward=plugin", f"reward.name={REWARD}", "reward.cap=${rollout.max_new_tokens}"),
            f"rollout.prompts_per_step={self.prompts}",
            f"rollout.max_new_tokens={self.cap}",
            f"algo.group_size={self.group_size}",
            f"engine.max_running_samples={self.running}",
            f"engine.max_total_tokens={self.running * (self.cap + PROMPT_TOKENS)}",
            f"parallel.micro_batch_tokens={self.micro_batch_tokens}",
            f"optimizer.lr={self.lr}",
            "optimizer.schedule=constant",
            f"run.steps={self.steps}",
            f"seed={seed}",
            *QUIET_RUN,
        ]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Holds what a run left: its figures, and the trace for the simulation."""

    figures: Figures
    trace: Trace


def execute(words: Sequence[str], folder: Path, *, deadline_s: float) -> list[tuple[float, Mapping[str, Any]]]:
    """Makes a run in ``folder`` and returns the loads of its engine with their Unix times."""
    port = _free_port()
    command = [sys.executable, "-m", "relax_core", *words, f"run.dir={folder}", f"engine.port={port}"]
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=os.environ | ONE_THREAD, stdout=output, stderr=subprocess.STDOUT)
        watch = _Watch(process.pid, port=port)
        watch.start()
        try:
            code = process.wait(deadline_s)
        except BaseException:
            process.terminate()
            process.wait(deadline_s)
            raise
        finally:
            watch.ended.set()
            watch.join()
    if code:
        raise SystemExit(f"{' '.join(command)} ended with {code}:\n{log.read_text(errors='replace')[-4000:]}")
    return watch.loads


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@dataclass
class _Watch(threading.Thread):
    """Binds trainer and engine of a run to a core each, and asks the engine for its load."""

    pid: int
    port: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__init__(name="watch", daemon=True)
        self.ended = threading.Event()
        self.loads: list[tuple[float, Mapping[str, Any]]] = []

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        bound: set[int] = set()
        client: EngineClient | None = None
        while not self.ended.wait(LOOK_S):
            if len(bound) < 2:
                for pid in descendants(self.pid) - bound:
                    if core := self._core_of(pid, cores):
                        _bind(pid, core[0])
                        bound.add(pid)
                        client = client or self._client(pid)
            if client is not None:
                with suppress(EngineError):  # it starts or it ends
                    self.loads.append((time.time(), client.loads()))

    @staticmethod
    def _core_of(pid: int, cores: Sequence[int]) -> list[int]:
        if _name(pid).startswith(TRAINER):
            return [cores[0]]
        return [cores[1 % len(cores)]] if ENGINE in _command(pid) else []

    def _client(self, pid: int) -> EngineClient | None:
        words = _command(pid)
        if ENGINE not in words:
            return None
        token = Path(words[words.index("--token-file") + 1]).read_text(encoding="utf-8").strip()
        url = f"http://127.0.0.1:{self.port}"
        return EngineClient(url, token, request_timeout_s=ENGINE_S, control_timeout_s=ENGINE_S)


def descendants(pid: int) -> set[int]:
    """Returns the processes that a process has started, and those that they have started."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _bind(pid: int, core: int) -> None:
    with suppress(OSError):  # a thread has ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


# -- what a run left --------------------------------------------------------------------------------------------------
def read_run(
    folder: Path,
    loads: Sequence[tuple[float, Mapping[str, Any]]],
    work: Work,
    *,
    wishes: Sequence[int],
    bus: BusSettings,
    whole_steps: bool,
    max_aborts: int,
) -> Finished:
    """Returns figures and trace of a finished run. Raises ValueError where it has no times for the simulation."""
    records = read_metrics(folder)
    actor = by_step(records, ACTOR)
    if len(actor) != work.steps:
        raise ValueError(f"{folder}: {len(actor)} of {work.steps} train steps are recorded. Make the run again.")
    times = [one.time_s for one in _of_source(records, ACTOR)]
    before, after = loads_between(loads, times[work.skipped - 1], times[-2], where=str(folder))
    steps, seconds, waits_s = decode_totals(before, after)
    measured = range(work.skipped, work.steps - 1)
    busy_s, tokens = (float(after[key] - before[key]) for key in ("busy_s", "prefill_tokens"))
    decode_s, column_s = decode_costs([load for at, load in loads if at <= times[-2]])
    trace = Trace(
        bus=bus,
        lengths=answer_lengths(folder, wishes=wishes, group_size=work.group_size),
        decode_s=decode_s,
        column_s=column_s,
        prefill_s=max(0.0, busy_s - seconds) / max(1.0, tokens),
        train_s=train_line([actor[step] for step in measured], [by_step(records, RANK)[step] for step in measured]),
        max_running_samples=work.running,
        max_aborts=max_aborts,
        whole_steps=whole_steps,
        skipped_steps=work.skipped,
    )
    check_trace(trace, where=str(folder))
    took_s = times[-2] - times[work.skipped - 1]
    shares = {
        "trainer without a core": sum(by_step(records, RANK)[step]["actor-0/core_wait_ms"] for step in measured) / 1e3,
        "engine busy": busy_s,
        "engine without a core": waits_s,
    }
    figures = run_figures(actor, skipped=work.skipped) | {name: spent_s / took_s for name, spent_s in shares.items()}
    return Finished(figures=figures | {"decode steps": steps}, trace=trace)


def _of_source(records: Iterable[MetricRecord], source: str) -> list[MetricRecord]:
    return sorted((one for one in records if one.source == source), key=lambda one: one.step)


def run_figures(actor: Mapping[int, Mapping[str, float]], *, skipped: int) -> Figures:
    """Returns a run's figures from the trainer's records by step; the last step counts for the reward alone."""
    steps = sorted(actor)
    measured = [actor[step] for step in steps[skipped:-1]]
    spent = {
        name: sum(one[name] for one in measured) for name in ("step_ms", "samples", "tokens", "train_ms", "wait_ms")
    }
    return {
        "samples/s": 1e3 * spent["samples"] / spent["step_ms"],
        "tokens/s": 1e3 * spent["tokens"] / spent["step_ms"],
        "reward": fmean(actor[step]["reward"] for step in steps[-LAST_STEPS:]),
        "first reward": actor[steps[0]]["reward"],
        "counted": fmean(one["reward_counted"] for one in measured),
        "training": spent["train_ms"] / spent["step_ms"],
        "waiting": spent["wait_ms"] / spent["step_ms"],
        "staleness": fmean(one["staleness_mean"] for one in measured),
        "most staleness": max(one["staleness_max"] for one in actor.values()),
        "length": spent["tokens"] / spent["samples"],
    }


def answer_lengths(folder: Path, *, wishes: Sequence[int], group_size: int) -> list[list[int]]:
    """Returns the tokens of each answer by group, in order of issue.

    Of an answer that was not made they are those that its prompt asks for.
    """
    lengths = [[wish] * group_size for wish in wishes]
    for name in numbers_files(folder):
        path, offset = folder / SAMPLES_FOLDER / name, 0
        while frames := read_frames(path, offset):
            offset = frames[-1].offset + frames[-1].size
            for record in map(decode_numbers, frames):
                if isinstance(record, MadeRecord):
                    found = [sum(t.end - t.start for t in one.turns) for one in decode_episodes(bytes(record.episodes))]
                    lengths[int(record.group_uid.removeprefix("g"))] = found
    return lengths


def loads_between(
    loads: Sequence[tuple[float, Mapping[str, Any]]], began_s: float, ended_s: float, *, where: str
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Returns the engine's loads at the begin and the end of the measured steps. Raises ValueError without them."""
    before = [load for at, load in loads if at <= began_s and "decode_times" in load]
    after = [load for at, load in loads if began_s < at <= ended_s and "decode_times" in load]
    if not before or not after:
        raise ValueError(
            f"{where}: loads={len(loads)}: the engine was not asked for its decode times before and after the measured "
            "train steps. Give --steps more, or --skip 1 or more."
        )
    return before[-1], after[-1]


def decode_totals(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[float, float, float]:
    """Returns the decode steps between two loads, their seconds, and how many of these were waits for a core."""
    first, last = (np.array([one[1:] for one in load["decode_times"]] or [(0, 0.0, 0.0)]) for load in (before, after))
    steps, seconds, waits = last.sum(0) - first.sum(0)
    return float(steps), float(seconds), float(waits)


def decode_costs(loads: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[float, float]], float]:
    """Returns (samples, seconds of a decode step without its columns), and the seconds of a column.

    ``loads`` are those of an engine in order. Waits for a core are left out. Neighbouring numbers of samples are one
    entry until it has `FEWEST` decode steps. A least-squares fit to the times between loads finds the seconds of a
    column; the entries are what is left of the times.
    """
    last = {size: steps for size, steps, _, _ in loads[-1]["decode_times"]}
    entry_of: dict[int, int] = {}
    steps = entry = 0
    for size, count in last.items():
        entry_of[size] = entry
        steps += count
        if steps >= FEWEST:
            steps, entry = 0, entry + 1
    totals = np.array([_totals(load, entry_of, entries=entry + 1) for load in loads])
    totals = totals[:, totals[-1, :, 0] > 0]  # [loads, entries, (steps, samples, columns, seconds)]
    between = np.diff(totals, axis=0, prepend=0.0)
    known = np.concatenate((between[:, :, 0], between[:, :, 2].sum(1, keepdims=True)), 1)
    fitted = np.linalg.lstsq(known, between[:, :, 3].sum(1), rcond=None)[0]
    column_s = max(0.0, float(fitted[-1]))
    count, samples, columns, seconds = totals[-1].T
    table = zip(samples / count, np.maximum(seconds - column_s * columns, 0.1 * seconds) / count, strict=True)
    return [(float(size), float(of)) for size, of in table], column_s


def _totals(load: Mapping[str, Any], entry_of: Mapping[int, int], *, entries: int) -> np.ndarray:
    """Returns steps, samples, columns and seconds since the engine's start by entry, ``[entries, 4]``."""
    found = np.zeros((entries, 4))
    columns = dict(load["decode_columns"])
    for size, steps, seconds, wait in load["decode_times"]:
        middle = size if size < EXACT_SIZES else size + (COARSE - 1) / 2
        found[entry_of[size]] += (steps, steps * middle, columns[size], seconds - wait)
    return found


def train_line(actor: Sequence[Mapping[str, float]], ranks: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Returns the seconds of a train step and of each of its tokens, without waits for a core, by a line.

    If the line does not begin above 0, it goes through 0.
    """
    tokens = np.array([one["tokens"] for one in actor])
    seconds = np.array(
        [(one["train_ms"] - rank["actor-0/core_wait_ms"]) / 1e3 for one, rank in zip(actor, ranks, strict=True)]
    )
    by_token, fixed = np.polyfit(tokens, seconds, 1) if len(tokens) > 2 else (0.0, -1.0)
    if fixed < 0.0 or by_token < 0.0:
        return 0.0, float(seconds.sum() / tokens.sum())
    return float(fixed), float(by_token)
