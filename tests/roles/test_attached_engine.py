"""A server of somebody else joins by its address, is lost when it falls silent, and goes on running when it leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.contracts.engine import EngineError
from relax_core.engines.engine_process import EngineLaunch
from relax_core.preflight import settle
from relax_core.roles import attached_engine
from relax_core.roles.attached_engine import AttachedEngineOwner, engine_needs, fit_problem, held_server
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
    for number, one in enumerate((leaves, dies), start=1):
        members.append(EngineMember(number=number, origin="external", state="joining", url=one.process.url))
    write_members(context.weights_folder, members)
    misfit = AttachedEngineOwner("engine-1", other_model, 1)
    wait_until(lambda: misfit.status().state == "failed", what="the end of the owner in a run of another model")
    assert "tokens in its vocabulary, and the run's has" in misfit.status().detail
    owners = [AttachedEngineOwner(f"engine-{number}", context, number) for number in (1, 2)]
    try:
        for owner, one in zip(owners, (leaves, dies), strict=True):
            assert owner.endpoint(120.0) == one.process.url
            wait_until(lambda owner=owner: owner.status().engine.version == 5, what="its weights")
            assert one.version == 5
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
    assert leaves.process.poll() is None and leaves.client.ready(), "it goes on running"
    attached = (tmp_path / "attached").read_text().split()
    assert attached.count(leaves.process.url) == 3, "it was attached to twice, and told to forget its weights"
    with held_server(leaves.process.url, run_dir=tmp_path / "another", wait_s=0.0):
        pass
    publisher.close()
