"""Checks the arguments of calls to the bus. Each check raises ValueError with the key, the value and the fix."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from relax_core.contracts.bus import Group, LeaseRequest
from relax_core.contracts.columns import payload_bytes
from relax_core.contracts.media_file import is_digest
from relax_core.contracts.tree import group_uid

ACTOR = "actor"


def check_admit(max_groups: int) -> None:
    """Refuses a call for less than one group."""
    if max_groups < 1:
        raise ValueError(f"bus: admit was asked for max_groups={max_groups}: ask for 1 or more")


def check_lease_request(request: LeaseRequest, *, version: int, groups_per_step: int) -> None:
    """Refuses a request with impossible counts, or one of the actor for a step that is over."""
    if not 1 <= request.min_groups <= request.max_groups or request.lease_s <= 0:
        raise ValueError(
            f"bus: a lease wants 1 <= min_groups <= max_groups and lease_s > 0, not min_groups={request.min_groups}, "
            f"max_groups={request.max_groups}, lease_s={request.lease_s}"
        )
    if request.task != ACTOR:
        return
    if request.step is None or request.step < version:
        raise ValueError(
            f"bus: the actor asked for groups of step {request.step}, version {version} is in force: "
            f"give step={version} or later"
        )
    if request.min_groups > groups_per_step:
        raise ValueError(
            f"bus: the actor asked for min_groups={request.min_groups}, a step has groups_per_step={groups_per_step}: "
            "ask for at most those"
        )


def check_read(lease_id: int, group_uids: Sequence[str], *, held: Sequence[str]) -> None:
    """Refuses groups that are not among ``held``, the groups of the lease."""
    unknown = sorted(set(group_uids).difference(held))
    if unknown:
        raise ValueError(
            f"bus: lease {lease_id} does not hold {', '.join(unknown[:4])}: read the groups that the lease came with"
        )


def check_write(lease_id: int, group_uids: Iterable[str], *, task: str, held: Sequence[str]) -> None:
    """Refuses a write to the actor's lease, or one whose groups are not exactly ``held``, the groups of the lease."""
    if task == ACTOR:
        raise ValueError(f"bus: lease {lease_id} is the actor's: end it with ack or release, not write")
    if wrong := sorted(set(group_uids) ^ set(held)):
        raise ValueError(
            f"bus: a write must give columns for each group of lease {lease_id}; wrong: {', '.join(wrong[:4])}"
        )


def check_ack_step(step: int, *, version: int) -> None:
    """Refuses an acknowledgement of another step than the current one."""
    if step != version:
        raise ValueError(f"bus: ack of step {step}, but version {version} is in force: ack step {version}")


def check_dropped(dropped: Iterable[str], leased: Iterable[Sequence[str]]) -> None:
    """Refuses dropped samples that are not among ``leased``, the sample uids of each leased group."""
    if unknown := sorted(set(dropped).difference(*leased)):
        raise ValueError(f"bus: ack drops samples that are not in its leases: {', '.join(unknown[:4])}")


def check_issued(uid: str, index: int | None, *, issued: int) -> None:
    """Refuses a group that is not among the first ``issued`` ones. If ``index`` is None, the uid gives it."""
    if index is None:
        index = int(uid[1:]) if uid[1:].isdecimal() else -1
    if not (0 <= index < issued and uid == group_uid(index)):
        raise ValueError(f"bus: group {uid!r} (index {index}) was never admitted: use the admission's uid and index")


def check_samples(group: Group, issued: Sequence[str], *, version: int) -> None:
    """Refuses a group whose samples or versions contradict its admission.

    ``issued`` lists the uids that the admission opened. ``version`` is the version in force; an engine may have the
    next version before the trainer acknowledges its step, so ``version + 1`` is allowed.
    """
    named = [*group.uids, *group.dropped]
    if len(named) != len(issued) or set(named) != set(issued):
        wrong = sorted(set(named) ^ set(issued)) or sorted({uid for uid in named if named.count(uid) > 1})
        raise ValueError(
            f"bus: group {group.group_uid} must name each of its {len(issued)} samples once, as kept or as dropped; "
            f"wrong: {', '.join(wrong[:4])}"
        )
    if len(group.versions) != len(group.uids):
        raise ValueError(
            f"bus: group {group.group_uid} has {len(group.uids)} samples and {len(group.versions)} versions: give one "
            "version for each sample"
        )
    if max(group.versions, default=0) > version + 1:
        raise ValueError(
            f"bus: group {group.group_uid} names weights {max(group.versions)}, but version {version} is in force: no "
            "engine can have them. Does an engine serve another run's weights?"
        )


def check_size(group_uid: str, columns: Mapping[str, bytes], media: Mapping[str, int], *, max_row_bytes: int) -> None:
    """Refuses a group whose payloads and media items (digest → bytes) have more than ``max_row_bytes`` bytes."""
    media_bytes = sum(media.values())
    nbytes = payload_bytes(columns) + media_bytes
    if nbytes > max_row_bytes:
        of_media = f", {media_bytes} of them in media items" if media else ""
        raise ValueError(
            f"bus: group {group_uid} has {nbytes} bytes{of_media}, the largest group has {max_row_bytes}: "
            "raise it or make the group smaller"
        )


def check_media(group: Group, named: Container[str]) -> None:
    """Refuses a group that places a media item that is not ``named`` by anybody."""
    if lost := [digest for digest in group.media if digest not in named]:
        raise ValueError(
            f"bus: group {group.group_uid} places media item {lost[0]}, which nobody holds, so that its tensors may be "
            "gone: hold an item until the groups that place it were put"
        )


def check_digests(digests: Iterable[str]) -> None:
    """Refuses names that are no digests, because the name of a file is made from each."""
    if wrong := [digest for digest in digests if not is_digest(digest)]:
        raise ValueError(f"bus: {wrong[0]!r} is no digest of a media item: give 32 hexadecimal digits")
