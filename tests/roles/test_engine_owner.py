"""Tests engine owners: the ports of their engines, and the moments at which they send weights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from relax_core.config.compose import load_config
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.engine import WeightManifest
from relax_core.engines.engine_process import EngineLaunch
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.engines.sglang.sglang_client import SglangClient
from relax_core.preflight import settle
from relax_core.roles import engine_owner
from relax_core.roles.engine_directory import engine_client
from relax_core.roles.engine_owner import EngineHealth, EngineOwner, WeightReconciler, how_it_ended
from relax_core.roles.role_context import RunContext
from relax_core.roles.trainer.teacher_worker import TeacherEngineOwner
from relax_core.tools.make_tiny import tiny_model_folder
from relax_core.weights.folder_stream import read_safetensors
from relax_core.weights.publisher import WeightPublisher
from relax_core.weights.transports import SharedMemoryTransport
from relax_core.weights.version_file import write_weights
from relax_core.weights.version_folder import LATEST
from tests.ports import free_port


def context_of(config: RelaxConfig, tmp_path: Path) -> RunContext:
    (tmp_path / "token").write_text("token-of-the-run")
    folder = tiny_model_folder("tiny_qwen3", task="reverse_digits")
    context = RunContext(
        config=config,
        run_namespace="test",
        namespace="test-0",
        run_dir=tmp_path,
        model_folder=folder,
        weights_folder=tmp_path / "weights",
        token_file=tmp_path / "token",
        resume_from=None,
        start_step=0,
        teacher_folders={"default": folder},
    )
    context.log_dir.mkdir(exist_ok=True)
    return context


@pytest.mark.parametrize("host", [EngineOwner, TeacherEngineOwner])
def test_a_fixed_port_is_the_students_and_no_teachers(tmp_path: Path, host: type[EngineOwner]) -> None:
    """In one run, an engine of the student and an engine of the teacher may have rank 0."""
    config, port = load_config(settle=settle), free_port()
    context = context_of(replace(config, engine=replace(config.engine, port=port)), tmp_path)
    owner = host("owner", context, 0)
    try:
        found = int(owner.endpoint(180.0).rpartition(":")[2])
    finally:
        owner.request_stop()
        assert owner.join(120.0)
    assert (found == port) == (host is EngineOwner)


def test_the_owner_brings_weights_at_once_only_where_no_push_has_been() -> None:
    reconciler = WeightReconciler(retry_after_s=60.0)
    assert reconciler.due(-1, 0, pushed=-1, now=0.0), "a new process"
    reconciler.brought(4)
    assert reconciler.due(4, 5, pushed=4, now=1.0), "the trainer may not know this process yet"
    for version in range(5, 500):
        assert not reconciler.due(version, version + 1, pushed=version, now=float(version)), "a push is under way"
    assert not reconciler.due(500, 501, pushed=500, now=500.0)
    assert not reconciler.due(500, 501, pushed=500, now=559.0)
    assert reconciler.due(500, 501, pushed=500, now=560.0)
    assert not reconciler.due(501, 501, pushed=501, now=561.0)
    assert not reconciler.due(500, 501, pushed=500, now=562.0), "it had caught up meanwhile"
    assert reconciler.due(-1, 502, pushed=500, now=563.0), "its weights were removed, or it is a new process"


def test_what_a_push_did_not_bring_is_offered_at_once_and_what_is_refused_again_later() -> None:
    reconciler = WeightReconciler(retry_after_s=60.0)
    assert not reconciler.due(3, 4, pushed=3, now=0.0), "its push is under way"
    assert reconciler.due(3, 4, pushed=4, now=1.0), "its push was refused"
    reconciler.offered(3, 4, now=2.0)
    assert not reconciler.due(3, 4, pushed=4, now=61.0), "the owner's offer was refused, too"
    assert reconciler.due(3, 4, pushed=4, now=62.0)
    assert reconciler.due(3, 5, pushed=5, now=3.0), "the next version is offered at once"


class RefusedPush:
    """A proxy between publisher and engine that changes the digest of each push."""

    def __init__(self, client: EngineClient) -> None:
        self.url, self.group_ranks, self._client = client.url, client.group_ranks, client

    def update_weights(self, manifest: WeightManifest) -> dict[str, Any]:
        return self._client.update_weights(msgspec.structs.replace(manifest, digest="0" * 32))


def test_a_refused_push_is_made_good_by_the_owner_at_once_and_a_damaged_file_is_named(
    tmp_path: Path, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner does not wait for the next version or for the end of `SYNC_TIMEOUT_S`, which is long here. It reports a
    damaged file of the newest version and continues with the next version.
    """
    monkeypatch.setattr(engine_owner, "SYNC_TIMEOUT_S", 3600.0)
    context = context_of(load_config(settle=settle), tmp_path)
    owner = EngineOwner("owner", context, 0)
    publisher = WeightPublisher(
        context.weights_folder, lambda: [RefusedPush(client)], transport=SharedMemoryTransport()
    )
    try:
        client = engine_client(context, owner.endpoint(180.0), control_timeout_s=30.0)
        weights = list(read_safetensors(context.model_folder))
        client.update_weights(write_weights(tmp_path / "w", version=0, tensors=weights))
        assert list(publisher.publish(1, weights).result(120.0).refused) == [client.url]
        wait_until(lambda: client.model_info()["weight_version"] == "1", what="the owner's offer")
        latest = context.weights_folder / LATEST
        latest.write_bytes(latest.read_bytes()[:100])
        wait_until(lambda: f"{latest} is damaged" in owner.status().detail, what="the name of the damaged file")
        publisher.publish(2, weights).result(120.0)
        wait_until(lambda: client.model_info()["weight_version"] == "2", what="the next version")
    finally:
        publisher.close()
        owner.request_stop()
        assert owner.join(120.0)


