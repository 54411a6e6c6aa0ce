"""Tests `relax engines` with a real gateway. The controller is a thread of the test."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_core.__main__ import main
from relax_core.config.compose import load_config
from relax_core.control.engine_set import limits_of
from relax_core.control.gateway_process import GatewayProcess, gateway
from relax_core.plan.build_plan import make_plan
from relax_core.plan.plan_command import save_plan
from relax_core.server.engine_order_service import EngineOrderService, answering
from relax_core.server.engine_order_store import EngineOrderStore
from relax_core.server.gateway_client import FILE, GatewayClient, GatewayUnreachable
from relax_core.server.order_types import EngineRow, Order, RunRow, engine_id, read_room
from tests.control.gateway_harness import look_after, until_up

DEADLINE_S = 120.0


class Controller:
    """Advances the orders in the order book. An order for four engines fails, and with ``slow`` no order ends."""

    def __init__(self, order_store: EngineOrderStore) -> None:
        self.slow = threading.Event()
        self._ended = threading.Event()
        self._book = order_store
        self._book.run = RunRow(at=1.0, step=4, steps=9, stopping=False)
        self._has([0])
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(DEADLINE_S)

    def _work(self) -> None:
        while not self._ended.wait(0.02):
            for order in self._book.open_orders():
                self._tick(order)

    def _tick(self, order: Order) -> None:
        if order.cancel_requested:
            self._book.move(order, "CANCELLED")
        elif self.slow.is_set():
            self._book.move(order, "CREATING", engines=[2])
        elif order.body["num_replicas"] == 4:
            self._book.move(order, "FAILED", engines=[2, 3], failure="engine-3: no memory is left")
        elif order.kind == "scale_out":
            self._has([0, 1])
            self._book.move(self._book.move(order, "CREATING", engines=[1]), "ACTIVE")
        else:
            self._has([0])
            self._book.move(self._book.move(order, "DRAINING", engines=[1]), "COMPLETED")

    def _has(self, present: list[int]) -> None:
        self._book.write_engines(
            [
                EngineRow(
                    id=engine_id(engine),
                    origin="added" if engine else "start",
                    state="serving" if engine in present else "left",
                    since=1.0,
                    url=f"http://h:{engine}",
                )
                for engine in (0, 1)
                if engine in present or engine in {row.number for row in self._book.engines()}
            ]
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Controller, GatewayProcess]]:
    folder = tmp_path_factory.mktemp("run")
    config = load_config(["gateway=local", "gateway.port=0", f"run.dir={folder}"])
    save_plan(make_plan(config), folder)
    with gateway(config) as process:
        assert process is not None
        until_up(process)
        order_store = EngineOrderStore(folder)
        controller = Controller(order_store)
        desk = EngineOrderService(order_store, limits_of(config), read_room(folder))
        with answering(process.controller_end, desk.answer):
            yield folder, controller, process
        controller.end()


def test_engines_are_shown_added_and_taken_out(
    run: tuple[Path, Controller, GatewayProcess], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # the token must only go to the gateway
    folder = str(run[0])
    assert main(["engines", folder]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "step 4 of 9"
    assert main(["engines", folder, "add", "1", "--dry-run"]) == 0
    first, takes, but = capsys.readouterr().out.splitlines()
    assert first == "1 engines would become 2" and re.fullmatch(
        r"they take 0\.\d GiB of .* GiB free, and 1 of .*", takes
    )
    assert but == "but the samples in flight can fill 1 engines, so more of them would get none"
    assert main(["engines", folder, "add", "1"]) == 0
    output = capsys.readouterr().out.split()
    assert [word for word in output if word.isupper()] == ["PENDING", "CREATING", "ACTIVE"] and output[-1] == "engine-1"
    assert main(["engines", folder, "remove", "engine-1"]) == 0
    capsys.readouterr()
    assert main(["engines", folder, "add", "3", "--keep-partial"]) == 1
    assert "engine-3: no memory is left" in capsys.readouterr().err
    assert main(["engines", folder]) == 0
    assert "http://h:1" in capsys.readouterr().out.splitlines()[-1], "engines that have left come last"

    run[1].slow.set()
    assert main(["engines", folder, "add", "1", "--no-wait"]) == 0
    order = capsys.readouterr().out.split()[1].rstrip(":")
    assert main(["engines", folder]) == 0 and order in capsys.readouterr().out
    assert main(["engines", folder, "add", "1"]) == 2
    assert f"order {order} is under way" in capsys.readouterr().err
    assert main(["engines", folder, "cancel", order]) == 0
    run[1].slow.clear()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["add"], "name how many engines"),
        (["add", "0"], "name how many engines"),
        (["add", "many"], "name how many engines"),
        (["add", "100"], "is the largest number of engines"),
        (["remove", "1"], "Engines of its start cannot be removed"),
        (["remove", "engine-0"], "is an engine of the start"),
        (["remove", "engine-9"], "is not an engine of this run"),
        (["cancel"], "name one order"),
        (["cancel", "../../run/stop"], "name one order"),
        (["cancel", "0123"], "no such order"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(
    run: tuple[Path, Controller, GatewayProcess], arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engines", str(run[0]), *arguments]) == 2
    assert why in capsys.readouterr().err


def test_a_gateway_that_starts_again_answers_a_request_once(run: tuple[Path, Controller, GatewayProcess]) -> None:
    folder, _, process = run
    client = GatewayClient(folder)
    order = client.ask("POST", "/rollout/scale_in", {"num_replicas": 1}, key="k")
    os.kill(process.pid, signal.SIGKILL)
    checking = threading.Event()

    def check() -> None:
        while not checking.wait(0.1):
            look_after(process)

    thread = threading.Thread(target=check)
    thread.start()
    deadline = time.monotonic() + DEADLINE_S
    try:
        while True:
            try:
                again = client.ask("POST", "/rollout/scale_in", {"num_replicas": 1}, key="k")
                break
            except GatewayUnreachable:  # on a loaded machine the start takes longer than the timeout
                assert time.monotonic() < deadline
    finally:
        checking.set()
        thread.join(DEADLINE_S)
    assert again["request_id"] == order["request_id"]


def test_a_folder_without_a_gateway_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", str(tmp_path)]) == 2
    assert f"{tmp_path / FILE} does not exist: no run that has a gateway" in capsys.readouterr().err
