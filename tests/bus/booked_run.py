"""A bus core whose events go to a file, with rows as the rollout makes them."""

from __future__ import annotations

from pathlib import Path

from relax_core.bus.core import BusCore
from relax_core.bus.journal import Journal
from relax_core.bus.ledger import Ledger
from relax_core.bus.ledger_file import LedgerFile
from relax_core.contracts.bus import Admission, GroupRow
from relax_core.contracts.columns import encode_group
from relax_core.contracts.sample import Group, Sample, VersionSpan
from tests.bus.make_rows import Clock, for_actor, make_settings, uids_of

T = 120.0


def generated_row(admission: Admission) -> GroupRow:
    """Two samples whose weights changed while they were made; the second was better."""
    samples = [
        Sample(
            uid=uid,
            response_ids=[5, 6, 7],
            rollout_logprobs=[-1.0, -1.0, -1.0],
            loss_mask=[1, 1, 1],
            weight_versions=[VersionSpan(0, 2, 0), VersionSpan(2, 3, 1)],
            finish_reason="stop",
            reward=0.25 + place,
            reward_parts={"exact": float(place)},
            engine="engine-1",
        )
        for place, uid in enumerate(uids_of(admission))
    ]
    group = Group(group_uid=admission.group_uid, index=admission.index, prompt_ids=[1, 2], samples=samples)
    return GroupRow(
        group_uid=group.group_uid,
        index=group.index,
        uids=[sample.uid for sample in samples],
        versions=[sample.version for sample in samples],
        columns={**encode_group(group), "a": b"x"},
    )


class BookedRun:
    """A bus core whose events go to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = Journal(path)
        self.core = BusCore(make_settings(), ledger=Ledger(group_size=2, journal=self.journal), clock=Clock())

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
