"""How a worker finds the run's bus and metrics, which may still be starting: all processes start at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from relax_core.bus.factory import connect_bus
from relax_core.bus.ray_backend import RayBus
from relax_core.observe.metrics_actor import MetricsClient, connect_metrics
from relax_core.roles.context import BUS, METRICS, RunContext

T = TypeVar("T")
RETRY_S = 0.05


def meet_bus(context: RunContext) -> RayBus:
    """The run's bus; raises TimeoutError where it is not there within ``run.start_timeout_s``."""
    return _meet(BUS, lambda: connect_bus(BUS, context.namespace), timeout_s=context.config.run.start_timeout_s)


def meet_metrics(context: RunContext) -> MetricsClient:
    """The run's metrics; raises TimeoutError where they are not there within ``run.start_timeout_s``."""
    return _meet(
        METRICS,
        lambda: connect_metrics(METRICS, namespace=context.namespace),
        timeout_s=context.config.run.start_timeout_s,
    )


def _meet(what: str, connect: Callable[[], T], *, timeout_s: float) -> T:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return connect()
        except ValueError as error:  # no actor of that name yet
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} was not there within {timeout_s:.0f} s: {error}") from error
            time.sleep(RETRY_S)
