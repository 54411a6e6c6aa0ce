"""Audits a run's reward in a child process, which is killed if the reward hangs on an answer.

The child process runs this module: ``python -m relax_core.rollout.trial.reward_trial``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import msgspec

from relax_core.config.redaction import packed_text
from relax_core.contracts.child_process import (
    Child,
    ChildLost,
    Limit,
    OwnerPipe,
    import_path,
    module_command,
    to_frame,
)
from relax_core.contracts.data import DataRow
from relax_core.contracts.reward import RewardConfig
from relax_core.registry import find_reward
from relax_core.rollout.episodes.episode_records import without_bytes
from relax_core.rollout.trial.plugin_trial import START_S, printed_cause

HANG_S = 30.0  # seconds in which the audit must end after its own limit


class AuditRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the input of the audit: a reward with its settings as msgpack, and data rows.

    After ``limit_s`` seconds the audit begins no further row. ``workers`` is the number of processes of isolated
    rewards.
    """

    reward: str
    settings: bytes
    rows: list[dict[str, Any]]
    workers: int
    limit_s: float


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the result of an audit in a child process.

    ``rows`` is the number of judged rows. ``families`` has the families of wrong answers that the reward awards, the
    worst family first: the share of rows with an awarded answer, and the worst answer. ``why_not`` is the reason why
    the reward could not be audited, else empty. ``crashed`` is True if the process died or hung.
    """

    rows: int = 0
    families: dict[str, tuple[float, str]] = {}
    why_not: str = ""
    crashed: bool = False


def audit_in_child(reward: RewardConfig, rows: Sequence[DataRow], *, workers: int, limit_s: float) -> Audited:
    """Returns the result of an audit; ``why_not`` tells if the reward crashed or hung."""
    request = AuditRequest(
        reward=reward.name,
        settings=msgspec.msgpack.encode(reward, enc_hook=packed_text),
        rows=[dict(without_bytes(row)) for row in rows],
        workers=workers,
        limit_s=limit_s,
    )
    environment = os.environ | {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
    command = module_command("relax_core.rollout.trial.reward_trial")
    with tempfile.TemporaryFile() as printed:
        child = Child(command, name="the audit of the reward", log=printed.fileno(), environment=environment)
        try:
            child.send(to_frame(request))
            return msgspec.msgpack.decode(child.next_frame(Limit(START_S + limit_s + HANG_S)), type=Audited)
        except ChildLost as lost:
            why_not = f"reward={reward.name} cannot be checked: {lost}{printed_cause(printed)}"
            return Audited(why_not=why_not, crashed=True)
        finally:
            child.end(grace_s=0.0)


def main() -> None:
    """Reads an `AuditRequest` from stdin, runs the audit, and writes `Audited` to the parent process."""
    from relax_core.rollout.rewards.reward_audit import audit_run_reward

    replies = OwnerPipe()
    request = msgspec.msgpack.decode(replies.read(), type=AuditRequest)
    try:
        settings = msgspec.msgpack.decode(request.settings, type=find_reward(request.reward).config)
        found = audit_run_reward(settings, request.rows, workers=request.workers, limit_s=request.limit_s)
    except ValueError as error:
        replies.write(Audited(why_not=str(error)))
        return
    families = {name: (found.families[name].share, found.families[name].worst) for name in found.above(0.0)}
    replies.write(Audited(rows=found.judged, families=families))


if __name__ == "__main__":
    main()
