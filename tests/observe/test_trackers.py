"""Tests trackers that follow the event log in separate processes and are down, die, hang or are refused."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.config.schema import TrackerConfig
from relax_core.observe.event_log import EventReader, EventWriter
from relax_core.observe.trackers import tracker_process
from relax_core.observe.trackers.tracker_process import Trackers, read_state

CSV_SINK = str(Path(__file__).resolve().parents[2] / "examples" / "plugins" / "csv_sink.py")
T = 120.0
ODD = """
import os
import time
from relax_core.contracts.sink import BaseSink, SinkConfig, SinkSpec


class Odd(BaseSink):
    def __init__(self, start):
        self.folder = start.run_dir
        print("words of a library")

    def write(self, batch):
        if (self.folder / "refuse").exists():
            raise LookupError("no such project")
        if (self.folder / "crash").exists():
            print("the library says farewell")
            os._exit(3)
        if (self.folder / "hang").exists():
            (self.folder / "hang").unlink()
            time.sleep(600.0)
        with (self.folder / "seen").open("a") as file:
            file.writelines(f"{record.source} {record.step}\\n" for record in batch)


SPEC = SinkSpec(name="odd", summary="s", config=SinkConfig, open=lambda start, config: OPENED)
"""


def tracker(sinks: Any, *, tensorboard: bool = False) -> TrackerConfig:
    return TrackerConfig(tensorboard=tensorboard, sinks=sinks)


def report(run_dir: Path, *steps: int) -> int:
    """Records a number for each step, and returns the number of events in the log."""
    writer = EventWriter(run_dir, "actor-0")
    for step in steps:
        writer.record("actor", step, {"reward": 0.5})
    writer.close()
    return len(list(EventReader(run_dir).each()))


@pytest.fixture
def odd(tmp_path: Path) -> str:
    file = tmp_path / "odd.py"
    file.write_text(ODD.replace("OPENED", "Odd(start)"))
    return str(file)


def seen(run_dir: Path) -> list[int]:
    file = run_dir / "seen"
    return [int(line.split()[1]) for line in file.read_text().splitlines()] if file.exists() else []


def test_the_example_keeps_every_number_once_and_a_resumed_run_adds_to_it(tmp_path: Path) -> None:
    sinks = {CSV_SINK: {"file": "numbers.csv", "sources": ["actor"]}}
    for steps in ((0, 1), (2,)):
        trackers = Trackers(tracker(sinks), tmp_path)
        assert trackers.close(records=report(tmp_path, *steps), timeout_s=T) == ([], {})
    with (tmp_path / "numbers.csv").open(newline="", encoding="utf-8") as opened:
        rows = [line[1:] for line in csv.reader(opened)]  # without the time
    assert rows == [["source", "step", "name", "value"], *(["actor", str(step), "reward", "0.5"] for step in range(3))]


def test_the_configuration_chooses_the_files_of_the_run(tmp_path: Path) -> None:
    for tensorboard in (True, False):
        folder = tmp_path / str(tensorboard)
        trackers = Trackers(tracker(None, tensorboard=tensorboard), folder)
        assert trackers.close(records=report(folder, 0), timeout_s=T) == ([], {})
        assert (folder / "tensorboard").exists() == tensorboard
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["values"] for line in lines] == [{"reward": 0.5}]


def test_a_tracker_that_is_down_delays_nobody_and_gets_everything_when_it_is_up_again(
    tmp_path: Path, odd: str, wait_until: Callable[..., None]
) -> None:
    (tmp_path / "refuse").touch()
    trackers = Trackers(tracker([odd]), tmp_path)
    report(tmp_path, 0, 1)
    problems: list[str] = []

    def failed() -> bool:
        problems.extend(trackers.check())
        return bool(problems)

    wait_until(failed, what="the refusal", timeout_s=T)
    assert trackers.check() == []  # the failure is reported once
    assert "metrics: odd cannot be written: LookupError: no such project" in problems[0]
    records = report(tmp_path, 2)
    lines, lacking = trackers.close(records=records, timeout_s=T)
    assert lacking == {"odd": 3} and "odd lacks 3 records" in lines[0] and seen(tmp_path) == []
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3  # the other tracker has all events
    (tmp_path / "refuse").unlink()
    again = Trackers(tracker([odd]), tmp_path)
    assert again.close(records=report(tmp_path, 3), timeout_s=T) == ([], {})
    assert seen(tmp_path) == [0, 1, 2, 3]
    assert "words of a library" in (tmp_path / "logs" / "tracker-odd.log").read_text()


def test_a_tracker_that_dies_or_hangs_is_started_again_and_goes_on(
    tmp_path: Path, odd: str, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    monkeypatch.setattr(tracker_process, "FIRST_PAUSE_S", 0.1)
    (tmp_path / "crash").touch()
    trackers = Trackers(tracker([odd]), tmp_path)
    report(tmp_path, 0)
    problems: list[str] = []

    def reported(word: str) -> bool:
        problems.extend(trackers.check())
        return any(word in problem for problem in problems)

    wait_until(lambda: reported("the library says farewell"), what="its death", timeout_s=T)
    (tmp_path / "crash").unlink()
    wait_until(lambda: trackers.check() is not None and seen(tmp_path) == [0], what="step 0", timeout_s=T)
    (tmp_path / "hang").touch()
    report(tmp_path, 1)
    wait_until(lambda: not (tmp_path / "hang").exists(), what="the hang", timeout_s=T)
    monkeypatch.setattr(tracker_process, "HANGS_S", 0.0)
    trackers.check()
    monkeypatch.setattr(tracker_process, "HANGS_S", 600.0)
    wait_until(lambda: trackers.check() is not None and seen(tmp_path) == [0, 1], what="step 1", timeout_s=T)
    assert trackers.close(records=2, timeout_s=T) == ([], {})


def test_a_tracker_that_hangs_at_the_end_is_ended_in_time_and_what_it_lacks_is_counted(
    tmp_path: Path, odd: str, wait_until: Callable[..., None]
) -> None:
    (tmp_path / "hang").touch()
    trackers = Trackers(tracker([odd]), tmp_path)
    report(tmp_path, 0)
    wait_until(lambda: not (tmp_path / "hang").exists(), what="the hang", timeout_s=T)
    began = time.monotonic()
    lines, lacking = trackers.close(records=1, timeout_s=0.5)
    assert time.monotonic() - began < T and lacking == {"odd": 1} and "did not end in time" in lines[0]
    assert read_state(tmp_path, "odd").records == 0


@pytest.mark.parametrize(
    ("opened", "cause"),
    [("None", "returned None of type NoneType. Wanted: an object of a class under BaseSink"), ("[][0]", "IndexError")],
)
def test_a_sink_that_does_not_open_is_named(tmp_path: Path, opened: str, cause: str) -> None:
    file = tmp_path / "odd.py"
    file.write_text(ODD.replace("OPENED", opened))
    trackers = Trackers(tracker([str(file), str(tmp_path / "gone.py")]), tmp_path)
    lines, lacking = trackers.close(records=report(tmp_path, 0), timeout_s=T)
    assert lacking == {"odd": 1, "gone": 1}
    assert cause in lines[0] and "gone.py: no such file" in lines[1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            f"tracker.sinks={{{CSV_SINK}: {{fil: x}}}}",
            "tracker.sinks.csv_sink.fil is not a setting of .*csv_sink.py. Nearest",
        ),
        (f"tracker.sinks={{{CSV_SINK}: {{file: /x.csv}}}}", "tracker.sinks.csv_sink.file=/x.csv: give a path below"),
        (f"tracker.sinks={{{CSV_SINK}: {{sources: 3}}}}", "tracker.sinks.csv_sink.sources"),
        (f"tracker.sinks=[{CSV_SINK},{CSV_SINK}]", "csv_sink.py is named twice"),
        ("tracker.sinks=[tensorboard]", "tensorboard has a separate key. Use tracker.tensorboard=true."),
        ("tracker.sinks=[nobody]", "tracker.sinks=nobody is not known. What exists: clearml, jsonl, mlflow"),
        ("tracker.sinks=csv", "tracker.sinks=csv: Give a list"),
    ],
    ids=["unknown key", "refused value", "wrong type", "twice", "own key", "unknown sink", "no list"],
)
def test_a_mistake_is_refused_before_the_start(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([override])


def test_a_path_is_absolute_whatever_folder_a_tracker_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(CSV_SINK).parent)
    assert load_config(["tracker.sinks=[csv_sink.py]"]).tracker.sinks == [CSV_SINK]
    assert load_config(["tracker.sinks={csv_sink.py: {file: a.csv}}"]).tracker.sinks == {CSV_SINK: {"file": "a.csv"}}
