"""Warns about this machine before a run starts: too little shared memory, and network interfaces that do not exist."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.host.interfaces import GLOO_INTERFACES, missing_interface, network_interfaces
from relax_core.plan.memory.memory_cpu import SHARED_ITEMS
from relax_core.plan.memory.memory_terms import Holder, size_words
from relax_core.plan.memory.transfers import Transfers

NCCL_INTERFACES = "NCCL_SOCKET_IFNAME"


def host_warnings(
    config: RelaxConfig, memory: Sequence[Holder], transfers: Transfers, *, shared_memory: Path
) -> Iterator[str]:
    """Yields warnings for a run on this machine."""
    yield from _shared_memory_warning(memory, transfers, folder=shared_memory)
    names = os.environ.get(GLOO_INTERFACES, "")
    if names and (problem := missing_interface(names)) is not None:
        yield problem
    names = os.environ.get(NCCL_INTERFACES, "")
    if config.placement.gpus_per_node > 0 and names and not _nccl_matches(names):
        yield (
            f"{NCCL_INTERFACES}={names} matches no network interface of this machine "
            f"({', '.join(network_interfaces())}). Unset it or name another interface."
        )


def _shared_memory_warning(memory: Sequence[Holder], transfers: Transfers, *, folder: Path) -> Iterator[str]:
    items = sum(holder.peak.bytes for holder in memory if holder.name == SHARED_ITEMS)
    need = transfers.published_bytes + items
    try:
        free = shutil.disk_usage(folder).free
    except FileNotFoundError:
        yield f"{folder} does not exist, but published weights need {size_words(need)} there. Mount a tmpfs there."
        return
    if free < need:
        of_items = f" and media items {size_words(items)}" if items else ""
        yield (
            f"{folder} has {size_words(free)} free, but {transfers.published_bytes // transfers.sync_bytes} weight "
            f"versions need {size_words(transfers.published_bytes)}{of_items}. Free some of it, or make it larger: "
            f"mount -o remount,size=SIZE {folder}; in a container: --shm-size=SIZE."
        )


def _nccl_matches(names: str) -> bool:
    """Reads NCCL's syntax: prefixes, separated by commas; ``=`` wants whole names, ``^`` excludes."""
    excludes, names = names.startswith("^"), names.removeprefix("^")
    exact, names = names.startswith("="), names.removeprefix("=")
    given = [name for name in names.split(",") if name]

    def matches(interface: str) -> bool:
        return any(interface == name if exact else interface.startswith(name) for name in given)

    return any(matches(interface) != excludes for interface in network_interfaces())
