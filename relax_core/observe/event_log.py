"""Is the event log of a run: what its processes report, each in files of its own, and the one reader of these files.

``RUN/events/ATTEMPT.WRITER.START.jsonl`` has one JSON object a line, whose ``type`` says what it is (`Event`). ATTEMPT
counts how often the services of the run were started together, and START how often this writer was in that attempt. So
a file has one writer, and it only grows. Its last line may be half-written if the writer was killed.

The order of the events is that of the attempts, and within one that of time. An attempt that goes on from a checkpoint
begins with the mark of a resume, which undoes the later steps of the attempts before it.
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

from relax_core.contracts.foreign_files import decode_json, open_plain
from relax_core.contracts.sink import HistogramRecord as HistogramRecord
from relax_core.contracts.sink import MetricRecord as MetricRecord
from relax_core.contracts.sink import Record as Record
from relax_core.contracts.sink import TextCell as TextCell
from relax_core.contracts.sink import TextRecord as TextRecord

log = logging.getLogger(__name__)
EVENTS_FOLDER = "events"
CONTROLLER = "controller"  # the writer that marks resumes
ACTOR = "actor"  # source of one record a train step
ROLLOUT = "rollout"  # source of one record a prompt batch of generation
EVAL = "eval"  # source of one record an evaluation; its step is the weight version
SKELETONS = "skeletons"  # kind of the texts that say what the right answers of an evaluation look like
RANK = "rank"  # source of the times of the trainer's ranks, one record a train step
PROCESS = "process"  # source of what the processes of the run use, one record each some seconds
LEDGER = "ledger"  # source of the ledger's drop counts, one record a train step from the first dropped sample on
RUN = "run"  # source of events of the run itself
RESUMED = "resumed"
BAD_ROWS = "bad_rows"  # kind of texts about data rows that were skipped

KEPT_RECORDS = 10_000  # some 20 MB of records that wait for the disk
RETRY_S = 1.0  # between two tries to write, such as on a full disk
FLUSH_S = 10.0
READ_BYTES = 4 * 2**20  # of a file at once; no line is longer
CALL_BYTES, LEAST_BYTES = 32 * 2**20, 16 * 2**10  # of all files at once, and of each of many files
MOST_STEP, MOST_TIME_S = 2**53, 1e11
MOST_FILES = 20_000
MOST_TAILS, TAIL_BYTES = 16, 2**18  # files whose ends are read for the newest numbers, and bytes of each end
_NAME = re.compile(r"(\d{4,9})\.[\w-]+\.\d+\.jsonl")


class GapRecord(msgspec.Struct, frozen=True, kw_only=True, tag="gap", tag_field="type"):
    """Says that a writer has left out ``records`` records, because the disk took none for too long."""

    records: int
    time_s: float
    step: int = -1


class Alarm(msgspec.Struct, frozen=True, kw_only=True, tag="alarm", tag_field="type"):
    """Is one message about a run.

    ``event`` is one of `notify_schema.EVENTS`. Two messages with the same event and ``cause`` are about one thing;
    ``kind`` says whether it is new, told again, or over. ``left_out`` is how often it came since the message before.
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
    """Is one change of the run's orders, engines or autoscaler, as `relax_core.server.order_book` writes it."""

    time_s: float
    change: msgspec.Raw
    step: int = -1


Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_STEP)]
Version = Annotated[int, msgspec.Meta(ge=-1, le=MOST_STEP)]


class TokensAt(msgspec.Struct, frozen=True, array_like=True):
    """Says where the tokens of a record stand: a file in the folder of samples, an offset and a size in bytes."""

    file: str
    offset: Count
    size: Count


class MadeSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Holds the numbers of a sample that the rollout made, as `relax_core.contracts.tree.Episode` names them.

    ``length`` counts its sampled tokens, ``turns`` its turns, and ``engine`` is that of the first turn. ``version`` is
    that of the oldest trained token, None for a sample that is not put on the bus.
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
    """Holds the samples of one group that the rollout made. How each of them ended is in the ledger."""

    group_uid: str
    time_s: float
    samples: list[MadeSample]
    tokens: TokensAt
    step: int = -1


class TrainedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="trained", tag_field="type"):
    """Holds the numbers of samples of one group that a rank of the trainer trained at train step ``step``.

    ``lengths`` counts the sampled tokens of each sample, and ``trained`` those that no mask takes out. ``versions`` has
    the version of the oldest trained token of each.
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
ALARMS, ORDERS = "alarms", "orders"  # writers of files of their own, which begin no attempt
SAMPLES = "samples-"  # begins the names of the writers of sample records; only who asks for these opens their files


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
    """Makes a record with the current time. Raises TypeError or ValueError if a value is not a number."""
    numbers = {name: float(value) for name, value in values.items()}
    return MetricRecord(source=source, step=step, time_s=time.time(), values=numbers)


def text_record(kind: str, step: int, rows: Sequence[Mapping[str, TextCell]]) -> TextRecord:
    """Makes a record with the current time."""
    return TextRecord(kind=kind, step=step, time_s=time.time(), rows=[dict(row) for row in rows])


def bad_rows_kind(worker: int) -> str:
    """Returns the kind of the texts in which a rollout worker names the data rows that it skipped."""
    return f"{BAD_ROWS}-{worker}" if worker else BAD_ROWS


def is_resume(record: Event) -> bool:
    """Is True if the record marks that the run went on from a checkpoint of ``record.step`` train steps."""
    return isinstance(record, MetricRecord) and record.source == RUN and RESUMED in record.values


def without_undone(records: Iterable[MetricRecord]) -> list[MetricRecord]:
    """Returns the valid records. A resume at step s undoes the earlier records for step s and later steps."""
    kept: list[MetricRecord] = []
    for record in records:
        if is_resume(record):
            kept = [earlier for earlier in kept if earlier.step < record.step]
        else:
            kept.append(record)
    return kept


def by_step(records: Iterable[MetricRecord], source: str) -> dict[int, dict[str, float]]:
    """Returns step → values of ``source``, in order of step. Of several records of a step the last counts."""
    values = {record.step: record.values for record in records if record.source == source}
    return dict(sorted(values.items()))


# -- The writer -------------------------------------------------------------------------------------------------------
class AppendFile:
    """Appends whole batches to a file, after those of an earlier process.

    ``size`` is its valid length in bytes.
    """

    def __init__(self, path: Path, *, lines: bool) -> None:
        """Opens or makes the file. With ``lines`` it removes a last line without an end, whose writer was killed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self.size = self._end_of_last_line() if lines else self._file.seek(0, os.SEEK_END)
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
    """Appends the events of one process to the log, from a thread, so that no caller waits for a disk.

    All methods are thread-safe. Events that cannot be written wait and are tried again. While `KEPT_RECORDS` wait,
    newer ones are left out and counted in a `GapRecord`. ``problem`` says why nothing can be written, "" if something
    can.
    """

    def __init__(self, run_dir: Path, writer: str, *, attempt: int = 0) -> None:
        self.problem = ""
        self.left_out = 0
        self._run_dir, self._writer = run_dir, writer
        self._wake = threading.Condition()
        self._attempt = attempt
        self._waiting: list[tuple[int, Event]] = []  # with the attempt of each
        self._put = self._written = 0
        self._unreported = 0  # records that were left out since the newest gap
        self._ended = False
        self._file: AppendFile | None = None
        self._file_attempt = -1
        self._thread: threading.Thread | None = None

    def begin_attempt(self, step: int) -> int:
        """Begins a new attempt, which goes on after ``step`` train steps, and returns its number.

        It marks the resume, unless the attempt is the first one and begins at step 0.
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
        """Waits until all events so far are in the file. Raises TimeoutError, which names the cause."""
        with self._wake:
            upto = self._put
            if not self._wake.wait_for(lambda: self._written >= upto, timeout_s):
                raise TimeoutError(
                    f"events were not written within {timeout_s:g} s: {self.problem or 'the disk hangs'}"
                )

    def close(self, *, timeout_s: float = FLUSH_S) -> None:
        """Writes what waits and ends the thread. Raises TimeoutError as `flush` does."""
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
    """Appends events to the log in the thread of the caller, which learns whether they are there.

    Without ``attempt`` they belong to the newest one.
    """

    def __init__(self, run_dir: Path, writer: str, *, attempt: int | None = None) -> None:
        self._run_dir, self._writer, self._attempt = run_dir, writer, attempt
        self._path: Path | None = None

    def append(self, *events: Event) -> int:
        """Appends events and returns how many are left out, because no reader takes so long a line.

        If the others cannot all be written, none is, and it raises OSError.
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
    for start in range(MOST_FILES):
        path = folder / f"{attempt:04d}.{writer}.{start}.jsonl"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        return path
    raise OSError(f"{folder} has more than {MOST_FILES} files of {writer}")


