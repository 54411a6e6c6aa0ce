"""Defines the HTTP routes of the dashboard: runs, metrics, samples, evaluations, logs and the ledger."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from relax_core.contracts.untrusted_files import open_plain, shown
from relax_core.data.media.played_files import MAX_FILE_BYTES as MAX_PLAYED
from relax_core.data.media.played_files import played_type
from relax_core.observe.sample_index import FILTERS
from relax_core.observe.stragglers import Straggler, straggler_text
from relax_core.server.listed_runs import ListedRuns
from relax_core.server.order_types import Refusal
from relax_core.server.request_guard import Session, refusal_answer
from relax_core.server.run_events import MAX_POINTS, process_rows
from relax_core.server.run_folders import BROKEN, NotInside, find_runs, log_chunk, log_files, reason, search_log
from relax_core.server.run_reader import CONFIG, PLAN, RunReader, open_ledger
from relax_core.server.run_timeline import make_timeline
from relax_core.server.sample_views import picture_file, played_file

STATIC = Path(__file__).parent / "static"
PULSE_S = 1.0
THREADS, CONCURRENT_READS = 32, 2  # reader threads, and limit of threads that read one run
QUEUE_S = 60.0  # longest wait of a request for earlier requests about the same run
MAX_READERS = 10  # cached readers of runs; the page compares up to eight runs
MAX_FIRST = 2**40
MAX_TAGS, MAX_LISTED = 80, 100
JPEG, MAX_PICTURE = b"\xff\xd8\xff", 4 * 2**20  # first bytes of a JPEG file, and limit of its size in bytes
Answer = TypeVar("Answer")
_TEXT_FILTERS = ("uid", "group", "state", "reason", "engine", "ended")


class Page:
    """Answers the page's requests about the runs below ``folders``. Calls ``on_exchange`` for each new session."""

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        cache: Path | None,
        session: Session,
        on_exchange: Callable[[], object] = lambda: None,
    ) -> None:
        self._folders, self._cache, self._session, self._on_exchange = folders, cache, session, on_exchange
        self._lock = threading.Lock()
        self._readers: dict[str, RunReader] = {}
        self._users: Counter[str] = Counter()  # number of current requests per run
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._listed = ListedRuns()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="page")
        pages = {
            "": lambda run, query: run.overview(),
            "/series": _series,
            "/samples": _samples,
            "/sample": _sample,
            "/group": _group,
            "/config": _config,
            "/logs": lambda run, query: log_files(run.run_dir),
            "/log": _log,
            "/lineage": _lineage,
            "/timeline": _timeline,
            "/batch": _batch,
            "/engines": _engines,
            "/processes": lambda run, query: process_rows(run.series()),
            "/evaluations": lambda run, query: run.texts().evaluations(),
            "/evaluation": _evaluation,
            "/prompt": lambda run, query: run.texts().history(query.get("prompt", "")),
        }
        self.routes = [
            Route("/", _index),
            Route("/api/session", self._exchange, methods=["POST"]),
            Route("/api/runs", self._runs),
            Route("/api/run/{run}/stream", self._stream),
            *(Route(f"/api/run/{{run}}{path}", self._answer(page)) for path, page in pages.items()),
            Route("/api/run/{run}/picture/{digest}", self._picture),
            Route("/api/run/{run}/media/{digest}", self._media),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]

    def close(self) -> None:
        """Closes the indices."""
        for reader in self._readers.values():
            reader.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _answer(self, page: Callable[[RunReader, Mapping[str, str]], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            try:
                async with (
                    self._used_reader(request) as run,
                    asyncio.timeout(QUEUE_S),
                    self._turns[run.run_id],
                ):
                    return await self._thread(lambda: _json(page(run, request.query_params)))
            except TimeoutError as error:
                raise Refusal("busy", "Other requests about this run are still being answered.") from error
            except (FileNotFoundError, NotInside) as error:
                raise Refusal("unknown-id", shown(f"{error}")) from error
            except sqlite3.Error as error:
                message = f"The ledger cannot be read just now: {reason('', error)}. Try again."
                raise Refusal("busy", message) from error
            except ValueError as error:
                raise Refusal("malformed", shown(f"{error}")) from error
            except BROKEN as error:
                raise Refusal("unreadable", f"A file of this run cannot be read: {reason('', error)}.") from error

        return answer

    async def _thread(self, work: Callable[..., Answer], *given: Any) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *given))

    @asynccontextmanager
    async def _used_reader(self, request: Request) -> AsyncIterator[RunReader]:
        """Yields the reader of the request's run. The reader stays open while the block runs."""
        name = request.path_params["run"]
        with self._lock:
            self._users[name] += 1
        try:
            yield await self._thread(self._reader, name)
        finally:
            with self._lock:
                self._users[name] -= 1
                if not self._users[name]:
                    del self._users[name]

    def _reader(self, run: str) -> RunReader:
        """Returns the reader of a run. If there are too many readers, closes unused readers."""
        with self._lock:
            if run not in self._readers:
                path = find_runs(self._folders).get(run)
                if path is None:
                    raise Refusal("unknown-id", "There is no such run. It may have been moved or removed.")
                self._readers[run] = RunReader(path, self._cache)
                self._turns[run] = asyncio.Semaphore(CONCURRENT_READS)
            found = self._readers[run] = self._readers.pop(run)  # the most recently used reader is last
            unused = [name for name in self._readers if name not in self._users]
            oldest = unused[: max(0, len(self._readers) - MAX_READERS)]
            gone = [self._readers.pop(name) for name in oldest]
        for reader in gone:
            reader.close()
        return found

    async def _exchange(self, request: Request) -> Response:
        key = self._session.exchange((await request.body()).decode("utf-8", "replace"))
        if key is None:
            raise Refusal("no-token", "This link was used already. Open the newest link that the command printed.")
        self._on_exchange()
        return _json({"session": key})

    async def _runs(self, request: Request) -> Response:
        return _json(await self._thread(lambda: self._listed(find_runs(self._folders))))

    async def _stream(self, request: Request) -> Response:
        async with self._used_reader(request):  # an unknown run is refused before the stream begins
            pass

        async def events() -> AsyncIterator[bytes]:
            while not await request.is_disconnected():
                async with self._used_reader(request) as run:
                    pulse = await self._thread(run.pulse)
                yield b"data: " + msgspec.json.encode(pulse) + b"\n\n"
                await asyncio.sleep(PULSE_S)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _picture(self, request: Request) -> Response:
        async with self._used_reader(request) as run:
            path = picture_file(run.run_dir, request.path_params["digest"])
        data = b"" if path is None else await self._thread(_first_bytes, path)
        if not data.startswith(JPEG) or len(data) > MAX_PICTURE:
            raise Refusal("unknown-id", "There is no picture of this item.")
        return Response(data, media_type="image/jpeg")

    async def _media(self, request: Request) -> Response:
        """Answers with a sound or video, or with the part that the Range header requests."""
        async with self._used_reader(request) as run:
            path = played_file(run.run_dir, request.path_params["digest"])
        large = path is None or path.stat().st_size > MAX_PLAYED  # runs keep no larger files
        found = None if path is None or large else await self._thread(played_type, path)
        if path is None or found is None:
            raise Refusal("unknown-id", "There is no sound or video of this item.")
        return FileResponse(path, media_type=found)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return refusal_answer(error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    name = {404: "unknown-route", 405: "unknown-method"}.get(error.status_code, "malformed")
    fix = "see /openapi.json for the routes of a run"
    return refusal_answer(Refusal(name, str(error.detail), headers=dict(error.headers or {}), fix=fix))


REFUSALS: dict[Any, Callable[[Request, Any], Any]] = {Refusal: _refused, HTTPException: _no_route}


def page_app(page: Page) -> Starlette:
    """Returns the application that serves the page. It accepts no orders."""
    return Starlette(routes=page.routes, exception_handlers=REFUSALS)


def _first_bytes(path: Path) -> bytes:
    with open_plain(path) as file:
        return file.read(MAX_PICTURE + 1)


async def _index(request: Request) -> Response:
    return Response((STATIC / "index.html").read_bytes(), media_type="text/html")


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _filters(query: Mapping[str, str]) -> dict[str, str | float]:
    """Returns the filters of a query. Raises ValueError with the filter's name for an invalid number."""
    filters: dict[str, str | float] = {}
    for name in FILTERS:
        if value := query.get(name, ""):
            try:
                filters[name] = value if name in _TEXT_FILTERS else float(value)
            except ValueError:
                raise ValueError(f"{name}={value[:40]}: give a number") from None
    return filters


def _samples(run: RunReader, query: Mapping[str, str]) -> dict[str, Any]:
    views, filters = run.views(), _filters(query)
    most = min(MAX_LISTED, int(query.get("most", "50")))
    if words := query.get("words", ""):
        before = query.get("before", "")
        found = views.searched(filters, words, most=most, before=int(before) if before else None)
        return {**found, "share": run.samples_share}
    first = min(MAX_FIRST, max(0, int(query.get("first", "0"))))
    found = views.listed(filters, order=query.get("order", "newest"), first=first, most=most)
    return {**found, "share": run.samples_share}


def _sample(run: RunReader, query: Mapping[str, str]) -> dict[str, Any]:
    found = run.views().sample(int(query.get("id", "0")))
    if found is None:
        raise FileNotFoundError("There is no such sample.")
    return found


def _batch(run: RunReader, query: Mapping[str, str]) -> dict[str, Any]:
    step, lives = int(query.get("step", "-1")), run.batch(int(query.get("step", "-1")))
    turns: dict[str, list[Any]] = {}
    if run.samples() is not None:
        views = run.views()
        for group in dict.fromkeys(life.group for life in lives):
            turns |= views.turn_times(group)
    return {
        "step": step,
        "rows": [{**msgspec.to_builtins(life), "turns": turns.get(life.uid, [])} for life in lives],
    }


def _group(run: RunReader, query: Mapping[str, str]) -> dict[str, Any]:
    return run.views().group(query.get("uid", ""))


def _series(run: RunReader, query: Mapping[str, str]) -> dict[str, Any]:
    series = run.series()
    tags = [tag for tag in query.get("tags", "").split(",") if tag][:MAX_TAGS]
    most = min(MAX_POINTS, max(2, int(query.get("points", MAX_POINTS))))
    return {"resumes": series.resumes, "curves": {tag: series.curve(tag, most=most) for tag in tags}}


def _config(run: RunReader, query: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for name in (CONFIG, PLAN):
        try:
            found[name] = run.text(name)
        except (OSError, ValueError):
            found[name] = ""
    return {"config": found[CONFIG], "values": run.config(), "plan": found[PLAN], "summary": run.summary()}


def _log(run: RunReader, query: Mapping[str, str]) -> dict[str, Any]:
    name = query.get("name", "")
    if words := query.get("words", ""):
        return search_log(run.run_dir, name, words)
    start = query.get("from")
    return log_chunk(run.run_dir, name, None if start is None else int(start))


def _timeline(run: RunReader, query: Mapping[str, str]) -> dict[str, Any]:
    ends = [int(query[name]) if query.get(name) else None for name in ("first", "last")]
    events, problems = run.faults_and_orders()
    found = make_timeline(run.series().timed, first=ends[0], last=ends[1], events=events)
    if found is None:
        raise FileNotFoundError("No train step in this range has ended yet.")
    slow = [
        straggler_text(straggler)
        for straggler in run.texts().stragglers()
        if _overlaps(straggler, found.first, found.last)
    ]
    shown = {**msgspec.to_builtins(found), "steps_done": run.series().steps_done}
    return {**shown, "told": [*problems, *(f"{words}." for words in slow), *found.told]}


def _overlaps(straggler: Straggler, first: int, last: int) -> bool:
    return straggler.from_step <= last and (not straggler.ended or straggler.to_step >= first)


def _engines(run: RunReader, query: Mapping[str, str]) -> list[dict[str, Any]]:
    index = run.samples()
    return [] if index is None else run.engines()


def _evaluation(run: RunReader, query: Mapping[str, str]) -> dict[str, Any]:
    exact, first = query.get("exact", ""), min(MAX_FIRST, max(0, int(query.get("first", "0"))))
    wanted = None if not exact else exact == "1"
    return run.texts().rows(int(query.get("step", "-1")), exact=wanted, words=query.get("words", ""), first=first)


def _lineage(run: RunReader, query: Mapping[str, str]) -> dict[str, Any]:
    filters: dict[str, str | int] = {}
    for name in ("uid", "group", "reason"):
        if value := query.get(name, ""):
            filters[name] = value
    if step := query.get("step", ""):
        filters["step"] = int(step)
    with open_ledger(run.run_dir) as ledger:
        if not filters:
            return {"counts": ledger.counts(run_over=False), "reasons": ledger.reasons(), "steps": ledger.steps()}
        found = ledger.samples(filters)
    return {"count": len(found), "samples": found[:MAX_LISTED]}
