"""A process is killed while an engine joins or leaves: the order ends and says how, and no sample is lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from relax_core.gateway.gateway_client import GatewayClient, GatewayRefused, GatewayUnreachable
from tests.integration.live_run import ENGINE, ROLLOUT, LiveRun

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

OVERRIDES = (
    "gateway=local",
    "gateway.port=0",
    "run.steps=100000",
    "run.save_every=5",
    "run.max_restarts=20",
    "run.max_recoveries=20",
    "run.export_hf=false",
    "engine.max_running_samples=16",
    "engine.elastic.drain_timeout_s=5",
    "eval.every=0",
)
JOINING = ("PENDING", "CREATING", "HEALTH_CHECKING", "WEIGHT_SYNCING", "READY", "ACTIVE")
ENDED = ("ACTIVE", "COMPLETED", "NOOP", "FAILED", "CANCELLED")
OWNER, TRAINER = "ray::EngineOwner", "ray::PolicyTrainer"
IN_PLACE = [
    ("gateway", "CREATING"),
    ("owner", "CREATING"),
    ("newcomer", "HEALTH_CHECKING"),
    ("rollout", "HEALTH_CHECKING"),
    ("owner", "WEIGHT_SYNCING"),
    ("newcomer", "WEIGHT_SYNCING"),
    ("gateway", "DRAINING"),
    ("rollout", "DRAINING"),
    ("newcomer", "DRAINING"),
]
FROM_CHECKPOINT = [
    ("trainer", "HEALTH_CHECKING"),
    ("controller", "CREATING"),
    ("controller", "WEIGHT_SYNCING"),
    ("controller", "DRAINING"),
    ("trainer", "DRAINING"),
]


class Elastic:
    """Holds a run with one engine of the start, to which engines are added and from which they are taken."""

    def __init__(self, live: LiveRun) -> None:
        self.live = live
        self._client = GatewayClient(live.folder)

    def ask(self, method: str, route: str, body: dict[str, Any] | None = None, *, key: str = "") -> Any:
        """Returns the answer of the gateway, which may be starting again, or whose run may be."""
        answers: list[Any] = []

        def answered() -> bool:
            try:
                answers.append(self._client.ask(method, route, body, key=key))
            except GatewayUnreachable:
                return False
            except GatewayRefused as refused:
                if refused.problem["status"] not in (429, 503):
                    raise
                return False
            return True

        self.live.wait_for(f"an answer to {route}", answered)
        return answers[-1]

    def pids(self, command: str) -> set[int]:
        return {pid for pid, line in self.live.processes().items() if command in line}

    def kill(self, victim: str, *, older: set[int]) -> None:
        """Kills a process; ``older`` are the engines and owners that were there before the order."""
        match victim:
            case "gateway":
                os.kill(json.loads((self.live.folder / "gateway.json").read_text())["pid"], signal.SIGKILL)
            case "controller":
                self.live.kill_controller()
            case "rollout":
                self.live.kill(ROLLOUT)
            case "trainer":
                self.live.kill(TRAINER)
            case "owner" | "newcomer":
                command = OWNER if victim == "owner" else ENGINE
                self.live.wait_for(f"a new process {command}", lambda: bool(self.pids(command) - older))
                for pid in self.pids(command) - older:
                    os.kill(pid, signal.SIGKILL)

    def order(self, way: str, engines: int, *, victim: str = "", state: str = "") -> str:
        """Gives an order, kills ``victim`` once the order is in ``state`` or beyond, and returns how it ended."""
        older = self.pids(ENGINE) | self.pids(OWNER)
        key = f"{way}-{victim}-{state}-{sorted(older)}"
        order = self.ask("POST", f"/rollout/{way}", {"num_replicas": engines}, key=key)
        route = f"/rollout/{way}/{order['request_id']}"
        newest: dict[str, Any] = {}

        def reached(states: Sequence[str]) -> bool:
            newest.update(self.ask("GET", route))
            return newest["status"] in states

        if victim:
            beyond = JOINING[JOINING.index(state) :] if state in JOINING else (state, "REMOVING")
            self.live.wait_for(f"{way} to be {state}", lambda: reached([*beyond, *ENDED]))
            self.kill(victim, older=older if way == "scale_out" else self._of_the_start())
        self.live.wait_for(f"the end of {way} after {victim} was killed", lambda: reached(ENDED))
        assert newest["status"] != "FAILED" or newest["failure"], newest
        return str(newest["status"])

    def _of_the_start(self) -> set[int]:
        """Returns the processes of the engine that never leaves: the oldest engine and the oldest owner."""
        return {min(pids) for command in (ENGINE, OWNER) if (pids := self.pids(command))}

    def present(self) -> list[str]:
        rows = self.ask("GET", "/rollout/engines")["engines"]
        return [row["id"] for row in rows if row["state"] in ("joining", "serving")]


@pytest.mark.parametrize("kills", [IN_PLACE, FROM_CHECKPOINT], ids=["in_place", "from_checkpoint"])
def test_an_order_ends_whoever_is_killed(kills: Sequence[tuple[str, str]], tmp_path: Path) -> None:
    with LiveRun(tmp_path / "run", *OVERRIDES) as live:
        live.wait_step(6)  # there is a checkpoint
        elastic = Elastic(live)
        for victim, state in kills:
            joining = state in JOINING
            out = elastic.order("scale_out", 2, victim=victim if joining else "", state=state if joining else "")
            assert out in (("ACTIVE", "FAILED") if joining else ("ACTIVE",)), (victim, state, out)
            assert len(elastic.present()) == (2 if out == "ACTIVE" else 1), (victim, state)
            if out == "ACTIVE":
                gone = elastic.order("scale_in", 1, victim="" if joining else victim, state="" if joining else state)
                assert gone in ("COMPLETED", "NOOP"), (victim, state, gone)
            live.wait_for("one engine", lambda: elastic.present() == ["engine-0"] and len(elastic.pids(ENGINE)) == 1)
        step = elastic.ask("GET", "/run")["step"]
        live.wait_step(step + 2)
        elastic.ask("POST", "/run/stop")
        run = live.finish()
    assert run.code == 128 + signal.SIGTERM, run.output
    books = run.summary["ledger"]
    assert books["lost"] == books["trained_twice"] == 0, books
    assert books["issued"] == books["trained"] + books["open"] + sum(books["dropped"].values()), books
    ids = [one["id"] for one in run.summary["engines"]]
    assert ids == sorted(set(ids), key=lambda name: int(name.partition("-")[2])), "no number is used twice"
    for one in run.summary["engines"][1:]:
        assert one["state"] == "left" or (one["state"] == "failed" and one["last_failure"]), one
