"""A bus core that writes its events to a file, with groups like a rollout's groups."""

from __future__ import annotations

from pathlib import Path

from relax_core.bus.journal import Journal
from relax_core.bus.ledger import Ledger
from relax_core.bus.ledger_reader import LedgerFile
from relax_core.bus.replay_buffer import ReplayBuffer
from relax_core.contracts.bus import Admission, Group
from relax_core.contracts.columns import encode_tree
from tests.bus.make_rows import Clock, for_actor, make_settings, uids_of
from tests.trees import answers_tree

T = 120.0


def generated_row(admission: Admission) -> Group:
    """Returns a group of two samples. The weights changed during their generation.

    The second sample has the higher reward.
    """
    tree = answers_tree(
        admission.group_uid,
        [1, 2],
        [3, 3],
        [5, 6, 7, 5, 6, 7],
        logprobs=-1.0,
        versions=[0, 0, 1] * 2,
        rewards=[0.25, 1.25],
    )
    return Group(
        group_uid=admission.group_uid,
        index=admission.index,
        uids=uids_of(admission),
        versions=tree.oldest_versions(trained=True).tolist(),
        columns={**encode_tree(tree), "a": b"x"},
    )


class PersistedRun:
    """A bus core that writes its events to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = Journal(path)
        self.core = ReplayBuffer(make_settings(), ledger=Ledger(group_size=2, journal=self.journal), clock=Clock())

    def roll_out(self, groups: int) -> list[Admission]:
        admissions = self.core.admit(groups)
        self.core.put([generated_row(admission) for admission in admissions])
        return admissions

    def train(self) -> None:
        step = self.core.version
        lease = self.core.lease(for_actor(step))
        assert lease is not None
        self.core.ack([lease.lease_id], step=step, dropped={})

    def file(self) -> LedgerFile:
        self.journal.flush(timeout_s=T)
        return LedgerFile(self.path)
