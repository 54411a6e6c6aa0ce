"""Makes broken or hostile run folders, each with one fault."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec

SPARSE = 6 * 2**30
Breaks = Callable[[Path], object]
KINDS: dict[str, Breaks] = {}
EVENTS = "events/0001.made.0.jsonl"
SAMPLES = "events/0001.samples-made.0.jsonl"
MADE = (
    '{"type":"made","group_uid":"g00000009","time_s":1.0,"tokens":["rollout-9.00000000.tokens",0,99],"samples":'
    '[{"uid":"g00000009.0","reward":1.0,"length":%s,"ended":"stop","engine":"engine-0"}]}\n'
)
LINE = '{"type":"numbers","source":"actor","step":%d,"time_s":1.0,"values":{"reward":0.5}}\n'
BILLION_LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join(f'*{old}' for _ in range(9))}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def text(name: str, content: str | bytes) -> Breaks:
    def write(run: Path) -> None:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def sparse(name: str, head: bytes = b"") -> Breaks:
    def write(run: Path) -> None:
        text(name, head)(run)
        os.truncate(run / name, SPARSE)

    return write


def instead(name: str, make: Callable[[Path], object]) -> Breaks:
    """Replaces a file by an object that is not a plain file."""

    def write(run: Path) -> None:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        make(path)

    return write


def made(name: str, make: Callable[[Path], object]) -> Breaks:
    """Writes a sample record with its tokens in this file."""

    def write(run: Path) -> None:
        text(SAMPLES, (MADE % 1).replace("rollout-9.00000000.tokens", name))(run)
        make(run / "samples" / name)

    return write


def ledger(script: str) -> Breaks:
    def write(run: Path) -> None:
        (run / "ledger.sqlite").unlink()
        with closing(sqlite3.connect(run / "ledger.sqlite")) as database:
            database.executescript(script)

    return write


def listen(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


OTHERS = (
    "CREATE TABLE restores (id INTEGER); CREATE TABLE generated (id INTEGER, episodes BLOB);"
    "CREATE TABLE rolled_back (id INTEGER, event, uid, group_uid, step, version, reason, time);"
)
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
COLUMNS = "id INTEGER PRIMARY KEY, event, uid, group_uid, step, version, reason, time"
VIEW = f"{OTHERS} CREATE VIEW events AS {ENDLESS} SELECT i AS id, 'put' AS event, 'u' AS uid, 'g' AS group_uid, "
VIEW += "1 AS step, 1 AS version, '' AS reason, 1.0 AS time FROM n;"


def spoofed(run: Path) -> None:
    """Makes a table, and replaces its statement in the schema by the statement of a view."""
    ledger(f"{OTHERS} CREATE TABLE events ({COLUMNS});")(run)
    with closing(sqlite3.connect(run / "ledger.sqlite")) as database, database:
        database.execute("PRAGMA writable_schema=ON")
        database.execute(
            "UPDATE sqlite_master SET sql = ? WHERE name = 'events'",
            (f"CREATE VIEW events AS {ENDLESS} SELECT * FROM n",),
        )


def beside_ledger(ending: str) -> Breaks:
    """Writes a large file next to a ledger. A local process seems to write this ledger."""

    def write(run: Path) -> None:
        (run / ".lock").write_text(f"process 1 of {socket.gethostname()}")
        (run / "ledger.sqlite-wal").touch()
        sparse(f"ledger.sqlite{ending}")(run)

    return write


def orders_many(run: Path) -> None:
    order = {
        "request_id": "x",
        "kind": "stop",
        "engine_ids": [],
        "failure": "",
        "history": 1000 * [{"state": "A", "at": 1}],
    }
    changes = [{"order": order | {"request_id": f"{i}"}} for i in range(2000)]
    lines = [msgspec.json.encode({"type": "order", "time_s": 1, "change": change}) for change in changes]
    (run / EVENTS).write_bytes(b"\n".join([*lines, b"[" * 10**6, b"{}", b"\xff"]))


def logs(run: Path) -> None:
    for number in range(20_000):
        (run / "logs" / f"{number}.log").touch()


def tokenizer(**parts: object) -> Breaks:
    whole = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}} | parts
    return text("samples/tokenizer/tokenizer.json", msgspec.json.encode(whole))


def links(run: Path) -> None:
    outside = run.parent / "outside.txt"
    outside.write_text("root:secret-of-the-owner\n")
    for name in ("summary.json", "config.yaml", "ledger.sqlite"):
        (run / name).unlink()
        (run / name).symlink_to(outside)


# These faults are visible in the list of runs.
LISTED: dict[str, Breaks] = {
    "summary_empty": text("summary.json", "{}"),
    "summary_of_wrong_types": text("summary.json", '{"outcome": ["finished"], "steps": {}}'),
    "summary_a_list": text("summary.json", "[1, 2]"),
    "summary_nested": text("summary.json", "[" * 200_000),
    "summary_nan": text("summary.json", '{"outcome": NaN}'),
    "summary_huge_number": text("summary.json", '{"outcome": "finished", "steps": ' + "9" * 100_000 + "}"),
    "summary_of_many_values": text("summary.json", '{"outcome":"x","a":[' + "{}," * 1_300_000 + "{}]}"),
    "summary_no_text": text("summary.json", b"\xff\xfe\x00"),
    "summary_sparse": sparse("summary.json"),
    "summary_pipe": instead("summary.json", os.mkfifo),
    "summary_folder": instead("summary.json", Path.mkdir),
    "config_aliases": text("config.yaml", BILLION_LAUGHS),
    "config_nested": text("config.yaml", "a: " + "[" * 50_000),
    "config_list": text("config.yaml", "- a\n- b\n"),
    "config_python": text("config.yaml", "a: !!python/object/apply:os.system ['true']\n"),
    "config_sparse": sparse("config.yaml"),
    "config_pipe": instead("config.yaml", os.mkfifo),
    "config_socket": instead("config.yaml", listen),
    "config_link_to_itself": instead("config.yaml", lambda path: path.symlink_to(path.name)),
    "links_out": links,
    "name_\x1b[31m\u202e_\x85": text("summary.json", '{"outcome": "\\u001b[31m\\u202e<script>"}'),
    "ledger_view": ledger(VIEW),
    "ledger_spoofed_view": spoofed,
    "ledger_virtual_table": ledger(f"{OTHERS} CREATE VIRTUAL TABLE events USING fts5(event, uid);"),
    "ledger_computed_column": ledger(
        f"{OTHERS} CREATE TABLE events ({COLUMNS.replace('event,', 'event AS (hex(zeroblob(900000000))),')});"
    ),
    "ledger_without_tables": ledger("CREATE TABLE other (a);"),
    "ledger_no_database": text("ledger.sqlite", b"no database at all" * 100),
    "ledger_sparse": sparse("ledger.sqlite"),
    "ledger_pipe": instead("ledger.sqlite", os.mkfifo),
    "ledger_wal_pipe": instead("ledger.sqlite-wal", os.mkfifo),
}
# These faults break a view of the run, or have no effect.
OTHER: dict[str, Breaks] = {
    "orders_many": orders_many,
    "ledger_wrong_types": ledger(
        f"{OTHERS} CREATE TABLE events ({COLUMNS});"
        "INSERT INTO events VALUES (1, x'ff00', 7, NULL, 'x', 1e300, 5, 'never');"
    ),
    "ledger_large_values": ledger(
        f"{OTHERS} CREATE TABLE events ({COLUMNS});"
        "INSERT INTO events VALUES (1, zeroblob(60000000), '', '', 1, 1, '', 1.0);"
    ),
    "ledger_wal_sparse": beside_ledger("-wal"),
    "ledger_shm_sparse": beside_ledger("-shm"),
    "config_plan_pipe": instead("plan.json", os.mkfifo),
    "metrics_pipe": instead(EVENTS, os.mkfifo),
    "metrics_device": instead(EVENTS, lambda path: path.symlink_to("/dev/zero")),
    "metrics_sparse": sparse(EVENTS),
    "metrics_sparse_behind_lines": sparse(EVENTS, (LINE % 0).encode()),
    "metrics_huge_step": text(EVENTS, (LINE % 0).replace('"step":0', '"step":' + "9" * 40)),
    "metrics_many_names": text(
        EVENTS,
        "".join(
            f'{{"type":"numbers","source":"actor","step":0,"time_s":1,"values":{{"{name}":1}}}}\n'
            for name in range(60_000)
        ),
    ),
    "metrics_many_resumes": text(
        EVENTS, '{"type":"numbers","source":"run","step":0,"time_s":1,"values":{"resumed":1}}\n' * 100_000
    ),
    "metrics_nested": text(EVENTS, '{"type":"numbers","source":' + "[" * 100_000 + "\n" + LINE % 0),
    "texts_sparse": sparse(EVENTS),
    "texts_of_many_values": text(
        EVENTS, '{"type":"texts","kind":"eval","step":0,"time_s":1,"rows":[' + '{"a":1},' * 2_000_000 + '{"a":1}]}\n'
    ),
    "texts_wrong_straggler": text(
        EVENTS, '{"type":"texts","kind":"straggler","step":0,"time_s":1,"rows":[{"who":1}]}\n'
    ),
    "alarms_pipe": instead("events/0001.alarms.0.jsonl", os.mkfifo),
    "alarms_wrong": text(EVENTS, '{"type":"alarm","event":1}\n{"type":"alarm","event":' + "[" * 100_000 + "\n"),
    "recoveries_sparse": sparse("logs/recoveries.json"),
    "recoveries_wrong": text("logs/recoveries.json", '[{"tier": "x"}]'),
    "lock_sparse": sparse(".lock"),
    "lock_huge_number": text(".lock", f"process {'9' * 150} of {socket.gethostname()}"),
    "log_sparse": sparse("logs/actor-0.log"),
    "log_pipe": instead("logs/pipe.log", os.mkfifo),
    "logs_of_many_files": logs,
    "log_name_no_text": lambda run: Path(os.fsdecode(os.fsencode(run / "logs") + b"/\xff\xfe.log")).touch(),
    "samples_sparse": sparse(SAMPLES),
    "samples_wrong": text(SAMPLES, '{"type":"made","group_uid":7}\n' * 3 + '{"type":"trained"}\n' + MADE % "-1"),
    "samples_huge_step": text(SAMPLES, MADE % "9223372036854775813"),
    "samples_nested": text(SAMPLES, '{"type":"made","samples":' + "[" * 100_000 + "\n"),
    "samples_pipe": instead(SAMPLES, os.mkfifo),
    "samples_tokens_pipe": made("rollout-9.00000000.tokens", os.mkfifo),
    "samples_tokens_outside": made("../config.yaml", lambda path: None),
    "samples_tokens_wrong": made("rollout-9.00000000.tokens", lambda path: path.write_bytes(b"\xdf\xff" * 100)),
    "samples_link": instead("samples", lambda path: path.symlink_to("/proc")),
    "tokenizer_sparse": sparse("samples/tokenizer/tokenizer.json"),
    "tokenizer_pipe": instead("samples/tokenizer/tokenizer.json", os.mkfifo),
    "tokenizer_slow_pattern": tokenizer(decoder={"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}),
    "tokenizer_long_token": tokenizer(model={"type": "WordLevel", "vocab": {"a" * 5_000_000: 0}, "unk_token": "a"}),
    "name_no_text_\udcff": lambda run: None,
    "<img src=x onerror=alert(1)>": lambda run: None,
}
KINDS = LISTED | OTHER
