"""Writes records to files: JSON lines for programs, TensorBoard event files for people.

A sink opens its file with its first batch. A batch enters a file whole or not at all, so that a file can be read to its
end even if the disk was full for a while.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from relax_core.config.plugin_lists import plugins_of
from relax_core.contracts.sink import BaseSink, SinkConfig, SinkSpec, SinkStart
from relax_core.observe.plugin_sink import PluginSink
from relax_core.observe.service.records import HistogramRecord, MetricRecord, Record, TextCell, TextRecord, is_resume

if TYPE_CHECKING:
    from relax_core.config.sections.tracker_schema import TrackerConfig

METRICS_FILE = "metrics.jsonl"
TEXTS_FILE = "texts.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
DISTRIBUTION = "distribution"  # the end of a histogram's tag in TensorBoard
SHOWN_ROWS = 16  # of a text in TensorBoard


class Sink(Protocol):
    """Declares a destination of records.

    A thread of its own calls it (`SinkThread`), so it may wait. If it raises, the error is reported, the batch is
    dropped, and the next batch is tried. It ignores kinds of records that it does not know. ``local`` is True for the
    run's own files, for which a checkpoint waits and which a restarted service reads.
    """

    @property
    def name(self) -> str:
        """Returns the sink's name in messages."""

    @property
    def local(self) -> bool:
        """Is True for the run's own files."""

    def write(self, batch: Sequence[Record]) -> None:
        """Writes a batch of records."""

    def flush(self) -> None:
        """Passes on what the sink has collected."""

    def close(self) -> None:
        """Closes the sink after its last batch."""


