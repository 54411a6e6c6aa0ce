"""A data source with questions of a task of the package reasoning-gym; reward=reasoning_gym scores the answers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from relax_core.contracts.data import BaseDataSource, DataSourceConfig, DataSourceSpec

_HELD_OUT_SLOTS = 4  # a question is held out of training if its checksum is a multiple of this number
_TRIES = 64  # largest number of draws for a row until the checksum fits; a task with few questions may not succeed
_MAX_ROWS = 1 << 24  # the package draws question i with seed + i; streams of questions have seeds with this distance


@dataclass(frozen=True)
class ReasoningTasksConfig(DataSourceConfig):
    """Holds the settings of the source.

    ``task`` is the name of a task of the package (also set by data.task), and ``arguments`` are the task's arguments.
    ``rows`` is the number of training questions, ``held_out`` is the number of held-out questions, and ``seed`` is the
    seed of all questions.
    """

    name: str = "reasoning_gym"
    task: str = "chain_sum"
    arguments: dict[str, Any] = field(default_factory=dict)
    rows: int = 10_000
    held_out: int = 256
    seed: int = 0


class ReasoningTasks(BaseDataSource):
    """Draws a question when its row is read. The reward draws the question again from the row's key "reasoning_gym"."""

    def __init__(self, config: ReasoningTasksConfig) -> None:
        self._config = config
        self._streams: dict[int, Any] = {}  # streams of the package's questions, by seed

    def __len__(self) -> int:
        return self._config.rows

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        return self._row(number, held_out=False)

    def where(self, number: int) -> str:
        """Returns the task and the number of a question."""
        return f"task {self._config.task}, question {number}"

    def held_out(self) -> Sequence[Mapping[str, Any]]:
        """Returns held-out questions. No training row asks them if the task has enough different questions."""
        return [self._row(number, held_out=True) for number in range(self._config.held_out)]

    def _row(self, number: int, *, held_out: bool) -> Mapping[str, Any]:
        config = self._config
        for attempt in range(_TRIES):
            seed = (config.seed << 40) + (2 * attempt + held_out) * _MAX_ROWS
            if seed not in self._streams:
                self._streams[seed] = drawn(config, seed)
            entry = self._streams[seed][number]
            if (zlib.crc32(entry["question"].encode()) % _HELD_OUT_SLOTS == 0) == held_out:
                break
        answer = entry["answer"]  # None if several answers are right; scoring then needs no reference
        origin = {"task": config.task, "arguments": dict(config.arguments), "seed": seed}
        return {
            "prompt": entry["question"],
            "answer": "" if answer is None else str(answer),
            "reasoning_gym": origin | {"size": size_of(config), "index": number},
        }


def size_of(config: ReasoningTasksConfig) -> int:
    """Returns the number of questions per stream; some tasks refuse more questions than their word list has words."""
    return max(config.rows, config.held_out)


def drawn(config: ReasoningTasksConfig, seed: int) -> Any:
    """Returns a stream of the package's questions; raises the task's error for invalid arguments."""
    import reasoning_gym

    return reasoning_gym.create_dataset(config.task, seed=seed, size=size_of(config), **config.arguments)


def check(config: ReasoningTasksConfig) -> None:
    """Raises ValueError if the package or the task is missing, or if the task refuses its arguments."""
    if find_spec("reasoning_gym") is None:
        raise ValueError("data=reasoning_gym needs the package reasoning-gym: pip install 'relax-core[envs]'.")
    from reasoning_gym.factory import DATASETS

    if config.task not in DATASETS:
        near = ", ".join(get_close_matches(config.task, DATASETS))
        hint = f"Nearest: {near}" if near else f"Some of its {len(DATASETS)}: {', '.join(sorted(DATASETS)[::12])}"
        raise ValueError(f"data.task={config.task}: reasoning-gym has no such task. {hint}.")
    for key, least in (("rows", 1), ("held_out", 0), ("seed", 0)):
        if not least <= (value := getattr(config, key)) <= _MAX_ROWS:
            raise ValueError(f"data.config.{key}={value}: must be from {least} to {_MAX_ROWS}.")
    try:
        drawn(config, config.seed)
    except (TypeError, ValueError, AssertionError) as error:
        told = f"data.config.arguments={config.arguments} with data.task={config.task}: {error}"
        raise ValueError(f"{told}. See the fields of the task's config class in reasoning-gym.") from error


SPEC = DataSourceSpec(
    name="reasoning_gym",
    summary="questions of a task of the package reasoning-gym",
    config=ReasoningTasksConfig,
    open=ReasoningTasks,
    check=check,
)
