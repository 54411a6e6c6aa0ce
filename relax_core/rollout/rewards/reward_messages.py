"""The messages from a reward pool to its worker processes; `relax_core.contracts.child_process` has the frames."""

from __future__ import annotations

from pathlib import Path

import msgspec

from relax_core.config.redaction import packed_text
from relax_core.contracts.reward import RewardConfig, RewardInput
from relax_core.registry import is_file_plugin


class WorkerReward(msgspec.Struct, frozen=True):
    """Names a reward and has its settings as msgpack."""

    name: str
    config: bytes

    @staticmethod
    def of(config: RewardConfig) -> WorkerReward:
        """Returns the reward of these settings; a file gets its absolute path, because the worker's folder differs."""
        name = str(Path(config.name).expanduser().absolute()) if is_file_plugin(config.name) else config.name
        return WorkerReward(name, msgspec.msgpack.encode(config, enc_hook=packed_text))


class Load(msgspec.Struct, frozen=True, tag=True):
    """Requests the import of a reward; `Ready` is the answer."""

    reward: WorkerReward


class Score(msgspec.Struct, frozen=True, tag=True):
    """Requests the outputs of these answers, one for each, by a reward that is loaded."""

    reward: WorkerReward
    inputs: list[RewardInput]


class WorkerStart(msgspec.Struct, frozen=True):
    """Holds the first message: the rewards that the process imports at its start."""

    rewards: list[WorkerReward]
