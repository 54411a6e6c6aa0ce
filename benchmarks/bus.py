"""Measures the cost of the data bus: ``python -m benchmarks.bus`` (about two minutes; shorter with ``--quick``).

With ``--media`` it measures only media items.

Prints for every backend: round trips at the demo's size, rows per second, and bytes per second compared with memcpy.
Then prints the CPU time per row as the ledger grows. The ledger's code is the same for all backends.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.bus_media import measure_media
from benchmarks.bus_transport import (
    GROUP_SIZE,
    STEPS_WITHOUT_END,
    T,
    for_actor,
    local_ray,
    make_row,
    measure_large_rows,
    measure_round_trips,
    measure_small_rows,
)
from relax_core.bus.journal import Journal
from relax_core.bus.ledger import Ledger
from relax_core.bus.replay_buffer import ReplayBuffer
from relax_core.bus.settings import BusSettings
from relax_core.contracts.columns import EPISODES, PERSISTED_COLUMNS
from relax_core.contracts.tree import Episode, Turn, sample_uid

# The columns of a row that the ledger's file stores: the row's episodes, here with one turn each.
_EPISODES = [
    Episode(
        sample_uid("g00001000", place),
        [64 + 8 * place],
        0.5,
        {"exact": 0.0, "length": 1.0},
        [Turn(57 + 8 * place, 65 + 8 * place, "engine-0", [(1000, 8)], "stop")],
        "stop",
    )
    for place in range(GROUP_SIZE)
]
PERSISTED: dict[str, bytes] = {EPISODES: msgspec.msgpack.encode(_EPISODES)}
assert tuple(PERSISTED) == PERSISTED_COLUMNS


class _GrowingLedger:
    """Holds a bus core with its journal on disk. The ledger is filled with a number of samples."""

    def __init__(self, path: Path, *, samples: int) -> None:
        settings = BusSettings(
            groups_per_step=8,
            group_size=GROUP_SIZE,
            max_staleness=0,
            on_stale="drop",
            total_steps=STEPS_WITHOUT_END,
            inline_bytes=1 << 16,
            max_row_bytes=1 << 20,
        )
        self.samples = samples
        self.journal = Journal(path)
        self.core = ReplayBuffer(
            settings, ledger=Ledger(group_size=GROUP_SIZE, journal=self.journal), clock=time.monotonic
        )
        self.seconds: list[float] = []
        while self.core.progress().ledger.issued < samples:
            self.train_steps(20)
            self.journal.flush(timeout_s=T)

    def train_steps(self, steps: int) -> None:
        columns = {"payload": b"x" * 2048, **PERSISTED}
        for _ in range(steps):
            step = self.core.version
            rows = [make_row(admission, version=step, columns=columns) for admission in self.core.admit(8)]
            self.core.put(rows)
            lease = self.core.lease(for_actor(step, 8, columns))
            assert lease is not None
            self.core.ack([lease.lease_id], step=step, dropped={})
            self.core.progress()

    def measure(self, steps: int) -> None:
        """Records the CPU seconds per row, including the CPU time of the journal's thread."""
        start = time.process_time()
        self.train_steps(steps)
        self.journal.flush(timeout_s=T)
        self.seconds.append((time.process_time() - start) / (steps * 8))


def measure_ledger(folder: Path, *, sizes: tuple[int, ...], rounds: int) -> None:
    """Prints the CPU time per row by ledger size. The ledgers alternate, so machine load affects all equally."""
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
    parser.add_argument("--media", action="store_true", help="only items of 12 MB")
    arguments = parser.parse_args()
    quick = arguments.quick
    with tempfile.TemporaryDirectory(prefix="rx", dir="/tmp") as name:
        folder = Path(name)
        if arguments.media:
            with local_ray(folder):
                measure_media(folder, rounds=3 if quick else 5)
            return
        with local_ray(folder):
            measure_round_trips(folder, rounds=5 if quick else 25)
            measure_small_rows(folder, rounds=3 if quick else 15)
            for nbytes in (200_000, 1_000_000):
                measure_large_rows(folder, nbytes=nbytes, rounds=4 if quick else 15)
        measure_ledger(
            folder, sizes=(1_000, 100_000) if quick else (1_000, 100_000, 1_000_000), rounds=5 if quick else 40
        )


if __name__ == "__main__":
    main()
