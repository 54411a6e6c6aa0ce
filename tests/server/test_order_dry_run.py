"""Tests that a dry run of an order reports the memory and cores that its engines would need, like the run's plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.plan.build_plan import as_text, make_plan
from relax_core.plan.plan_command import save_plan
from relax_core.server import engine_order_service
from relax_core.server.engine_order_service import with_room
from relax_core.server.order_types import DryRun, EngineRoom, read_room

WAYS = ("engine.max_running_samples=16",)


def dry(now: int, then: int) -> DryRun:
    return DryRun(status="PENDING", engines_now=now, engines_then=then, engine_ids=[])


def test_the_plan_of_a_run_says_what_its_gateway_says(tmp_path: Path) -> None:
    plan = make_plan(load_config([*WAYS, "engine.autoscaler.enabled=true"]))
    save_plan(plan, tmp_path)
    room = read_room(tmp_path)
    assert room == plan.engine_room and room is not None
    assert room.usable == 16, "two weight versions of 8 groups of 16 samples, 16 at one time"
    of_one = {holder.name: holder.peak.bytes for holder in plan.memory if "engine" in holder.name}
    assert room.engine_bytes == of_one["engine"] + of_one["owner of an engine"] > 300 << 20
    message = as_text(plan)
    assert "up to 16 by order; the samples in flight can fill 16 engines" in message
    assert "the autoscaler orders 1 to 16 engines" in message
    assert json.loads((tmp_path / "plan.json").read_text())["engines"] == list(plan.engines)


@pytest.mark.parametrize("overrides", [["gateway=none"], ["mode=colocate"]])
def test_a_run_that_starts_no_engines_has_no_room(overrides: list[str], tmp_path: Path) -> None:
    plan = make_plan(load_config(overrides))
    save_plan(plan, tmp_path)
    assert plan.engine_room is None and read_room(tmp_path) is None
    assert any("mode=colocate" in line for line in plan.engines) == ("mode=colocate" in overrides)
    assert with_room(dry(1, 2), None, more=1) == dry(1, 2)


def test_a_dry_run_lists_the_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_order_service, "available_bytes", lambda: 1 << 30)
    room = EngineRoom(usable=3, engine_bytes=300 << 20, engine_cores=1, machine_cores=4)
    good = with_room(dry(1, 3), room, more=2)
    assert (good.memory_bytes, good.cores, good.usable_engines, good.warnings) == (600 << 20, 2, 3, [])
    bad = with_room(dry(1, 5), room, more=4)
    assert [warning.split(",")[0] for warning in bad.warnings] == [
        "the samples in flight can fill 3 engines",
        "they take 1.2 GiB at their peaks",
        "they compute on 4 cores",
    ]