# -- The reader -------------------------------------------------------------------------------------------------------
class Place(NamedTuple):
    """Says where an event stands: the file's name, and the first byte and the length of its line."""

    name: str
    offset: int
    size: int


class _Entry(NamedTuple):
    """Is one line of a file: its place in the order, its event (None if it is not asked for), and where it stands."""

    is_later: bool  # False for the mark of a resume, which is the first event of its attempt
    time_s: float
    event: Event | None
    place: Place


class EventReader:
    """Follows the log of a run from a cursor on, also while it is written or after it was copied elsewhere.

    ``cursor`` maps each file to the bytes that were read of it, and may be stored between two readers. ``kinds`` are
    the types of the events that are given, by default all but alarms, orders and samples; with ``writer`` only the
    files of this writer are read. With a type of sample records only their files and those of the controller, which has
    the resumes, are read. ``count`` is the number of events that were given.
    ``problems`` says of each file why it, or a line of it, cannot be read. No event that was given is kept.
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
        self._left: set[str] = set()  # files that are not read on
        self._starts: dict[int, int] = {}  # attempt → the train steps after which it goes on

    def read(self) -> list[Event]:
        """Returns the next events in order, of one attempt and at most some MiB; none if there are none now."""
        return [event for event, _ in self.read_placed()]

    def read_placed(self) -> list[tuple[Event, Place]]:
        """Returns what `read` does, each event with its place, from which `read_event` reads it again."""
        while True:
            before = dict(self.cursor)
            for names in self._unread():
                events = self._next_of(names)
                self.count += len(events)
                if events:
                    return events
                if before != self.cursor:  # there were only events of other kinds, and the attempt may have more
                    break
            if before == self.cursor:
                return []

    def each(self) -> Iterator[Event]:
        """Yields the events up to the present end of the log."""
        while events := self.read():
            yield from events

    def _unread(self) -> list[list[str]]:
        """Returns the files that have bytes that were not read, by attempt; a killed writer's last line stays there."""
        attempts: dict[int, list[str]] = {}
        for name, size in event_files(self._run_dir).items():
            if size > self.cursor.get(name, 0) and name not in self._left and self._reads(name.split(".")[1]):
                attempts.setdefault(int(name.partition(".")[0]), []).append(name)
        return [names for _, names in sorted(attempts.items())]

    def _reads(self, writer: str) -> bool:
        if self._writer is not None:
            return writer == self._writer
        return writer.startswith(SAMPLES) == self._of_samples or (self._of_samples and writer == CONTROLLER)

    def _next_of(self, names: Sequence[str]) -> list[tuple[Event, Place]]:
        attempt = int(names[0].partition(".")[0])
        entries: list[_Entry] = []
        until = math.inf  # a file has further events from this time on that were not read yet
        most_bytes, read_bytes = min(READ_BYTES, max(LEAST_BYTES, CALL_BYTES // len(names))), 0
        for name in names:
            if read_bytes > 2 * CALL_BYTES:  # many long lines; the other files come with the next call, out of order
                break
            own, is_cut = self._entries(name, most_bytes)
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
        """Is True for what a process reports of a step after a later attempt has begun before that step."""
        return any(number > attempt and event.step >= step for number, step in self._starts.items())

    def _entries(self, name: str, most_bytes: int) -> tuple[list[_Entry], bool]:
        """Returns the next whole lines of a file, one at least, and whether it has more."""
        offset, found, time_s = self.cursor.get(name, 0), [], 0.0
        try:
            with open_plain(self._run_dir / EVENTS_FOLDER / name) as file:
                file.seek(offset)
                data = file.read(most_bytes)
                if len(data) == most_bytes and b"\n" not in data:
                    data += file.read(READ_BYTES - most_bytes)
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
                time_s = max(time_s, event.time_s)  # a clock that was set back does not change the order of a file
            place = Place(name, offset, len(line))
            found.append(_Entry(event is None or not is_resume(event), time_s, event, place))
            offset += len(line)
        return found, len(data) >= most_bytes

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
    if abs(event.step) > MOST_STEP or not 0.0 <= event.time_s <= MOST_TIME_S:
        raise ValueError("its step or its time is out of all bounds")
    if isinstance(event, _NumbersLine):
        values = {key: math.nan if value is None else value for key, value in event.values.items()}
        return MetricRecord(source=event.source, step=event.step, time_s=event.time_s, values=values)
    return event


def read_event(run_dir: Path, place: Place) -> Event:
    """Returns the event at a place that `EventReader.read_placed` gave. Raises OSError, and ValueError for another."""
    with open_plain(run_dir / EVENTS_FOLDER / place.name) as file:
        file.seek(place.offset)
        return _decoded(file.read(place.size))


def event_files(run_dir: Path) -> dict[str, int]:
    """Returns name and size of each file of the log, sorted; links and whatever is no plain file are left out."""
    if (run_dir / EVENTS_FOLDER).is_symlink():
        return {}
    try:
        with os.scandir(run_dir / EVENTS_FOLDER) as entries:
            return dict(
                sorted(
                    (entry.name, entry.stat(follow_symlinks=False).st_size)
                    for entry in islice(entries, MOST_FILES)
                    if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
                )
            )
    except OSError:
        return {}


def of_samples(name: str) -> bool:
    """Is True for the name of a file of sample records."""
    return name.split(".")[1].startswith(SAMPLES)


def newest_metrics(run_dir: Path) -> dict[str, MetricRecord]:
    """Returns the newest record of each source that stands at the end of a file of the log, at little cost."""
    files = event_files(run_dir)
    newest = sorted((name for name in files if not of_samples(name)), reverse=True)[:MOST_TAILS]
    cursor = files | {name: max(0, files[name] - TAIL_BYTES) for name in newest}
    events = EventReader(run_dir, cursor=cursor, kinds=("numbers",)).each()
    return {event.source: event for event in events if isinstance(event, MetricRecord)}


def each_metric(run_dir: Path) -> Iterator[MetricRecord]:
    """Yields the numbers that a run has recorded so far, in order."""
    for event in EventReader(run_dir, kinds=("numbers",)).each():
        assert isinstance(event, MetricRecord)
        yield event


def read_metrics(run_dir: Path) -> list[MetricRecord]:
    """Returns all of `each_metric`, which takes much memory for a long run."""
    return list(each_metric(run_dir))


def read_texts(run_dir: Path, kind: str | None = None) -> list[TextRecord]:
    """Returns the texts that a run has recorded so far, in order, or those of one kind."""
    events = EventReader(run_dir, kinds=("texts",)).each()
    return [event for event in events if isinstance(event, TextRecord) and kind in (None, event.kind)]
