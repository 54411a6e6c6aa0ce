"""The environment of a run or of an evaluation, with the worker processes of its episodes if it is isolated."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.env import EnvSpec
from relax_core.registry import find_env
from relax_core.rollout.env_workers.env_workers import EnvWorkers

ENV_LOG = "env.log"  # the output of an isolated env's worker processes


class RunEnv:
    """Holds the env that ``config`` names; it must be closed, and be used by one event loop.

    The output of worker processes goes to a file in ``log_dir``.
    """

    def __init__(self, config: RelaxConfig, *, log_dir: Path) -> None:
        self.env = find_env(config.env.name)
        self._workers = EnvWorkers(self.env, config.env, log_file=log_dir / ENV_LOG) if self.env.isolated else None

    def __enter__(self) -> RunEnv:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def spec(self, *, episodes_per_group: int) -> EnvSpec:
        """Returns the env for groups of this size, whose episodes open where they have to."""
        return self.env if self._workers is None else self._workers.spec(episodes_per_group=episodes_per_group)

    def close(self) -> None:
        """Kills the worker processes with all of their children."""
        if self._workers is not None:
            self._workers.close()
