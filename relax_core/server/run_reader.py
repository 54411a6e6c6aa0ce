"""Answers the page's requests about one run from the files in its folder. Caches the data."""

from __future__ import annotations

import datetime
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import msgspec
import yaml

from relax_core.bus.ledger_reader import MAX_ROW_BYTES, LedgerFile, SampleLife, check_plain
from relax_core.contracts.untrusted_files import decode_json, shown_line
from relax_core.observe.alarms import NOTICES
from relax_core.observe.event_log import (
    ACTOR,
    EVENTS_FOLDER,
    Alarm,
    EventReader,
    MetricRecord,
    OrderChange,
    TextRecord,
)
from relax_core.observe.sample_index import FORMAT, SampleIndex
from relax_core.observe.sample_log import SAMPLES_FOLDER
from relax_core.server.run_events import RunSeries, RunTexts
from relax_core.server.run_folders import (
    BROKEN,
    LOCK,
    MAX_LOCK,
    MAX_NAME,
    MAX_SUMMARY,
    SUMMARY,
    inside,
    open_inside,
    reason,
    run_id,
    run_name,
    run_status,
)
from relax_core.server.run_timeline import RunOrder, event_spans, take_order
from relax_core.server.sample_views import SampleViews

CONFIG, PLAN = "config.yaml", "plan.json"
LEDGER, NO_LEDGER = "ledger.sqlite", "This run has no ledger that can be read from this machine."
LEDGER_BUSY_S, QUERY_S = 1.0, 10.0  # longest wait for a writer; time limit for all reads of a ledger
REST = 100  # an answer is cached for this multiple of its computation time
NEWEST_S = 1.0  # longest wait of a request for the newest samples
END_S = 10.0
MAX_ALARMS = 50
MAX_TEXT_BYTES = 2**20  # limit of a file's text in a response
MAX_CONFIG = 2**18  # bytes of config.yaml
MAX_NODES, MAX_YAML_DEPTH, MAX_SCALAR = 20_000, 50, 20_000  # limits of a YAML text: nodes, depth, scalar's length
READ_S = 5.0  # time limit for reading the event log in one call
SAMPLES_LEFT_OUT = f"{SAMPLES_FOLDER} is not a folder of the run, so no sample is shown"
Answer = TypeVar("Answer")
SUMMARY_DECODER = msgspec.json.Decoder(dict[str, Any])


class CachedAnswer(Generic[Answer]):
    """Caches an answer for 100 times its computation time, and at least one second."""

    def __init__(self, compute: Callable[[], Answer]) -> None:
        self._compute, self._until = compute, 0.0
        self._answer: Answer | None = None

    def __call__(self) -> Answer:
        """Returns the answer. Recomputes it if the cached answer has expired."""
        began = time.monotonic()
        if began >= self._until:
            self._answer = self._compute()
            took = time.monotonic() - began
            self._until = began + max(1.0, REST * took)
        return cast(Answer, self._answer)