def test_an_engine_that_stood_still_is_brought_to_the_newest_version_by_its_owner(
    tmp_path: Path, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer continued without this engine and pushes no further version."""
    config = load_config(settle=settle)
    monkeypatch.setattr(engine_owner, "SYNC_TIMEOUT_S", 600.0)
    run = replace(config.run, heartbeat_timeout_s=600.0)
    context = context_of(replace(config, run=run), tmp_path)
    owner = EngineOwner("engine-0", context, 0)
    publisher = WeightPublisher(context.weights_folder, lambda: [client], transport=SharedMemoryTransport())
    try:
        client = engine_client(context, owner.endpoint(180.0))
        weights = list(read_safetensors(context.model_folder))
        assert not publisher.publish(0, weights).result(120.0).behind
        (pid,) = owner.child_pids
        os.kill(pid, signal.SIGSTOP)
        try:
            for version in range(1, 6):
                assert publisher.publish(version, weights).result(0.2).behind == {client.url}
        finally:
            os.kill(pid, signal.SIGCONT)
        second_client = engine_client(context, client.url)
        wait_until(lambda: second_client.model_info()["weight_version"] == "5", what="the owner's offer")
        wait_until(lambda: not list(context.weights_folder.glob("reader-*")), what="the end of the reading")
    finally:
        publisher.close()
        owner.request_stop()
        assert owner.join(120.0)


def test_an_engine_that_is_killed_before_it_answers_starts_again(
    tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    context = context_of(load_config(settle=settle), tmp_path)
    older = {child.pid for child in psutil.Process().children()}
    owner = EngineOwner("engine-0", context, 0)
    try:
        engines: list[psutil.Process] = []

        def started() -> bool:
            engines[:] = [child for child in psutil.Process().children() if child.pid not in older]
            return bool(engines)

        wait_until(started, what="the engine's process")
        engines[0].kill()
        assert engine_client(context, owner.endpoint(180.0)).ready()
        assert owner.restarts == 1 and owner.last_restart == "was killed by SIGKILL before it answered"
    finally:
        owner.request_stop()
        assert owner.join(120.0)


class FailsTwice(EngineOwner):
    """An engine owner that starts its second process with a timeout near 0, and its third process without a model."""

    starts = 0

    def _engine_launch(self, port: int) -> EngineLaunch:
        self.starts += 1
        launch = super()._engine_launch(port)
        if self.starts == 2:
            return replace(launch, engine=replace(launch.engine, start_timeout_s=0.01))
        return replace(launch, model_folder=Path("/nowhere")) if self.starts == 3 else launch


def test_a_restart_that_is_late_or_ends_with_an_error_is_repeated(
    tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    owner = FailsTwice("engine-0", context_of(load_config(settle=settle), tmp_path), 0)
    try:
        url = owner.endpoint(180.0)
        (pid,) = owner.child_pids
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: owner.starts == 4 and owner.child_pids != (pid,), what="the fourth process")
        assert owner.restarts == 3 and owner.endpoint(1.0) == url
        assert "did not start again" in owner.last_restart and "/nowhere" in owner.last_restart
    finally:
        owner.request_stop()
        assert owner.join(120.0)


def test_an_engine_whose_replies_a_client_cannot_read_is_started_again_at_its_address(
    tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    context = context_of(load_config(settle=settle), tmp_path)
    owner = EngineOwner("engine-0", context, 0)
    try:
        url = owner.endpoint(180.0)
        client = engine_client(context, url, control_timeout_s=30.0)
        (pid,) = owner.child_pids
        owner.replace_engine("engine http://… /generate: a log-prob is not finite")
        wait_until(lambda: owner.child_pids != (pid,) and owner.restarts == 1, what="another process")
        assert owner.last_restart is not None and "a log-prob is not finite" in owner.last_restart
        wait_until(lambda: owner.status().engine is not None and client.ready(), what="its answer")
        assert owner.endpoint(1.0) == url and owner.restarts == 1
        client.close()
    finally:
        owner.request_stop()
        assert owner.join(120.0)


# -- An engine that runs and does not answer is killed; an engine that answers is not ---------------------------------

FROZEN_S = 4.0  # longer than short pauses of the machine

SERVER = """
import http.server, sys
STATUS = int(sys.argv[1])
class Ready(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(STATUS)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *words):
        print(self.path, flush=True)
server = http.server.HTTPServer(("127.0.0.1", 0), Ready)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_owner, "ASK_S", 0.05)


