"""The ports that engines' owners take."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.roles.context import RunContext
from relax_core.roles.engine_host import CatchUp, EngineHost
from relax_core.roles.teacher import TeacherEngineHost
from relax_core.tools.make_tiny import tiny_model_folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("host", [EngineHost, TeacherEngineHost])
def test_a_fixed_port_is_the_students_and_no_teachers(tmp_path: Path, host: type[EngineHost]) -> None:
    """Both may be rank 0 of one run."""
    (tmp_path / "token").write_text("token-of-the-run")
    config, port = load_config(), free_port()
    config = replace(config, engine=replace(config.engine, port=port))
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
    owner = host("owner", context, 0)
    try:
        found = int(owner.endpoint(60.0).rpartition(":")[2])
    finally:
        owner.request_stop()
        assert owner.join(30.0)
    assert (found == port) == (host is EngineHost)


def test_the_owner_brings_weights_at_once_only_where_no_push_has_been() -> None:
    catch_up = CatchUp(patience_s=60.0)
    assert catch_up.due(-1, 0, now=0.0), "a new process"
    catch_up.brought(4)
    assert catch_up.due(4, 5, now=1.0), "the trainer may not know this process yet"
    for version in range(5, 500):
        assert not catch_up.due(version, version + 1, now=float(version)), "a push is on its way each time"
    assert not catch_up.due(500, 501, now=500.0)
    assert not catch_up.due(500, 501, now=559.0)
    assert catch_up.due(500, 501, now=560.0)
    assert not catch_up.due(501, 501, now=561.0)
    assert not catch_up.due(500, 501, now=562.0), "it had caught up in between"
    assert catch_up.due(-1, 502, now=563.0), "given up, or a new process"
