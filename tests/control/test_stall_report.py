"""Tests stall detection and the wait graph of workers."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from relax_core.contracts.bus import BusWait
from relax_core.control.controller import TRAINER, Controller
from relax_core.control.recoveries import ServicesLost
from relax_core.control.stall_report import chain
from relax_core.control.worker_health import RoleWatch, WorkerHeartbeat
from relax_core.roles.worker import State, Wait, WorkerStatus
from tests.roles.run_context import context_in


def beat(name: str, *on: str, silent_s: float = 0.0, state: State = "running", life: Any = "alive") -> WorkerHeartbeat:
    waits = tuple(Wait(what=f"call {number}", on=peer, since=0.0) for number, peer in enumerate(on))
    status = WorkerStatus(name=name, state=state, since=0.0, pid=1, detail="", error=None, waits=waits)
    return WorkerHeartbeat(name=name, life=life, status=status, silent_s=silent_s)


def in_bus(task: str, *owed_by: str) -> BusWait:
    return BusWait(task=task, since_s=5.0, text=f"{task} waits for g00000007", owed_by=list(owed_by))


def blockers(*beats: WorkerHeartbeat, bus: Any = ()) -> list[str]:
    return chain({known_beat.name: known_beat for known_beat in beats}, bus, start="actor-0").blockers


def test_the_chain_is_followed_through_the_bus() -> None:
    bus = [in_bus("actor", "advantages"), in_bus("advantages", "actor_fwd")]
    beats = [beat("actor-0", "bus"), beat("advantages-0", "bus"), beat("actor_fwd-0"), beat("reference-0")]
    assert blockers(*beats, bus=bus) == ["actor_fwd-0"]
    found = chain({known_beat.name: known_beat for known_beat in beats}, bus, start="actor-0")
    assert "bus: actor waits for g00000007; owed by advantages" in found.lines
    assert any(line.startswith("actor-0: waits ") and "on bus for call 0" in line for line in found.lines)


def test_one_who_does_not_answer_is_named_wherever_it_stands() -> None:
    bus = [in_bus("actor", "rollout"), in_bus("rollout", "actor")]
    frozen = beat("rollout-0", "bus", silent_s=9.0)
    assert blockers(beat("actor-0", "bus"), frozen, bus=bus) == ["rollout-0"]
    assert blockers(beat("actor-0"), beat("actor-1", silent_s=9.0)) == ["actor-1", "actor-0"]


def test_a_role_stands_for_its_workers() -> None:
    beats = [beat("actor-0", "bus"), beat("rollout-0", "engine"), beat("engine-0", state="done"), beat("engine-1")]
    assert blockers(*beats, bus=[in_bus("actor", "rollout")]) == ["engine-0", "engine-1"]


def test_the_bus_knows_a_worker_by_its_number() -> None:
    """The second rollout worker waits for credit. The call of the first worker has not arrived at the bus yet."""
    waits_for_credit = msgspec.structs.replace(in_bus("rollout", "actor"), worker=1)
    beats = [beat("actor-0", "bus"), beat("rollout-0", "engine"), beat("rollout-1", "bus"), beat("engine-0")]
    assert blockers(*beats, bus=[in_bus("actor", "rollout-0"), waits_for_credit]) == ["engine-0"]
    assert blockers(beat("actor-0", "rollout-0"), beat("rollout-0", "bus"), bus=[waits_for_credit]) == ["bus"]


def test_who_works_for_itself_beside_a_wait_is_a_blocker() -> None:
    beats = [beat("actor-0", "bus"), beat("rollout-0", "rollout-0", "engine"), beat("engine-0")]
    assert blockers(*beats, bus=[in_bus("actor", "rollout")]) == ["rollout-0", "engine-0"]


def test_ranks_that_work_together_are_blockers_together_but_for_those_that_wait() -> None:
    lead = beat("actor-0", "actor-0", "actor-1", "actor-2")
    assert blockers(lead, beat("actor-1", "actor-0"), beat("actor-2")) == ["actor-0", "actor-2"]
    assert blockers(beat("actor-0", "actor-2"), beat("actor-1", "actor-0"), beat("actor-2")) == ["actor-2"]


def test_a_circle_names_all_of_it() -> None:
    bus = [in_bus("actor", "rollout"), in_bus("rollout", "actor")]
    assert blockers(beat("actor-0", "bus"), beat("rollout-0", "bus"), beat("engine-0"), bus=bus) == [
        "actor-0",
        "rollout-0",
    ]


def test_a_bus_that_does_not_answer_is_the_blocker() -> None:
    found = chain({"actor-0": beat("actor-0", "bus")}, "it is stuck", start="actor-0")
    assert found.blockers == ["bus"]
    assert "bus: it is stuck" in found.lines


def test_a_trainer_that_has_not_started_waits_for_no_worker() -> None:
    starting = WorkerHeartbeat(name="actor-0", life="starting", status=None)
    found = chain({"actor-0": starting, "rollout-0": beat("rollout-0", "bus")}, [], start="actor-0")
    assert found.blockers == ["actor-0"]
    assert "actor-0: starting" in found.lines


# -- A run without train steps stalls, but not while its trainer writes a checkpoint slowly ---------------------------

LONG_S = 1000.0  # more than run.start_timeout_s and run.stall_timeout_s together


def beat_of(*, progress: int) -> WorkerHeartbeat:
    status = WorkerStatus(
        name=TRAINER,
        state="running",
        since=time.time(),
        pid=1,
        detail="writes checkpoint of step 7",
        error=None,
        progress=progress,
    )
    return WorkerHeartbeat(name=TRAINER, life="alive", status=status)


def controller(folder: Path) -> Controller:
    nothing: Any = SimpleNamespace(
        bus=None,
        bus_pid=1,
        alarms=SimpleNamespace(happened=print, over=print, look=print),
        engines=SimpleNamespace(added=lambda *states: []),
        view=SimpleNamespace(
            stragglers=SimpleNamespace(add_decoding=print),
            check_trackers=print,
            report_stragglers=print,
            send_alarms=print,
        ),
        events=SimpleNamespace(record=print),
        checks=(),
        order_store=None,
        serve=None,
        recoveries=None,
        supervisor=None,
        record_statuses=lambda statuses: None,
        handles=dict,
    )
    return Controller(context_in(folder), nothing, nothing)


def test_a_checkpoint_that_is_being_written_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = controller(tmp_path)
    monkeypatch.setattr("relax_core.control.stall_report.REPORTS", 1e-6)  # a report would call workers
    monkeypatch.setattr(run._health, "check", lambda **given: None)
    (stall,) = [check for check in run.checks() if check.name == "stall"]
    for progress in (1, 2, 3):  # meanwhile no train step ends
        run._watchdog._since -= LONG_S
        run._health.beats = {TRAINER: beat_of(progress=progress)}
        run._health.roles = RoleWatch().roles(run._health.beats)
        run._look_at_workers()
        assert stall.look() is None
    run._watchdog._since -= LONG_S
    finding = stall.look()
    assert finding is not None
    with pytest.raises(
        ServicesLost,
        match=r"no train step ended for .*run\.stall_timeout_s.*actor-0 running .* writes checkpoint of step 7",
    ):
        stall.act(finding)
