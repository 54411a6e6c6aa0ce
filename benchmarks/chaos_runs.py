"""Defines the runs of `benchmarks.chaos`: settings and process kinds. Also reads a run's progress and ledger."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.integration.live_run import MARK, NOBODY, LiveRun

HEARTBEAT_S = 5
APPEAR_S = 60.0
HUNG_S = 300.0
BREATH_S = (0.1, 1.5)  # bounds of a random wait before the next injury
LAST_STEPS = 5  # train steps after the last injury, enough to train or drop every open sample
WITHOUT_END = "run.steps=1000000"
STEPS_BETWEEN = 5  # minimum train steps between a recovery and the next injury
POLL_S = 0.02
CONTROLLER = "controller"
ENCODE_WORKER, ENV_WORKER, REWARD_WORKER = "encode_worker", "env_worker", "reward_worker"
AGENT, AGENT_GUARD = "agent", "agent_guard"
FORK_SERVER, FORKED_WORKER = "fork_server", "forked_worker"  # a fork has no process title of Ray
OF_SOME_RUNS = (ENCODE_WORKER, ENV_WORKER, REWARD_WORKER, AGENT, AGENT_GUARD)
CALCULATOR = Path(__file__).parents[1] / "examples" / "agents" / "calculator.py"
FALSE_CLOCK = Path(__file__).with_name("false_clock.c")
OFFSET = "clock_offset"  # file of a run with a false clock, with text such as +3600
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
    REWARD_WORKER: "relax_core.rollout.rewards.reward_worker_main",
    AGENT: f"{sys.executable} {CALCULATOR}",  # the older guard process also has it
    AGENT_GUARD: "agent_guard.py",
}
RAY = ("gcs", "raylet")  # if one of them dies, the controller ends, too; the next controller starts a new Ray


@dataclass(frozen=True, kw_only=True)
class HarmedRun:
    """Defines a kind of run.

    ``overrides`` are its settings; ``own`` are its processes that a run on text lacks. ``user`` is the id of another
    user, which needs root. With ``false_clock`` the run reads its wall clock through false_clock.c, which needs a C
    compiler.
    """

    overrides: tuple[str, ...]
    own: tuple[str, ...] = ()
    user: int | None = None
    false_clock: bool = False

    @property
    def processes(self) -> tuple[str, ...]:
        """Returns the kinds of the run's processes."""
        return tuple(kind for kind in TITLES if kind not in OF_SOME_RUNS or kind in self.own)

    def start(self, folder: Path, *overrides: str) -> LiveRun:
        """Starts the command with further overrides in ``folder``. The parent of ``folder`` must exist."""
        environment: Mapping[str, str] = {}
        if self.user is not None:
            home = folder.with_name("home")  # all commands of the run share the caches in this folder
            home.mkdir(exist_ok=True)
            for path in (folder.parent, home):
                os.chown(path, self.user, self.user)
            environment = {"HOME": str(home)}
        if self.false_clock:
            offset = folder.with_name(OFFSET)
            if not offset.exists():
                offset.write_text("+0")
            library = folder.with_name("false_clock.so")
            if not library.exists():
                subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, FALSE_CLOCK, "-ldl"], check=True)
            environment = {"LD_PRELOAD": str(library), "RELAX_CLOCK_OFFSET": str(offset)}
        return LiveRun(folder, *self.overrides, *overrides, environment=environment, user=self.user)


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
TEXT = "text"
RUNS = {
    TEXT: HarmedRun(overrides=_TEXT),
    "see": HarmedRun(overrides=(*_SMALL, "model=tiny_qwen3_vl", "data=see"), own=(ENCODE_WORKER,)),
    "states": HarmedRun(overrides=(*_SMALL, "model=tiny_qwen3_5", "data=see"), own=(ENCODE_WORKER,)),
    "four_modalities": HarmedRun(
        overrides=(*_SMALL, "model=tiny_qwen3_omni", "data=four_modalities", "algo.routing_replay=true"),
        own=(ENCODE_WORKER,),
    ),
    "number_guess": HarmedRun(
        overrides=(
            "experiment=number_guess",
            *_SMALL,
            f"env.name={Path(__file__).with_name('isolated_number_guess.py')}",
            *("env.workers=2", "env.episodes_per_worker=16", "env.max_retries=3"),
            f"env.step_timeout_s={HEARTBEAT_S}",  # after this deadline Relax notices a stopped worker
        ),
        own=(ENV_WORKER,),
    ),
    "agents": HarmedRun(
        overrides=(
            *("experiment=calculator", "env=agent", "env.max_retries=3"),
            *_SMALL,
            *(f"agent.command=python {CALCULATOR}", "agent.workers=4", "agent.timeout_s=30"),
            f"agent.env.{MARK}=${{oc.env:{MARK},none}}",  # `LiveRun` finds the run's processes by this mark
        ),
        own=(AGENT, AGENT_GUARD),
    ),
    "reward_workers": HarmedRun(
        overrides=(
            *_SMALL,
            f"reward.name={Path(__file__).with_name('isolated_exact_match.py')}",
            *("rollout.reward_workers=2", f"reward.timeout_s={HEARTBEAT_S}"),
        ),
        own=(REWARD_WORKER,),
    ),
    "non_root": HarmedRun(overrides=_TEXT, user=NOBODY),
    "false_clock": HarmedRun(overrides=_TEXT, false_clock=True),
}


