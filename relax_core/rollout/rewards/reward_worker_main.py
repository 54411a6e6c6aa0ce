"""The worker process of an isolated reward: ``python -m relax_core.rollout.rewards.reward_worker_main NAME``.

A `RewardPool` starts it as a child.
"""

from __future__ import annotations

import sys

import msgspec

from relax_core.contracts.reward import RewardInput
from relax_core.data.killable.worker_frames import Ready
from relax_core.data.killable.worker_pipe import WorkerPipe, cpu_limit
from relax_core.registry import find_reward
from relax_core.rollout.rewards.reward_calls import score_here


def main() -> None:
    """Reads the settings, imports the reward and scores until stdin ends."""
    pipe = WorkerPipe()
    settings = pipe.read()
    try:
        spec = find_reward(sys.argv[1])
        config = msgspec.msgpack.decode(settings, type=spec.config)
        spec.prepare()
    except Exception as error:  # plug-in code: the owner reports the error to the user
        pipe.write(Ready(f"{type(error).__name__}: {error}"))
        raise
    pipe.write(Ready(""))
    while True:
        inputs = msgspec.msgpack.decode(pipe.read(), type=list[RewardInput])
        with cpu_limit(config.timeout_s * len(inputs)):
            outputs = [output for output, _ in score_here(spec, inputs, config)]
        pipe.write(outputs)


if __name__ == "__main__":
    main()
