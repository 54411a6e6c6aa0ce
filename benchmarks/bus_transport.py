"""Measures round trips and throughput of the data bus for every backend: see `benchmarks.bus`.

The upper bound is memcpy. The backends and memcpy alternate in one Ray session, so machine load affects all equally.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from relax_core.bus.factory import BACKENDS, create_bus
from relax_core.bus.settings import BusSettings
from relax_core.config.compose import load_config
from relax_core.config.schema import BusConfig
from relax_core.contracts.bus import Admission, Bus, Group, LeaseRequest
from relax_core.contracts.tree import sample_uid

GROUP_SIZE = 16
T = 60.0
STEPS_WITHOUT_END = 10**9
OBJECT_STORE_BYTES = 512 << 20
WARM_UP_BYTES = 1 << 30  # sent over each bus first, because unused memory of Ray's store is slow
PARTS = ("put", "lease", "ack")


def make_row(admission: Admission, *, version: int, columns: dict[str, bytes]) -> Group:
    uids = [sample_uid(admission.group_uid, place) for place in range(GROUP_SIZE)]
    return Group(
        group_uid=admission.group_uid,
        index=admission.index,
        uids=uids,
        versions=[version] * GROUP_SIZE,
        columns=columns,
    )


def bus_settings(groups_per_step: int, **media: Any) -> BusSettings:
    return BusSettings(
        groups_per_step=groups_per_step,
        group_size=GROUP_SIZE,
        max_staleness=0,
        on_stale="drop",
        total_steps=STEPS_WITHOUT_END,
        **media,
    )


def for_actor(step: int, groups: int, columns: dict[str, bytes]) -> LeaseRequest:
    return LeaseRequest(task="actor", columns=tuple(columns), max_groups=groups, min_groups=groups, step=step)


@contextmanager
def local_ray(folder: Path) -> Iterator[None]:
    """Starts Ray with token authentication and shuts it down at the end."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    import ray

    ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=str(folder),
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


class Line:
    """Measures one backend: cycles of put, lease and ack on a bus with the settings of conf/bus."""

    def __init__(self, bus: Bus, *, groups: int, columns: dict[str, bytes]) -> None:
        self._bus = bus
        self._groups = groups
        self._columns = columns
        self._step = 0
        self.seconds: list[tuple[float, float, float]] = []  # of put, lease and ack in each cycle

    def run(self, cycles: int, *, counts: bool = True) -> None:
        """Runs cycles and records their times, unless ``counts`` is False (warm-up)."""
        for _ in range(cycles):
            seconds = asyncio.run(self._cycle())
            if counts:
                self.seconds.append(seconds)

    async def _cycle(self) -> tuple[float, float, float]:
        step, bus = self._step, self._bus
        admissions = await bus.admit(self._groups, timeout_s=T)
        rows = [make_row(admission, version=step, columns=self._columns) for admission in admissions]
        start = time.perf_counter()
        await bus.put(rows, timeout_s=T)
        after_put = time.perf_counter()
        lease = await bus.lease(for_actor(step, self._groups, self._columns), timeout_s=T)
        after_lease = time.perf_counter()
        await bus.ack([lease.lease_id], step=step, dropped={}, timeout_s=T)
        self._step += 1
        return after_put - start, after_lease - after_put, time.perf_counter() - after_lease

    @property
    def table(self) -> np.ndarray:
        """Returns the seconds of put, lease and ack, ``[cycles, 3]``."""
        return np.array(self.seconds)


@cache
def _settings(backend: str) -> BusConfig:
    return load_config([f"bus={backend}"]).bus


@contextmanager
def lines(folder: Path, name: str, *, groups: int, columns: dict[str, bytes]) -> Iterator[dict[str, Line]]:
    """Yields a `Line` with a new bus for every backend."""
    with ExitStack() as ends:
        made: dict[str, Line] = {}
        for backend in BACKENDS:
            bus = create_bus(
                _settings(backend),
                bus_settings(groups),
                ledger_path=folder / f"{name}-{backend}.sqlite",
                name=f"{name}-{backend}",
                namespace="benchmark",
                socket_folder=folder,
            )
            ends.callback(bus.terminate)
            ends.callback(lambda bus: asyncio.run(bus.close(reason="the benchmark is over", timeout_s=T)), bus)
            made[backend] = Line(bus, groups=groups, columns=columns)
        yield made


