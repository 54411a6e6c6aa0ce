"""Leases of a whole train step's groups, on the bus's own state machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from relax_core.bus.state.bus_state import BusCore
from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import Requirements, TeacherRequirements
from relax_core.contracts.bus import BusProgress, BusTimeout, Lease, LeaseRequest
from relax_core.roles.trainer.column_worker import lease_whole_step
from relax_core.roles.trainer.rank_worker import train_columns
from tests.bus.make_rows import for_actor, for_worker, make_core, make_row


def test_the_trainer_leases_what_the_algorithm_needs() -> None:
    plain = {*c.ROLLOUT_COLUMNS, c.ADVANTAGES}
    teacher = TeacherRequirements(models={"default": "x"})
    top = TeacherRequirements(models={"default": "x"}, top_k=4)
    for requirements, more in (
        (Requirements(old_logprobs="rollout"), set()),
        (Requirements(old_logprobs="rollout", critic=True), {c.VALUES, c.RETURNS}),
        (Requirements(old_logprobs="actor_fwd", reference=True), {c.OLD_LOGPROBS, c.REFERENCE_LOGPROBS}),
        (Requirements(old_logprobs="rollout", teacher=teacher), {c.TEACHER_LOGPROBS}),
        (
            Requirements(old_logprobs="rollout", teacher=top),
            {c.TEACHER_LOGPROBS, c.TEACHER_TOP_IDS, c.TEACHER_TOP_LOGPROBS},
        ),
    ):
        columns = train_columns(requirements, routing_replay=False, truncates=False)
        assert len(columns) == len(set(columns)) and set(columns) == plain | more
        columns = train_columns(requirements, routing_replay=True, truncates=True)
        assert set(columns) == plain | more | {c.ROUTED_EXPERTS, c.KEPT_TOKENS}


class CoreBus:
    """The bus's state machine behind the calls that the role makes; a call that must wait times out at once."""

    def __init__(self, core: BusCore) -> None:
        self._core = core

    def lease(self, request: LeaseRequest, *, timeout_s: float) -> Lease:
        lease = self._core.lease(request)
        if lease is None:
            raise BusTimeout(f"nothing for {timeout_s} s")
        return lease

    def release(self, lease_ids: Sequence[int], *, timeout_s: float) -> None:
        self._core.release(lease_ids)

    def progress(self, *, timeout_s: float) -> BusProgress:
        return self._core.progress()


def whole_step(core: BusCore) -> list[str]:
    bus: Any = CoreBus(core)
    lease = lease_whole_step(bus, for_worker(groups=2), timeout_s=0.05, slice_s=0.01)
    core.write(lease.lease_id, {row.group_uid: {"advantages": b"x"} for row in lease.rows})
    return [row.group_uid for row in lease.rows]


def test_a_whole_step_is_waited_for() -> None:
    core = make_core(max_staleness=0)
    first, second = core.admit(2)
    core.put([make_row(first)])
    with pytest.raises(BusTimeout):
        whole_step(core)
    assert not core.leases  # what it looked at went back
    core.put([make_row(second)])
    assert whole_step(core) == [first.group_uid, second.group_uid]


def test_a_lost_groups_replacement_need_not_wait_for_company() -> None:
    """One of a step's groups ages out after it got its advantages; only its replacement comes until the step ends."""
    core = make_core(max_staleness=1)
    old, on_policy, *later = core.admit(4)
    core.put([make_row(old), make_row(on_policy)])
    whole_step(core)
    core.put([make_row(one) for one in later])
    whole_step(core)
    lease = core.lease(for_actor(0))
    assert lease is not None
    core.ack([lease.lease_id], step=0, dropped={})
    # Of step 1's two groups the trainer holds one; the other is lost with its advantages.
    held = core.lease(for_actor(1, groups=1))
    assert held is not None
    lost = next(uid for uid, group in core.groups.items() if group.actor_step is None)
    core._end_as_dropped(core.groups[lost], dict.fromkeys(core.groups[lost].uids, "lost"))
    replacement = core.admit(1)[0]
    core.put([make_row(replacement, version=1)])
    assert whole_step(core) == [replacement.group_uid]
    rest = core.lease(for_actor(1, groups=1))
    assert rest is not None and [row.group_uid for row in rest.rows] == [replacement.group_uid]
