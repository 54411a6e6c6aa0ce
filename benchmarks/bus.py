"""What the data bus costs: ``python -m benchmarks.bus`` (about a minute; ``--quick`` for a look).

Prints round trips at the demo's size, rows and bytes a second against memcpy, and a row's cost as the ledger grows.
"""

from __future__ import annotations

import argparse
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from relax_core.bus.core import BusCore
from relax_core.bus.journal import Journal
from relax_core.bus.ledger import Ledger
from relax_core.bus.settings import BusSettings
from relax_core.config.schema import BusConfig
from relax_core.contracts.bus import Admission, Bus, GroupRow, LeaseRequest
from relax_core.contracts.sample import sample_uid

GROUP_SIZE = 16
INLINE_BYTES = 64 * 1024
T = 60.0
STEPS_WITHOUT_END = 10**9


def make_row(admission: Admission, *, version: int, columns: dict[str, bytes]) -> GroupRow:
    uids = [sample_uid(admission.group_uid, place) for place in range(GROUP_SIZE)]
    return GroupRow(
        group_uid=admission.group_uid,
        index=admission.index,
        uids=uids,
        versions=[version] * GROUP_SIZE,
        columns=columns,
    )


def for_actor(step: int, groups: int, columns: dict[str, bytes]) -> LeaseRequest:
    return LeaseRequest(task="actor", columns=tuple(columns), max_groups=groups, min_groups=groups, step=step)


@contextmanager
def local_ray(folder: Path) -> Iterator[None]:
    """Ray behind a token, with 2 GB of object store."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    import ray

    ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=2 << 30,
        _temp_dir=str(folder),
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def ray_bus(folder: Path, name: str, *, groups: int) -> Iterator[Bus]:
    from relax_core.bus.factory import create_bus

    config = BusConfig(
        name="ray", lease_s=600.0, call_timeout_s=T, inline_bytes=INLINE_BYTES, max_row_bytes=256 * 1024 * 1024
    )
    bus = create_bus(
        config,
        groups_per_step=groups,
        group_size=GROUP_SIZE,
        max_staleness=0,
        on_stale="drop",
        total_steps=STEPS_WITHOUT_END,
        ledger_path=folder / f"{name}.sqlite",
        name=name,
        namespace="benchmark",
    )
    try:
        yield bus
    finally:
        bus.close(reason="the benchmark is over", timeout_s=T)
        bus.terminate()


def run_cycles(bus: Bus, *, steps: int, groups: int, columns: dict[str, bytes]) -> np.ndarray:
    """Seconds of (put, lease, ack), ``[steps, 3]``; the first quarter is warm-up and left out."""
    seconds = np.empty((steps, 3))
    for step in range(steps):
        admissions = bus.admit(groups, timeout_s=T)
        rows = [make_row(admission, version=step, columns=columns) for admission in admissions]
        start = time.perf_counter()
        bus.put(rows, timeout_s=T)
        after_put = time.perf_counter()
        lease = bus.lease(for_actor(step, groups, columns), timeout_s=T)
        after_lease = time.perf_counter()
        bus.ack([lease.lease_id], step=step, dropped={}, timeout_s=T)
        seconds[step] = (after_put - start, after_lease - after_put, time.perf_counter() - after_lease)
    return seconds[steps // 4 :]


def measure_round_trips(folder: Path, *, steps: int) -> None:
    """The demo's size: 8 groups of 16 samples with 7 small columns."""
    columns = {f"column{number}": os.urandom(512) for number in range(7)}
    with ray_bus(folder, "round_trips", groups=8) as bus:
        seconds = run_cycles(bus, steps=steps, groups=8, columns=columns)
    print(f"round trips of 8 groups x 16 samples, 3.5 KB a group, {len(seconds)} cycles (ms)")
    whole = seconds.sum(axis=1)
    for name, values in (*zip(("put", "lease", "ack"), seconds.T, strict=True), ("put + lease + ack", whole)):
        p50, p99 = np.percentile(values * 1e3, (50, 99))
        print(f"  {name:<18} p50 {p50:6.2f}   p99 {p99:6.2f}")


def measure_small_rows(folder: Path, *, steps: int) -> None:
    columns = {"payload": os.urandom(2048)}
    with ray_bus(folder, "small_rows", groups=64) as bus:
        seconds = run_cycles(bus, steps=steps, groups=64, columns=columns)
    rate = 64 / np.median(seconds.sum(axis=1))
    print(
        f"rows of 2 KB, 64 at a time: {rate:,.0f} rows/s ({rate * GROUP_SIZE:,.0f} samples/s) through put, lease, ack"
    )