def measure_round_trips(folder: Path, *, rounds: int) -> None:
    """Measures round trips at the demo's size: 8 groups of 16 samples with 7 small columns."""
    columns = {f"column{number}": os.urandom(512) for number in range(7)}
    print("round trips of 8 groups x 16 samples, 3.5 KB a group (ms: p50, p99)")
    with lines(folder, "round_trips", groups=8, columns=columns) as made:
        _take_turns(made, rounds=rounds, cycles=20)
        for backend, line in made.items():
            milliseconds = line.table * 1e3
            named = [*zip(PARTS, milliseconds.T, strict=True), ("together", milliseconds.sum(axis=1))]
            cells = [f"{part} {np.percentile(times, 50):6.2f} {np.percentile(times, 99):6.2f}" for part, times in named]
            print(f"  {backend:<14} {'   '.join(cells)}")


def measure_small_rows(folder: Path, *, rounds: int) -> None:
    print("rows of 2 KB, 64 at a time, through put, lease and ack")
    with lines(folder, "small_rows", groups=64, columns={"payload": os.urandom(2048)}) as made:
        _take_turns(made, rounds=rounds, cycles=10)
        for backend, line in made.items():
            rate = 64 / np.median(line.table.sum(axis=1))
            print(f"  {backend:<14} {rate:7,.0f} rows/s ({rate * GROUP_SIZE:,.0f} samples/s)")


def measure_large_rows(folder: Path, *, nbytes: int, rounds: int) -> None:
    """Measures large rows and two bounds: memcpy into new memory and into warm memory.

    Many puts also copy into newly allocated memory.
    """
    groups = 32
    sources = [np.frombuffer(os.urandom(nbytes), dtype=np.uint8) for _ in range(groups)]
    warm = [np.zeros(nbytes, dtype=np.uint8) for _ in range(groups)]
    bounds: dict[str, list[float]] = {"memcpy, new": [], "memcpy, warm": []}
    with lines(folder, f"large_{nbytes}", groups=groups, columns={"pixels": os.urandom(nbytes)}) as made:
        for line in made.values():
            line.run(WARM_UP_BYTES // (nbytes * groups), counts=False)
        for _ in range(rounds):
            _take_turns(made, rounds=1, cycles=4)
            for bound, seconds in bounds.items():
                start = time.perf_counter()
                if bound == "memcpy, new":
                    copies = [source.copy() for source in sources]
                    del copies
                else:
                    for target, source in zip(warm, sources, strict=True):
                        np.copyto(target, source)
                seconds.append(time.perf_counter() - start)
        rates = {bound: nbytes * groups / float(np.median(seconds)) / 1e9 for bound, seconds in bounds.items()}
        print(
            f"rows of {nbytes // 1000} KB, {groups} at a time (GB/s): "
            + ", ".join(f"{bound} {rate:.2f}" for bound, rate in rates.items())
        )
        for backend, line in made.items():
            put, lease, both = nbytes * groups / np.median(_put_lease_both(line.table), axis=0) / 1e9
            print(
                f"  {backend:<14} put {put:5.2f}   lease {lease:6.2f}   put + lease {both:5.2f} = "
                f"{both / rates['memcpy, new']:.2f} of memcpy into new memory, "
                f"{both / rates['memcpy, warm']:.2f} into warm"
            )


def _put_lease_both(table: np.ndarray) -> np.ndarray:
    return np.column_stack((table[:, 0], table[:, 1], table[:, 0] + table[:, 1]))


def _take_turns(made: dict[str, Line], *, rounds: int, cycles: int) -> None:
    for line in made.values():
        line.run(cycles, counts=False)
    for _ in range(rounds):
        for line in made.values():
            line.run(cycles)
