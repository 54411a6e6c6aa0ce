"""Checks the keys of launchers and their combinations; ranges.py checks the ranges of numbers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from relax_core.config.choices import LauncherKind
from relax_core.config.schema import (
    LAUNCHERS,
    LauncherConfig,
    RayJobLauncherConfig,
    RelaxConfig,
    SlurmLauncherConfig,
)

VOLUME_PATH = "/data"  # mount point of launcher.volume_claim in a KubeRay manifest
_NAMES_OF_OURS = ("job-name", "output", "error", "signal", "nodes", "ntasks-per-node", "time", "open-mode", "array")
_NO_RUN = ("wrap", "input", "test-only", "parsable", "wait", "quiet", "help", "usage", "version", "batch")
_WORD = re.compile(r"[\w/][\w.,:@+=/-]*")  # Excludes options, quotes and file-name patterns.
_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=[^'\"\\#`$]*)?")
_PATTERNS = re.compile(r"[%'\"\\`$#]")
_KEYS_OF_OURS = {  # sbatch option → key of Relax
    "gpus-per-node": "gpus_per_node",
    "cpus-per-task": "cpus_per_node",
    "mem": "memory_gb",
    "time": "time_limit_min",
    "nodes": "nodes",
}


def sbatch_arguments(args: list[str]) -> dict[str, str | bool]:
    """Converts ``["--exclusive", "--reservation=mine"]`` to ``{"exclusive": True, "reservation": "mine"}``."""
    split = [arg.removeprefix("--").partition("=") for arg in args]
    return {name: value if equals else True for name, equals, value in split}


def environment(args: list[str]) -> dict[str, str]:
    """Converts ``["NAME=value"]`` to ``{"NAME": "value"}``."""
    return dict(arg.split("=", 1) for arg in args)


def launcher_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of the launcher; the type is checked first, because other checks read keys of that type."""
    launcher = config.launcher
    if type(launcher) is not LAUNCHERS[launcher.name.value]:
        yield f"launcher.name={launcher.name.value}: choose it with launcher={launcher.name.value}."
        return
    several = launcher.nodes > 1 or launcher.name is LauncherKind.ray_job or launcher.ray_address is not None
    if several and config.bus.name == "transfer_queue":
        yield (
            f"bus=transfer_queue with launcher={launcher.name.value} and launcher.nodes={launcher.nodes}: its sockets "
            "work only within one machine. Use bus=ray."
        )
    if launcher.name is LauncherKind.local:
        yield from _local(launcher)
    elif launcher.ray_address is not None:
        yield (
            f"launcher.ray_address={launcher.ray_address} with launcher={launcher.name.value}, which finds the address "
            "itself. Drop it."
        )
    if isinstance(launcher, SlurmLauncherConfig):
        yield from _slurm(launcher, name=config.name, run_dir=config.run.dir)
    if isinstance(launcher, RayJobLauncherConfig):
        yield from _ray_job(config, launcher)


def _local(launcher: LauncherConfig) -> Iterator[str]:
    if launcher.nodes > 1 and launcher.ray_address is None:
        yield (
            f"launcher.nodes={launcher.nodes} with a Ray that the run starts, which has only this machine. Add "
            "launcher.ray_address=auto, or choose launcher=slurm."
        )


def script_path_problem(key: str, path: str) -> str | None:
    """Returns a problem if a path has a pattern that Slurm would replace, such as %j; otherwise None."""
    if (found := _PATTERNS.search(path)) is None:
        return None
    return f"{key}={path} has the character {found[0]!r}, which Slurm or the shell replaces. Choose another folder."


def python_problems(python: str | None) -> Iterator[str]:
    """Yields the problems of launcher.python; a shell command contains its value."""
    try:
        args = shlex.split(python or "python")
    except ValueError as error:
        yield f"launcher.python={python}: {error}. Close the quote, or escape it."
        return
    if not args or args[0].startswith("-"):
        yield f"launcher.python={python!r}: give a program and then its arguments."


def _slurm(launcher: SlurmLauncherConfig, *, name: str, run_dir: str) -> Iterator[str]:
    if not _WORD.fullmatch(name):
        yield (
            f"name={name!r} with launcher=slurm: sbatch reads it as a word of the batch script. Use letters, "
            "digits and . , : @ + = / _ - alone, and no - at the beginning."
        )
    if problem := script_path_problem("run.dir", run_dir):
        yield problem
    yield from python_problems(launcher.python)
    for arg in launcher.srun:
        if not arg.startswith("--"):
            yield f"launcher.srun has {arg!r}: write it as --name or --name=value."
    for arg in launcher.sbatch:
        name = arg.removeprefix("--").partition("=")[0]
        if not _OPTION.fullmatch(arg):
            yield f"launcher.sbatch has {arg!r}: write it as --name or --name=value. No value has quotes."
        elif name in _NO_RUN:
            yield f"launcher.sbatch has {arg!r}, which submits no run. Drop it."
        elif name in _KEYS_OF_OURS:
            yield f"launcher.sbatch has {arg!r}: use launcher.{_KEYS_OF_OURS[name]}."
        elif name in _NAMES_OF_OURS:
            yield f"launcher.sbatch has {arg!r}, which Relax sets itself. Drop it."
    if launcher.checkpoint_s >= launcher.time_limit_min * 60:
        yield (
            f"launcher.checkpoint_s={launcher.checkpoint_s} is not less than launcher.time_limit_min="
            f"{launcher.time_limit_min} minutes: the run would be stopped when it starts. Raise the limit."
        )


def _ray_job(config: RelaxConfig, launcher: RayJobLauncherConfig) -> Iterator[str]:
    for number, arg in enumerate(launcher.env):
        if not re.match(r"[A-Za-z_]\w*=", arg) or "\0" in arg:  # The message omits the value, because it may be secret.
            yield f"launcher.env[{number}] is not NAME=value. Use this form, with letters, digits and _ in the name."
    yield from python_problems(launcher.python)
    if not launcher.address.startswith(("http://", "https://")):
        yield f"launcher.address={launcher.address}: give the dashboard's address, e.g. http://127.0.0.1:8265."
    if not launcher.dry_run:
        return
    if launcher.image is None:
        yield "launcher.dry_run=true needs launcher.image=..., a container image with Relax."
    if launcher.volume_claim is None and launcher.nodes > 1:
        yield (
            f"launcher.dry_run=true with launcher.nodes={launcher.nodes} needs launcher.volume_claim=...: weights and "
            "checkpoints need a folder that all pods share."
        )
    if launcher.volume_claim is not None and not PurePosixPath(config.run.dir).is_relative_to(VOLUME_PATH):
        yield (
            f"run.dir={config.run.dir} is not below {VOLUME_PATH}, the folder that all pods "
            f"share. Use run.dir={VOLUME_PATH}/runs/{config.name}."
        )