class RunReader:
    """Reads one run's folder. Its methods are thread-safe. ``cache`` is the folder of the index files.

    ``samples_share`` is the indexed share of the sample files, from 0 to 1.
    """

    def __init__(self, run_dir: Path, cache: Path | None) -> None:
        self.run_dir, self.run_id = run_dir, run_id(run_dir)
        self._cache = cache
        self._lock = threading.Lock()
        self._open_log()
        self._index: SampleIndex | None = None
        self._views: SampleViews | None = None
        self._indexing: threading.Thread | None = None
        self.samples_share, self._index_problem, self._closing = 0.0, "", False
        self._wanted, self._read_all = threading.Event(), threading.Event()
        none: dict[str, Any] = {}
        self._events = CachedAnswer(lambda: self._tried(LEDGER, self._count_events, none))
        self._standing = CachedAnswer(lambda: run_status(run_dir))
        self._values = CachedAnswer(lambda: self._tried(CONFIG, self._read_config, none))
        self._outcome = CachedAnswer(lambda: self._tried(SUMMARY, self._read_summary, none))
        self._problems: dict[str, str] = {}  # by file
        self._staleness = CachedAnswer(self._count_staleness)
        self._counts = CachedAnswer(self._count_samples)
        self.engines = CachedAnswer(self._count_engines)
        self._drops = CachedAnswer(self._take_drops)
        self.faults_and_orders = CachedAnswer(
            lambda: event_spans(run_dir, self.series().timed, list(self._orders.values()))
        )

    def series(self) -> RunSeries:
        """Returns the run's current metrics."""
        self._follow()
        return self._series

    def texts(self) -> RunTexts:
        """Returns the run's current evaluations and stragglers."""
        self._follow()
        return self._texts

    def _open_log(self) -> None:
        self._log = EventReader(self.run_dir, kinds=("numbers", "texts", "alarm", "order"))
        self._series, self._texts = RunSeries(), RunTexts(self.run_dir)
        self._alarms, self._orders = deque[Alarm](maxlen=MAX_ALARMS), dict[str, RunOrder]()
        self._log_inode = _inode(self.run_dir / EVENTS_FOLDER)

    def _follow(self) -> None:
        """Reads new events of the log for at most `READ_S` seconds. The next call continues."""
        with self._lock:
            if self._log_inode != _inode(self.run_dir / EVENTS_FOLDER):  # another run now has this folder name
                self._open_log()
            until = time.monotonic() + READ_S
            while time.monotonic() < until and (found := self._log.read_placed()):
                for event, place in found:
                    try:
                        if isinstance(event, MetricRecord):
                            self._series.add(event)
                        elif isinstance(event, TextRecord):
                            self._texts.add(event, place)
                        elif isinstance(event, Alarm):
                            self._alarms.append(event)
                        elif isinstance(event, OrderChange):
                            take_order(self._orders, event)
                    except (ValueError, LookupError, TypeError) as error:
                        self._problems[EVENTS_FOLDER] = reason(place.name, error)

    def samples(self) -> SampleIndex | None:
        """Returns the index of the run's samples, or None if the run has no samples.

        A thread indexes new records. The call waits for the thread for at most `NEWEST_S` seconds. So a small run is
        indexed completely. For a large run the thread continues later, and ``samples_share`` is the indexed share.
        """
        with self._lock:
            if self._index is None:
                folder = self.run_dir / SAMPLES_FOLDER
                if not folder.is_dir() or os.path.realpath(folder) != os.path.join(
                    os.path.realpath(self.run_dir), SAMPLES_FOLDER
                ):
                    self._problems[SAMPLES_FOLDER] = SAMPLES_LEFT_OUT if os.path.lexists(folder) else ""
                    return None
                name = f"{self.run_id}-{folder.stat().st_ino}-{FORMAT}.sqlite"
                self._index = SampleIndex(self.run_dir, None if self._cache is None else self._cache / name)
                self._indexing = threading.Thread(target=self._index_forever, daemon=True, name="samples-index")
                self._indexing.start()
            index = self._index
        self._read_all.clear()
        self._wanted.set()
        self._read_all.wait(NEWEST_S)
        return index

    def views(self) -> SampleViews:
        """Returns the views of the run's samples. Raises FileNotFoundError if the run has no samples."""
        index = self.samples()
        if index is None:
            raise FileNotFoundError("This run keeps no samples (tracker.samples=0, or an older Relax made it).")
        with self._lock:
            if self._views is None:
                self._views = SampleViews(self.run_dir, index)
            return self._views

    def _index_forever(self) -> None:
        index = self._index
        assert index is not None, "the index exists before the thread starts"
        while not self._closing:
            if not self._wanted.wait(1.0):
                continue
            self._wanted.clear()
            try:
                while not self._closing and index.refresh():
                    self.samples_share = index.share()
                self.samples_share, self._index_problem = 1.0, ""
                self._drops()
            except BROKEN as error:  # invalid file, removed folder, or full disk of the cache
                self._index_problem = f"No further samples can be read: {reason('', error)}."
            self._read_all.set()

    def overview(self) -> dict[str, Any]:
        """Returns the data of the page header: state, progress, expected end, newest values, ledger."""
        series, config, index = self.series(), self.config(), self.samples()
        newest = list(self._alarms)[::-1]
        total = _number(_at(config, "run", "steps"))
        state, step_s, done = self._standing().state, series.step_s(), series.steps_done
        live = state == "live" and step_s is not None and total is not None
        found = {
            "id": self.run_id,
            "folder": shown_line(str(self.run_dir)),
            "name": shown_line(str(config.get("name") or ""))[:MAX_NAME] or run_name(self.run_dir),
            "state": state,
            "steps_done": done,
            "steps": total,
            "step_s": step_s,
            "left_s": step_s * max(0, int(total or 0) - done) if live and step_s is not None else None,
            "ended_s": series.ended_s(),
            "resumes": series.resumes,
            "alarms": [msgspec.to_builtins(record) | {"alarm": record.event not in NOTICES} for record in newest],
            "tags": series.tags(),
            "ledger": self._events(),
            "samples": self._counts(),
            "samples_share": 1.0 if index is None else self.samples_share,
            "staleness": self._staleness(),
        }
        own = [self._standing().problem, *self._problems.values(), *self._log.problems.values()]
        of_samples = [*(index.problems() if index else []), self._index_problem]
        return found | {"problems": list(dict.fromkeys(filter(None, [*own, *of_samples])))}

    def _tried(self, name: str, read: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Returns the result of ``read``, which reads the file ``name``.

        Returns ``otherwise`` if the file is missing or unreadable. The overview lists unreadable files.
        """
        try:
            found = read()
        except FileNotFoundError:
            self._problems.pop(name, None)
            return otherwise
        except BROKEN as error:
            self._problems[name] = reason(name, error)
            return otherwise
        self._problems.pop(name, None)
        return found

    def pulse(self) -> dict[str, Any]:
        """Returns a few values that change when there is new data, for open pages."""
        series = self.series()
        return {"state": self._standing().state, "steps_done": series.steps_done, "points": len(series.tags())}

    def config(self) -> dict[str, Any]:
        """Returns the run's configuration. Empty if the file is missing or unreadable."""
        return self._values()

    def summary(self) -> dict[str, Any]:
        """Returns summary.json. Empty if the file is missing or unreadable."""
        return self._outcome()

    def _read_config(self) -> dict[str, Any]:
        return decode_yaml(self._bytes(CONFIG, MAX_CONFIG).decode("utf-8", "replace"))

    def _read_summary(self) -> dict[str, Any]:
        return decode_json(self._bytes(SUMMARY, MAX_SUMMARY), SUMMARY_DECODER)

    def _bytes(self, name: str, most: int) -> bytes:
        with open_inside(self.run_dir, name) as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise ValueError(f"it has more than {most} bytes")
        return data

    def text(self, name: str) -> str:
        """Returns the text of a file, at most the first MiB. Raises FileNotFoundError and NotInside."""
        with open_inside(self.run_dir, name) as file:
            return file.read(MAX_TEXT_BYTES).decode("utf-8", "replace")

    def close(self) -> None:
        """Ends the thread and closes the index."""
        self._closing = True
        self._wanted.set()  # wakes the thread
        if self._indexing is not None:
            self._indexing.join(END_S)
        with self._lock:
            if self._index is not None:
                self._index.close()
                self._index = None

    def _count_staleness(self) -> dict[str, int]:
        if self._index is not None:
            counts = self._index.staleness()
            if counts:
                return counts
        counts = _at(self.summary(), "staleness", "histogram")
        return self._tried(SUMMARY, lambda: msgspec.convert(counts or {}, dict[str, int]), {})

    def batch(self, step: int) -> list[SampleLife]:
        """Returns the life cycles of the samples that ended at a train step.

        Raises FileNotFoundError before the step has ended.
        """
        ends = {record.step: record for record in self.series().timed if record.source == ACTOR and "step" in record.ms}
        if step not in ends:
            raise FileNotFoundError(f"Train step {step} has not ended.")
        staleness = _number(_at(self.config(), "mode", "max_staleness")) or 0
        before = ends.get(step - staleness - 3)
        from_s = 0.0 if before is None else before.end_s - before.ms["step"] / 1e3
        with open_ledger(self.run_dir) as ledger:
            return ledger.lives(step=step, from_s=from_s, to_s=ends[step].end_s)

    def _count_events(self) -> dict[str, int]:
        with open_ledger(self.run_dir) as ledger:
            return {shown_line(str(kind)[:MAX_NAME]): int(count) for kind, count in ledger.event_counts().items()}

    def _count_engines(self) -> list[dict[str, Any]]:
        return [] if self._index is None else self._index.engines()

    def _count_samples(self) -> dict[str, Any] | None:
        return None if self._index is None else self._index.overview()

    def _take_drops(self) -> bool:
        assert self._index is not None, "`samples` has opened the index"
        return self._tried(f"the drops in {LEDGER}", partial(self._give_drops, self._index), None) is None

    def _give_drops(self, index: SampleIndex) -> None:
        """Marks the newly dropped samples in the index.

        After a restore of the ledger, marks all dropped samples again.
        """
        with open_ledger(self.run_dir) as ledger:
            after, restores = index.ledger_position()
            found = ledger.drops(after=after, restores=restores)
        index.take_ledger(found.dropped, anew=found.anew)
        index.set_ledger_position(found.position, found.restores)


def open_ledger(run_dir: Path) -> LedgerFile:
    """Returns the run's ledger.

    Raises FileNotFoundError if the ledger does not exist, or if a run of another host is writing it on a shared disk.
    SQLite must not open such a ledger, because the index of its write-ahead log is in the other host's memory. For an
    invalid file, raises the errors of `LedgerFile`.
    """
    try:
        path = inside(run_dir, LEDGER)
    except FileNotFoundError:
        raise FileNotFoundError(NO_LEDGER) from None
    check_plain(path)
    if os.path.lexists(path.with_name(f"{LEDGER}-wal")) and _host_of_lock(run_dir) != socket.gethostname():
        raise FileNotFoundError(NO_LEDGER)
    return LedgerFile(path, seconds=QUERY_S, max_bytes=MAX_ROW_BYTES, busy_s=LEDGER_BUSY_S)


def _host_of_lock(run_dir: Path) -> str:
    try:
        with open_inside(run_dir, LOCK) as file:
            return file.read(MAX_LOCK).decode("utf-8", "replace").split()[-1]
    except (OSError, ValueError, IndexError):
        return ""


def cache_folder() -> Path:
    """Returns the folder of the sample indices in the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "relax" / "dashboard"


class _YamlLoader(yaml.SafeLoader):
    """Limits yaml's safe loader. Refuses aliases, because they can expand a short text to a huge value."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Composes the next node. Raises ValueError above a limit."""
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias (*name), and configurations of Relax have no aliases")
        self._nodes += 1
        self._depth += 1
        if self._nodes > MAX_NODES or self._depth > MAX_YAML_DEPTH:
            raise ValueError(f"it has more than {MAX_NODES} nodes, or nodes deeper than {MAX_YAML_DEPTH}")
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and len(node.value) > MAX_SCALAR:
            node.tag = "tag:yaml.org,2002:str"  # not parsed: a number or time is shorter
        self._depth -= 1
        return node


def decode_yaml(text: str) -> dict[str, Any]:
    """Returns the mapping in a YAML text, with string keys and JSON values. Raises ValueError for any other text."""
    loader = _YamlLoader(text)
    try:
        found = loader.get_single_data()
    except (yaml.YAMLError, RecursionError, LookupError, TypeError, ArithmeticError) as error:
        raise ValueError(f"it is not valid YAML: {error}") from error
    finally:
        loader.dispose()
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError("it is not a mapping")
    return {str(key): _plain(value) for key, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(element) for element in value]
    if isinstance(value, bytes | datetime.date):
        return str(value)
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length()} bits"
    return value


def _inode(path: Path) -> int:
    try:
        return path.lstat().st_ino
    except OSError:
        return -1


def _at(values: Any, *keys: str) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 2**53 else None
