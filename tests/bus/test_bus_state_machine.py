"""Compares random histories of the bus's core with a model of each sample.

The actions are calls of clients and crashes, in any order. After each action the counts must agree with the model, and
exactly the media items in use must be stored. After each restore the ledger's file must agree, too. At the end, a run
without faults must be able to finish from any state.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.bus.bus_model import MAX_WORKERS, BusModel
from tests.bus.media_model import DIGESTS

WORK = ["roll_out", "train", "work", "lease"] * 4 + [
    "admit",
    "write",
    "ack",
    "put_again",
    "drop",
    "hold",
    "release_items",
] * 2
TROUBLE = ["release", "revoke", "wait", "reclaim", "save", "restore", "crash_and_resume", "start_afresh"]


class BusMachine(RuleBasedStateMachine):
    max_staleness = 0
    on_stale = "drop"
    spare_groups = 0
    surplus = "drop"

    def __init__(self) -> None:
        super().__init__()
        self.model: BusModel | None = None
        # The file is in shared memory, because the test covers the journal and not the disk.
        self.folder = tempfile.TemporaryDirectory(prefix=f"{Path(tempfile.gettempdir()).name}-", dir="/dev/shm")

    @initialize(
        groups_per_step=st.integers(1, 4),
        group_size=st.integers(1, 3),
        rollout_workers=st.sampled_from([1, MAX_WORKERS]),
    )
    def begin(self, groups_per_step: int, group_size: int, rollout_workers: int) -> None:
        self.model = BusModel(
            Path(self.folder.name),
            groups_per_step=groups_per_step,
            group_size=group_size,
            max_staleness=self.max_staleness,
            on_stale=self.on_stale,
            spare_groups=self.spare_groups,
            surplus=self.surplus,
            rollout_workers=rollout_workers,
        )

    # All actions are one rule, because Hypothesis omits some rules in each history, but every history needs rollouts.
    @rule(action=st.sampled_from(WORK + TROUBLE), data=st.data())
    def act(self, action: str, data: st.DataObject) -> None:
        assert self.model is not None
        if not self.model.core.finished():
            getattr(self.model, action)(data.draw)

    @invariant()
    def counts_agree(self) -> None:
        if self.model is not None:
            self.model.check_counts()

    def teardown(self) -> None:
        with self.folder:
            self.finish()

    def finish(self) -> None:
        if self.model is None:
            return
        self.model.core.revoke("actor")
        self.model.core.revoke("advantages")
        self.model.worker_leases = []
        while not self.model.core.finished():
            self.model.train_fully()
            self.model.check_counts()
        self.model.check_file()
        for worker in range(MAX_WORKERS):
            self.model.media.release_items(self.model.core, worker, DIGESTS)
        self.model.check_counts()
        assert self.model.core.groups or not self.model.media.stored, "an item remains at the end of the run"
        self.model.close()


@pytest.mark.parametrize("examples", [20, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("on_stale", ["drop", "mask"])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_any_history_keeps_the_counts_right_and_can_finish(max_staleness: int, on_stale: str, examples: int) -> None:
    machine = type("Machine", (BusMachine,), {"max_staleness": max_staleness, "on_stale": on_stale})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=60, deadline=None))


@pytest.mark.parametrize(
    ("max_staleness", "on_stale", "surplus"),
    [(0, "drop", "drop"), (0, "mask", "keep"), (1, "drop", "drop"), (1, "drop", "keep"), (3, "mask", "drop")],
)
def test_so_does_any_history_with_over_sampling(max_staleness: int, on_stale: str, surplus: str) -> None:
    case = {"max_staleness": max_staleness, "on_stale": on_stale, "surplus": surplus, "spare_groups": 2}
    machine = type("Machine", (BusMachine,), case)
    run_state_machine_as_test(machine, settings=settings(max_examples=10, stateful_step_count=60, deadline=None))
