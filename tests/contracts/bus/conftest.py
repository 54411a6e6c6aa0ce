"""Runs the contract suite of the bus on every backend of `create_bus`.

To test a new backend, add it to `relax_core.bus.factory.BACKENDS` and run ``pytest tests/contracts/bus``. The tests do
not depend on the implementation of a backend.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from relax_core.bus.factory import BACKENDS, create_bus
from relax_core.config.schema import BusConfig
from tests.bus.blocking import BlockingBus
from tests.bus.make_rows import make_settings

if TYPE_CHECKING:
    from relax_core.bus.transfer_queue_plane import DataPlane

NAMESPACE = "bus-contract"

_numbers = itertools.count()


@pytest.fixture(scope="package")
def plane(ray_session: str) -> Iterator[DataPlane]:
    """Yields one data plane for all buses of bus=transfer_queue in this folder, because its start takes seconds."""
    from relax_core.bus.transfer_queue_plane import DataPlane  # imported late because it imports Ray

    plane = DataPlane(folder=Path(tempfile.gettempdir()))
    yield plane
    plane.close()


@pytest.fixture(params=BACKENDS)
def make_bus(request: pytest.FixtureRequest, ray_session: str, tmp_path: Path) -> Iterator[Callable[..., BlockingBus]]:
    """Yields ``make_bus(**changes)``, which starts a new bus.

    By default the bus has 2 groups of 2 samples per step, staleness 1, and inline payloads up to 1 KB.
    """
    made: list[Any] = []

    def make(**changes: Any) -> BlockingBus:
        number, plane = next(_numbers), None
        if request.param == "transfer_queue":
            plane = request.getfixturevalue("plane")
        bus = create_bus(
            BusConfig(name=request.param),
            make_settings(**changes),
            ledger_path=tmp_path / f"ledger{number}.sqlite",
            name=f"bus{number}",
            namespace=NAMESPACE,
            plane=plane,
        )
        blocking = BlockingBus(bus)
        made.append(blocking)
        if request.param == "transfer_queue":
            blocking.open()  # as `connect_bus` does
        return blocking

    yield make
    for bus in made:
        bus.close(reason="the test is over", timeout_s=60.0)
        bus.terminate()
