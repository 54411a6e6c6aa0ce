from __future__ import annotations

import time
from pathlib import Path

import pytest

from relax_core.control.recoveries import FROM_CHECKPOINT, IN_PLACE, Recoveries


def test_each_recovery_is_reported_when_it_begins_and_when_training_goes_on(tmp_path: Path) -> None:
    reported: list[str] = []
    now = [100.0]
    recoveries = Recoveries(tmp_path / "logs" / "recoveries.json", report=reported.append, clock=lambda: now[0])
    recoveries.begin(IN_PLACE, "engine-0 was killed by SIGKILL", at_step=7, from_step=7)
    now[0] = 101.5
    recoveries.step_done()
    recoveries.step_done()
    noticed_s = time.time() - 1.5
    recoveries.begin(FROM_CHECKPOINT, "the bus died", at_step=12, from_step=10, noticed=100.0)
    now[0] = 104.0
    recoveries.step_done()
    began_s = time.time()
    recoveries.begin(FROM_CHECKPOINT, "actor-0 died", at_step=15, from_step=10)
    assert reported == [
        "tier 1 at step 7: engine-0 was killed by SIGKILL; started again in place",
        "tier 1 at step 7: engine-0 was killed by SIGKILL; training went on from step 7 after 1.5 s",
        "tier 2 at step 12: the bus died; all services start again from step 10",
        "tier 2 at step 12: the bus died; training went on from step 10 after 4.0 s",
        "tier 2 at step 15: actor-0 died; all services start again from step 10",
    ]
    records = recoveries.as_records()
    times = [record.pop("time_s") for record in records]
    assert times[1:] == [pytest.approx(noticed_s, abs=60.0), pytest.approx(began_s, abs=60.0)]
    assert noticed_s <= times[1] < times[2]
    assert records[1:] == [
        {"tier": 2, "cause": "the bus died", "at_step": 12, "from_step": 10, "seconds": 4.0},
        {"tier": 2, "cause": "actor-0 died", "at_step": 15, "from_step": 10, "seconds": None},
    ]
    assert recoveries.count(FROM_CHECKPOINT) == 2
    assert recoveries.first_cause(FROM_CHECKPOINT) == "the bus died"


def test_the_file_is_whole_at_every_moment(tmp_path: Path) -> None:
    """A controller may be killed while it writes. A process with the open file reads the earlier content completely."""
    file = tmp_path / "recoveries.json"
    recoveries = Recoveries(file, report=lambda text: None)
    recoveries.begin(FROM_CHECKPOINT, "the bus died", at_step=12, from_step=10)
    earlier = file.read_bytes()
    with file.open("rb") as reader:
        recoveries.begin(FROM_CHECKPOINT, "actor-0 died", at_step=15, from_step=10)
        assert reader.read() == earlier
    assert [path.name for path in tmp_path.iterdir()] == ["recoveries.json"]


def test_a_controller_that_follows_a_killed_one_knows_the_earlier_ones(tmp_path: Path) -> None:
    first = Recoveries(tmp_path / "recoveries.json", report=lambda text: None)
    first.begin(FROM_CHECKPOINT, "the bus died", at_step=12, from_step=10)
    second = Recoveries(tmp_path / "recoveries.json", report=lambda text: None)
    assert second.as_records() == []
    second.load()
    assert second.as_records() == first.as_records()
    second.step_done()  # its successor closes the open recoveries of the killed controller
    assert second.as_records()[0]["seconds"] is None
