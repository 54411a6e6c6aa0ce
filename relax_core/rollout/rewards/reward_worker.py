"""Scores with an isolated reward in one worker process, which is restarted if it hangs or dies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput
from relax_core.data.killable.killable_process import KillableProcess, WorkerLost

_MAIN = "relax_core.rollout.rewards.reward_worker_main"


class RewardWorker:
    """Scores in one worker process; a process that is lost is replaced."""

    def __init__(self, config: RewardConfig, log_file: Path | None) -> None:
        self._config = config
        self.process = KillableProcess([_MAIN, config.name], config, what=f"reward {config.name}", log_file=log_file)

    def score(self, inputs: Sequence[RewardInput]) -> list[RewardOutput]:
        """Returns one output per input, in order, within ``config.timeout_s`` seconds per input.

        Must be called by one thread at a time. Raises RuntimeError if the process cannot start or was stopped.
        """
        try:
            answer = self.process.ask(inputs, limit_s=self._config.timeout_s * len(inputs))
        except WorkerLost as error:
            return [RewardOutput(reward=None, reason=f"reward {self._config.name}: {error}")] * len(inputs)
        return msgspec.msgpack.decode(answer, type=list[RewardOutput])
