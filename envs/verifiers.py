"""Plays tasksets of the package verifiers 0.4, with a program that requests the model's responses from an endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_core.contracts.env import EnvSpec, TurnsConfig

PROGRAM = Path(__file__).parent / "programs" / "verifiers_program.py"


@dataclass(frozen=True)
class VerifiersConfig(TurnsConfig):
    """Holds the settings of the adapter.

    ``taskset`` and ``harness`` are names that the package knows, or paths of files that end in .py. The package runs in
    the Python interpreter agent.python, because it cannot be installed in the environment of Relax.
    """

    name: str = "verifiers"
    taskset: str = ""
    harness: str = "null"
    max_turns: int = 64


def command(config: VerifiersConfig) -> Sequence[str]:
    """Returns the words of the command that plays a task."""
    return ["python", str(PROGRAM), _absolute(config.taskset), _absolute(config.harness)]


def _absolute(name: str) -> str:
    return str(Path(name).absolute()) if name.endswith(".py") else name


def check(config: VerifiersConfig) -> None:
    """Raises ValueError for a missing taskset or a missing file."""
    if not config.taskset:
        raise ValueError("env.taskset is empty: name a taskset of verifiers, or the path of a file that holds one.")
    for key in ("taskset", "harness"):
        name = getattr(config, key)
        if name.endswith(".py") and not Path(name).is_file():
            raise ValueError(f"env.{key}={name}: there is no such file.")


SPEC = EnvSpec(
    name="verifiers",
    summary="tasksets of the package verifiers, in a separate Python environment (agent.python)",
    config=VerifiersConfig,
    agent=command,
    check=check,
)
