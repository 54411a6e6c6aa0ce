"""Tracks references to media items: the tensors of an item are stored as long as the item has a reference.

In this module, a name is a reference, and an item with references is named. Rollout workers reference the items that
they use. Complete groups reference the items of their trees. Leases reference the items of their groups, because a
group may end as stale while another task still computes with the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

Kind = Literal["worker", "earlier worker", "group", "lease"]
Name = tuple[Kind, int | str]


class NamedMedia:
    """Stores the digests and sizes of the items with references. It does not store tensors."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._names: dict[str, set[Name]] = {}  # by digest
        self._items: dict[Name, dict[str, None]] = {}  # reference → its items, in order
        self._sizes: dict[str, int] = {}
        self._unnamed: dict[str, None] = {}
        self._lost: dict[Name, set[str]] = {}  # lost worker → open groups that need the worker's references

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, digest: object) -> bool:
        return digest in self._names

    def take_unnamed(self) -> list[str]:
        """Returns the items without references, each item once. The caller removes their tensors."""
        if not self._unnamed:
            return []
        taken, self._unnamed = list(self._unnamed), {}
        return taken

    # -- rollout workers ------------------------------------------------------------------------------------------
    def hold(self, worker: int, items: Mapping[str, int]) -> None:
        """Adds references of a rollout worker to items (digest → bytes)."""
        self._name(("worker", worker), items)

    def release_items(self, worker: int, digests: Iterable[str]) -> None:
        """Removes the worker's references to these items."""
        self._forget(("worker", worker), digests)

    def lose_worker(self, worker: int, *, until_ended: Iterable[str]) -> None:
        """Removes all references of a lost worker as soon as all groups in ``until_ended`` are complete or ended."""
        held: Name = ("worker", worker)
        earlier: Name = ("earlier worker", worker)
        waits_for = set(until_ended)
        if waits_for:
            self._name(earlier, {digest: self._sizes[digest] for digest in self._items.get(held, ())})
            self._lost[earlier] = waits_for  # includes open groups of earlier lost processes of this worker
        else:
            self._forget_all(earlier)
        self._forget_all(held)

    # -- groups and leases ------------------------------------------------------------------------------------------
    def enter_group(self, uid: str, items: Mapping[str, int]) -> None:
        """Adds references of a complete group to its items."""
        self._name(("group", uid), items)
        self._leave_flight(uid)

    def end_group(self, uid: str) -> None:
        """Removes the references of a group."""
        self._forget_all(("group", uid))
        self._leave_flight(uid)

    def lease(self, lease_id: int, group_uids: Iterable[str]) -> None:
        """Adds references of a lease to the items of its groups."""
        for uid in group_uids:
            items = self._items.get(("group", uid), ())
            self._name(("lease", lease_id), {digest: self._sizes[digest] for digest in items})

    def end_lease(self, lease_id: int) -> None:
        """Removes the references of a lease."""
        self._forget_all(("lease", lease_id))

    def end_groups_and_leases(self) -> None:
        """Removes the references of all groups, leases and lost workers. The references of live workers stay."""
        self._lost.clear()
        for name in [name for name in self._items if name[0] != "worker"]:
            self._forget_all(name)

    def _leave_flight(self, uid: str) -> None:
        for name, groups in list(self._lost.items()):
            groups.discard(uid)
            if not groups:
                self._forget_all(name)

    # -- names ----------------------------------------------------------------------------------------------------
    def _name(self, name: Name, items: Mapping[str, int]) -> None:
        for digest, nbytes in items.items():
            if digest not in self._names:
                self._names[digest] = set()
                self._sizes[digest] = nbytes
                self.nbytes += nbytes
                self._unnamed.pop(digest, None)
            self._names[digest].add(name)
            self._items.setdefault(name, {})[digest] = None

    def _forget_all(self, name: Name) -> None:
        self._lost.pop(name, None)
        self._forget(name, list(self._items.get(name, ())))

    def _forget(self, name: Name, digests: Iterable[str]) -> None:
        items = self._items.get(name, {})
        for digest in digests:
            if digest not in items:
                continue
            del items[digest]
            names = self._names[digest]
            names.remove(name)
            if not names:
                del self._names[digest]
                self.nbytes -= self._sizes.pop(digest)
                self._unnamed[digest] = None
        if not items:
            self._items.pop(name, None)
