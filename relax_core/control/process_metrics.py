"""Records metrics of the run's engines, and the CPU, memory and GPU usage of the run's processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from relax_core.control.engine_set import EngineSet
from relax_core.control.worker_health import WorkerHeartbeat
from relax_core.observe.process_usage import UsageMeter, usage_numbers
from relax_core.observe.stragglers import DecodeTime, DecodeTimes
from relax_core.roles.role_context import BUS, ENGINE, worker_name
from relax_core.roles.worker import WorkerStatus
from relax_core.weights.engine_members import STARTED

CONTROLLER = "controller"


class ProcessMetrics:
    """Records the resource usage of the workers, the bus, and this process with its children (the trackers).

    ``bus_pid`` is None if the bus may be on another host. ``record`` is called with the number of train steps and the
    metrics.
    """

    def __init__(
        self,
        *,
        bus_pid: int | None,
        record: Callable[[int, Mapping[str, float]], None],
    ) -> None:
        self._put = record
        self._meters = {CONTROLLER: UsageMeter()} | ({} if bus_pid is None else {BUS: UsageMeter(bus_pid)})

    def record(self, beats: Mapping[str, WorkerHeartbeat], *, step: int) -> None:
        """Records the newest usage."""
        found = {name: beat.alive.usage for name, beat in beats.items() if beat.alive is not None}
        found |= {name: meter.newest() for name, meter in self._meters.items()}
        numbers: dict[str, float] = {}
        for name, usage in found.items():
            if usage is not None:
                numbers |= usage_numbers(name, usage)
        if numbers:
            self._put(step, numbers)


# -- Metrics of the run's engines, and their decode times for the straggler detection ---------------------------------

RECORD_S = 1.0  # interval of the check in seconds; the engines report with the same interval


class EngineMetrics:
    """Records metrics of the present engines that serve or have served prompts.

    ``record`` is called with the number of train steps and the metrics. ``add_decoding`` is called with the number of
    train steps and the decode times of each engine since its start.
    """

    def __init__(
        self,
        engines: EngineSet,
        *,
        record: Callable[[int, Mapping[str, float]], None],
        add_decoding: Callable[[int, Mapping[str, DecodeTimes]], None],
    ) -> None:
        self._engines, self._put, self._add_decoding = engines, record, add_decoding
        self._recorded = -1  # train steps at the last record

    def record(self, beats: Mapping[str, WorkerHeartbeat], *, step: int) -> None:
        """Records the metrics once per train step."""
        if step == self._recorded:
            return
        statuses = {name: beats[name].alive for name in self._names() if name in beats}
        found = {name: status for name, status in statuses.items() if status is not None}
        numbers = {
            f"{name}/{key}": value for name, status in found.items() for key, value in _numbers_of(status).items()
        }
        if not numbers:
            return
        self._recorded = step
        self._put(step, numbers)
        decoding = {
            name: {
                size: DecodeTime(steps, seconds, wait_s) for size, steps, seconds, wait_s in status.engine.decode_times
            }
            for name, status in found.items()
            if status.engine is not None and status.engine.decode_times
        }
        if len(decoding) > 1:
            self._add_decoding(step, decoding)

    def _names(self) -> list[str]:
        return [worker_name(ENGINE, member.number) for member in self._engines.members() if member.state in STARTED]


def _numbers_of(status: WorkerStatus) -> dict[str, float]:
    """Returns the metrics of one engine."""
    report = status.engine
    if report is None:
        return {"version": -1.0, "restarts": float(status.restarts)}
    reported = {"version": report.version, "running": report.running, "waiting": report.waiting}
    rates = {"tokens_per_s": report.tokens_per_s, "cache_share": report.cache_share}
    known: dict[str, float | None] = {**reported, **rates, "restarts": status.restarts}
    return {name: float(value) for name, value in known.items() if value is not None}
