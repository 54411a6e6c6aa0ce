"""Tests that an engine process reports its start, ends with its owner, and is unreachable after its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from pathlib import Path

import msgspec
import pytest

from relax_core.contracts.engine import EngineError, EngineUnreachable, SamplingParams
from relax_core.contracts.process_trees import EXITED, process_state
from relax_core.engines.embedded.embedded_spec import ROOT
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import EngineClient
from tests.contracts.engine.harness import TOKEN, Engine, long_request, prompts_of

ENDS_S = 60.0


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + ENDS_S
    while not process_state(pid).startswith(EXITED):
        assert time.monotonic() < deadline, f"engine {pid} still runs after {ENDS_S:.0f} s"
        time.sleep(0.02)


def kill(process: EngineProcess) -> None:
    """Kills the engine and waits for the end of all its threads. Then the port is free."""
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + ENDS_S
    while process.poll() is None:
        assert time.monotonic() < deadline, f"engine {process.pid} outlives SIGKILL"
        time.sleep(0.01)


def test_it_ends_when_its_stdin_ends_even_while_it_decodes(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine()
    with engine.stream(long_request("running")) as events:
        next(events)
        engine.process.stop(timeout_s=ENDS_S)
    assert engine.process.poll() == 0, "it was killed because it did not end"


def test_it_ends_on_sigterm(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine()
    os.kill(engine.process.pid, signal.SIGTERM)
    wait_gone(engine.process.pid)


def test_it_ends_with_an_owner_that_was_killed(launch: EngineLaunch, tmp_path: Path) -> None:
    keys = {name: value for name, value in vars(launch.engine).items() if not is_dataclass(value)}
    owner = f"""
import json, pathlib, sys, time
from relax_core.config.schema import EngineConfig
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
process = EngineProcess.start(EngineLaunch(model_folder=pathlib.Path({str(launch.model_folder)!r}),
    engine=EngineConfig(**json.loads({json.dumps(keys)!r})), dtype="float32",
    token_file=pathlib.Path({str(launch.token_file)!r}), log_file=pathlib.Path({str(tmp_path / "log")!r})))
print(process.pid, flush=True)
time.sleep(600)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", owner], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert child.stdout is not None
    pid = int(child.stdout.readline())
    child.kill()
    child.wait()
    child.stdout.close()
    wait_gone(pid)


def test_a_restart_on_the_same_port_needs_no_new_client(start_engine: Callable[..., Engine]) -> None:
    first = start_engine()
    client = first.client
    assert client.ready()
    kill(first.process)
    with pytest.raises(EngineUnreachable, match=rf"{first.process.url} /model_info"):
        client.model_info()
    second = start_engine(after=first.process)
    assert client.model_info()["weight_version"] == "0"
    kill(second.process)
    start_engine(after=first.process)
    assert client.ready()


def test_an_engine_that_dies_in_the_middle_is_unreachable(start_engine: Callable[..., Engine]) -> None:
    """The first prompt has its responses. The second prompt waits for weights that never arrive."""
    engine = start_engine()
    first, second = prompts_of([5, 6], [7, 8])
    prompts = [first, msgspec.structs.replace(second, min_version=10**6)]

    async def scene() -> None:
        client = engine.new_client()
        try:
            async for _ in client.generate(prompts, SamplingParams(n=32, max_new_tokens=1500)):
                os.kill(engine.process.pid, signal.SIGKILL)
        finally:
            await client.aclose()

    with pytest.raises(EngineUnreachable, match="/generate"):
        asyncio.run(scene())


def test_an_engine_that_is_stopped_runs_into_the_clients_deadlines(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine()
    client = EngineClient(engine.process.url, TOKEN, request_timeout_s=1.0, control_timeout_s=1.0)

    async def scene() -> None:
        try:
            async for _ in client.generate(prompts_of([5, 6]), SamplingParams()):
                pass
        finally:
            await client.aclose()

    os.kill(engine.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineUnreachable, match=r"/ready: no answer within 1 s"):
            client.ready()
        with pytest.raises(EngineUnreachable, match=r"/generate: silent for 1 s"):
            asyncio.run(scene())
    finally:
        os.kill(engine.process.pid, signal.SIGCONT)


def test_a_wrong_token_is_the_engines_own_word(engine: Engine) -> None:
    with pytest.raises(EngineUnreachable, match="does not prove that it knows the run's token"):
        engine.new_client(token="wrong").pause("in_place")
    attached = EngineClient(engine.process.url, "wrong", request_timeout_s=60.0, control_timeout_s=30.0, attached=True)
    with pytest.raises(EngineError, match=r"401.*(bearer token|Unauthorized)"):
        attached.pause("in_place")


def run_engine(launch: EngineLaunch) -> subprocess.CompletedProcess[str]:
    """Runs an engine that must end by itself. Its stdin stays open."""
    with subprocess.Popen(
        launch.command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=launch.environment(),
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        code = process.wait(120)
        return subprocess.CompletedProcess(process.args, code, process.stdout.read(), process.stderr.read())


def test_a_taken_port_is_said(engine: Engine, launch: EngineLaunch) -> None:
    ended = run_engine(replace(launch, port=engine.process.port))
    assert ended.returncode == 2 and ended.stdout == ""
    assert f"--port {engine.process.port}" in ended.stderr and "in use" in ended.stderr
    assert "Traceback" not in ended.stderr


NOT_BUILT: list[tuple[dict[str, object], str]] = [
    ({"model_type": "phi3"}, "its model_type is 'phi3', which is not a family of Relax. What exists: llama, mistral"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_type=yarn"),
    ({"max_position_embeddings": 100}, "the model has 100 positions"),
]
START_ALL = """
import json, sys
from relax_core.engines.embedded.__main__ import main
for words in json.loads(sys.argv[1]):
    assert main([*words, "--stay"]) == 2
"""


def test_a_model_that_is_not_built_is_said(launch: EngineLaunch, tmp_path: Path) -> None:
    """One process tries all of these models."""
    config = json.loads((launch.model_folder / "config.json").read_text())
    commands = []
    for number, (change, _) in enumerate(NOT_BUILT):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        command = replace(launch, model_folder=folder).command()
        commands.append(command[command.index("--model-path") :])
    ended = subprocess.run(
        [sys.executable, "-c", START_ALL, json.dumps(commands)],
        cwd=ROOT,
        env=launch.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = ended.stderr.splitlines()
    assert ended.returncode == 0 and len(lines) == len(NOT_BUILT), ended.stderr
    assert all(words in line for line, (_, words) in zip(lines, NOT_BUILT, strict=True)), ended.stderr


def test_a_start_that_fails_shows_the_log(launch: EngineLaunch, tmp_path: Path) -> None:
    failing = replace(launch, model_folder=tmp_path / "nothing", log_file=tmp_path / "log")
    with pytest.raises(EngineError, match=r"exit code 2\)(.|\n)*no config.json there"):
        EngineProcess.start(failing)
