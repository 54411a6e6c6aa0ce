"""Collects the Python stacks of a process: from the process itself, or with py-spy if it does not answer.

A process that answers reports its own stacks, because py-spy needs the right to trace other processes, which containers
often lack.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from relax_core.control.health.heartbeats import Beat
from relax_core.control.host.process_trees import process_state
from relax_core.roles.process.worker import process_host

ASK_S = 2.0
DUMP_S = 10.0


def stacks_of(beat: Beat | None, handle: Any) -> list[str]:
    """Returns lines with the stacks of a worker's threads.

    If the worker does not answer, they come from `stacks_from_outside`.
    """
    if beat is None or beat.status is None:
        return ["it has not answered yet"]
    status = beat.status
    if beat.life != "alive":
        return [f"it is {beat.life}: {beat.cause}"]
    try:
        stacks: dict[str, str] = ray.get(handle.stacks.remote(), timeout=ASK_S)
    except GetTimeoutError:
        if status.host != process_host():
            return [f"pid {status.pid} on another host does not answer"]
        return stacks_from_outside(status.pid)
    except RayActorError as error:
        return [f"pid {status.pid} has exited: {str(error).splitlines()[0]}"]
    lines = [f"pid {status.pid}, {status.state}"]
    for thread, stack in stacks.items():
        lines += [f"thread {thread}:", *stack.splitlines()]
    for pid in status.child_pids:
        lines += [f"its child {pid}: {line}" for line in stacks_from_outside(pid)]
    return lines


def stacks_from_outside(pid: int) -> list[str]:
    """Returns lines with the state of a process and, if py-spy is installed, py-spy's dump of its stacks."""
    lines = [f"pid {pid}, state {process_state(pid)}"]
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy is None:
        return lines
    command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        dump = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_S, check=False)
    except subprocess.TimeoutExpired:
        return [*lines, f"py-spy did not answer within {DUMP_S:.0f} s"]
    return [*lines, *(dump.stdout or dump.stderr).strip().splitlines()]
