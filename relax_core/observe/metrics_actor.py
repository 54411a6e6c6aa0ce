"""The metrics service as a Ray actor, and the client with which any process reports to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.observe.metrics import MetricsService
from relax_core.observe.records import MetricRecord, TextCell, TextRecord
from relax_core.observe.sinks import make_sinks, read_metrics, read_texts

if TYPE_CHECKING:
    from relax_core.config.schema import TrackerConfig

MAX_IN_FLIGHT = 1_000  # reports not yet taken by the actor; more means that it hangs
CALL_TIMEOUT_S = 10.0


class MetricsUnavailable(RuntimeError):
    """The metrics actor is gone, restarts, or does not answer; the text names the call. The run can go on."""


class MetricsActor:
    """`MetricsService` behind Ray. A restarted one, and one of a resumed run, takes up what the files hold."""

    def __init__(self, tracker: TrackerConfig, run_dir: Path) -> None:
        self._service = MetricsService(
            make_sinks(tracker, run_dir), history=read_metrics(run_dir), texts=read_texts(run_dir)
        )

    def record(self, source: str, step: int, values: dict[str, float]) -> None:
        self._service.record(source, step, values)

    def record_texts(self, kind: str, step: int, rows: list[dict[str, TextCell]]) -> None:
        self._service.record_texts(kind, step, rows)

    def mark_resume(self, step: int) -> None:
        self._service.mark_resume(step)

    def poll(self, since: int) -> tuple[int, list[MetricRecord]]:
        return self._service.poll(since)

    def texts(self, kind: str) -> list[TextRecord]:
        return self._service.texts(kind)

    def problems(self) -> list[str]:
        return self._service.problems()

    def flush(self, timeout_s: float) -> None:
        self._service.flush(timeout_s=timeout_s)

    def close(self, timeout_s: float) -> list[str]:
        """Returns the problems not told yet, those of the closing included."""
        self._service.close(timeout_s=timeout_s)
        return self._service.problems()


class MetricsClient:
    """Usable from any process of the run; thread-safe.

    Reports are sent and not waited for: ``errors`` counts those that failed or were left out because the actor did not
    take the earlier ones; ``last_error`` has the words of the newest. The other calls wait for an answer and raise
    `MetricsUnavailable` when there is none.
    """

    def __init__(self, handle: Any) -> None:
        self.errors = 0
        self.last_error = ""
        self._handle = handle
        self._lock = threading.Lock()
        self._in_flight = 0

    def record(self, source: str, step: int, values: Mapping[str, float]) -> None:
        """Sends numbers and returns at once. Raises TypeError or ValueError for what is not a number."""
        numbers = {name: float(value) for name, value in values.items()}
        self._send(self._handle.record, source, step, numbers)

    def record_texts(self, kind: str, step: int, rows: Sequence[Mapping[str, TextCell]]) -> None:
        """Sends texts and returns at once."""
        self._send(self._handle.record_texts, kind, step, [dict(row) for row in rows])

    def mark_resume(self, step: int, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """See `MetricsService.mark_resume`; waits, so that it stands before the first report after the resume."""
        self._call("mark_resume", step, timeout_s=timeout_s)

    def send_mark(self, step: int, *, timeout_s: float = CALL_TIMEOUT_S) -> Callable[[], None]:
        """As `mark_resume`, but returns at once, with the call that waits."""
        reference = self._handle.mark_resume.remote(step)
        return lambda: self._answer("mark_resume", reference, timeout_s=timeout_s)

    def poll(self, since: int, *, timeout_s: float = CALL_TIMEOUT_S) -> tuple[int, list[MetricRecord]]:
        return self._call("poll", since, timeout_s=timeout_s)

    def texts(self, kind: str, *, timeout_s: float = CALL_TIMEOUT_S) -> list[TextRecord]:
        return self._call("texts", kind, timeout_s=timeout_s)

    def problems(self, *, timeout_s: float = CALL_TIMEOUT_S) -> list[str]:
        return self._call("problems", timeout_s=timeout_s)

    def flush(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Waits until all that this process reported is in the files. A file that hangs counts as unavailable."""
        import ray

        try:
            self._call("flush", timeout_s / 2, timeout_s=timeout_s)
        except ray.exceptions.RayTaskError as error:
            raise MetricsUnavailable(str(error.cause)) from error

    def close(self, *, timeout_s: float = CALL_TIMEOUT_S) -> list[str]:
        """Flushes the sinks and ends the service; returns the problems not told yet."""
        return self._call("close", timeout_s / 2, timeout_s=timeout_s)

    def restart(self) -> None:
        """Kills the actor, also a stopped one (seconds then); Ray starts another as often as it may."""
        import ray

        ray.kill(self._handle, no_restart=False)

    def _send(self, method: Any, *args: Any) -> None:
        with self._lock:
            if self._in_flight >= MAX_IN_FLIGHT:
                self.errors += 1
                self.last_error = f"the metrics actor has not taken {MAX_IN_FLIGHT} earlier reports"
                return
            self._in_flight += 1
        method.remote(*args).future().add_done_callback(self._sent)

    def _sent(self, future: Any) -> None:
        error = future.exception()
        with self._lock:
            self._in_flight -= 1
            if error is not None:
                self.errors += 1
                self.last_error = f"{type(error).__name__}: {error}"

    def _call(self, name: str, *args: Any, timeout_s: float) -> Any:
        return self._answer(name, getattr(self._handle, name).remote(*args), timeout_s=timeout_s)

    def _answer(self, name: str, reference: Any, *, timeout_s: float) -> Any:
        import ray

        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise MetricsUnavailable(f"the metrics actor did not answer {name} within {timeout_s:g} s") from error
        except ray.exceptions.RayActorError as error:
            raise MetricsUnavailable(f"the metrics actor is gone or restarts, {name} had no answer: {error}") from error


def start_metrics(
    tracker: TrackerConfig, run_dir: Path, *, name: str, namespace: str, max_restarts: int
) -> MetricsClient:
    """Starts the run's metrics actor under ``name``; it takes no logical CPU."""
    import ray

    options = {"name": name, "namespace": namespace, "max_restarts": max_restarts, "num_cpus": 0}
    return MetricsClient(ray.remote(MetricsActor).options(**options).remote(tracker, run_dir))


def connect_metrics(name: str, *, namespace: str) -> MetricsClient:
    """The client of the actor that `start_metrics` started. Raises ValueError when there is none."""
    import ray

    return MetricsClient(ray.get_actor(name, namespace=namespace))
