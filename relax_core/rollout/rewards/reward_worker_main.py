"""The worker process of isolated rewards: ``python -m relax_core.rollout.rewards.reward_worker_main``.

A `RewardPool` starts this module as a child process.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from relax_core.contracts.child_process import OwnerPipe, Ready, cpu_limit
from relax_core.contracts.reward import RewardInput, RewardOutput, RewardSpec
from relax_core.contracts.untrusted_values import shown_error
from relax_core.registry import find_reward
from relax_core.rollout.rewards.answer_process import scored_alone
from relax_core.rollout.rewards.reward_calls import score_sync
from relax_core.rollout.rewards.reward_messages import Load, Score, WorkerReward, WorkerStart

_GIB = 1 << 30


class _Rewards:
    """Holds the rewards that this process has imported; ``pipe`` is the connection to the parent process."""

    def __init__(self, pipe: OwnerPipe) -> None:
        self._pipe = pipe
        self._loaded: dict[WorkerReward, tuple[RewardSpec, Any]] = {}

    def load(self, reward: WorkerReward) -> None:
        """Imports a reward; raises the errors of the reward's module, settings and ``prepare``."""
        spec = find_reward(reward.name)
        config = msgspec.msgpack.decode(reward.config, type=spec.config)
        spec.prepare()
        self._loaded[reward] = spec, config

    def score(self, reward: WorkerReward, inputs: Sequence[RewardInput]) -> list[RewardOutput]:
        """Returns the outputs of a loaded reward; limits CPU time and memory by the reward's settings."""
        spec, config = self._loaded[reward]
        if not spec.needs_sandbox:
            return self._score(spec, config, inputs)
        return scored_alone(
            lambda: self._score(spec, config, inputs),
            self._pipe,
            answers=len(inputs),
            memory_bytes=round(config.memory_gib * _GIB),
        )

    @staticmethod
    def _score(spec: RewardSpec, config: Any, inputs: Sequence[RewardInput]) -> list[RewardOutput]:
        with cpu_limit(config.timeout_s * len(inputs)), memory_limit(config.memory_gib):
            outcomes = score_sync(spec, inputs, config)
        return [
            replace(output, reason=f"it needs more memory than reward.memory_gib={config.memory_gib:g}", cause="memory")
            if isinstance(error, MemoryError)
            else output
            for output, error in outcomes
        ]


@contextmanager
def memory_limit(gib: float) -> Iterator[None]:
    """Limits the private memory of the process to ``gib`` GiB in the context; more memory raises MemoryError.

    The limit does not include memory that libraries map from files, or reserve and never touch.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = round(gib * _GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def main() -> None:
    """Imports the rewards of the first message, and answers requests until stdin ends."""
    pipe = OwnerPipe()
    rewards = _Rewards(pipe)
    try:
        for reward in msgspec.msgpack.decode(pipe.read(), type=WorkerStart).rewards:
            rewards.load(reward)
    except Exception as error:  # plug-in code: the parent process reports the error to the user
        pipe.write(Ready(shown_error(error)))
        raise
    pipe.write(Ready(""))
    while True:
        request = msgspec.msgpack.decode(pipe.read(), type=Load | Score)
        if isinstance(request, Score):
            pipe.write(rewards.score(request.reward, request.inputs))
            continue
        try:
            rewards.load(request.reward)
        except Exception as error:  # plug-in code: as at the start
            pipe.write(Ready(shown_error(error)))
        else:
            pipe.write(Ready(""))


if __name__ == "__main__":
    main()
