"""Tests that foreign text cannot move the cursor, set a title, change the direction or be invisible on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from relax_core.contracts.untrusted_files import shown, shown_json, shown_line
from relax_core.observe.panel import ShownConsole
from tests.server.made_run import make_run

DANGEROUS = [
    *("\x00", "\x07", "\x08", "\r", "\x1b", "\x7f", "\x85", "\x9b", "\u00ad", "\u061c", "\u200b", "\u200d", "\u200e"),
    *("\u2028", "\u202a", "\u202e", "\u2060", "\u2066", "\u2069", "\u3164", "\ufeff", "\ufff9", "\U000e0041"),
]
TITLE, CLEAR, COPY = "\x1b]0;owned\x07", "\x1b[2J\x1b[1A", "\x1b]52;c;ZWNobyBwd25lZA==\x07"
HOSTILE = f"{TITLE}{CLEAR}{COPY}\x9b31m\u202egpj.exe\u200b\r"
ALLOWED = re.compile(rb"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\r\n")  # colours, and a panel's hidden cursor


@pytest.mark.parametrize("character", DANGEROUS, ids=lambda char: f"U+{ord(char):04X}")
def test_a_hidden_character_is_shown_by_its_code(character: str) -> None:
    assert shown(f"a{character}b") == f"aU+{ord(character):04X}b"
    assert json.loads(shown_json(json.dumps(f"a{character}b", ensure_ascii=False))) == f"a{character}b"
    assert character not in shown_json(json.dumps(f"a{character}b", ensure_ascii=False))


def test_text_that_can_be_seen_stays() -> None:
    for text in ("äß 漢字 ✓ ▁▂ ❤️ − …", "a\tb\nc", "<script>"):
        assert shown(text) == text
    assert shown("\ud800") == "U+D800"
    assert shown_line("a\nb") == "a b"


def test_the_page_hides_nothing_that_the_terminal_shows() -> None:
    """The page's list and the terminal's list have the same characters."""
    page = Path("relax_core/server/static/dom.js").read_text(encoding="utf-8")
    pattern = re.search(r"const HIDDEN = /\[(.*)\]/gu;", page)
    assert pattern is not None
    of_page = re.compile("[" + re.sub(r"\\u\{([0-9a-f]+)\}", lambda match: f"\\U{match[1]:>08}", pattern[1]) + "]")
    every = [chr(code) for code in range(0x110000)]
    assert [char for char in every if of_page.match(char)] == [char for char in every if shown(char) != char]


def test_the_console_colours_and_text_does_not() -> None:
    written = io.StringIO()
    console = ShownConsole(file=written, force_terminal=True, color_system="standard", width=200)
    table = Table(HOSTILE)
    table.add_row(Text(HOSTILE, style="red"))
    console.print(Text(HOSTILE, style="bold red"))
    console.print(HOSTILE, markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    assert "\x1b[1;31m" in written.getvalue()
    assert_harmless(written.getvalue().encode("utf-8", "surrogatepass"))
    assert "U+202E" in written.getvalue()


def assert_harmless(output: bytes) -> None:
    rest = ALLOWED.sub(b"", output)
    text = rest.decode("utf-8")
    assert shown(text) == text, text


def on_a_terminal(*command: str, folder: Path) -> bytes:
    """Runs a command on a terminal and returns its output."""
    owner, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, *command], stdin=terminal, stdout=terminal, stderr=terminal, cwd=folder, env=environment
    ) as process:
        os.close(terminal)
        output = b""
        while True:
            try:
                piece = os.read(owner, 65536)
            except OSError:  # the last process has closed the terminal
                break
            output += piece
        process.wait(60)
    os.close(owner)
    return output


def test_lineage_of_a_hostile_folder_on_a_terminal(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "summary.json").write_text('{"outcome": "stopped", "ledger": {"open": 0}}')
    with closing(sqlite3.connect(run / "ledger.sqlite")) as database, database:
        database.execute("UPDATE events SET reason = ? WHERE reason != ''", (f"{HOSTILE}\nnothing was lost",))
    output = on_a_terminal("-m", "relax_core", "lineage", str(run), "uid=g00000000.1", folder=tmp_path)
    assert b"U+202E" in output and b"U+001B]52" in output
    assert_harmless(output)
    assert not re.search(rb"^nothing was lost", output, re.MULTILINE), "a reason cannot start a line"


def test_errors_that_quote_a_name_on_a_terminal(tmp_path: Path) -> None:
    for command in (
        ("-m", "relax_core", "lineage", f"no{HOSTILE}such"),
        ("-m", "relax_core", f"run.{HOSTILE}=1"),
        ("-m", "relax_core.tools.lineage", f"no{HOSTILE}such"),
        ("-m", "relax_core", "dashboard", f"no{HOSTILE}such"),
    ):
        output = on_a_terminal(*command, folder=tmp_path)
        assert b"U+001B" in output or b"\\x1b" in output, output
        assert_harmless(output)


def test_an_error_that_nobody_caught_is_shown_by_code(tmp_path: Path) -> None:
    program = "import relax_core.__main__ as command\n"
    program += f"def fail(words): raise OSError({HOSTILE!r})\ncommand._main = fail\ncommand.main([])"
    output = on_a_terminal("-c", program, folder=tmp_path)
    assert b"OSError: U+001B" in output, output
    assert_harmless(output)


def test_a_live_panel_moves_the_cursor_and_its_texts_do_not(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from relax_core.observe.panel import Panel, PanelState
from relax_core.observe.panel import RoleState
from relax_core.observe.standard_streams import unread_streams, write_as_it_is
hostile = {HOSTILE!r}
with unread_streams(timeout_s=1.0):
    with Panel(4, Path("run" + hostile), "title" + hostile) as panel:
        role = RoleState(name="actor" + hostile, state="failed", since_s=1.0, detail=hostile)
        panel.update(PanelState(step=1, roles=[role], message=hostile))
        panel.print_line("line" + hostile)
        print("plain" + hostile)
    write_as_it_is("\\x1b[?25h")
"""
    output = on_a_terminal("-c", program, folder=tmp_path)
    assert output.startswith(b"\x1b[?25l") and output.endswith(b"\x1b[?25h") and b"\x1b[1A" in output
    assert b"U+001B" in output and b"\x1b[2J" not in output
    assert_harmless(output.replace(b"\x1b[1A", b"").replace(b"\x1b[2K", b"").replace(b"\r", b""))


def test_answers_of_a_reward_on_a_terminal(tmp_path: Path) -> None:
    row = {"prompt": f"1+1{HOSTILE}", "answer": "2", "response": f"3{HOSTILE}"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    words = ("-m", "relax_core.tools.score", "reward=math", "file=rows.jsonl")
    for more in ((), ("--json",)):
        output = on_a_terminal(*words, *more, folder=tmp_path)
        assert_harmless(output)
