"""Writes and reads the event log of a run.

Each process appends events to separate files, and `EventReader` merges them.

``RUN/events/ATTEMPT.WRITER.START.jsonl`` has one JSON object per line. The field ``type`` names the kind of `Event`.
ATTEMPT counts the starts of all services of the run. START counts the starts of this writer within the attempt. So each
file has one writer and only grows. If the writer was killed, the last line may be incomplete.

Events are ordered by attempt, then by time. An attempt that continues from a checkpoint of step s begins with a resume
event. Readers then ignore the events of earlier attempts for step s and later steps.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from relax_core.contracts.sink import HistogramRecord as HistogramRecord
from relax_core.contracts.sink import MetricRecord as MetricRecord
from relax_core.contracts.sink import Record as Record
from relax_core.contracts.sink import TextCell as TextCell
from relax_core.contracts.sink import TextRecord as TextRecord
from relax_core.contracts.untrusted_files import decode_json, open_plain

log = logging.getLogger(__name__)
EVENTS_FOLDER = "events"
CONTROLLER = "controller"  # writer of resume events
ACTOR = "actor"  # source of one record per train step
ROLLOUT = "rollout"  # source of one record per generated prompt batch
EVAL = "eval"  # source of one record per evaluation; the record's step is the weight version
SKELETONS = "skeletons"  # kind of text record: the most frequent forms of correct answers in an evaluation
RANK = "rank"  # source of the timings of the trainer's ranks, one record per train step
PROCESS = "process"  # source of the resource usage of the run's processes, one record every few seconds
LEDGER = "ledger"  # source of the ledger's drop counts; one record per train step once a sample was dropped
RUN = "run"  # source of events about the whole run
RESUMED = "resumed"
BAD_ROWS = "bad_rows"  # kind of text record: skipped data rows

KEPT_RECORDS = 10_000  # limit of records that wait to be written, about 20 MB
RETRY_S = 1.0  # pause between two attempts to write, for example on a full disk
FLUSH_S = 10.0
READ_BYTES = 4 * 2**20  # limit of one read from a file, and of a line
CALL_BYTES, MIN_BYTES = 32 * 2**20, 16 * 2**10  # bytes that one call reads: in total, and at least per file
MAX_STEP, MAX_TIME_S = 2**53, 1e11
MAX_FILES = 20_000
MAX_TAILS, TAIL_BYTES = 16, 2**18  # `newest_metrics` reads at most this number of files, this much of each
_NAME = re.compile(r"(\d{4,9})\.[\w-]+\.\d+\.jsonl")


class GapRecord(msgspec.Struct, frozen=True, kw_only=True, tag="gap", tag_field="type"):
    """Reports that a writer left out ``records`` records, because it could not write to the disk for too long."""

    records: int
    time_s: float
    step: int = -1


class Alarm(msgspec.Struct, frozen=True, kw_only=True, tag="alarm", tag_field="type"):
    """Holds one message about a run.

    ``event`` is an entry of `relax_core.config.schema.EVENTS`. ``cause`` names the problem. All messages about one
    problem have the same event and cause. ``kind`` says whether the problem is new, repeated or over. ``left_out`` is
    the number of unreported occurrences since the previous message.
    """

    time_s: float
    event: str
    cause: str
    kind: Literal["new", "again", "over"]
    title: str
    text: str
    left_out: int = 0
    step: int = -1


class OrderChange(msgspec.Struct, frozen=True, kw_only=True, tag="order", tag_field="type"):
    """Holds one change of orders, engines or the autoscaler. `relax_core.server.engine_order_store` writes it."""

    time_s: float
    change: msgspec.Raw
    step: int = -1


Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
Version = Annotated[int, msgspec.Meta(ge=-1, le=MAX_STEP)]


class TokensAt(msgspec.Struct, frozen=True, array_like=True):
    """Locates the tokens of a record: a file in the samples folder, an offset and a size in bytes."""

    file: str
    offset: Count
    size: Count


class MadeSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Holds the metrics of a generated sample. The names are the names in `relax_core.contracts.tree.Episode`.

    ``length`` is the number of sampled tokens, ``turns`` the number of turns, and ``engine`` the engine of the first
    turn. ``version`` is the weight version of the oldest trained token, or None if the sample was not put on the bus.
    """

    uid: str
    reward: float | None
    length: Count
    ended: str
    engine: str
    version: Version | None = None
    turns: Count = 1
    parts: dict[str, float] = {}
    why: str = ""


class MadeRecord(msgspec.Struct, frozen=True, kw_only=True, tag="made", tag_field="type"):
    """Holds the samples of one generated group. The ledger records how each sample ended."""

    group_uid: str
    time_s: float
    samples: list[MadeSample]
    tokens: TokensAt
    step: int = -1


class TrainedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="trained", tag_field="type"):
    """Holds metrics of the samples of one group that a trainer rank trained at train step ``step``.

    Each list has one value per sample: ``lengths`` the number of sampled tokens, ``trained`` the number of unmasked
    tokens, ``versions`` the weight version of the oldest trained token.
    """

    group_uid: str
    step: int
    time_s: float
    uids: list[str]
    lengths: list[Count]
    trained: list[Count]
    versions: list[Version]
    tokens: TokensAt


Event = Record | GapRecord | Alarm | OrderChange | MadeRecord | TrainedRecord
ALARMS, ORDERS = "alarms", "orders"  # writers with separate files; these files start no attempt
SAMPLES = "samples-"  # prefix of the writers of sample records; other readers do not open these files


class _NumbersLine(msgspec.Struct, tag="numbers", tag_field="type"):
    source: str
    step: int
    time_s: float
    values: dict[str, float | None]


_decoder = msgspec.json.Decoder(
    _NumbersLine | TextRecord | HistogramRecord | GapRecord | Alarm | OrderChange | MadeRecord | TrainedRecord
)


# -- Records ----------------------------------------------------------------------------------------------------------
def metric_record(source: str, step: int, values: Mapping[str, float]) -> MetricRecord:
    """Returns a metric record with the current time. Raises TypeError or ValueError if a value is not a number."""
    numbers = {name: float(value) for name, value in values.items()}
    return MetricRecord(source=source, step=step, time_s=time.time(), values=numbers)


def text_record(kind: str, step: int, rows: Sequence[Mapping[str, TextCell]]) -> TextRecord:
    """Returns a text record with the current time."""
    return TextRecord(kind=kind, step=step, time_s=time.time(), rows=[dict(row) for row in rows])


def bad_rows_kind(worker: int) -> str:
    """Returns the ``kind`` of the text records that list a rollout worker's skipped data rows."""
    return f"{BAD_ROWS}-{worker}" if worker else BAD_ROWS


def is_resume(record: Event) -> bool:
    """Returns whether the record marks a resume from a checkpoint of ``record.step`` train steps."""
    return isinstance(record, MetricRecord) and record.source == RUN and RESUMED in record.values


def without_undone(records: Iterable[MetricRecord]) -> list[MetricRecord]:
    """Returns the records that no resume undid. A resume at step s undoes all earlier records of steps >= s."""
    kept: list[MetricRecord] = []
    for record in records:
        if is_resume(record):
            kept = [earlier for earlier in kept if earlier.step < record.step]
        else:
            kept.append(record)
    return kept


def by_step(records: Iterable[MetricRecord], source: str) -> dict[int, dict[str, float]]:
    """Returns step → values of ``source``, in order of step. A later record of a step replaces an earlier record."""
    values = {record.step: record.values for record in records if record.source == source}
    return dict(sorted(values.items()))


