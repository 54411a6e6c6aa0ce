"""Ray for one run: started on this machine with its own token and folder, or joined; ended without a trace."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from relax_core.config.schema import LauncherConfig, PlacementConfig
from relax_core.control.host.process_trees import kill_trees
from relax_core.control.host.run_paths import RunPaths
from relax_core.roles.process.process_placement import cluster_fault

# Loopback only: the one switch that lets Ray keep 127.0.0.1, which it else swaps for the host's own address.
LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
QUIET = {
    "RAY_AUTH_MODE": "token",
    LOOPBACK_SWITCH: "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",  # the health manager says it in fewer words
    "RAY_worker_niceness": "0",  # as urgent as what started the run: by default whatever else runs here goes first
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a worker that asks for no GPU sees none
}
NODES_S = 0.2  # how often a joined cluster's nodes are counted
DAEMONS = {"gcs_server": "GCS", "raylet": "raylet"}  # Ray's names of the processes that a run cannot do without → ours
KEPT_LOGS = ("worker-*", "raylet.*", "gcs_server.*")
ONE_THREAD = {  # every process says its own number later; this is what a library takes that nobody told
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


class RayUnstarted(RuntimeError):
    """The run's own Ray did not come up; another try may."""


def new_token_file(path: Path) -> Path:
    """Writes a fresh token that only this user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path


class RaySession:
    """Use as a context manager, once a process: Ray reads its token's place when it is imported. Raises RayUnstarted,
    or RuntimeError where a cluster cannot be joined.

    ``placement``: how many GPUs a node is to have; None: none. ``token_file``: the run's bearer token. ``daemons``:
    name → process id of those of a Ray of the run's own.
    """

    def __init__(
        self,
        launcher: LauncherConfig,
        place: RunPaths,
        *,
        log_dir: Path,
        placement: PlacementConfig | None = None,
        start_timeout_s: float = 300.0,
    ) -> None:
        self._launcher = launcher
        self._placement = placement
        self._start_timeout_s = start_timeout_s
        self._place = place
        self.token_file = place.token_folder / "token"
        self._log_dir = log_dir
        self._undo = ExitStack()
        self.daemons: dict[str, int] = {}

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            new_token_file(self.token_file)
            self._init_ray(undo)
            self._undo = undo.pop_all()
        return self

    def _init_ray(self, undo: ExitStack) -> None:
        own = self._launcher.ray_address is None
        os.environ.update(ONE_THREAD)
        if own:
            assert "ray" not in sys.modules or os.environ.get("RAY_AUTH_MODE") == "token", "Ray reads it when imported"
            # Where torch has it too, told before TMPDIR moves: what was compiled outlives the run.
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
            os.environ.update(QUIET, RAY_AUTH_TOKEN_PATH=str(new_token_file(self._place.folder / "ray-token")))
            os.environ["TMPDIR"] = str(self._place.folder)  # what lies there goes with the run
        import ray

        where = {
            "address": "local",  # whatever RAY_ADDRESS says
            "num_cpus": self._launcher.ray_logical_cpus,
            "num_gpus": 0 if self._placement is None else self._placement.gpus_per_node,
            "object_store_memory": self._launcher.object_store_mb << 20,
            "include_dashboard": False,
            "_temp_dir": str(self._place.folder / "ray"),
        }
        undo.callback(_end_ray)
        try:
            ray.init(
                **(where if own else {"address": self._launcher.ray_address}),
                namespace=self._place.namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:  # Ray's own time-outs are bare ones
            raise self._unstarted(error) if own else self._not_joined(error) from error
        if own:
            self.daemons = {DAEMONS[kind]: pid for kind, pid in _live_processes() if kind in DAEMONS}
        else:
            self._await_nodes()

    def _unstarted(self, error: Exception) -> RayUnstarted:
        self.keep_logs()
        return RayUnstarted(
            f"Ray did not start on this machine ({os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}): "
            f"{_first_line(error)} End other work here, or join a Ray that runs already by launcher.ray_address=auto. "
            f"Ray's own words are in {self._log_dir}."
        )

    def _not_joined(self, error: Exception) -> RuntimeError:
        return RuntimeError(
            f"launcher.ray_address={self._launcher.ray_address}: no Ray could be joined: {_first_line(error)} "
            "Start one with `ray start --head`, name its host:port, or leave the key null for a Ray of the run's own."
        )

    def _await_nodes(self) -> None:
        import ray

        deadline = time.monotonic() + self._start_timeout_s
        while (there := sum(node["Alive"] for node in ray.nodes())) < self._launcher.nodes:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{there} of launcher.nodes={self._launcher.nodes} Ray nodes are there after run.start_timeout_s="
                    f"{self._start_timeout_s:.0f} s"
                )
            time.sleep(NODES_S)
        if self._placement is not None and (fault := cluster_fault(self._placement, ray.nodes())) is not None:
            raise RuntimeError(fault)

    def keep_logs(self) -> None:
        """Copies what the workers and the daemons wrote into the run's folder; for a run that failed, or lost its
        Ray."""
        logs = self._place.folder / "ray" / "session_latest" / "logs"
        try:
            for file in (file for pattern in KEPT_LOGS for file in logs.glob(pattern)):
                if file.stat().st_size:
                    self._log_dir.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file, self._log_dir / file.name)
        except OSError as error:  # a full disk must not hide why the run failed
            print(f"relax: not all logs were kept: {error}", file=sys.stderr)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.keep_logs()
        self._undo.close()


def _live_processes() -> list[tuple[str, int]]:
    """(Ray's name for its kind, process id) of the processes that Ray started below this one; none where it joined."""
    from ray._private import worker

    node = worker._global_node
    return [] if node is None else [(kind, process.pid) for kind, process in node.live_processes()]


def _end_ray() -> None:
    """Leaves Ray. A Ray of our own ends by SIGKILL: its processes do not take the SIGTERM that Ray would send to one
    after the other, with a second's wait for each."""
    import ray
    from ray._private import worker

    started = [pid for _, pid in _live_processes()]
    worker._global_node = None
    ray.shutdown()
    kill_trees(started)


def _first_line(error: Exception) -> str:
    """Of an error's words, as a sentence."""
    words = str(error).strip().split("\n", 1)[0] or type(error).__name__
    return words if words.endswith(".") else f"{words}."
