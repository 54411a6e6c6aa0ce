"""Tests an external server: it joins by address, is lost when it does not respond, and keeps running when it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.compose import load_config
from relax_core.contracts.engine import EngineError
from relax_core.engines.engine_process import EngineLaunch
from relax_core.preflight import settle
from relax_core.roles import attached_engine
from relax_core.roles.attached_engine import (
    AttachedEngineOwner,
    EngineNeeds,
    engine_needs,
    fit_problem,
    held_server,
    marks_folder,
)
from relax_core.tools.make_tiny import tiny_model_folder
from relax_core.weights.engine_members import EngineMember, write_members
from relax_core.weights.publisher import WeightPublisher
from relax_core.weights.transports import DiskTransport
from tests.contracts.engine.conftest import launch, model_folder, start_engine
from tests.contracts.engine.harness import TOKEN, Engine, hf_weights, make_model
from tests.roles.test_engine_owner import context_of

__all__ = ["launch", "model_folder", "start_engine"]

KIND = """
from pathlib import Path
from relax_core.contracts.engine_kind import EngineSpec
from relax_core.engines.embedded.embedded_spec import SPEC as EMBEDDED


def attach(client, timeout_s, rollout):
    client.ready()
    with Path(__file__).with_name("attached").open("a") as file:
        file.write(client.url + "\\n")


SPEC = EngineSpec(
    name="attached", summary="Embedded engines of somebody else.", command=EMBEDDED.command, attach=attach,
    keys=frozenset({"urls", "token_file"}), transports=frozenset({"disk"}), memory_mib=1,
)
"""


def test_a_server_joins_by_its_address_and_is_lost_when_it_is_silent(
    launch: EngineLaunch,
    start_engine: Callable[..., Engine],
    tmp_path: Path,
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attached_engine, "LOST_AFTER_S", 0.5)
    leaves, dies = start_engine(load_weights=False), start_engine(load_weights=False)
    (tmp_path / "kind.py").write_text(KIND)
    (tmp_path / "key").write_text(TOKEN)
    config = load_config(settle=settle)
    engine = replace(
        config.engine,
        name=str(tmp_path / "kind.py"),
        urls=["http://127.0.0.1:9"],
        token_file=str(tmp_path / "key"),
    )
    other_model = context_of(replace(config, engine=engine), tmp_path)
    context = replace(other_model, model_folder=launch.model_folder)
    publisher = WeightPublisher(context.weights_folder, list, transport=DiskTransport())
    publisher.publish(5, hf_weights(make_model(None, seed=1))).result(timeout=120.0)
    members = [EngineMember(number=0)]
    for number, engine in enumerate((leaves, dies), start=1):
        members.append(EngineMember(number=number, origin="external", state="joining", url=engine.process.url))
    write_members(context.weights_folder, members)
    misfit = AttachedEngineOwner("engine-1", other_model, 1)
    wait_until(lambda: misfit.status().state == "failed", what="the end of the owner in a run of another model")
    assert "tokens in its vocabulary, and the run's has" in misfit.status().detail
    owners = [AttachedEngineOwner(f"engine-{number}", context, number) for number in (1, 2)]
    try:
        for owner, engine in zip(owners, (leaves, dies), strict=True):
            assert owner.endpoint(120.0) == engine.process.url
            wait_until(lambda owner=owner: owner.status().engine.version == 5, what="its weights")
            assert engine.version == 5
        needs = engine_needs(context)
        assert fit_problem(leaves.client.server_info(), needs) is None
        more = fit_problem(leaves.client.server_info(), replace(needs, slots=10_000))
        assert more is not None and "the run needs 10000" in more
        with (
            pytest.raises(EngineError, match=f"the run in {tmp_path} holds this server"),
            held_server(leaves.process.url, run_dir=tmp_path / "another", wait_s=0.0),
        ):
            pass

        os.kill(dies.process.pid, signal.SIGKILL)
        wait_until(lambda: owners[1].status().state == "failed", what="the end of its owner")
        assert "it did not answer for 0.5 s" in owners[1].status().detail
        assert owners[0].status().state == "running"
    finally:
        for owner in owners:
            owner.request_stop()
            assert owner.join(120.0)
    assert leaves.process.poll() is None and leaves.client.ready(), "it keeps running"
    attached = (tmp_path / "attached").read_text().split()
    assert attached.count(leaves.process.url) == 3, "two attachments, and a call that removes its weights"
    with held_server(leaves.process.url, run_dir=tmp_path / "another", wait_s=0.0):
        pass
    publisher.close()


# -- A server that does not meet the run's needs is refused with the reason, from its own information ------------------

NEEDS = EngineNeeds(vocabulary=64, sample_tokens=96, slots=8)
FITS: dict[str, Any] = {"max_running_requests": 8, "context_length": 96, "max_total_num_tokens": 96, "model_path": "x"}


def test_what_fits_and_what_is_not_told_is_taken() -> None:
    assert fit_problem(FITS, NEEDS) is None
    assert fit_problem({}, NEEDS) is None
    assert fit_problem({"context_length": None, "max_running_requests": None}, NEEDS) is None


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("max_running_requests", 7, "7 samples of one group at once, and the run needs 8"),
        ("max_running_samples", 1, "1 samples of one group at once"),
        ("context_length", 95, "95 tokens of one sample in its context, and the run needs 96"),
        ("max_total_num_tokens", 10, "10 tokens of one sample in its cache"),
        ("max_total_tokens", 10, "10 tokens of one sample in its cache"),
    ],
)
def test_what_is_too_small_is_named_with_what_is_needed(setting: str, value: int, message: str) -> None:
    assert message in str(fit_problem({**FITS, setting: value}, NEEDS))


def test_another_vocabulary_is_named_where_the_model_can_be_seen(tmp_path: Path) -> None:
    needs = engine_needs(context_of(load_config(settle=settle), tmp_path))
    own = tiny_model_folder("tiny_qwen3", task="reverse_digits")
    assert fit_problem({"model_path": str(own)}, needs) is None
    values = json.loads((own / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"vocab_size": needs.vocabulary + 16}))
    found = fit_problem({"model_path": str(tmp_path)}, needs)
    assert f"has {needs.vocabulary + 16} tokens in its vocabulary, and the run's has {needs.vocabulary}" in str(found)


# -- One run at a time holds a server: other runs are refused with the holder's name; a kill releases it --------------

URL = "http://127.0.0.1:30000"
HOLD = f"""
from pathlib import Path
from relax_core.roles.attached_engine import held_server
with held_server({URL!r}, run_dir=Path("runs/of_another_process")):
    print("held", flush=True)
    input()
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("cache")
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
    assert not list(marks_folder().iterdir()), "a released server leaves no file"


@pytest.mark.usefixtures("cache")
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
