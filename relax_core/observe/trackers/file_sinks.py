"""Writes the metrics and texts of the event log to files: JSON lines, and TensorBoard event files.

A sink opens its file at the first batch. A batch is written completely or not at all. So a file stays readable even if
the disk was full for a while.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from relax_core.contracts.sink import BaseSink, SinkConfig, SinkSpec
from relax_core.observe.event_log import (
    AppendFile,
    HistogramRecord,
    MetricRecord,
    Record,
    TextCell,
    TextRecord,
    is_resume,
)

METRICS_FILE = "metrics.jsonl"
TEXTS_FILE = "texts.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
DISTRIBUTION = "distribution"  # suffix of a histogram's tag in TensorBoard
SHOWN_ROWS = 16  # rows of a text that TensorBoard shows


class JsonlSink(BaseSink):
    """Writes metrics to ``metrics.jsonl`` and texts to ``texts.jsonl``, one JSON object per line; NaN becomes null."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[str, AppendFile] = {}
        self._encoder = msgspec.json.Encoder()

    def write(self, batch: Sequence[Record]) -> None:
        """Appends the metrics and the texts of a batch to their files."""
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

    A resume is written as a session start. So TensorBoard hides the undone steps. The text dashboard shows the run's
    configuration and the first `SHOWN_ROWS` rows of each text record. This class does not use EventFileWriter, because
    a full disk kills the thread of EventFileWriter.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / TENSORBOARD_FOLDER
        self._file: AppendFile | None = None

    def write(self, batch: Sequence[Record]) -> None:
        """Appends the records of a batch to the event file."""
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
        """Closes the file."""
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
        # TensorBoard takes the type of a tag from its first event. So a histogram and a number must have different
        # tags.
        values = [Summary.Value(tag=f"{record.source}/{record.name}/{DISTRIBUTION}", histo=histogram)]
    elif is_resume(record):
        return Event(session_log=SessionLog(status=SessionLog.START), wall_time=record.time_s, step=record.step)
    else:
        values = [
            Summary.Value(tag=f"{record.source}/{name}", simple_value=value) for name, value in record.values.items()
        ]
    return Event(summary=Summary(value=values), wall_time=record.time_s, step=record.step)


def _markdown(row: Mapping[str, TextCell]) -> str:
    """Returns a row as Markdown. Texts become code blocks, which are not rendered as markup."""
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
