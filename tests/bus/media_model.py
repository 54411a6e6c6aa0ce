"""A model of the media items in use and their users. Tests compare it with a bus."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from relax_core.bus.replay_buffer import ReplayBuffer
from relax_core.contracts.bus import Group, Lease

DIGESTS = [f"{number:032x}" for number in range(6)]
NBYTES = {digest: 100 + number for number, digest in enumerate(DIGESTS)}


class MediaModel:
    """Holds the stored items and their users."""

    def __init__(self) -> None:
        self.stored: set[str] = set()
        self.held: dict[int, set[str]] = defaultdict(set)  # items that each rollout worker holds
        # The items of a lost worker, and its groups in flight at the time of the loss.
        self.lost: dict[int, tuple[set[str], set[str]]] = {}
        self.leased: dict[int, set[str]] = {}  # by lease id

    def hold(self, core: ReplayBuffer, worker: int, digests: Collection[str]) -> None:
        core.hold({digest: NBYTES[digest] for digest in digests}, worker=worker)
        self.held[worker].update(digests)
        self.stored.update(digests)

    def release_items(self, core: ReplayBuffer, worker: int, digests: Collection[str]) -> None:
        core.release_items(list(digests), worker=worker)
        self.held[worker].difference_update(digests)

    def lose_worker(self, worker: int, in_flight: Iterable[str]) -> None:
        earlier = self.lost.get(worker, (set(), set()))[0]
        self.lost[worker] = (earlier | self.held.pop(worker, set()), set(in_flight))

    def lease(self, lease: Lease, rows: dict[str, Group]) -> None:
        self.leased[lease.lease_id] = {digest for row in lease.rows for digest in rows[row.group_uid].media}

    def go_back(self) -> None:
        """Applies a restore of the bus: removes groups and leases. Workers keep the items that they hold."""
        self.lost, self.leased = {}, {}

    def check(self, core: ReplayBuffer, rows: dict[str, Group], in_flight: Collection[str]) -> None:
        """Removes unused items like the bus, and compares the remaining items with the items in use."""
        self.stored.difference_update(core.media.take_unnamed())
        self.lost = {worker: loss for worker, loss in self.lost.items() if not loss[1].isdisjoint(in_flight)}
        self.leased = {lease: digests for lease, digests in self.leased.items() if lease in core.leases}
        open_groups = [set(rows[uid].media) for uid in core.groups if uid in rows and uid not in in_flight]
        needed = set().union(
            *self.held.values(), *(items for items, _ in self.lost.values()), *self.leased.values(), *open_groups
        )
        assert needed <= self.stored, "an item in use was removed"
        assert self.stored <= needed, "an unused item is stored"
        progress = core.progress()
        assert (progress.media_items, progress.media_bytes) == (len(needed), sum(NBYTES[item] for item in needed))
