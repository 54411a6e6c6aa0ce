"""A model of a run's sample counts. Tests compare it with a bus that writes a real ledger file.

The file must agree with the counts after every restore, every crash and at the end.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from relax_core.bus.journal import Journal
from relax_core.bus.ledger import Ledger
from relax_core.bus.ledger_reader import LedgerFile
from relax_core.bus.replay_buffer import ReplayBuffer
from relax_core.contracts.bus import Admission, Group, Lease
from tests.bus.make_rows import Clock, make_settings
from tests.bus.media_model import MediaModel

TOTAL_STEPS = 12
FLUSH_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Holds a checkpoint: the bus's snapshot, and the model's state and a copy of the ledger's file at this time."""

    snapshot: bytes
    issued: set[str]
    trained: dict[str, int]
    unfilled: int
    ended_rows: dict[str, Group]
    file: Path


class LedgerModel:
    """Holds a bus, its ledger's file, and the end of each sample according to the model."""

    def __init__(
        self,
        folder: Path,
        *,
        groups_per_step: int,
        group_size: int,
        max_staleness: int,
        on_stale: str,
        spare_groups: int = 0,
        surplus: str = "drop",
        rollout_workers: int = 1,
    ) -> None:
        self.folder = folder
        self.files = 0
        self.gps, self.group_size = groups_per_step, group_size
        self.max_staleness, self.on_stale = max_staleness, on_stale
        self.spare_groups, self.surplus = spare_groups, surplus
        self.rollout_workers = rollout_workers
        self.clock = Clock()
        self.start(self.new_file())
        self.in_flight: dict[str, Admission] = {}
        self.owners: dict[str, int] = {}  # group → rollout worker of its admission
        self.rows: dict[str, Group] = {}  # all groups that were put
        self.actor_leases: list[Lease] = []
        self.worker_leases: list[Lease] = []
        self.issued: set[str] = set()
        self.trained: dict[str, int] = {}  # uid → staleness
        self.unfilled = 0  # groups that past steps could have trained, but did not train
        self.saved: list[Saved] = []
        self.media = MediaModel()

    def new_file(self) -> Path:
        self.files += 1
        return self.folder / f"ledger{self.files}.sqlite"

    def start(self, file: Path) -> None:
        """Starts a bus on an empty file or on the file of an earlier bus."""
        settings = make_settings(
            groups_per_step=self.gps,
            group_size=self.group_size,
            max_staleness=self.max_staleness,
            on_stale=self.on_stale,
            total_steps=TOTAL_STEPS,
            spare_groups=self.spare_groups,
            surplus=self.surplus,
            rollout_workers=self.rollout_workers,
        )
        self.file = file
        self.journal = Journal(file)
        self.core = ReplayBuffer(
            settings, ledger=Ledger(group_size=self.group_size, journal=self.journal), clock=self.clock
        )

    # -- invariants --------------------------------------------------------------------------------------------
    def check_file(self) -> None:
        """Checks that the counts of the file's events equal the counts of the bus and of the model."""
        self.journal.flush(timeout_s=FLUSH_S)
        counts = self.core.progress().ledger
        none_left = self.core.finished() and (self.spare_groups > 0 or not self.unfilled)
        with LedgerFile(self.file) as file:
            in_file = file.counts(run_over=none_left)
        assert in_file.lost == in_file.trained_twice == []
        assert (in_file.issued, in_file.trained, in_file.dropped) == (counts.issued, counts.trained, counts.dropped)
        assert sum(in_file.open.values()) == counts.open
        with closing(sqlite3.connect(self.file)) as database:
            trained = {uid for (uid,) in database.execute("SELECT uid FROM events WHERE event = 'trained'")}
            issued = {uid for (uid,) in database.execute("SELECT uid FROM events WHERE event = 'issued'")}
        assert (issued, trained) == (self.issued, set(self.trained))

    def check_counts(self) -> None:
        self.media.check(self.core, self.rows, self.in_flight)
        progress = self.core.progress()
        counts = progress.ledger
        assert counts.lost == 0
        assert counts.trained_twice == 0
        assert counts.issued == len(self.issued)
        assert counts.trained == len(self.trained)
        assert counts.issued == counts.trained + sum(counts.dropped.values()) + counts.open
        assert sum(progress.staleness_histogram.values()) == counts.trained
        assert {k: list(self.trained.values()).count(k) for k in set(self.trained.values())} == (
            progress.staleness_histogram
        )
        if self.on_stale == "drop":
            assert max(progress.staleness_histogram, default=0) <= self.max_staleness
        assert [g.admission.index for g in self.core.groups.values()] == sorted(
            g.admission.index for g in self.core.groups.values()
        )