def memcpy_rate(nbytes: int, *, blocks: int) -> float:
    """GB/s of copying ``blocks`` buffers of ``nbytes`` into fresh memory, as a put has to."""
    sources = [np.frombuffer(os.urandom(nbytes), dtype=np.uint8) for _ in range(blocks)]
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        copies = [source.copy() for source in sources]
        rates.append(nbytes * len(copies) / (time.perf_counter() - start) / 1e9)
    return float(np.median(rates))


def measure_large_rows(folder: Path, *, nbytes: int, steps: int) -> None:
    groups = 32
    columns = {"pixels": os.urandom(nbytes)}
    with ray_bus(folder, f"large_{nbytes}", groups=groups) as bus:
        seconds = np.median(run_cycles(bus, steps=steps, groups=groups, columns=columns), axis=0)
    memcpy = memcpy_rate(nbytes, blocks=groups)
    put, lease = nbytes * groups / seconds[:2] / 1e9
    print(
        f"rows of {nbytes // 1000} KB, {groups} at a time: put {put:.2f} GB/s, lease (zero-copy) {lease:.2f} GB/s, "
        f"memcpy {memcpy:.2f} GB/s; put = {put / memcpy:.2f} memcpy"
    )


class _GrowingLedger:
    """A core with its journal on disk, filled to a number of samples."""

    def __init__(self, path: Path, *, samples: int) -> None:
        settings = BusSettings(
            groups_per_step=8,
            group_size=GROUP_SIZE,
            max_staleness=0,
            on_stale="drop",
            total_steps=STEPS_WITHOUT_END,
            inline_bytes=INLINE_BYTES,
            max_row_bytes=1 << 20,
        )
        self.samples = samples
        self.journal = Journal(path)
        self.core = BusCore(settings, ledger=Ledger(group_size=GROUP_SIZE, journal=self.journal), clock=time.monotonic)
        self.seconds: list[float] = []
        while self.core.progress().ledger.issued < samples:
            self.train_steps(20)
            self.journal.flush(timeout_s=T)

    def train_steps(self, steps: int) -> None:
        columns = {"payload": b"x" * 2048}
        for _ in range(steps):
            step = self.core.version
            rows = [make_row(admission, version=step, columns=columns) for admission in self.core.admit(8)]
            self.core.put(rows)
            lease = self.core.lease(for_actor(step, 8, columns))
            assert lease is not None
            self.core.ack([lease.lease_id], step=step, dropped={})
            self.core.progress()

    def measure(self, steps: int) -> None:
        """Adds the CPU seconds a row takes, the journal's thread included."""
        start = time.process_time()
        self.train_steps(steps)
        self.journal.flush(timeout_s=T)
        self.seconds.append((time.process_time() - start) / (steps * 8))


def measure_ledger(folder: Path, *, sizes: tuple[int, ...], rounds: int) -> None:
    """All ledgers are built first and measured in turn, so that the machine's mood hits all alike."""
    ledgers = [_GrowingLedger(folder / f"ledger{samples}.sqlite", samples=samples) for samples in sizes]
    for _ in range(rounds):
        for ledger in ledgers:
            ledger.measure(10)
    base = float(np.median(ledgers[0].seconds))
    print("CPU time of a row (16 samples: admit, put, lease, ack, progress, events on disk) by ledger size")
    for ledger in ledgers:
        row = float(np.median(ledger.seconds))
        print(f"  {ledger.samples:>9,} samples: {row * 1e6:6.1f} us a row   {row / base:.2f} of the smallest")
        ledger.journal.close(timeout_s=T)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and a ledger of 100,000 samples at most")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory(prefix="rx", dir="/tmp") as name:
        folder = Path(name)
        with local_ray(folder):
            measure_round_trips(folder, steps=100 if quick else 500)
            measure_small_rows(folder, steps=30 if quick else 150)
            for nbytes in (200_000, 1_000_000):
                measure_large_rows(folder, nbytes=nbytes, steps=16 if quick else 60)
        measure_ledger(
            folder, sizes=(1_000, 100_000) if quick else (1_000, 100_000, 1_000_000), rounds=5 if quick else 40
        )


if __name__ == "__main__":
    main()
