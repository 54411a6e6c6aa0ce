"""Makes groups, settings and a clock for the bus's tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_core.bus.ledger import Ledger
from relax_core.bus.replay_buffer import ReplayBuffer
from relax_core.bus.settings import BusSettings
from relax_core.contracts.bus import Admission, Group, LeaseRequest
from relax_core.contracts.tree import sample_uid


class Clock:
    """A clock in seconds that only the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_settings(**changes: Any) -> BusSettings:
    values: dict[str, Any] = {
        "groups_per_step": 2,
        "group_size": 2,
        "max_staleness": 1,
        "on_stale": "drop",
        "total_steps": 100,
        "inline_bytes": 1024,
        "max_row_bytes": 1 << 22,
    }
    return BusSettings(**(values | changes))


def make_core(*, clock: Clock | None = None, **changes: Any) -> ReplayBuffer:
    settings = make_settings(**changes)
    return ReplayBuffer(settings, ledger=Ledger(group_size=settings.group_size, journal=None), clock=clock or Clock())


def uids_of(admission: Admission, group_size: int = 2) -> list[str]:
    return [sample_uid(admission.group_uid, number) for number in range(group_size)]


def make_row(
    admission: Admission,
    *,
    version: int | None = None,
    group_size: int = 2,
    dropped: Mapping[str, str] | None = None,
    columns: Mapping[str, bytes] | None = None,
) -> Group:
    """Returns a complete group of the admission. Every sample has ``version`` (default: the admission's min_version).

    Column "a" holds the group's uid.
    """
    dropped = dict(dropped or {})
    kept = [uid for uid in uids_of(admission, group_size) if uid not in dropped]
    return Group(
        group_uid=admission.group_uid,
        index=admission.index,
        uids=kept,
        versions=[admission.min_version if version is None else version] * len(kept),
        columns=dict(columns or {"a": admission.group_uid.encode()}),
        dropped=dropped,
    )


def for_actor(step: int, *, groups: int = 2, at_least: int | None = None, lease_s: float = 600.0) -> LeaseRequest:
    return LeaseRequest(
        task="actor",
        columns=("a",),
        max_groups=groups,
        min_groups=groups if at_least is None else at_least,
        step=step,
        lease_s=lease_s,
    )


def for_worker(
    columns: tuple[str, ...] = ("a",), *, task: str = "advantages", groups: int = 1, lease_s: float = 600.0
) -> LeaseRequest:
    return LeaseRequest(task=task, columns=columns, max_groups=groups, lease_s=lease_s)
