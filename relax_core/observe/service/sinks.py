"""Where records are kept: JSON lines for programs, TensorBoard event files for eyes.

A sink opens its file with its first batch. A batch enters a file whole or not at all, so that a disk that was full for
a while leaves a file that can be read to its end.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from relax_core.observe.service.records import HistogramRecord, MetricRecord, Record, TextRecord, is_resume

if TYPE_CHECKING:
    from relax_core.config.schema import TrackerConfig

METRICS_FILE = "metrics.jsonl"
TEXTS_FILE = "texts.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class Sink(Protocol):
    """Called by a thread of its own (`SinkThread`), so it may wait, and whatever it raises is told and counted: the
    batch is then dropped, and the next one tried. A kind of record that it does not know it leaves out.

    ``local``: it is the run's own record on disk, which a checkpoint waits for and a restarted service reads.
    """

    @property
    def name(self) -> str: ...

    @property
    def local(self) -> bool: ...

    def write(self, batch: Sequence[Record]) -> None: ...

    def close(self) -> None: ...


class AppendFile:
    """A file that grows by whole batches. It goes on where an earlier process stopped. ``size``: bytes that hold."""

    def __init__(self, path: Path, *, lines: bool) -> None:
        """``lines``: the file is text; a last line without an end (its writer was killed) is cut off."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = io.FileIO(path, "r+" if path.exists() else "w+")
        self.size = _end_of_last_line(self._file) if lines else self._file.seek(0, os.SEEK_END)
        self._rewind()

    def append(self, data: bytes) -> None:
        """Raises OSError, with the file as it was, when not all of ``data`` could be written."""
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            self._rewind()
            raise
        self.size += len(data)

    def close(self) -> None:
        self._file.close()

    def _rewind(self) -> None:
        self._file.seek(self.size)
        self._file.truncate()


def _end_of_last_line(file: io.FileIO) -> int:
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


class JsonlSink:
    """One JSON object a line: numbers to ``metrics.jsonl``, texts to ``texts.jsonl``. NaN and infinities as null."""

    name = METRICS_FILE
    local = True

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[str, AppendFile] = {}
        self._encoder = msgspec.json.Encoder()

    def write(self, batch: Sequence[Record]) -> None:
        self._append(METRICS_FILE, [record for record in batch if isinstance(record, MetricRecord)])
        self._append(TEXTS_FILE, [record for record in batch if isinstance(record, TextRecord)])

    def _append(self, name: str, records: Sequence[Record]) -> None:
        if not records:
            return
        if name not in self._files:
            self._files[name] = AppendFile(self._run_dir / name, lines=True)
        self._files[name].append(self._encoder.encode_lines(records))

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class TensorBoardSink:
    """Scalars with tag ``<source>/<name>`` and histograms, through TensorBoard's own protobufs and framing.

    A resume is told as a session start, so that TensorBoard hides the steps that it undid. Texts are left to the
    JSON lines. EventFileWriter is not used: it has a thread of its own, which a full disk kills.
    """

    name = TENSORBOARD_FOLDER
    local = False

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / TENSORBOARD_FOLDER
        self._file: AppendFile | None = None

    def write(self, batch: Sequence[Record]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        events = [_event(record) for record in batch if not isinstance(record, TextRecord)]
        if not events:
            return
        if self._file is None:
            name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
            self._file = AppendFile(self._folder / name, lines=False)
        if self._file.size == 0:
            events.insert(0, Event(wall_time=events[0].wall_time, file_version="brain.Event:2"))
        self._file.append(_frame([event.SerializeToString() for event in events]))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _event(record: MetricRecord | HistogramRecord) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    if isinstance(record, HistogramRecord):
        histogram = HistogramProto(
            min=record.least,
            max=record.largest,
            num=sum(record.counts),
            sum=record.total,
            sum_squares=record.total_of_squares,
            bucket_limit=record.limits,
            bucket=record.counts,
        )
        values = [Summary.Value(tag=f"{record.source}/{record.name}", histo=histogram)]
    elif is_resume(record):
        return Event(session_log=SessionLog(status=SessionLog.START), wall_time=record.time_s, step=record.step)
    else:
        values = [
            Summary.Value(tag=f"{record.source}/{name}", simple_value=value) for name, value in record.values.items()
        ]
    return Event(summary=Summary(value=values), wall_time=record.time_s, step=record.step)


def _frame(events: Sequence[bytes]) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events:
        writer.write(event)
    return buffer.getvalue()


def make_sinks(tracker: TrackerConfig, run_dir: Path) -> list[Sink]:
    """The sinks that ``tracker`` switches on. Nothing is opened yet."""
    sinks: list[Sink] = []
    if tracker.jsonl:
        sinks.append(JsonlSink(run_dir))
    if tracker.tensorboard:
        sinks.append(TensorBoardSink(run_dir))
    return sinks


class _MetricLine(msgspec.Struct):
    source: str
    step: int
    time_s: float
    values: dict[str, float | None]


Line = TypeVar("Line")


def _read_lines(path: Path, kind: type[Line]) -> list[Line]:
    """Every whole line; a last one without an end was never finished. No file, no lines."""
    if not path.exists():
        return []
    decoder = msgspec.json.Decoder(kind)
    lines: list[Line] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                lines.append(decoder.decode(line))
            except msgspec.DecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not a record of Relax ({error}). Repair or remove the line."
                ) from error
    return lines


def read_metrics(run_dir: Path) -> list[MetricRecord]:
    """The numbers that a run has kept so far; null reads as NaN. Raises ValueError for a broken line."""
    nan = float("nan")
    return [
        MetricRecord(
            source=line.source,
            step=line.step,
            time_s=line.time_s,
            values={name: nan if value is None else value for name, value in line.values.items()},
        )
        for line in _read_lines(run_dir / METRICS_FILE, _MetricLine)
    ]


def read_texts(run_dir: Path) -> list[TextRecord]:
    """The texts that a run has kept so far. Raises ValueError for a broken line."""
    return _read_lines(run_dir / TEXTS_FILE, TextRecord)
