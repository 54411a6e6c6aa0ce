"""Tries a run's plug-ins on real data rows before the run starts, in a child process that is killed if it hangs.

The env makes the messages of data rows, and the reward scores the rows' reference answers. An algorithm is called on a
made-up group, from rewards to the loss. A data source is opened twice.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import msgspec

from relax_core.contracts.child_process import Child, ChildLost, Limit, cause_in, import_path, module_command, to_frame

START_S = 120.0  # limit for the start of an interpreter with the imports of plug-ins and their libraries


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the plug-ins and data rows that the child process tries.

    ``rows`` has data rows with their origin (file and line). ``env``, ``reward``, ``algo`` and ``data`` each have the
    name of a plug-in and its settings as msgpack; a plug-in with an empty name is not tried. ``call_s`` limits one call
    of an environment, a reward or a data source, in seconds. If the ``timeout_s`` of a reward or the ``step_timeout_s``
    of an environment with turns is longer, this longer limit applies. ``open_s`` limits the opening of a data source.
    """

    rows: list[tuple[str, dict[str, Any]]]
    env: tuple[str, bytes] = ("", b"")
    reward: tuple[str, bytes] = ("", b"")
    algo: tuple[str, bytes] = ("", b"")
    data: tuple[str, bytes] = ("", b"")
    call_s: float
    open_s: float


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Announces the next call ``what`` of the child process; the call may take at most ``limit_s`` seconds."""

    what: str
    limit_s: float


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reports the end of the trial with the found ``problems``."""

    problems: list[str]


def try_plugins(request: Request) -> list[str]:
    """Returns the problems of the plug-ins, one sentence per problem; a hang or a crash is a problem, too."""
    environment = os.environ | {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
    command = module_command("relax_core.rollout.trial.plugin_trial_main")
    with tempfile.TemporaryFile() as printed:
        child = Child(command, name="the trial of plug-ins", log=printed.fileno(), environment=environment)
        stage = Stage(what="the plug-ins' worker process: its start", limit_s=START_S)
        try:
            child.send(to_frame(request))
            while True:
                message = msgspec.msgpack.decode(child.next_frame(Limit(stage.limit_s)), type=Stage | Done)
                if isinstance(message, Done):
                    return message.problems
                stage = message
        except ChildLost as lost:
            if lost.late:
                return [f"{stage.what} did not end within {stage.limit_s:g} s"]
            return [f"{stage.what}: {lost}{printed_cause(printed)}"]
        finally:
            child.end(grace_s=0.0)


def printed_cause(printed: Any) -> str:
    """Returns a colon and the cause of a child's end from its output file; empty if the file shows no cause."""
    printed.seek(0)
    cause = cause_in(printed.read())
    return f": {cause}" if cause else ""
