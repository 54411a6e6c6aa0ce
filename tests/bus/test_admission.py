"""Compares the admission rule with an independent formula for the group at each position. Also tests losses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relax_core.bus.staleness import plan_admissions
from tests.bus.make_rows import for_actor, make_core, make_row, make_settings


def by_position(
    position: int, *, version: int, slots_left: int, gps: int, staleness: int, total_steps: int
) -> int | None:
    """Returns the ``min_version`` of the group at this position without losses, or None if the group must wait."""
    step = version if position < slots_left else version + 1 + (position - slots_left) // gps
    if step > version + staleness + 1 or step >= total_steps:
        return None
    return max(0, step - staleness)


@given(
    version=st.integers(0, 9),
    gps=st.integers(1, 5),
    staleness=st.integers(0, 4),
    data=st.data(),
)
def test_without_losses_the_place_in_the_queue_decides(
    version: int, gps: int, staleness: int, data: st.DataObject
) -> None:
    slots_left = data.draw(st.integers(0, gps))
    expected: list[int] = []
    while True:
        fits = by_position(
            len(expected), version=version, slots_left=slots_left, gps=gps, staleness=staleness, total_steps=10
        )
        if fits is None:
            break
        expected.append(fits)
    outstanding = data.draw(st.integers(0, len(expected)))
    queue = expected[:outstanding]
    planned = plan_admissions(
        queue,
        make_settings(groups_per_step=gps, max_staleness=staleness, total_steps=10),
        version=version,
        slots_left=slots_left,
        max_groups=1000,
    )
    assert planned == expected[outstanding:]


def test_a_lost_group_is_replaced_by_one_that_may_start_now() -> None:
    """At staleness 0 the groups of step 1 wait for version 1, so step 0 needs another group of version 0."""
    core = make_core(max_staleness=0)
    first, second, third, fourth = core.admit(100)
    assert [a.min_version for a in (first, second, third, fourth)] == [0, 0, 1, 1]
    core.put([make_row(first)])
    core.drop(second.group_uid, reason="engine failed")
    (replacement,) = core.admit(100)
    assert (replacement.index, replacement.min_version) == (4, 0)
    core.put([make_row(replacement)])
    lease = core.lease(for_actor(0))
    assert lease is not None
    assert [row.index for row in lease.rows] == [0, 4]


def test_rows_that_the_actor_holds_take_their_slots_with_them() -> None:
    core = make_core(max_staleness=1)
    admissions = core.admit(100)
    core.put([make_row(admission) for admission in admissions[:4]])
    lease = core.lease(for_actor(0))
    assert lease is not None
    assert core.admit(100) == []
    core.drop(admissions[4].group_uid, reason="engine failed")
    assert [a.min_version for a in core.admit(100)] == [1]
    core.ack([lease.lease_id], step=0, dropped={})
    assert [a.min_version for a in core.admit(100)] == [2, 2]


def test_credits_count_the_groups_that_the_weights_in_force_may_start() -> None:
    core = make_core(max_staleness=1)
    assert core.credits() == 4
    core.admit(3)
    assert core.credits() == 1
    core.admit(3)
    assert core.credits() == 0
