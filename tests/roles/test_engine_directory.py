"""Tests that the directory reads engine addresses from the engine owners, even if one owner does not respond."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ray

from relax_core.config.compose import load_config
from relax_core.roles.engine_directory import EngineDirectory
from relax_core.roles.role_context import worker_name
from relax_core.weights.engine_members import start_members, write_members
from tests.roles.test_engine_owner import context_of


@ray.remote(num_cpus=0, max_concurrency=8)
class Owner:
    """A fake engine owner that responds after its release."""

    def __init__(self, url: str, *, held: bool) -> None:
        import threading

        self._url, self._gate, self._asked = url, threading.Event(), 0
        if not held:
            self._gate.set()

    def endpoint(self, timeout_s: float) -> str:
        self._asked += 1
        self._gate.wait(120.0)
        return self._url

    def let_go(self) -> None:
        self._gate.set()

    def asked(self) -> int:
        return self._asked


def test_a_silent_owner_is_asked_once_and_holds_up_nobody(
    ray_session: str, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    config = load_config()
    context = replace(
        context_of(replace(config, engine=replace(config.engine, count=3)), tmp_path), namespace="directory"
    )
    owners = [
        Owner.options(name=worker_name("engine", number), namespace="directory").remote(f"http://h:{number}", held=held)
        for number, held in enumerate([False, True])
    ]
    ray.get([owner.asked.remote() for owner in owners])
    directory = EngineDirectory(context)
    try:
        wait_until(lambda: [client.url for client in directory.reachable()] == ["http://h:0"], what="the first address")
        for _ in range(20):
            assert [client.url for client in directory.reachable()] == ["http://h:0"]
        assert ray.get(owners[1].asked.remote()) == 1
        ray.get(owners[1].let_go.remote())
        both = ["http://h:0", "http://h:1"]
        wait_until(lambda: [client.url for client in directory.reachable()] == both, what="the late address")
        directory.forget("http://h:0")
        wait_until(lambda: [client.url for client in directory.reachable()] == both, what="the address again")
        write_members(context.weights_folder, start_members(1).members)
        assert [client.url for client in directory.reachable()] == ["http://h:0"], (
            "an engine that has left is no receiver"
        )
        assert directory.left() == ["http://h:1"] and directory.left() == []
    finally:
        for owner in owners:
            ray.kill(owner)
