"""A server is held by one run at a time: another one is refused with the first one's name, also after a kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from relax_core.contracts.engine import EngineError
from relax_core.roles.attached_engine import held_server, marks_folder

URL = "http://127.0.0.1:30000"
HOLD = f"""
from pathlib import Path
from relax_core.roles.attached_engine import held_server
with held_server({URL!r}, run_dir=Path("runs/of_another_process")):
    print("held", flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_second_run_is_refused_until_the_first_has_left() -> None:
    with held_server(URL, run_dir=Path("runs/first")):
        with (
            pytest.raises(EngineError, match="the run in runs/first holds this server"),
            held_server(URL, run_dir=Path("runs/second"), wait_s=0.0),
        ):
            pass
        with held_server("http://127.0.0.1:30001", run_dir=Path("runs/second"), wait_s=0.0):
            pass
    with (
        held_server(URL, run_dir=Path("runs/second"), wait_s=0.0),
        pytest.raises(EngineError, match="the run in runs/second holds this server"),
        held_server(URL, run_dir=Path("runs/first"), wait_s=0.0),
    ):
        pass
    assert not list(marks_folder().iterdir()), "what is held no more leaves no file"


def test_a_process_that_was_killed_holds_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == b"held\n"
            with (
                pytest.raises(EngineError, match="the run in runs/of_another_process holds"),
                held_server(URL, run_dir=Path("runs/second"), wait_s=0.0),
            ):
                pass
        finally:
            holder.kill()
            holder.wait(60.0)
    with held_server(URL, run_dir=Path("runs/second"), wait_s=60.0):
        pass
