"""Makes one whole run for `benchmarks.long_tail` and watches it from outside.

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.countdown_env import LONGEST_WAIT
from benchmarks.countdown_task import PROMPT_TOKENS, model_folder
from relax_core.contracts.engine import EngineError
from relax_core.engines.protocol.engine_client import EngineClient

ENGINE, TRAINER = "relax_core.engines.embedded", "ray::PolicyTrai"  # in a command line; a process's name
REWARD, ENV = (Path(__file__).with_name(f"countdown_{kind}.py") for kind in ("reward", "env"))
SPARE_S = 30.0  # of a call of the env, beside its wait
LOOK_S = 0.5
ENGINE_S = 10.0  # an answer of the engine
QUIET_RUN = ("eval.every=0", "run.save_every=0", "run.export_hf=false", "run.panel=false")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what all runs of a comparison have in common."""

    steps: int
    prompts: int
    group_size: int
    cap: int  # tokens of a turn
    lr: float
    running: int  # samples decoded at one time at most
    skipped: int  # train steps at the start that no figure counts
    micro_batch_tokens: int  # a step of several micro-batches begins before all of its groups are there
    turns: int = 1
    tool_wait_s: float = 0.0  # mean time of the tool between two turns

    @property
    def step_timeout_s(self) -> float:
        """Is the time that a call of the env may take, which the longest wait for a tool never reaches."""
        return SPARE_S + LONGEST_WAIT * self.tool_wait_s

    def words(self, rows: Path, *, seed: int) -> list[str]:
        """Returns the words of a run on the rows of a file, in their order."""
        limit, room = "rollout.max_new_tokens", self.running * self.turns * (self.cap + PROMPT_TOKENS)
        env: list[str] = []
        if self.turns > 1:
            limit = "env.max_turn_tokens"
            env = [
                *("env=plugin", f"env.name={ENV}", f"env.max_turns={self.turns}", f"{limit}={self.cap}"),
                *(f"env.tool_wait_s={self.tool_wait_s}", f"env.step_timeout_s={self.step_timeout_s}"),
                f"engine.prefix_cache_tokens={room}",
            ]
        return [
            *("model=qwen3", f"model.path={model_folder()}", "model.dtype=float32"),
            *("data=file", f"data.path={rows}", "data.shuffle=false", "data.eval_size=0", "data.max_bad_rows=0"),
            *("reward=plugin", f"reward.name={REWARD}", f"reward.cap=${{{limit}}}"),
            *env,
            f"rollout.prompts_per_step={self.prompts}",
            f"rollout.max_new_tokens={self.turns * self.cap}",
            f"algo.group_size={self.group_size}",
            "algo.skip_without_advantage=false",  # the limit's train step takes a time by all of its tokens
            f"engine.max_running_samples={self.running}",
            f"engine.max_total_tokens={room}",
            f"parallel.micro_batch_tokens={self.micro_batch_tokens}",
            f"optimizer.lr={self.lr}",
            "optimizer.schedule=constant",
            f"run.steps={self.steps}",
            f"seed={seed}",
            *QUIET_RUN,
        ]


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