# -- The writer -------------------------------------------------------------------------------------------------------
class AppendFile:
    """Appends to a file that an earlier process may have begun. Each batch is written completely or not at all.

    ``size`` is its valid length in bytes.
    """

    def __init__(self, path: Path, *, lines: bool) -> None:
        """Opens or creates the file. With ``lines``, removes an incomplete last line that a killed writer left."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self.size = self._end_of_last_line() if lines else self._file.seek(0, os.SEEK_END)
        self._rewind()

    def append(self, data: bytes) -> None:
        """Appends ``data``. If a part cannot be written, restores the file and raises OSError."""
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

    def _end_of_last_line(self) -> int:
        end = self._file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            self._file.seek(start)
            newline = self._file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0


class EventWriter:
    """Appends the events of one process to the log in a background thread. Callers never wait for the disk.

    All methods are thread-safe. Events that cannot be written stay in a queue and are retried. If `KEPT_RECORDS` events
    wait, newer events are dropped and counted in a `GapRecord`. ``problem`` is the current write error, or "".
    """

    def __init__(self, run_dir: Path, writer: str, *, attempt: int = 0) -> None:
        self.problem = ""
        self.left_out = 0
        self._run_dir, self._writer = run_dir, writer
        self._wake = threading.Condition()
        self._attempt = attempt
        self._waiting: list[tuple[int, Event]] = []  # (attempt, event)
        self._put = self._written = 0
        self._unreported = 0  # records dropped since the newest gap record
        self._ended = False
        self._file: AppendFile | None = None
        self._file_attempt = -1
        self._thread: threading.Thread | None = None

    def begin_attempt(self, step: int) -> int:
        """Begins a new attempt that continues after ``step`` train steps. Returns the number of the attempt.

        Writes a resume event, except for a first attempt that begins at step 0.
        """
        names = [name.split(".") for name in event_files(self._run_dir)]
        numbers = [int(attempt) for attempt, writer, *_ in names if writer not in (ALARMS, ORDERS)]
        with self._wake:
            started = self._put > 0 or bool(numbers)
            self._attempt = max([self._attempt, *numbers]) + 1 if started else self._attempt
            number = self._attempt
        if number or step:
            self.record(RUN, step, {RESUMED: 1.0})
        return number

    def record(self, source: str, step: int, values: Mapping[str, float]) -> None:
        """Reports numbers and returns at once. Raises TypeError or ValueError if a value is not a number."""
        self.put(metric_record(source, step, values))

    def record_texts(self, kind: str, step: int, rows: Sequence[Mapping[str, TextCell]]) -> None:
        """Reports texts and returns at once."""
        self.put(text_record(kind, step, rows))

    def put(self, *records: Record) -> None:
        """Reports records that the caller made, and returns at once."""
        with self._wake:
            room = 0 if self._ended else max(0, KEPT_RECORDS - len(self._waiting))
            self._waiting += [(self._attempt, record) for record in records[:room]]
            self._put += min(room, len(records))
            self.left_out += max(0, len(records) - room)
            self._unreported += max(0, len(records) - room)
            self._wake.notify_all()
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._main, name="events", daemon=True)
                self._thread.start()

    def flush(self, *, timeout_s: float = FLUSH_S) -> None:
        """Waits until all events so far are in the file. Raises TimeoutError with the cause."""
        with self._wake:
            upto = self._put
            if not self._wake.wait_for(lambda: self._written >= upto, timeout_s):
                raise TimeoutError(
                    f"events were not written within {timeout_s:g} s: {self.problem or 'the disk hangs'}"
                )

    def close(self, *, timeout_s: float = FLUSH_S) -> None:
        """Writes the waiting events and ends the thread. Raises TimeoutError if that takes too long."""
        try:
            self.flush(timeout_s=timeout_s)
        finally:
            with self._wake:
                self._ended = True
                self._wake.notify_all()

    def _main(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._ended)
                if not self._waiting:
                    break
                attempt = self._waiting[0][0]
                batch = [record for number, record in self._waiting if number == attempt]
                gap = self._unreported
            try:
                if gap:
                    batch.append(GapRecord(records=gap, time_s=time.time()))
                self._append(attempt, batch)
            except OSError as error:
                self._report(error)
                with self._wake:
                    self._wake.wait_for(lambda: self._ended, RETRY_S)
                    if self._ended:
                        break
                continue
            self.problem = ""
            with self._wake:
                written = len(batch) - bool(gap)
                del self._waiting[:written]
                self._written += written
                self._unreported -= gap
                self._wake.notify_all()
        if self._file is not None:
            self._file.close()

    def _append(self, attempt: int, batch: Sequence[Event]) -> None:
        if self._file is None or attempt != self._file_attempt:
            if self._file is not None:
                self._file.close()
            path = _new_file(self._run_dir / EVENTS_FOLDER, self._writer, attempt)
            self._file, self._file_attempt = AppendFile(path, lines=False), attempt
        self._file.append(msgspec.json.Encoder().encode_lines(batch))

    def _report(self, error: OSError) -> None:
        if not self.problem:
            log.warning("events cannot be written: %s", error)
        self.problem = f"events cannot be written: {error}. Free space or repair the folder. The run goes on."


class EventFile:
    """Appends events to the log in the caller's thread. The caller gets any error.

    Without ``attempt`` the events belong to the newest attempt.
    """

    def __init__(self, run_dir: Path, writer: str, *, attempt: int | None = None) -> None:
        self._run_dir, self._writer, self._attempt = run_dir, writer, attempt
        self._path: Path | None = None

    def append(self, *events: Event) -> int:
        """Appends events. Returns the number of events that were left out because their lines exceed `READ_BYTES`.

        Raises OSError if the events cannot be written. Then the file is unchanged.
        """
        if self._path is None:
            attempt = self._attempt
            if attempt is None:
                attempt = max((int(name.partition(".")[0]) for name in event_files(self._run_dir)), default=0)
            self._path = _new_file(self._run_dir / EVENTS_FOLDER, self._writer, attempt)
        file = AppendFile(self._path, lines=True)
        try:
            lines = [line for line in map(msgspec.json.encode, events) if len(line) < READ_BYTES]
            file.append(b"".join(line + b"\n" for line in lines))
        finally:
            file.close()
        return len(events) - len(lines)


def _new_file(folder: Path, writer: str, attempt: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(MAX_FILES):
        path = folder / f"{attempt:04d}.{writer}.{start}.jsonl"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        return path
    raise OSError(f"{folder} has more than {MAX_FILES} files of {writer}")


# -- The reader -------------------------------------------------------------------------------------------------------
class EventLocation(NamedTuple):
    """Locates an event: the file's name, and the offset and length of its line in bytes."""

    name: str
    offset: int
    size: int


