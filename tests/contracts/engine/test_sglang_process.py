"""Tests an SGLang server that the run starts: its reports, its private address, and the removal of its files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from relax_core.config.compose import load_config
from relax_core.contracts.engine import EngineError, SamplingParams
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.sglang.sglang_client import SglangClient
from relax_core.engines.sglang.sglang_spec import check_server
from tests.contracts.engine.harness import (
    ROOT,
    TOKEN,
    VOCAB,
    Engine,
    Started,
    make_model,
    prompts_of,
    publish,
    random_prompt,
)

pytestmark = pytest.mark.sglang
WaitUntil = Callable[..., None]


CHUNK = 64


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    with Started() as started:
        yield started


@pytest.fixture(scope="module")
def blank(sglang_launch: EngineLaunch, started: Started, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Yields a server that has no weights yet and prefills in small chunks. The last test kills the server."""
    log = tmp_path_factory.mktemp("blank") / "engine.log"
    engine = replace(sglang_launch.engine, flags={"chunked-prefill-size": CHUNK})
    process = started.start(replace(sglang_launch, engine=engine, load_weights=False, log_file=log))
    yield Engine(process, "sglang")
    process.stop(timeout_s=10.0)


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def all_ended(processes: list[psutil.Process]) -> bool:
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes)


def test_nothing_is_served_before_the_first_attested_weights(blank: Engine, tmp_path: Path) -> None:
    assert blank.version == -1
    params = SamplingParams(max_new_tokens=4)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(blank.generate, prompts_of([5, 6]), params)
        later = pool.submit(blank.generate, prompts_of([5, 6], min_version=3), params)
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        blank.client.update_weights(publish(make_model(None, seed=7), tmp_path / "w0", version=0))
        assert waiting.result(30)[0].versions[0] == 0
        assert not later.done()
        blank.client.update_weights(publish(make_model(None, seed=8), tmp_path / "w3", version=3))
        assert later.result(30)[0].versions[0] == 3


def test_prompts_that_wait_for_different_versions_share_a_call(blank: Engine, tmp_path: Path) -> None:
    version = blank.version
    prompts = [*prompts_of([5, 6], min_version=version), *prompts_of([7, 8], min_version=version + 1)]
    with ThreadPoolExecutor() as pool:
        both = pool.submit(blank.generate, prompts, SamplingParams(n=2, max_new_tokens=4))
        blank.client.update_weights(publish(make_model(None, seed=9), tmp_path / "w", version=version + 1))
        responses = both.result(30)
    assert [(response.prompt, response.sample) for response in responses] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {response.versions[0] for response in responses if response.prompt == 1} == {version + 1}


def test_a_prompt_that_new_weights_cut_in_two_is_asked_for_again(blank: Engine, tmp_path: Path) -> None:
    """A log-prob must not come from a cache that was computed by two weight versions."""
    version, params, deadline = blank.version + 1, SamplingParams(max_new_tokens=4), time.monotonic() + 120.0
    blank.client.update_weights(publish(make_model(None, seed=9), tmp_path / "old", version=version))
    model = make_model(None, seed=10)
    manifest = publish(model, tmp_path / "new", version=version + 1)
    with ThreadPoolExecutor() as pool:
        for attempt in range(20):  # retried if the prefill ended before the pause
            prompt = random_prompt(4000, seed=attempt)
            cut = pool.submit(blank.generate, prompts_of(prompt, min_version=version), params)
            while not (half := half_prefilled(blank)) and not cut.done():
                blank.client.resume()
                assert time.monotonic() < deadline, "no prompt was paused in the middle of its prefill"
            if half:
                break
        assert half
        blank.client.update_weights(manifest)
        (response,) = cut.result(120)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response.output_ids.tolist()])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(response.output_ids.tolist())[:, None])[:, 0]
    assert float((expected - torch.tensor(response.logprobs)).abs().max()) <= 2e-5
    assert set(response.versions.tolist()) == {version + 1}


def half_prefilled(engine: Engine) -> bool:
    """Pauses the server. Returns whether its only prompt has some, but not all chunks of its prefill."""
    engine.client.pause("in_place")
    loads = engine.client.loads()
    return loads["num_waiting_reqs"] == 0 and loads["num_waiting_uncached_tokens"] > 8 * CHUNK


