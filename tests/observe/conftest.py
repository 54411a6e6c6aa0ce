from __future__ import annotations

from collections.abc import Callable

import pytest

from relax_core.contracts.bus import BusProgress, LedgerCounts
from relax_core.observe.event_log import MetricRecord


@pytest.fixture
def make_record() -> Callable[..., MetricRecord]:
    def make(source: str, step: int, **values: float) -> MetricRecord:
        return MetricRecord(source=source, step=step, time_s=1000.0 + step, values=values)

    return make


@pytest.fixture
def progress() -> BusProgress:
    return BusProgress(
        version=12,
        admitted=14,
        in_flight=1,
        waiting=1,
        leased=0,
        credits=0,
        staleness_histogram={0: 4, 1: 44, 2: 0},
        ledger=LedgerCounts(
            issued=56, trained=48, dropped={"stale": 3, "reward timeout": 1}, open=4, lost=0, trained_twice=0
        ),
    )
