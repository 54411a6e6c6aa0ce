"""What a call must satisfy; each check raises ValueError with the key, the value and the fix."""

from __future__ import annotations

from collections.abc import Sequence

from relax_core.contracts.bus import GroupRow, LeaseRequest

ACTOR = "actor"


def check_lease_request(request: LeaseRequest, *, version: int, groups_per_step: int) -> None:
    if not 1 <= request.min_groups <= request.max_groups or request.lease_s <= 0:
        raise ValueError(
            f"bus: a lease wants 1 <= min_groups <= max_groups and lease_s > 0, not min_groups={request.min_groups}, "
            f"max_groups={request.max_groups}, lease_s={request.lease_s}"
        )
    if request.task != ACTOR:
        return
    if request.step is None or request.step < version:
        raise ValueError(
            f"bus: the actor asked for rows of step {request.step}, version {version} is in force: "
            f"give step={version} or later"
        )
    if request.min_groups > groups_per_step:
        raise ValueError(
            f"bus: the actor asked for min_groups={request.min_groups}, a step has groups_per_step={groups_per_step}: "
            "ask for at most those"
        )


def check_read(lease_id: int, group_uids: Sequence[str], *, held: Sequence[str]) -> None:
    """``held``: the groups of the lease."""
    foreign = sorted(set(group_uids).difference(held))
    if foreign:
        raise ValueError(
            f"bus: lease {lease_id} does not hold {', '.join(foreign[:4])}: read the groups that the lease came with"
        )


def check_samples(row: GroupRow, issued: Sequence[str], *, version: int) -> None:
    """``issued``: the uids that the group's admission opened. ``version``: the weights in force; engines may have the
    next ones before the trainer acknowledges its step."""
    told = [*row.uids, *row.dropped]
    if len(told) != len(issued) or set(told) != set(issued):
        wrong = sorted(set(told) ^ set(issued)) or sorted({uid for uid in told if told.count(uid) > 1})
        raise ValueError(
            f"bus: row {row.group_uid} must name each of its {len(issued)} samples once, as kept or as dropped; "
            f"wrong: {', '.join(wrong[:4])}"
        )
    if len(row.versions) != len(row.uids):
        raise ValueError(
            f"bus: row {row.group_uid} has {len(row.uids)} samples and {len(row.versions)} versions: give one each"
        )
    if max(row.versions, default=0) > version + 1:
        raise ValueError(
            f"bus: row {row.group_uid} names weights {max(row.versions)}, but version {version} is in force: no engine "
            "can have them. Does an engine serve another run's weights?"
        )


def check_size(group_uid: str, nbytes: int, *, max_row_bytes: int) -> None:
    if nbytes > max_row_bytes:
        raise ValueError(
            f"bus: row {group_uid} has {nbytes} bytes, bus.max_row_bytes={max_row_bytes}: "
            "raise it or make the row smaller"
        )