@pytest.mark.usefixtures("often")
def test_a_frozen_engine_is_killed_once_and_one_that_answers_never() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER, "200"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        kills: list[int] = []
        killed = threading.Event()

        def kill() -> None:
            kills.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            killed.set()

        client = EngineClient(url, "token", request_timeout_s=FROZEN_S, control_timeout_s=FROZEN_S, attached=True)
        health = EngineHealth(client, timeout_s=FROZEN_S, kill=kill)
        try:
            assert [process.stdout.readline() for _ in range(2)] == ["/ready\n", "/ready\n"]
            assert health.frozen_s is None and not kills
            os.kill(process.pid, signal.SIGSTOP)
            assert killed.wait(120.0)
            assert process.wait(120.0) == -signal.SIGKILL
            assert kills == [process.pid]
            assert health.frozen_s is not None and health.frozen_s >= FROZEN_S
        finally:
            health.end()
            process.kill()


@pytest.mark.usefixtures("often")
def test_an_engine_that_answers_with_a_refusal_is_still_looked_at() -> None:
    command = [sys.executable, "-c", SERVER, "500"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        killed = threading.Event()
        client = SglangClient(
            url,
            "token",
            request_timeout_s=FROZEN_S,
            control_timeout_s=FROZEN_S,
            ranks=1,
            vocab_size=50,
            seeds=True,
            attached=True,
        )
        health = EngineHealth(client, timeout_s=FROZEN_S, kill=killed.set)
        try:
            assert [process.stdout.readline() for _ in range(3)] == 3 * ["/ready\n"]
            assert not killed.is_set()
            os.kill(process.pid, signal.SIGSTOP)
            assert killed.wait(120.0)
        finally:
            health.end()
            process.kill()


def test_ends_in_words() -> None:
    assert how_it_ended(-9, frozen_s=None) == "was killed by SIGKILL"
    assert how_it_ended(1, frozen_s=None) == "ended with exit code 1"
    assert how_it_ended(-9, frozen_s=4.6) == "froze (no answer for 5 s) and was killed by SIGKILL"
