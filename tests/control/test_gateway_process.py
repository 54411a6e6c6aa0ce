"""Tests the gateway of a real supervisor: it survives a controller, restarts after a death, and ends with the run."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.compose import load_config
from relax_core.contracts.process_trees import process_state
from relax_core.control.engine_set import limits_of
from relax_core.control.gateway_process import gateway
from relax_core.server.gateway_client import FILE
from tests.control import supervised_cases
from tests.control.gateway_harness import look_after, until_up
from tests.control.supervised_cases import DEADLINE_S, start
from tests.ports import free_port


def answer(folder: Path, route: str) -> Any:
    address = json.loads((folder / FILE).read_text())
    request = urllib.request.Request(address["url"] + route, headers={"Authorization": f"Bearer {address['token']}"})
    with urllib.request.urlopen(request, timeout=10.0) as reply:
        return json.load(reply)


def eventually(what: str, true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            if true():
                return
        except (OSError, ValueError):  # the file or the server does not exist yet
            pass
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_gateway_that_does_not_start_ends_the_run_in_words(tmp_path: Path) -> None:
    """The gateway cannot bind a port, because this machine does not have the address."""
    process = start(
        tmp_path, supervised_cases.dies_when_told_and_then_waits, "gateway=local", "gateway.host=198.51.100.7"
    )
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1 and "the gateway did not start: gateway.port=" in err, err
    assert not (tmp_path / "ready").exists(), "no controller has started"


def test_the_gateway_outlives_its_controller_and_its_own_death_and_ends_with_the_run(tmp_path: Path) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):  # the first port is in use
        overrides = ("gateway=local", f"gateway.port={port}")
        process = start(tmp_path, supervised_cases.dies_when_told_and_then_waits, *overrides)
        eventually("it does not answer", lambda: answer(tmp_path, "/healthz") == {"status": "ok"})
        first = json.loads((tmp_path / FILE).read_text())
        assert int(first["url"].rpartition(":")[2]) > port
        assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
        eventually("no controller begins", lambda: (tmp_path / "ready").read_text() != "")
        controller = (tmp_path / "ready").read_text()
        (tmp_path / "first").touch()
        eventually("the controller is not repeated", lambda: (tmp_path / "ready").read_text() not in ("", controller))
        eventually("it does not answer", lambda: answer(tmp_path, "/run")["step"] == 2)
        assert json.loads((tmp_path / FILE).read_text()) == first
        os.kill(first["pid"], signal.SIGKILL)
        eventually("it is not started again", lambda: json.loads((tmp_path / FILE).read_text())["pid"] != first["pid"])
        eventually("it does not answer", lambda: bool(answer(tmp_path, "/run")["step"] == 2))
        second = json.loads((tmp_path / FILE).read_text())
        assert (second["url"], second["token"]) == (first["url"], first["token"]), "clients need no other address"
        (tmp_path / "second").touch()
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7, err
    assert f"relax: gateway: {first['url']}; its token is in {tmp_path / FILE}" in err and first["token"] not in err
    assert not (tmp_path / FILE).exists() and process_state(second["pid"]) == "exited"
    assert "another goes on from step 0" in err


def test_a_run_without_a_gateway_imports_no_web_framework() -> None:
    """The gateway itself does not import Ray or torch."""
    code = "import sys; import {}; print([name for name in {} if name in sys.modules])"
    for module, forbidden in {
        "relax_core.control.supervisor": ("fastapi", "uvicorn"),
        "relax_core.server.gateway_server": ("ray", "torch", "megatron"),
    }.items():
        found = subprocess.run([sys.executable, "-c", code.format(module, forbidden)], capture_output=True, check=True)
        assert found.stdout == b"[]\n", module


def test_runs_that_take_no_order_for_engines_say_why() -> None:
    assert not limits_of(load_config()).refusal
    assert "mode=colocate" in limits_of(load_config(["mode=colocate"])).refusal
    ours = limits_of(load_config())
    assert not ours.no_urls and not ours.no_more and ours.hosts == ["127.0.0.1", "localhost"]
    attached = limits_of(load_config(["engine.urls=[http://127.0.0.1:9]"]))
    assert "engine.urls" in attached.no_more and not attached.no_urls
    sees = ["model=tiny_qwen3_vl", "data=see"]
    assert "gets no image and no video of prompts" in limits_of(load_config(sees)).no_urls
    assert "gets no video of prompts" in limits_of(load_config([*sees, "engine=sglang"])).no_urls
    on_gpus = limits_of(load_config(["engine=sglang", "placement.gpus_per_node=8"]))
    assert "Send engine_urls" in on_gpus.no_more and not on_gpus.no_urls


def test_a_gateway_that_dies_too_often_is_told_of_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(["gateway=local", "gateway.port=0", "run.max_restarts=0", f"run.dir={tmp_path}"])
    with gateway(config) as process:
        assert process is not None
        until_up(process)
        assert (tmp_path / FILE).exists()
        os.kill(process.pid, signal.SIGKILL)
        eventually("it is not noticed", lambda: look_after(process) is None and not (tmp_path / FILE).exists())
        look_after(process)
    output = capsys.readouterr().err
    assert output.count("the run takes no more orders") == 1
    assert "ended with exit code -9" in output and "run.max_restarts=0" in output


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_a_gateway_that_dies_before_its_first_answer_is_started_again_or_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], max_restarts: int
) -> None:
    config = load_config(["gateway=local", "gateway.port=0", f"run.max_restarts={max_restarts}", f"run.dir={tmp_path}"])
    with gateway(config) as process:
        assert process is not None
        first = process.pid
        os.kill(first, signal.SIGKILL)
        if max_restarts:
            until_up(process)
            assert process.pid != first and answer(tmp_path, "/healthz") == {"status": "ok"}
        else:
            eventually("it is not reported", lambda: look_after(process) or "no more orders" in capsys.readouterr().err)
            look_after(process)
            assert not process.is_up and not (tmp_path / FILE).exists()
