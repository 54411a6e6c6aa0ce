"""Starts Ray for one run on this machine, with a separate token and folder, or joins a Ray cluster. Also ends Ray."""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from relax_core.config.schema import LauncherConfig, PlacementConfig
from relax_core.contracts.child_process import OPENMP_WAITS, Child, module_command
from relax_core.contracts.monitor import Check, Elapsed, Finding, Monitor
from relax_core.contracts.private_folder import set_compile_cache
from relax_core.contracts.process_trees import EXITED, kill_trees, process_state
from relax_core.control.host.run_paths import RunPaths
from relax_core.control.host.worker_start import FORK_SERVER
from relax_core.roles.process_placement import cluster_fault

# Without this variable Ray replaces 127.0.0.1 by the host's address.
LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
QUIET = {
    "RAY_AUTH_MODE": "token",
    LOOPBACK_SWITCH: "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",  # no list of finished calls, because it would fill the GCS's memory
    "RAY_prestart_worker_first_driver": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",  # hidden, because Relax's monitor also reports it
    "RAY_worker_niceness": "0",  # workers get the priority of the process that started the run; Ray's default is lower
    # After this time the raylet starts another process for a worker that was lost before its registration. Ray's
    # default is 60 s, for imports from a slow disk. This process has just imported the same files, so the time can be
    # shorter.
    "RAY_worker_register_timeout_seconds": "30",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # hides all GPUs from a worker that requests no GPU
}
RAY_CPUS = 16  # for Ray's bookkeeping only: it does not bind services to cores
NODES_S = 0.2  # interval in seconds between two counts of an external cluster's nodes
DAEMONS = {"gcs_server": "GCS", "raylet": "raylet"}  # program of each daemon that a run needs → its name in messages
DAEMONS_S = 0.25
FORK_SERVER_S = 1.0
OWN_NODE_RAY = "2.60.0"  # the version of Ray that own_ray_node.py supports
OWN_NODE_FILE = Path(__file__).with_name("own_ray_node.py")
KEPT_LOGS = ("worker-*", "raylet.*", "gcs_server.*")
ONE_THREAD = {  # default for libraries; every process sets its number of threads later
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    **OPENMP_WAITS,
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


class RayUnstarted(RuntimeError):
    """Raised if the run's Ray did not start. Another attempt may succeed."""


def new_token_file(path: Path) -> Path:
    """Writes a new random token to a file that only this user can read. Returns the path."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path


class ForkServer:
    """Owns the run's fork server. If a signal ends the fork server, restarts it, at most ``max_restarts`` times.

    Without a fork server Ray starts each worker in the usual way, which takes some seconds longer.
    """

    def __init__(self, path: Path, modules: Sequence[str], *, max_restarts: int) -> None:
        self._path, self._modules = path, modules
        self._restarts_left = max_restarts
        self._child = self._start()

    def check(self) -> Check:
        """Returns the check that restarts a fork server after a signal, but not after an error, which would recur."""
        return Check(name="fork server", every_s=FORK_SERVER_S, look=self._look, act=self._start_again)

    def end(self) -> None:
        """Kills the fork server and its remaining workers."""
        self._child.end(grace_s=0.0)

    def _start(self) -> Child:
        self._path.unlink(missing_ok=True)
        command = module_command("relax_core.control.host.fork_server", str(self._path), *self._modules)
        return Child(command, name="the fork server", stdout=None)

    def _look(self) -> Finding | None:
        code = self._child.poll() if self._restarts_left else None
        return (
            None if code is None or code >= 0 else Finding(failed_part="the fork server", how=f"died (signal {-code})")
        )

    def _start_again(self, died: Finding) -> None:
        self._restarts_left -= 1
        print(f"relax: {died} and is started again", file=sys.stderr, flush=True)
        self._child.close_pipes()
        self._child = self._start()


class RaySession:
    """Starts or joins Ray as a context manager.

    A process can use this class only once, because Ray reads the path of its token at import. Entering raises
    RayUnstarted if the run's Ray does not start, and RuntimeError if a cluster cannot be joined. ``placement`` has the
    number of GPUs per node; None means no GPU. ``token_file`` contains the run's bearer token. ``preloaded`` lists
    modules that the fork server imports once for all workers (`ForkServer`), if `can_use_own_node`. It must be empty
    for a run on GPUs, because a process that used a GPU cannot be forked. ``lost`` is called in another thread, with
    the cause, if the GCS or the raylet of the run's Ray dies or is stopped for ``frozen_after_s`` seconds, also during
    the start. ``started`` says whether Ray has started; ``daemons`` then maps the names of Ray's daemons to process
    ids.
    """

    def __init__(
        self,
        launcher: LauncherConfig,
        paths: RunPaths,
        *,
        log_dir: Path,
        placement: PlacementConfig | None = None,
        start_timeout_s: float = 300.0,
        preloaded: Sequence[str] = (),
        max_restarts: int = 0,
        frozen_after_s: float = math.inf,
        lost: Callable[[str], None] = lambda cause: None,
    ) -> None:
        self._launcher = launcher
        self._placement = placement
        self._start_timeout_s = start_timeout_s
        self._preloaded = preloaded
        self._max_restarts = max_restarts
        self._frozen_after_s, self._lost = frozen_after_s, lost
        self._paths = paths
        self.token_file = paths.token_folder / "token"
        self._log_dir = log_dir
        self._undo = ExitStack()
        self.started = False
        self.daemons: Mapping[str, int] = {}
        self._own_node = False
        self._fork_server: ForkServer | None = None
        self._before: set[psutil.Process] = set()  # children that existed before Ray

    def checks(self) -> list[Check]:
        """Returns the check of the fork server; empty without a fork server."""
        return [] if self._fork_server is None else [self._fork_server.check()]

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            new_token_file(self.token_file)
            self._init_ray(undo)
            self._undo = undo.pop_all()
        self.started = True
        return self

    def _init_ray(self, undo: ExitStack) -> None:
        own = self._launcher.ray_address is None
        os.environ.update(ONE_THREAD)
        set_compile_cache(os.environ)
        if own:
            assert "ray" not in sys.modules or os.environ.get("RAY_AUTH_MODE") == "token", "Ray reads it when imported"
            os.environ.update(QUIET, RAY_AUTH_TOKEN_PATH=str(new_token_file(self._paths.folder / "ray-token")))
            os.environ["TMPDIR"] = str(self._paths.folder)  # temporary files are then removed with the run's folder
            os.environ["RAY_TMPDIR"] = str(self._paths.folder)  # Ray creates the folder "ray" in it
            self._own_node = can_use_own_node()
            if self._preloaded and self._own_node:
                path = self._paths.folder / "fork-server"
                os.environ[FORK_SERVER] = str(path)
                self._fork_server = ForkServer(path, self._preloaded, max_restarts=self._max_restarts)
                undo.callback(self._fork_server.end)
        import ray

        if self._own_node:
            from relax_core.control.host.own_ray_node import use_own_node

            use_own_node()
        where = {
            "address": "local",  # RAY_ADDRESS has no effect
            "num_cpus": RAY_CPUS,
            "num_gpus": 0 if self._placement is None else self._placement.gpus_per_node,
            "object_store_memory": self._launcher.object_store_mb << 20,
            "include_dashboard": False,
        }
        self._before = set(psutil.Process().children())
        undo.callback(self._end_ray)
        if own:
            daemons = OwnDaemons(self._before)
            monitor = Monitor([daemons_check(daemons, self._frozen_after_s, lost=self._lost)]).start()
            undo.callback(monitor.end)  # before Ray ends
        try:
            ray.init(
                **(where if own else {"address": self._launcher.ray_address}),
                namespace=self._paths.namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:  # Ray raises the class Exception itself after a timeout
            raise self._unstarted(error) if own else self._not_joined(error) from error
        if own:
            self.daemons = daemons()
        else:
            self._await_nodes()

    def _unstarted(self, error: Exception) -> RayUnstarted:
        self.keep_logs()
        return RayUnstarted(
            f"Ray did not start on this machine ({os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}): "
            f"{_first_line(error)} End other work here, or join a running Ray with launcher.ray_address=auto. "
            f"Ray's logs are in {self._log_dir}."
        )

    def _not_joined(self, error: Exception) -> RuntimeError:
        return RuntimeError(
            f"launcher.ray_address={self._launcher.ray_address}: could not join a Ray cluster: {_first_line(error)} "
            "Start one with `ray start --head`, name its host:port, or leave the key null, and the run starts Ray."
        )

    def _await_nodes(self) -> None:
        import ray

        deadline = time.monotonic() + self._start_timeout_s
        while (joined := sum(node["Alive"] for node in ray.nodes())) < self._launcher.nodes:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{joined} of launcher.nodes={self._launcher.nodes} Ray nodes are up after run.start_timeout_s="
                    f"{self._start_timeout_s:.0f} s"
                )
            time.sleep(NODES_S)
        if self._placement is not None and (fault := cluster_fault(self._placement, ray.nodes())) is not None:
            raise RuntimeError(fault)

    def _end_ray(self) -> None:
        """Disconnects from Ray, and kills the processes of the run's Ray.

        Ray's shutdown is not used for this: it sends SIGTERM to one process after the other, and waits a second for
        each, because the processes ignore SIGTERM.
        """
        import ray

        if self._own_node:
            from relax_core.control.host.own_ray_node import leave_processes

            leave_processes()
        ray.shutdown()
        kill_trees(child.pid for child in set(psutil.Process().children()) - self._before if child.is_running())

    def keep_logs(self) -> None:
        """Copies the logs of workers and daemons to the run's folder, for a run that failed or lost its Ray."""
        logs = self._paths.folder / "ray" / "session_latest" / "logs"
        try:
            for file in (file for pattern in KEPT_LOGS for file in logs.glob(pattern)):
                if file.stat().st_size:
                    self._log_dir.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file, self._log_dir / file.name)
        except OSError as error:  # a full disk must not hide the cause of the run's failure
            print(f"relax: not all logs were copied: {error}", file=sys.stderr)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.keep_logs()
        self._undo.close()