def test_the_token_is_in_no_command_line_environment_or_log(blank: Engine, sglang_launch: EngineLaunch) -> None:
    for process in family(blank.process.pid):
        assert TOKEN not in " ".join(process.cmdline())
        assert TOKEN not in str(process.environ())
    log = next(Path(file.path) for file in psutil.Process(blank.process.pid).open_files() if file.path.endswith(".log"))
    assert "server_args" in log.read_text() or log.stat().st_size > 0
    assert TOKEN not in log.read_text()


def test_everything_listens_on_loopback(blank: Engine) -> None:
    for process in family(blank.process.pid):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1"), (process.name(), connection)


def test_a_server_can_be_met_by_its_address(blank: Engine) -> None:
    setting = {"ranks": 1, "vocab_size": VOCAB, "seeds": True, "attached": True}
    times = {"request_timeout_s": 30.0, "control_timeout_s": 10.0}
    attached = SglangClient(blank.process.url, TOKEN, **setting, **times)
    rollout = load_config(["rollout.top_k=4096", "rollout.top_p=0.9"]).rollout
    assert check_server(attached, timeout_s=10.0, rollout=rollout) == "0.5.23"
    with pytest.raises(EngineError, match=r"rollout\.top_k=4097, but it returns at most 4096 kept tokens"):
        check_server(attached, timeout_s=10.0, rollout=replace(rollout, top_k=4097))
    with pytest.raises(EngineError, match=r"rollout\.min_p=0\.1, but it was started with --enable-deterministic"):
        check_server(attached, timeout_s=10.0, rollout=replace(rollout, min_p=0.1))
    stranger = SglangClient(blank.process.url, "wrong", **setting, **times)
    with pytest.raises(EngineError, match=r"/server_info: 401"):
        check_server(stranger, timeout_s=10.0, rollout=rollout)


def test_a_server_that_is_killed_takes_its_processes_along(blank: Engine, wait_until: WaitUntil) -> None:
    processes = family(blank.process.pid)
    assert len(processes) >= 3
    os.kill(blank.process.pid, signal.SIGKILL)
    wait_until(lambda: all_ended(processes), what="the end of all its processes", timeout_s=60.0)
    assert blank.process.poll() == -signal.SIGKILL


def test_a_server_that_was_killed_leaves_nothing(blank: Engine, started: Started) -> None:
    """After the owner has noticed the server's end, no sockets, files or names in shared memory remain."""
    assert blank.process.poll() is not None, "the previous test has killed it"
    assert started.left(), "the killed server left files"
    blank.process.stop(timeout_s=0.0)
    assert not started.left()


def test_it_ends_with_an_owner_that_was_killed(
    sglang_launch: EngineLaunch, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """The owner is killed while the server starts, because the start takes the longest."""
    launch = replace(sglang_launch, log_file=tmp_path / "log")
    owner = """
import pickle, sys, time
from relax_core.engines.engine_process import EngineProcess
import subprocess, threading
launch = pickle.loads(sys.stdin.buffer.read())
threading.Thread(target=EngineProcess.start, args=(launch,), daemon=True).start()
time.sleep(600)
"""
    import pickle

    child = subprocess.Popen(
        [sys.executable, "-c", owner], stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert child.stdin is not None
    child.stdin.write(pickle.dumps(launch))
    child.stdin.close()
    wait_until(lambda: bool(psutil.Process(child.pid).children()), what="its server", timeout_s=30.0)
    time.sleep(3.0)  # now the server imports its modules
    processes = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    child.wait()
    wait_until(lambda: all_ended(processes), what="the end of all its processes", timeout_s=30.0)


def test_a_flag_that_sglang_does_not_know_is_said(sglang_launch: EngineLaunch, tmp_path: Path) -> None:
    engine = replace(sglang_launch.engine, flags={"no-such-flag": 3})
    with pytest.raises(EngineError, match=r"sglang engine did not start: .*exit code 2.*unrecognized.*--no-such-flag"):
        EngineProcess.start(replace(sglang_launch, engine=engine, log_file=tmp_path / "log"))
