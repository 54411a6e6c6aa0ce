"""Kills agents that exceed the memory limit or the process limit."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from relax_core.rollout.agent_processes.agent_process import AgentProcess

CHECK_S = 1.0
MEMORY_GIB = 2.0  # limit of the resident memory of an agent with its descendants
PROCESSES = 64  # limit of an agent's concurrent processes
_GIB = 2**30
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class TreeSize:
    """Holds the number of living descendants of a process and their total resident memory in bytes.

    A page that several processes share is counted once per process.
    """

    processes: int
    memory: int


class AgentLimits:
    """Holds the running agents, and kills agents above a limit. `watch` must run concurrently."""

    def __init__(self) -> None:
        self.running: set[AgentProcess] = set()

    async def watch(self) -> None:
        """Checks all agents every `CHECK_S` seconds, until it is cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            if self.running:
                sizes = await asyncio.to_thread(tree_sizes, [process.guard_pid for process in self.running])
                for process in list(self.running):
                    if (size := sizes.get(process.guard_pid)) is not None and (why := self._over(size)):
                        process.kill(why)

    def _over(self, size: TreeSize) -> str:
        if size.memory > MEMORY_GIB * _GIB:
            used = size.memory / _GIB
            return f"its processes used {used:.2f} GiB, more than {MEMORY_GIB:g}"
        if size.processes > PROCESSES:
            return f"it had {size.processes} processes, more than {PROCESSES}"
        return ""


def tree_sizes(roots: Iterable[int]) -> Mapping[int, TreeSize]:
    """Returns the size of the process tree below each of these processes, from a single scan of /proc."""
    children: dict[int, list[int]] = defaultdict(list)
    memory: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # the process has ended meanwhile
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    pid = int(entry.name)
                    children[int(fields[1])].append(pid)
                    memory[pid] = int(fields[21]) * _PAGE
    sizes = {}
    for root in roots:
        below, rest = [], list(children[root])
        while rest:
            below.append(pid := rest.pop())
            rest += children.get(pid, [])
        sizes[root] = TreeSize(processes=len(below), memory=sum(memory[pid] for pid in below))
    return sizes
