"""A sink in a process of its own: what it raises and prints, and that its hangs and its death cost its batch alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from relax_core.contracts.sink import HistogramRecord, MetricRecord, Record, SinkStart, TextRecord
from relax_core.observe.trackers import sink_process
from relax_core.observe.trackers.sink_process import ProcessSink, SinkLost

SINK = """
import os
import time
from relax_core.contracts.sink import BaseSink, SinkConfig, SinkSpec


class Odd(BaseSink):
    def __init__(self, start):
        self.file = (start.run_dir / "seen").open("a")
        self.file.write(f"open {os.getpid()}\\n")
        print("words of a library on the standard output")

    def write(self, batch):
        for record in batch:
            self.file.write(f"{record!r}\\n")
            match getattr(record, "source", ""):
                case "raise":
                    raise LookupError("no such project")
                case "crash":
                    print("the library says farewell")
                    self.file.flush()
                    os._exit(3)
                case "hang":
                    self.file.flush()
                    time.sleep(600.0)

    def close(self):
        self.file.write("close\\n")
        self.file.close()


SPEC = SinkSpec(name="odd", summary="s", config=SinkConfig, open=lambda start, config: Odd(start), isolated=True)
"""
HISTOGRAM = HistogramRecord(
    source="actor",
    step=1,
    time_s=2.0,
    name="response_tokens",
    limits=[2.0, 4.0],
    counts=[3, 4],
    least=1.0,
    largest=4.0,
    total=20.0,
    total_of_squares=60.0,
)


def number(source: str) -> MetricRecord:
    return MetricRecord(source=source, step=3, time_s=1.5, values={"reward": 0.5})


def test_a_sink_in_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "odd.py"
    file.write_text(SINK)
    sink = ProcessSink("odd", str(file), {}, SinkStart(run_dir=tmp_path))
    good: list[Record] = [
        number("actor"),
        TextRecord(kind="eval", step=3, time_s=1.0, rows=[{"prompt": "é"}]),
        HISTOGRAM,
    ]
    sink.write(good)
    with pytest.raises(RuntimeError, match="LookupError: no such project"):
        sink.write([number("raise")])
    sink.write([number("after")])
    with pytest.raises(SinkLost, match=r"its process ended: .*the library says farewell"):
        sink.write([number("crash")])
    while sink._next_start > time.monotonic():  # it is not started again at once
        with pytest.raises(SinkLost, match="is started again in"):
            sink.write([number("early")])
        time.sleep(0.05)
    sink.write([number("again")])
    monkeypatch.setattr(sink_process, "CALL_S", 0.2)
    monkeypatch.setattr(sink_process, "END_S", 0.2)
    with pytest.raises(SinkLost, match="did not answer within 0 s"):
        sink.write([number("hang")])
    sink.close()
    lines = (tmp_path / "seen").read_text().splitlines()
    opened = [int(line.split()[1]) for line in lines if line.startswith("open")]
    assert lines == [
        *(f"open {opened[0]}", *map(repr, good), repr(number("raise")), repr(number("after")), repr(number("crash"))),
        *(f"open {opened[1]}", repr(number("again")), repr(number("hang"))),
    ]
    for pid in opened:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert "words of a library" in (tmp_path / "logs" / "sink-odd.log").read_text()
