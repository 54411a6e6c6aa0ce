"""Controls a run through its gateway like a user: orders engines, and kills processes during an order."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from relax_core.contracts.columns import decode_episodes
from relax_core.server.gateway_client import GatewayClient, GatewayRefused, GatewayUnreachable
from tests.integration.live_run import ENGINE, ROLLOUT, FinishedRun, LiveRun

OVERRIDES = (
    "gateway.port=0",
    "run.steps=100000",
    "run.export_hf=false",
    "engine.max_running_samples=16",  # the engine is slower than training, so all engines get prompts
    "eval.every=0",
)
JOINING = ("PENDING", "CREATING", "HEALTH_CHECKING", "WEIGHT_SYNCING", "READY", "ACTIVE")
ENDED = ("ACTIVE", "COMPLETED", "NOOP", "FAILED", "CANCELLED")
OWNER, TRAINER = "ray::EngineOwner", "ray::PolicyTrainer"


class ElasticRun:
    """Holds a run that starts with one engine. Adds and removes engines.

    ``engine`` is a text that only command lines of engine processes contain.
    """

    def __init__(self, live: LiveRun, *, engine: str = ENGINE) -> None:
        self.live = live
        self._engine = engine
        self._client = GatewayClient(live.folder)
        self._seen = 0  # newest ledger group that `first_group` has read

    def ask(
        self,
        method: str,
        route: str,
        body: Mapping[str, Any] | None = None,
        *,
        key: str = "",
        refusals: Sequence[int] = (),
    ) -> Any:
        """Sends a request and returns the gateway's response. Retries while the gateway or its run restarts.

        Also returns refusals with a status in ``refusals``.
        """
        answers: list[Any] = []

        def answered() -> bool:
            try:
                answers.append(self._client.ask(method, route, None if body is None else dict(body), key=key))
            except GatewayUnreachable:
                return False
            except GatewayRefused as refused:
                if refused.problem["status"] in refusals:
                    answers.append(refused.problem)
                    return True
                if refused.problem["status"] not in (429, 503):
                    raise
                return False
            return True

        self.live.wait_for(f"an answer to {route}", answered)
        return answers[-1]

    def follow(self, way: str, order: Mapping[str, Any], *states: str) -> dict[str, Any]:
        """Waits until an order is in one of ``states`` or has ended, and returns the order."""
        newest: dict[str, Any] = {}

        def reached() -> bool:
            newest.update(self.ask("GET", f"/rollout/{way}/{order['request_id']}"))
            return newest["status"] in (*states, *ENDED)

        self.live.wait_for(f"{way} to be {' or '.join(states) or 'at its end'}", reached)
        return newest

    def order(self, way: str, body: Mapping[str, Any], *, victim: str = "", state: str = "") -> dict[str, Any]:
        """Creates an order and kills ``victim`` when the order is in ``state`` or later. Returns the ended order."""
        older = self.of_engines()
        order = self.ask("POST", f"/rollout/{way}", body, key=uuid.uuid4().hex)
        if victim:
            beyond: Sequence[str] = (state, "REMOVING")
            if state in JOINING:
                beyond = JOINING[JOINING.index(state) :]
            self.follow(way, order, *beyond)
            self.kill(victim, older=older if way == "scale_out" else self._of_the_start(), joins=way == "scale_out")
        ended = self.follow(way, order)
        assert ended["status"] != "FAILED" or ended["failure"], ended
        return ended

    def pids(self, command: str) -> set[int]:
        """Returns the processes with this text in their command lines."""
        return {pid for pid, line in self.live.processes().items() if command in line}

    def of_engines(self) -> set[int]:
        """Returns the processes of all engines and all engine owners."""
        return self.pids(self._engine) | self.pids(OWNER)

    def newcomers(self, command: str, *, older: set[int]) -> set[int]:
        """Waits for processes with this text that are not in ``older``, and returns all of them."""
        found: set[int] = set()

        def there() -> bool:
            found.update(self.pids(command) - older)
            return bool(found)

        self.live.wait_for(f"a new process {command}", there)
        return found

    def kill(self, victim: str, *, older: set[int], joins: bool) -> None:
        """Kills a process.

        ``older`` are engines and engine owners that must not be killed. A leaving engine may have left already.
        """
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
                command = OWNER if victim == "owner" else self._engine
                for pid in self.newcomers(command, older=older) if joins else self.pids(command) - older:
                    with suppress(ProcessLookupError):  # the engine has left meanwhile
                        os.kill(pid, signal.SIGKILL)
            case _:
                raise AssertionError(victim)

    def _of_the_start(self) -> set[int]:
        """Returns the processes of the first engine (it never leaves): the oldest engine and its owner process."""
        return {min(pids) for command in (self._engine, OWNER) if (pids := self.pids(command))}

    def engines(self) -> list[str]:
        """Returns the ids of engines that serve or join."""
        rows = self.ask("GET", "/rollout/engines")["engines"]
        return [row["id"] for row in rows if row["state"] in ("joining", "serving")]

    def stop(self) -> FinishedRun:
        """Stops the run over HTTP, and checks that no sample is lost or trained twice."""
        assert self.ask("POST", "/run/stop")["kind"] == "stop"
        run = self.live.finish()
        assert run.code == 128 + signal.SIGTERM, run.output
        books = run.summary["ledger"]
        assert books["lost"] == books["trained_twice"] == 0, books
        assert books["issued"] == books["trained"] + books["open"] + sum(books["dropped"].values()), books
        return run

    def wait_alone(self) -> None:
        """Waits until the first engine is the only engine and the processes of all other engines have ended."""
        self.live.wait_for("one engine", lambda: self.engines() == ["engine-0"] and len(self.pids(self._engine)) == 1)

    def first_group(self, engine: str) -> float:
        """Waits for a group on the bus with a response of this engine. Returns the Unix time of the group's arrival.

        Each group is read only once, so call this for engines in the order of their joining.
        """
        came: list[float] = []

        def found() -> bool:
            with closing(sqlite3.connect(f"file:{self.live.folder / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
                new = "SELECT id, episodes FROM generated WHERE id > ? ORDER BY id"
                for event, episodes in ledger.execute(new, (self._seen,)).fetchall():
                    self._seen = event
                    if any(turn.engine == engine for episode in decode_episodes(episodes) for turn in episode.turns):
                        came.extend(ledger.execute("SELECT time FROM events WHERE id = ?", (event,)).fetchone())
                        return True
            return False

        self.live.wait_for(f"a group of {engine}", found)
        return came[0]