class Training:
    """Reads a run's progress from the ledger's file: the train steps and the times of their records."""

    def __init__(self, folder: Path) -> None:
        self._uri = f"{(folder / 'ledger.sqlite').absolute().as_uri()}?mode=ro"

    def newest(self) -> int:
        """Returns the newest valid step, or -1 before the first step."""
        row = self._value("SELECT step FROM events WHERE event = 'trained' ORDER BY id DESC LIMIT 1")
        return -1 if row is None else int(row)

    def last_event(self) -> int:
        """Returns the id of the newest event, or 0 before the first event. Ids increase, also after a restore."""
        row = self._value("SELECT MAX(id) FROM events")
        return int(row or 0)

    def new_steps(self, *, behind: int, event: int) -> int:
        """Returns the number of steps above step ``behind`` that the run trained after event ``event``."""
        row = self._value(
            "SELECT COUNT(DISTINCT step) FROM events WHERE id > ? AND event = 'trained' AND step > ?", event, behind
        )
        return int(row or 0)

    def first_step_time(self, *, since: float) -> float | None:
        """Returns the Unix time of the first train step after Unix time ``since``, or None if there is none yet."""
        return self._value("SELECT MIN(time) FROM events WHERE event = 'trained' AND time > ?", since)

    def _value(self, query: str, *values: float) -> float | None:
        try:
            database = sqlite3.connect(self._uri, uri=True, timeout=10.0)
        except sqlite3.OperationalError:  # not created yet
            return None
        try:
            row = database.execute(query, values).fetchone()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error) or "locked" in str(error):  # an injury locks the ledger
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
    if kind in RAY:  # exclude just forked children, which have its title for a moment
        return {pid for pid in found if parent_of(parent_of(pid)) == live.pid}
    if kind in (FORK_SERVER, FORKED_WORKER):
        return {pid for pid in found if (parent_of(pid) in found) == (kind == FORKED_WORKER)}
    return found


def newborn(live: LiveRun, kind: str, *, known: set[int]) -> int | None:
    """Waits for a process of the kind that is not in ``known``. Returns its pid, or None after the timeout."""
    deadline = time.monotonic() + APPEAR_S
    while live.running() and time.monotonic() < deadline:
        if new := members(live, kind) - known:
            return max(new, key=_born)
        time.sleep(POLL_S)
    return None


def find_process(live: LiveRun, kind: str) -> int:
    """Returns the pid of a kind's newest living process. Waits while the process is being restarted."""
    pid = newborn(live, kind, known=set())
    if pid is None:
        raise TimeoutError(f"no process of kind {kind} within {APPEAR_S:.0f} s: {sorted(live.processes().values())}")
    return pid


def parent_of(pid: int) -> int:
    """Returns the pid of a process's parent, or 0 if the process has ended."""
    with suppress(psutil.NoSuchProcess):
        return int(psutil.Process(pid).ppid())
    return 0


def _born(pid: int) -> float:
    with suppress(psutil.NoSuchProcess):
        return float(psutil.Process(pid).create_time())
    return 0.0


def let_train(live: LiveRun, training: Training, chance: random.Random) -> str:
    """Waits for some train steps and then for a random time, because an injury may show its effect late.

    Returns "survived", or "ended" or "hung" if the run does not train.
    """
    goal, deadline = training.newest() + STEPS_BETWEEN, time.monotonic() + HUNG_S
    while training.newest() < goal:
        if not live.running():
            return "ended"
        if time.monotonic() > deadline:
            return "hung"
        time.sleep(POLL_S)
    time.sleep(chance.uniform(*BREATH_S))
    return "survived"


@dataclass(frozen=True, kw_only=True)
class LedgerCounts:
    """Holds the sample counts of a run's ledger at its end. The SQL is independent of Relax."""

    issued: int
    lost: int
    trained_twice: int
    without_reason: int
    wrong: tuple[str, ...] = field(default=())  # uids of the first wrong samples

    @property
    def closed(self) -> bool:
        """Returns whether every sample was trained once or dropped with a reason."""
        return self.issued > 0 and not (self.lost or self.trained_twice or self.without_reason)


def count_samples(folder: Path) -> LedgerCounts:
    """Reads the ledger of a run that has trained all steps."""
    over = "SELECT uid FROM events WHERE event IN ('trained', 'dropped')"
    lost = f"SELECT DISTINCT uid FROM events WHERE event = 'issued' AND uid NOT IN ({over})"
    twice = "SELECT uid FROM events WHERE event = 'trained' GROUP BY uid HAVING COUNT(*) > 1"
    without_reason = "SELECT uid FROM events WHERE event = 'dropped' AND (reason IS NULL OR reason = '')"
    issued = "SELECT DISTINCT uid FROM events WHERE event = 'issued'"
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as database:
        uids = {query: [str(uid) for (uid,) in database.execute(query)] for query in (lost, twice, without_reason)}
        return LedgerCounts(
            issued=int(database.execute(f"SELECT COUNT(*) FROM ({issued})").fetchone()[0]),
            lost=len(uids[lost]),
            trained_twice=len(uids[twice]),
            without_reason=len(uids[without_reason]),
            wrong=tuple(uid for found in uids.values() for uid in found[:3]),
        )
