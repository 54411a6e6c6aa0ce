"""Defines the interface of agents: tasks (as a file or a line of JSON), environment variables, and results."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from relax_core.contracts.data import DataRow
from relax_core.contracts.env import Ended
from relax_core.contracts.plugin_results import as_number, too_large
from relax_core.contracts.untrusted_values import clean_text, decode_json, shown
from relax_core.rollout.episodes.episode_records import without_bytes

MAX_RESULT_BYTES = 1 << 20
TASK_FILE, RESULT_FILE = "task.json", "result.json"


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """Holds the task of an agent: one attempt at an episode.

    ``attempt`` is the number of earlier attempts at this episode. ``key`` gives access to the attempt's session at the
    endpoint with the URL ``base_url``. ``evaluation`` is True if the episode is not trained. ``began`` is set when an
    agent has received the task. ``quiet_s`` returns the seconds since the session's last request.
    """

    uid: str
    attempt: int
    row: DataRow
    key: str
    base_url: str
    evaluation: bool
    quiet_s: Callable[[], float] = lambda: 0.0
    began: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """Returns the name of the attempt, which is unique in the run."""
        return f"{self.uid}.{self.attempt}"

    def row_json(self) -> bytes:
        """Returns the data row as JSON."""
        return msgspec.json.encode(without_bytes(self.row))

    def urls(self) -> dict[str, str]:
        """Returns the environment variables from which clients read the key and the base URLs."""
        return {
            "OPENAI_BASE_URL": f"{self.base_url}/v1",
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.base_url,
            "ANTHROPIC_API_KEY": self.key,
        }

    def as_json(self) -> dict[str, Any]:
        """Returns the task as JSON for external agents and warm agents; the key ``task`` holds the data row."""
        return {
            "uid": self.uid,
            "attempt": self.attempt,
            "evaluation": self.evaluation,
            "task": msgspec.json.decode(self.row_json()),
            "base_url": f"{self.base_url}/v1",
            "anthropic_base_url": self.base_url,
            "api_key": self.key,
        }


@dataclass(frozen=True, kw_only=True)
class AgentResult:
    """Holds the result of an attempt.

    ``reward`` is the reward that the agent computed, or None if the run's reward scores the episode. ``metrics`` maps
    names to numbers from the agent. ``failed`` is the reason of a failed attempt, which has no reward; else it is
    empty. ``ended`` is the end of a failed attempt. ``output`` is the agent's newest output.
    """

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    failed: str = ""
    ended: Ended = "env_failed"
    output: str = ""


class AgentRunner(Protocol):
    """Declares the methods that play tasks with agents."""

    async def play(self, task: AgentTask) -> AgentResult:
        """Returns the result of a task. A cancelled call ends the agent without waiting for its exit."""

    async def aclose(self) -> None:
        """Ends all agents."""


def result_of(told: Any, *, output: str = "", what: str) -> AgentResult:
    """Parses the result of an agent, a JSON object. Any other value gives a failed result.

    The key ``reward`` has a finite number or null, ``metrics`` maps names to numbers, and ``error`` has the reason of a
    failed attempt. Other keys are ignored.
    """

    def failed(words: str) -> AgentResult:
        return AgentResult(failed=f"{what}: {words}", output=output)

    if not isinstance(told, dict):
        return failed('it is not a JSON object, such as {"reward": 1.0}')
    if error := told.get("error"):
        words = clean_text(error, 1000) if isinstance(error, str) else shown(error, 1000)
        return AgentResult(failed=f"the agent says: {words}", output=output)
    reward, metrics = told.get("reward"), told.get("metrics") or {}
    if reward is not None and not _is_number(reward):
        return failed(f"reward={shown(reward)}: give a finite number, or leave it out for the run's reward")
    if not isinstance(metrics, dict) or not all(map(_is_number, metrics.values())):
        return failed(f'metrics={shown(metrics)}: give names with finite numbers, such as {{"calls": 2}}')
    own = None if reward is None else float(reward)
    return AgentResult(
        reward=own, metrics={str(name): float(metric) for name, metric in metrics.items()}, output=output
    )


def _is_number(value: Any) -> bool:
    number = as_number(value) if isinstance(value, int | float) else None
    return number is not None and too_large(number) is None


def read_result(file: Path, *, output: str) -> AgentResult:
    """Reads the result file of an agent; a missing file gives an empty result."""
    what = "RELAX_RESULT"
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return AgentResult(output=output)
    except OSError as error:
        return AgentResult(failed=f"{what}: {error.strerror}", output=output)
    with os.fdopen(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return AgentResult(failed=f"{what}: it is not a plain file", output=output)
        content = opened.read(MAX_RESULT_BYTES + 1)
    if len(content) > MAX_RESULT_BYTES:
        return AgentResult(failed=f"{what}: it is larger than {MAX_RESULT_BYTES} bytes", output=output)
    if not content.strip():
        return AgentResult(output=output)
    try:
        return result_of(decode_json(content, Any), output=output, what=what)
    except ValueError as error:
        return AgentResult(failed=f"{what}: it is not JSON: {error}", output=output)
