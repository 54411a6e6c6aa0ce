"""Runs for `benchmarks.chaos`: their settings, the kinds of their processes, and their progress."""

from __future__ import annotations

import random
import sqlite3
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from relax_core.bus.ledger_reader import LedgerFile
from tests.integration.live_run import MARK, LiveRun

HEARTBEAT_S = 5
APPEAR_S = 60.0
HUNG_S = 300.0
IN_THE_PIPE = 2  # steps whose rows may exist at the moment of the harm: max_staleness + 1
BREATH_S = (0.1, 1.5)  # bounds of a random wait before the next harm
LAST_STEPS = 5  # after the last harm, so that every open sample is trained or dropped
WITHOUT_END = "run.steps=1000000"
STEPS_BETWEEN = 5  # train steps after a recovery before the next harm may come
POLL_S = 0.02
CONTROLLER, FROZEN, PAIR = "controller", "frozen", "engine_and_owner"
ENCODE_WORKER, ENV_WORKER, AGENT, AGENT_GUARD = "encode_worker", "env_worker", "agent", "agent_guard"
FORK_SERVER, FORKED_WORKER = "fork_server", "forked_worker"  # the latter: a fork without Ray's title
OF_SOME_RUNS = (ENCODE_WORKER, ENV_WORKER, AGENT, AGENT_GUARD)
CALCULATOR = Path(__file__).parents[1] / "examples" / "agents" / "calculator.py"
TITLES = {  # kind → part of its process's command line
    "engine": "relax_core.engines.embedded",
    "engine_owner": "ray::EngineOwner",
    "rollout": "ray::RolloutWorker",
    "actor_rank_0": "ray::PolicyTrainer",
    "actor_rank_1": "ray::ActorRank",
    "actor_fwd": "ray::ActorFwdWorker",
    "reference": "ray::ReferenceWorker",
    "advantages": "ray::AdvantagesWorker",
    "bus": "ray::BusActor",
    "trackers": "relax_core.observe.trackers.tracker_process",
    "gateway": "relax_core.server.gateway_server",
    FORK_SERVER: "relax_core.control.host.fork_server",
    "gcs": "src/ray/gcs/gcs_server ",
    "raylet": "src/ray/raylet/raylet ",
    CONTROLLER: "-m relax_core ",
    ENCODE_WORKER: "relax_core.data.media.encode_worker_main",
    ENV_WORKER: "relax_core.rollout.env_workers.env_worker_main",
    AGENT: f"{sys.executable} {CALCULATOR}",  # also in the command line of its guard, which is older
    AGENT_GUARD: "agent_guard.py",
}
ENDS = ("survived", "hung", "ended", "unnoticed")
RAY = ("gcs", "raylet")  # if one dies, the controller ends too, and the next controller starts a new Ray


@dataclass(frozen=True, kw_only=True)
class HarmedRun:
    """Defines a kind of run. ``overrides`` are its settings; ``own`` are its processes that a run on text lacks."""

    overrides: tuple[str, ...]
    own: tuple[str, ...] = ()

    @property
    def processes(self) -> tuple[str, ...]:
        """Returns the kinds of its processes."""
        return tuple(one for one in TITLES if one not in OF_SOME_RUNS or one in self.own)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Returns the kinds of harm that are possible for it."""
        return (*self.processes, FROZEN, PAIR)


_TEXT = (
    "mode.max_staleness=1",
    "algo.old_logprobs=actor_fwd",
    "algo.kl_coef=0.001",
    "parallel.dp=2",
    "run.save_every=10",
    "run.max_restarts=100",
    "run.max_recoveries=100",
    f"run.heartbeat_timeout_s={HEARTBEAT_S}",
    "run.export_hf=false",
    "run.serve=true",
    "eval.every=0",
)
_SMALL = (*_TEXT, "algo.group_size=4", "rollout.prompts_per_step=8")
_MEDIA = _SMALL
TEXT = "text"
MEDIA_RUNS = {
    "see": HarmedRun(overrides=(*_MEDIA, "model=tiny_qwen3_vl", "data=see"), own=(ENCODE_WORKER,)),
    "states": HarmedRun(overrides=(*_MEDIA, "model=tiny_qwen3_5", "data=see"), own=(ENCODE_WORKER,)),
    "four_modalities": HarmedRun(
        overrides=(*_MEDIA, "model=tiny_qwen3_omni", "data=four_modalities", "algo.routing_replay=true"),
        own=(ENCODE_WORKER,),
    ),
}
ENV_RUNS = {
    "number_guess": HarmedRun(
        overrides=(
            "experiment=number_guess",
            *_SMALL,
            f"env.name={Path(__file__).with_name('isolated_number_guess.py')}",
            *("env.workers=2", "env.episodes_per_worker=16", "env.max_retries=3"),
            f"env.step_timeout_s={HEARTBEAT_S}",  # the deadline that finds a stopped worker
        ),
        own=(ENV_WORKER,),
    ),
    "agents": HarmedRun(
        overrides=(
            *("experiment=calculator", "env=agent", "env.max_retries=3"),
            *_SMALL,
            *(f"agent.command=python {CALCULATOR}", "agent.workers=4", "agent.timeout_s=30"),
            f"agent.env.{MARK}=${{oc.env:{MARK},none}}",  # marks the run's processes for `LiveRun`
        ),
        own=(AGENT, AGENT_GUARD),
    ),
}
RUNS = {TEXT: HarmedRun(overrides=_TEXT), **MEDIA_RUNS, **ENV_RUNS}


class Training:
    """Reads a run's progress from outside: the train steps in the ledger's file and when they were recorded."""

    def __init__(self, folder: Path) -> None:
        self._uri = f"{(folder / 'ledger.sqlite').absolute().as_uri()}?mode=ro"

    def newest(self) -> int:
        """Returns the newest valid step; -1 before the first."""
        row = self._one("SELECT step FROM events WHERE event = 'trained' ORDER BY id DESC LIMIT 1")
        return -1 if row is None else int(row)

    def last_event(self) -> int:
        """Returns the newest event's id; 0 before the first. Later events have higher ids, also after a restore."""
        row = self._one("SELECT MAX(id) FROM events")
        return int(row or 0)

    def newest_at(self, when: float) -> int:
        """Returns the newest step at Unix time ``when``; -1 before the first."""
        row = self._one("SELECT step FROM events WHERE event = 'trained' AND time <= ? ORDER BY id DESC LIMIT 1", when)
        return -1 if row is None else int(row)

    def time_of(self, number: int, *, behind: int, event: int, since: float) -> float | None:
        """Returns the Unix time of the ``number``-th step after step ``behind``, counted from 0, or None if it is not
        done. Only events after event number ``event`` and Unix time ``since`` count.
        """
        return self._one(
            "SELECT MIN(time) FROM events WHERE id > ? AND event = 'trained' AND step > ? AND time > ? "
            "GROUP BY step ORDER BY step LIMIT 1 OFFSET ?",
            event, behind, since, number,
        )  # fmt: skip

    def _one(self, query: str, *values: float) -> float | None:
        try:
            database = sqlite3.connect(self._uri, uri=True, timeout=10.0)
        except sqlite3.OperationalError:  # not created yet
            return None
        try:
            row = database.execute(query, values).fetchone()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return None
            raise
        finally:
            database.close()
        return None if row is None else row[0]


