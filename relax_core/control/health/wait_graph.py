"""Builds the wait graph, which says which worker waits for which worker, from the statuses of workers and bus."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_core.contracts.bus import BusWait
from relax_core.control.health.heartbeats import Beat
from relax_core.roles.process.role_context import BUS, worker_name

SILENT_S = 3.0  # the waits of a worker that has not answered for so long are unknown


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Holds the chain of waits from one worker.

    ``lines`` describes all workers and the bus. ``blockers`` are the workers that do not answer and the workers at
    which the chain ends. If the chain is a cycle, they are all of its members.
    """

    lines: list[str]
    blockers: list[str]


def chain(beats: Mapping[str, Beat], bus: Sequence[BusWait] | str, *, start: str) -> Chain:
    """Follows the waits from the worker ``start``. ``bus`` holds the bus's waits, or says why it does not answer."""
    edges = {name: _owed_by(beat, bus, beats) for name, beat in beats.items()}
    frozen = [beat.name for beat in beats.values() if beat.silent_s > SILENT_S]
    lines = [line for beat in beats.values() for line in _lines(beat)]
    if isinstance(bus, str):
        lines.append(f"{BUS}: {bus}")
    else:
        lines += [f"{BUS}: {wait.text}; owed by {', '.join(wait.owed_by)}" for wait in bus]
    return Chain(lines=lines, blockers=list(dict.fromkeys([*frozen, *_ends(edges, start)])))


def _owed_by(beat: Beat, bus: Sequence[BusWait] | str, beats: Mapping[str, Beat]) -> list[str]:
    """Returns the names of the workers for which this worker waits; none if it does not answer."""
    status = beat.status
    if beat.life != "alive" or status is None or beat.silent_s > SILENT_S or status.state in ("done", "failed"):
        return []
    owed: dict[str, None] = {}
    for wait in status.waits:
        if wait.on != BUS:
            owed |= dict.fromkeys(_workers(wait.on, beats))
            continue
        inside = [] if isinstance(bus, str) else [one for one in bus if worker_name(one.task, one.worker) == beat.name]
        if not inside:
            owed[BUS] = None  # the bus has not received the call yet, or does not answer
        for one in inside:
            owed |= dict.fromkeys(name for role in one.owed_by for name in _workers(role, beats))
    return list(owed)


def _workers(role: str, beats: Mapping[str, Beat]) -> list[str]:
    """Returns the workers of a role, or the one worker of that name. The trainer's lead stands for all of its ranks."""
    if role == "actor":
        return ["actor-0"]
    return [name for name in beats if name.rpartition("-")[0] == role] or [role]


def _ends(edges: Mapping[str, Sequence[str]], start: str) -> list[str]:
    """Returns the workers reached from ``start`` that wait for no worker, or for themselves.

    If there are none, it returns all reached workers, because they wait in a cycle.
    """
    reached: dict[str, None] = {start: None}
    queue = [start]
    while queue:
        for name in edges.get(queue.pop(), ()):
            if name not in reached:
                reached[name] = None
                queue.append(name)
    return [name for name in reached if not edges.get(name) or name in edges[name]] or list(reached)


def _lines(beat: Beat) -> list[str]:
    status = beat.status
    if status is None or beat.life != "alive":
        return [f"{beat.name}: {beat.life} {beat.cause.partition(chr(10))[0]}".rstrip()]
    silent = f", silent for {beat.silent_s:.0f} s" if beat.silent_s > SILENT_S else ""
    head = f"{beat.name}: {status.state} {status.detail} for {time.time() - status.since:.0f} s{silent}"
    now = time.time()
    return [head, *(f"{beat.name}: waits {now - w.since:.0f} s on {w.on} for {w.what}" for w in status.waits)]
