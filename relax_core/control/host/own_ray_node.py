"""Starts Ray for a run with only the processes that a run needs: GCS, raylet and workers.

By default Ray starts five further processes, which take four seconds of CPU time and 480 MB: the dashboard (also with
include_dashboard=False), the autoscaler's monitor, the log monitor, and two agents. Import this module after the
environment is set, because Ray reads the environment when it is imported.

Only this file uses private parts of Ray, of the version `ray_session.OWN_NODE_RAY`. Without this file Ray starts in the
usual way, and the programs `agent_on_demand`, `worker_start` and `fork_server` are not used.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ray import NodeID, _raylet
from ray._private import node, services, utils, worker

_ports: Any = _raylet  # Ray's type annotations lack the functions for port files
REGISTERED_S = 30.0  # Ray's deadline in seconds for the registration of the raylet
LOOK_S = 0.02
NO_PORT = -1  # value that Ray's agent writes for a missing service
FOLDER = Path(__file__).parent
# Maps the raylet's option for an agent to the name of the port at which the raylet calls the agent, or None.
AGENTS = {"--dashboard_agent_command=": None, "--runtime_env_agent_command=": _ports.RUNTIME_ENV_AGENT_PORT_NAME}
UNUSED_PORTS = (
    _ports.METRICS_AGENT_PORT_NAME,
    _ports.METRICS_EXPORT_PORT_NAME,
    _ports.DASHBOARD_AGENT_LISTEN_PORT_NAME,
)


class OwnRayNode(node.Node):
    """Starts a Ray node for a run on this machine, without the processes of Ray that a run does not need."""

    def start_monitor(self) -> None:
        """Starts no monitor, because the run's Ray always has one node."""

    def start_log_monitor(self) -> None:
        """Starts no log monitor, because the roles write log files and the driver prints no logs of Ray."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Starts no dashboard, because a run does not use Ray's dashboard."""
        assert not include_dashboard
        self._webui_url = ""

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        """Starts the raylet with Relax's programs for its agents and for the start of workers."""
        self._ray_params.setup_worker_path = str(FOLDER / "worker_start.py")
        for name in UNUSED_PORTS:
            _ports.persist_port(self._session_dir, self._node_id, name, NO_PORT)
        start = services.start_ray_process

        def start_with_stand_ins(command: list[str], *others: Any, **more: Any) -> Any:
            return start([self._with_stand_in(word) for word in command], *others, **more)

        # Ray would import the dependencies of its dashboard only to check whether they exist.
        with (
            _replaced(services, "start_ray_process", start_with_stand_ins),
            _replaced(utils, "get_dashboard_dependency_error", lambda: None),
        ):
            super().start_raylet(*arguments, **options)
        self._await_registration()

    def _await_registration(self) -> None:
        """Waits until the raylet is registered, because Ray's check runs only once a second.

        Returns after at most `REGISTERED_S` seconds; Ray then reports the failure.
        """
        assert self._node_id is not None
        deadline, own = time.monotonic() + REGISTERED_S, NodeID.from_hex(self._node_id)
        while own not in self.get_gcs_client().get_all_node_info() and time.monotonic() < deadline:
            time.sleep(LOOK_S)

    def _with_stand_in(self, word: str) -> str:
        """Returns the raylet's option.

        In options for agents, inserts `agent_on_demand` before the agent's command line.
        """
        for option, port_name in AGENTS.items():
            if word.startswith(option):
                port_file = "" if port_name is None else _ports.get_port_filename(self._node_id, port_name)
                path = os.path.join(self._session_dir, port_file) if port_file else ""
                stand_in = [sys.executable, "-I", "-S", str(FOLDER / "agent_on_demand.py"), path]
                return f"{option}{subprocess.list2cmdline(stand_in)} {word.removeprefix(option)}"
        return word


@contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of a module while the block runs."""
    earlier = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, earlier)


def use_own_node() -> None:
    """Makes `ray.init` of this process start an `OwnRayNode`."""
    node.Node = OwnRayNode  # type: ignore[misc]


def leave_processes() -> None:
    """Makes `ray.shutdown` of this process leave Ray's processes running, because its caller kills them at once."""
    worker._global_node = None