def members(live: LiveRun, kind: str) -> set[int]:
    """Returns the living processes of a kind."""
    title = TITLES[FORK_SERVER if kind == FORKED_WORKER else kind]
    found = {pid for pid, line in live.processes().items() if title in f"{line} "}
    if kind == CONTROLLER:
        return {pid for pid in found if parent_of(pid) == live.pid}
    if kind in RAY:  # without children that it has just forked, which have its title for a moment
        return {pid for pid in found if parent_of(parent_of(pid)) == live.pid}
    if kind in (FORK_SERVER, FORKED_WORKER):
        return {pid for pid in found if (parent_of(pid) in found) == (kind == FORKED_WORKER)}
    return found


def newborn(live: LiveRun, kind: str, *, known: set[int]) -> int | None:
    """Waits for a process of the kind that is not in ``known``; returns its pid, or None if none comes."""
    deadline = time.monotonic() + APPEAR_S
    while live.running() and time.monotonic() < deadline:
        if new := members(live, kind) - known:
            return max(new, key=_born)
        time.sleep(POLL_S)
    return None


def find_process(live: LiveRun, kind: str) -> int:
    """Returns the pid of a kind's newest living process; waits for a process that is being restarted."""
    pid = newborn(live, kind, known=set())
    if pid is None:
        raise TimeoutError(f"no process of kind {kind} within {APPEAR_S:.0f} s: {sorted(live.processes().values())}")
    return pid


def parent_of(pid: int) -> int:
    """Returns the pid of a process's parent, 0 if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return int(psutil.Process(pid).ppid())
    return 0


def _born(pid: int) -> float:
    with suppress(psutil.NoSuchProcess):
        return float(psutil.Process(pid).create_time())
    return 0.0


def let_train(live: LiveRun, training: Training, chance: random.Random) -> str:
    """Returns the run's state at a random moment after some more steps: the last harm may show its effect only now."""
    goal, deadline = training.newest() + STEPS_BETWEEN, time.monotonic() + HUNG_S
    while training.newest() < goal:
        if not live.running():
            return "ended"
        if time.monotonic() > deadline:
            return "hung"
        time.sleep(POLL_S)
    time.sleep(chance.uniform(*BREATH_S))
    return "survived"


def new_step(
    live: LiveRun, training: Training, *, since: float, event: int, number: int = 0
) -> tuple[str, float | None]:
    """Waits for the ``number``-th new step after Unix time ``since``, counted from 0.

    Only events after event number ``event`` count. Returns the run's state and the seconds.
    """
    behind = training.newest_at(since)
    while True:
        if (done := training.time_of(number, behind=behind, event=event, since=since)) is not None:
            return "survived", done - since
        if not live.running() or time.time() - since > HUNG_S:
            return "hung" if live.running() else "ended", None
        time.sleep(POLL_S)


def read_books(folder: Path, *, run_over: bool) -> tuple[int, int]:
    """Returns the numbers of lost and of twice trained samples from a run's ledger."""
    if not (folder / "ledger.sqlite").exists():  # the run ended before it created the file
        return 0, 0
    with LedgerFile(folder / "ledger.sqlite") as file:
        books = file.counts(run_over=run_over)
    return len(books.lost), len(books.trained_twice)
