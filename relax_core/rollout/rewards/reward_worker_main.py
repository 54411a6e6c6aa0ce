"""The worker process of an isolated reward: ``python -m relax_core.rollout.rewards.reward_worker_main NAME``.

A `RewardPool` starts it as a child. It always ends with its owner: a thread waits for the end of stdin, and if library
code never releases the interpreter, the kernel's CPU timer ends the process.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from typing import BinaryIO

import msgspec

from relax_core.contracts.reward import RewardInput
from relax_core.contracts.stop_signals import ignore_stop_signals
from relax_core.registry import find_reward
from relax_core.rollout.rewards.reward_calls import score_here
from relax_core.rollout.rewards.reward_frames import HEADER_BYTES, Ready, payload_bytes, to_frame

_CPU_GRACE_S = 1.0  # the owner kills a slow worker first; the timer is for a worker without an owner


def main() -> None:
    """Reads the settings, imports the reward and scores until stdin ends."""
    ignore_stop_signals()
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # the output of a library must not mix with the replies
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the log is read while the run goes on
    threading.Thread(target=_exit_with_owner, daemon=True).start()
    config_frame = _read(requests)
    try:
        spec = find_reward(sys.argv[1])
        config = msgspec.msgpack.decode(config_frame, type=spec.config)
        spec.prepare()
    except Exception as error:  # plug-in code: the owner reports the error to the user
        replies.write(to_frame(Ready(f"{type(error).__name__}: {error}")))
        raise
    replies.write(to_frame(Ready("")))
    while True:
        inputs = msgspec.msgpack.decode(_read(requests), type=list[RewardInput])
        signal.setitimer(signal.ITIMER_PROF, config.timeout_s * len(inputs) + _CPU_GRACE_S)
        outputs = [output for output, _ in score_here(spec, inputs, config)]
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(to_frame(outputs))


def _read(requests: BinaryIO) -> bytes:
    header = requests.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        sys.exit(0)
    return requests.read(payload_bytes(header))


def _exit_with_owner() -> None:
    poll = select.poll()
    poll.register(sys.stdin.fileno(), 0)  # an empty event mask reports only the hang-up
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