class AppendFile:
    """Appends whole batches to a file, after those of an earlier process.

    ``size`` is its valid length in bytes.
    """

    def __init__(self, path: Path, *, lines: bool) -> None:
        """Opens or makes the file. With ``lines`` it removes a last line without an end, whose writer was killed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = io.FileIO(path, "r+" if path.exists() else "w+")
        self.size = _end_of_last_line(self._file) if lines else self._file.seek(0, os.SEEK_END)
        self._rewind()

    def append(self, data: bytes) -> None:
        """Appends ``data``. If not all of it can be written, it restores the file and raises OSError."""
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            self._rewind()
            raise
        self.size += len(data)

    def close(self) -> None:
        """Closes the file."""
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


class JsonlSink(BaseSink):
    """Writes numbers to ``metrics.jsonl`` and texts to ``texts.jsonl``, one JSON object a line; NaN becomes null."""

    name = METRICS_FILE
    local = True

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[str, AppendFile] = {}
        self._encoder = msgspec.json.Encoder()

    def write(self, batch: Sequence[Record]) -> None:
        """Appends the numbers and the texts of a batch to their files."""
        self._append(METRICS_FILE, [record for record in batch if isinstance(record, MetricRecord)])
        self._append(TEXTS_FILE, [record for record in batch if isinstance(record, TextRecord)])

    def _append(self, name: str, records: Sequence[Record]) -> None:
        if not records:
            return
        if name not in self._files:
            self._files[name] = AppendFile(self._run_dir / name, lines=True)
        self._files[name].append(self._encoder.encode_lines(records))

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()


class TensorBoardSink(BaseSink):
    """Writes scalars with the tag ``<source>/<name>`` and histograms as TensorBoard's own protobufs.

    A resume becomes a session start, so that TensorBoard hides the steps that it undid. The first `SHOWN_ROWS` rows of
    each text and the run's configuration are in the text dashboard. It does not use EventFileWriter, because that has a
    thread of its own, which a full disk kills.
    """

    name = TENSORBOARD_FOLDER
    local = False

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / TENSORBOARD_FOLDER
        self._file: AppendFile | None = None

    def write(self, batch: Sequence[Record]) -> None:
        """Appends the numbers and the histograms of a batch to the event file."""
        from tensorboard.compat.proto.event_pb2 import Event

        events = [_event(record) for record in batch if not isinstance(record, TextRecord) or record.rows]
        if not events:
            return
        if self._file is None:
            name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
            self._file = AppendFile(self._folder / name, lines=False)
        if self._file.size == 0:
            began = events[0].wall_time
            config = _config_text(self._folder.parent)
            events[:0] = [
                Event(wall_time=began, file_version="brain.Event:2"),
                *([_text_event("config", config, step=0, time_s=began)] if config else []),
            ]
        self._file.append(_frame([event.SerializeToString() for event in events]))

    def close(self) -> None:
        """Closes the files."""
        if self._file is not None:
            self._file.close()


def _event(record: Record) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    if isinstance(record, TextRecord):
        text = "\n\n---\n\n".join(_markdown(row) for row in record.rows[:SHOWN_ROWS])
        return _text_event(f"{record.kind}/texts", text, step=record.step, time_s=record.time_s)
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
        # TensorBoard shows a tag as what its first event was, so a histogram must not share the tag of a number.
        values = [Summary.Value(tag=f"{record.source}/{record.name}/{DISTRIBUTION}", histo=histogram)]
    elif is_resume(record):
        return Event(session_log=SessionLog(status=SessionLog.START), wall_time=record.time_s, step=record.step)
    else:
        values = [
            Summary.Value(tag=f"{record.source}/{name}", simple_value=value) for name, value in record.values.items()
        ]
    return Event(summary=Summary(value=values), wall_time=record.time_s, step=record.step)


def _markdown(row: Mapping[str, TextCell]) -> str:
    """Returns a row as Markdown in which its texts are code blocks, so that nothing in them is markup."""
    return "\n\n".join(f"**{name}**\n\n{_code(str(value))}" for name, value in row.items())


def _code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _config_text(run_dir: Path) -> str:
    try:
        return _code((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except OSError:
        return ""


def _text_event(tag: str, text: str, *, step: int, time_s: float) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    value = Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
    return Event(summary=Summary(value=[value]), wall_time=time_s, step=step)


def _frame(events: Sequence[bytes]) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events:
        writer.write(event)
    return buffer.getvalue()


JSONL = SinkSpec(
    name="jsonl",
    summary="JSON lines in the run's folder, which Relax reads itself",
    config=SinkConfig,
    open=lambda start, config: JsonlSink(start.run_dir),
)
TENSORBOARD = SinkSpec(
    name="tensorboard",
    summary="TensorBoard event files in the run's folder",
    config=SinkConfig,
    open=lambda start, config: TensorBoardSink(start.run_dir),
)


def make_sinks(tracker: TrackerConfig, run_dir: Path) -> list[Sink]:
    """Returns the sinks that ``tracker`` switches on, Relax's own ones first.

    Nothing is opened yet, and no plug-in is imported. Raises ValueError for ``tracker.sinks`` that is neither a list
    nor a mapping.
    """
    start = SinkStart(run_dir=run_dir)
    own: list[Sink] = []
    if tracker.jsonl:
        own.append(JsonlSink(run_dir))
    if tracker.tensorboard:
        own.append(TensorBoardSink(run_dir))
    others = [PluginSink(name, values, start) for name, values in plugins_of(tracker.sinks, key="tracker.sinks")]
    return [*own, *others]


class _MetricLine(msgspec.Struct):
    source: str
    step: int
    time_s: float
    values: dict[str, float | None]


Line = TypeVar("Line")


def _each_line(path: Path, kind: type[Line]) -> Iterator[Line]:
    """Yields every whole line of the file. It ignores a last line without an end, and a file that does not exist."""
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not a record of Relax ({error}). Repair or remove the line."
                ) from error


def each_metric(run_dir: Path) -> Iterator[MetricRecord]:
    """Yields the numbers that a run has recorded so far; null becomes NaN. Raises ValueError for a broken line."""
    nan = float("nan")
    for line in _each_line(run_dir / METRICS_FILE, _MetricLine):
        values = {name: nan if value is None else value for name, value in line.values.items()}
        yield MetricRecord(source=line.source, step=line.step, time_s=line.time_s, values=values)


def read_metrics(run_dir: Path) -> list[MetricRecord]:
    """Returns all of `each_metric`, which takes much memory for a long run."""
    return list(each_metric(run_dir))


def read_texts(run_dir: Path) -> list[TextRecord]:
    """Returns the texts that a run has recorded so far. Raises ValueError for a broken line."""
    return list(_each_line(run_dir / TEXTS_FILE, TextRecord))
