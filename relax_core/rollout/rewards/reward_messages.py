"""Defines the messages from a reward pool to its worker processes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from relax_core.config.redaction import packed_text
from relax_core.contracts.reward import RewardConfig, RewardInput
from relax_core.registry import is_file_plugin


class WorkerReward(msgspec.Struct, frozen=True):
    """Identifies a reward by its name and its settings as msgpack."""

    name: str
    config: bytes

    @staticmethod
    def of(config: RewardConfig) -> WorkerReward:
        """Returns the message for a reward. A file gets its absolute path, because workers run in another folder."""
        name = str(Path(config.name).expanduser().absolute()) if is_file_plugin(config.name) else config.name
        return WorkerReward(name, msgspec.msgpack.encode(config, enc_hook=packed_text))


class Load(msgspec.Struct, frozen=True, tag=True):
    """Requests the import of a reward; the worker answers with `Ready`."""

    reward: WorkerReward


class Score(msgspec.Struct, frozen=True, tag=True):
    """Requests one output per answer from a loaded reward."""

    reward: WorkerReward
    inputs: list[RewardInput]


class WorkerStart(msgspec.Struct, frozen=True):
    """Defines the first message to a worker: the rewards that the process imports at its start."""

    rewards: list[WorkerReward]