class OwnDaemons:
    """Finds Ray's daemons among the children of this process, except the processes in ``before``.

    Daemons that have ended stay in the result.
    """

    def __init__(self, before: set[psutil.Process]) -> None:
        self._before = before
        self._found: dict[str, int] = {}

    def __call__(self) -> Mapping[str, int]:
        """Returns the daemons found so far: name → process id."""
        if len(self._found) < len(DAEMONS):
            for child in set(psutil.Process().children()) - self._before:
                with suppress(psutil.NoSuchProcess):
                    if (name := child.name()) in DAEMONS:
                        self._found.setdefault(DAEMONS[name], child.pid)
        return self._found


def daemons_check(
    daemons: Callable[[], Mapping[str, int]], frozen_after_s: float, *, lost: Callable[[str], None]
) -> Check:
    """Returns the check of the daemons of a run's Ray. ``daemons`` maps the names of known daemons to process ids.

    Without GCS or raylet, no process of the run can start or recover, and the main thread may wait for Ray forever. So
    if a daemon has exited or was stopped for ``frozen_after_s`` seconds, ``lost`` is called with the cause, in another
    thread.
    """
    elapsed, stopped_s = Elapsed(), dict.fromkeys(DAEMONS.values(), 0.0)

    def look() -> Finding | None:
        passed = elapsed.since_last()
        for name, pid in daemons().items():
            state = process_state(pid)
            stopped_s[name] = stopped_s[name] + passed if state == psutil.STATUS_STOPPED else 0.0
            if state in EXITED:
                return Finding(failed_part=f"Ray's {name}", how="died")
            if stopped_s[name] > frozen_after_s:
                return Finding(failed_part=f"Ray's {name}", how=f"froze (it was stopped for {stopped_s[name]:.0f} s)")
        return None

    return Check(name="Ray", every_s=DAEMONS_S, look=look, act=lambda finding: lost(str(finding)), in_thread=True)


def can_use_own_node() -> bool:
    """Returns whether `own_ray_node` can be used: its file exists, and Ray has the version `OWN_NODE_RAY`.

    Otherwise `ray.init` starts all processes of Ray, and each worker imports all its modules. The only difference is
    that this takes some seconds longer.
    """
    if not OWN_NODE_FILE.exists():
        return False
    if (found := version("ray")) == OWN_NODE_RAY:
        return True
    print(f"relax: Ray {found} starts all of its processes; Ray {OWN_NODE_RAY} would start fewer", file=sys.stderr)
    return False


def _first_line(error: Exception) -> str:
    """Returns the first line of an error's text, with a full stop."""
    line = str(error).strip().split("\n", 1)[0] or type(error).__name__
    return line if line.endswith(".") else f"{line}."