class _Entry(NamedTuple):
    """Holds one line of a file: its sort key, its event (None if not requested) and its location."""

    is_later: bool  # False for a resume event, which is sorted first in its attempt
    time_s: float
    event: Event | None
    place: EventLocation


class EventReader:
    """Reads the event log of a run, starting at a cursor. The run may still be writing, or the log may be a copy.

    ``cursor`` maps each file to the number of bytes read so far. It may be saved for a later reader. ``kinds`` are the
    event types to return, by default all types except alarms, orders and samples. With ``writer``, only the files of
    this writer are read. If ``kinds`` has a type of sample records, the reader opens only the sample files and the
    controller's files, because the controller's files have the resume events. ``count`` is the number of returned
    events. ``problems`` maps a file name to the reason why the file, or a line in it, cannot be read. The reader does
    not keep returned events in memory.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        cursor: Mapping[str, int] | None = None,
        kinds: Collection[str] | None = None,
        writer: str | None = None,
    ) -> None:
        self.cursor = dict(cursor or {})
        self.count = 0
        self.problems: dict[str, str] = {}
        self._run_dir, self._writer = run_dir, writer
        self._of_samples = bool({"made", "trained"} & set(kinds or ()))
        self._prefixes = None if kinds is None else tuple(f'{{"type":"{kind}"'.encode() for kind in kinds)
        self._left: set[str] = set()  # files that cannot be read any further
        self._starts: dict[int, int] = {}  # attempt → number of train steps after which the attempt continues

    def read(self) -> list[Event]:
        """Returns the next events of one attempt in order, at most a few MiB.

        The list is empty at the end of the log.
        """
        return [event for event, _ in self.read_placed()]

    def read_placed(self) -> list[tuple[Event, EventLocation]]:
        """Reads like `read`. Returns each event with its location, an argument of `read_event`."""
        while True:
            before = dict(self.cursor)
            for names in self._unread():
                events = self._next_of(names)
                self.count += len(events)
                if events:
                    return events
                if before != self.cursor:  # all lines were of other kinds; the attempt may have more lines
                    break
            if before == self.cursor:
                return []

    def each(self) -> Iterator[Event]:
        """Yields the events up to the current end of the log."""
        while events := self.read():
            yield from events

    def _unread(self) -> list[list[str]]:
        """Returns the files with unread bytes, grouped by attempt."""
        attempts: dict[int, list[str]] = {}
        for name, size in event_files(self._run_dir).items():
            if size > self.cursor.get(name, 0) and name not in self._left and self._reads(name.split(".")[1]):
                attempts.setdefault(int(name.partition(".")[0]), []).append(name)
        return [names for _, names in sorted(attempts.items())]

    def _reads(self, writer: str) -> bool:
        if self._writer is not None:
            return writer == self._writer
        return writer.startswith(SAMPLES) == self._of_samples or (self._of_samples and writer == CONTROLLER)

    def _next_of(self, names: Sequence[str]) -> list[tuple[Event, EventLocation]]:
        attempt = int(names[0].partition(".")[0])
        entries: list[_Entry] = []
        until = math.inf  # from this time on, some file may have unread events
        max_bytes, read_bytes = min(READ_BYTES, max(MIN_BYTES, CALL_BYTES // len(names))), 0
        for name in names:
            if read_bytes > 2 * CALL_BYTES:  # enough read; the next call reads the remaining files, out of order
                break
            own, is_cut = self._entries(name, max_bytes)
            read_bytes += own[-1].place.offset + own[-1].place.size - own[0].place.offset if own else 0
            entries += own
            until = min(until, own[-1].time_s) if is_cut and own else until
        found = []
        for entry in sorted(entries, key=lambda entry: entry[:2]):
            if entry.is_later and entry.time_s > until:
                break
            self.cursor[entry.place.name] = entry.place.offset + entry.place.size
            if entry.event is None:
                continue
            if is_resume(entry.event):
                self._starts[attempt] = entry.event.step
            if not self._is_undone(attempt, entry.event):
                found.append((entry.event, entry.place))
        return found

    def _is_undone(self, attempt: int, event: Event) -> bool:
        """Returns whether a later attempt began at or before the event's step."""
        return any(number > attempt and event.step >= step for number, step in self._starts.items())

    def _entries(self, name: str, max_bytes: int) -> tuple[list[_Entry], bool]:
        """Returns the next complete lines of a file, if any at least one.

        Also returns whether the file has more lines.
        """
        offset, found, time_s = self.cursor.get(name, 0), [], 0.0
        try:
            with open_plain(self._run_dir / EVENTS_FOLDER / name) as file:
                file.seek(offset)
                data = file.read(max_bytes)
                if len(data) == max_bytes and b"\n" not in data:
                    data += file.read(READ_BYTES - max_bytes)
        except (OSError, ValueError) as error:
            self.problems[name] = f"{name}: {error}"
            self._left.add(name)
            return [], False
        end = data.rfind(b"\n") + 1
        if not end and len(data) == READ_BYTES:
            self.problems[name] = f"{name}: the line at byte {offset} has more than {READ_BYTES} bytes"
            self._left.add(name)
        for line in data[:end].splitlines(keepends=True):
            event = self._event(name, line)
            if event is not None:
                time_s = max(time_s, event.time_s)  # keeps the order of the file even if the clock was set back
            place = EventLocation(name, offset, len(line))
            found.append(_Entry(event is None or not is_resume(event), time_s, event, place))
            offset += len(line)
        return found, len(data) >= max_bytes

    def _event(self, name: str, line: bytes) -> Event | None:
        if self._prefixes is not None and not line.startswith(self._prefixes):
            return None
        try:
            event = _decoded(line)
            return None if self._prefixes is None and isinstance(event, Alarm | OrderChange) else event
        except ValueError as error:
            self.problems[name] = f"{name}: a line is not an event of Relax ({error})"
            return None


