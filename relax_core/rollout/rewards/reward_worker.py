"""Scores answers with isolated rewards in one worker process; a process that hangs or dies is restarted."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from relax_core.contracts.child_process import ChildLost, Ready, WorkerProcess
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput
from relax_core.rollout.rewards.reward_messages import Load, Score, WorkerReward, WorkerStart
from relax_core.sandbox.worker_sandbox import WorkerSandbox

_MAIN = "relax_core.rollout.rewards.reward_worker_main"
_LOAD_S = 120.0  # equal to the limit for the start of a process


class RewardWorker:
    """Scores answers in one worker process; a lost process is replaced.

    The process imports the rewards of ``configs`` at its start, and other rewards on their first use. The output of the
    process goes to the descriptor ``log``; without ``log``, to the stderr of the calling process. With ``sandbox`` the
    process runs in this sandbox.
    """

    def __init__(
        self, configs: Sequence[RewardConfig], *, log: int | None, sandbox: WorkerSandbox | None = None
    ) -> None:
        self._at_start = [WorkerReward.of(config) for config in configs]
        self._loaded = set(self._at_start)
        what = "reward " + (", ".join(config.name for config in configs) or "worker")
        start = WorkerStart(self._at_start)
        self.process = WorkerProcess([_MAIN], start, name=what, log=log, sandbox=sandbox)

    def score(self, inputs: Sequence[RewardInput], config: RewardConfig) -> list[RewardOutput]:
        """Returns one output per input, in order, within ``config.timeout_s`` seconds per input.

        Must be called by one thread at a time. Raises RuntimeError if the process cannot start, a reward cannot be
        imported, or the process was stopped.
        """
        reward = WorkerReward.of(config)
        try:
            if reward not in self._loaded:
                self._load(reward)
            answer = self.process.ask(Score(reward, list(inputs)), limit_s=config.timeout_s * len(inputs))
        except ChildLost as error:
            self._loaded = set(self._at_start)
            cause = "timeout" if error.late else "died"
            return [RewardOutput(reward=None, reason=f"reward {config.name}: {error}", cause=cause)] * len(inputs)
        return msgspec.msgpack.decode(answer, type=list[RewardOutput])

    def _load(self, reward: WorkerReward) -> None:
        error = msgspec.msgpack.decode(self.process.ask(Load(reward), limit_s=_LOAD_S), type=Ready).error
        if error:
            raise RuntimeError(f"reward {reward.name}: its worker process could not import it: {error}")
        self._loaded.add(reward)