def _decoded(line: bytes) -> Event:
    event = decode_json(line, _decoder)
    if abs(event.step) > MAX_STEP or not 0.0 <= event.time_s <= MAX_TIME_S:
        raise ValueError("its step or its time is out of range")
    if isinstance(event, _NumbersLine):
        values = {key: math.nan if value is None else value for key, value in event.values.items()}
        return MetricRecord(source=event.source, step=event.step, time_s=event.time_s, values=values)
    return event


def read_event(run_dir: Path, place: EventLocation) -> Event:
    """Returns the event at a location from `EventReader.read_placed`.

    Raises OSError if the file cannot be read, and ValueError if the location has no event.
    """
    with open_plain(run_dir / EVENTS_FOLDER / place.name) as file:
        file.seek(place.offset)
        return _decoded(file.read(place.size))


def event_files(run_dir: Path) -> dict[str, int]:
    """Returns the name and size in bytes of each log file, sorted by name. Ignores links and special files."""
    if (run_dir / EVENTS_FOLDER).is_symlink():
        return {}
    try:
        with os.scandir(run_dir / EVENTS_FOLDER) as entries:
            return dict(
                sorted(
                    (entry.name, entry.stat(follow_symlinks=False).st_size)
                    for entry in islice(entries, MAX_FILES)
                    if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
                )
            )
    except OSError:
        return {}


def of_samples(name: str) -> bool:
    """Returns whether ``name`` is the name of a file with sample records."""
    return name.split(".")[1].startswith(SAMPLES)


def newest_metrics(run_dir: Path) -> dict[str, MetricRecord]:
    """Returns the newest record of each source. Reads only the ends of the newest log files."""
    files = event_files(run_dir)
    newest = sorted((name for name in files if not of_samples(name)), reverse=True)[:MAX_TAILS]
    cursor = files | {name: max(0, files[name] - TAIL_BYTES) for name in newest}
    events = EventReader(run_dir, cursor=cursor, kinds=("numbers",)).each()
    return {event.source: event for event in events if isinstance(event, MetricRecord)}


def each_metric(run_dir: Path) -> Iterator[MetricRecord]:
    """Yields the metric records of a run so far, in order."""
    for event in EventReader(run_dir, kinds=("numbers",)).each():
        assert isinstance(event, MetricRecord)
        yield event


def read_metrics(run_dir: Path) -> list[MetricRecord]:
    """Returns all records of `each_metric` as a list. The list of a long run takes much memory."""
    return list(each_metric(run_dir))


def read_texts(run_dir: Path, kind: str | None = None) -> list[TextRecord]:
    """Returns the text records of a run so far, in order. With ``kind``, only the records of this kind."""
    events = EventReader(run_dir, kinds=("texts",)).each()
    return [event for event in events if isinstance(event, TextRecord) and kind in (None, event.kind)]
