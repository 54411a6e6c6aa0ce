"""Defines the metrics service as a Ray actor, and the client with which any process reports to it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.observe.service.metrics_service import MetricsHealth, MetricsService
from relax_core.observe.service.outbox import Outbox, Receipt, Refused, Undelivered
from relax_core.observe.service.records import MetricRecord, Record, TextCell, TextRecord, metric_record, text_record
from relax_core.observe.service.sinks import each_metric, make_sinks, read_texts

if TYPE_CHECKING:
    from relax_core.config.sections.tracker_schema import TrackerConfig

CALL_TIMEOUT_S = 10.0


class MetricsUnavailable(RuntimeError):
    """Says that the metrics actor has exited, is restarting or does not answer.

    The text names the call. The run can go on without it.
    """


class MetricsActor:
    """Is `MetricsService` as a Ray actor.

    After a restart or a resume it reads the records in the run's files.
    """

    def __init__(self, tracker: TrackerConfig, run_dir: Path) -> None:
        self._name = secrets.token_hex(8)
        self._service = MetricsService(
            make_sinks(tracker, run_dir), history=each_metric(run_dir), texts=read_texts(run_dir)
        )

    def take(self, records: list[Record], left_out: int) -> Receipt:
        """Calls `MetricsService.take`."""
        return self._receipt(self._service.take(records, left_out=left_out))

    def mark_resume(self, step: int) -> None:
        """Calls `MetricsService.mark_resume`."""
        self._service.mark_resume(step)

    def poll(self, since: int) -> tuple[int, list[MetricRecord]]:
        """Calls `MetricsService.poll`."""
        return self._service.poll(since)

    def texts(self, kind: str) -> list[TextRecord]:
        """Calls `MetricsService.texts`."""
        return self._service.texts(kind)

    def health(self) -> MetricsHealth:
        """Calls `MetricsService.health`."""
        return self._service.health()

    def flush(self, timeout_s: float) -> Receipt:
        """Calls `MetricsService.flush`."""
        return self._receipt(self._service.flush(timeout_s=timeout_s))

    def close(self, timeout_s: float) -> MetricsHealth:
        """Calls `MetricsService.close`."""
        return self._service.close(timeout_s=timeout_s)

    def _receipt(self, counts: tuple[int, int]) -> Receipt:
        return Receipt(service=self._name, taken=counts[0], settled=counts[1])


class MetricsClient:
    """Calls the metrics actor from any process of the run.

    It is thread-safe. Records go into an `Outbox`, which keeps them until they are in the run's files, also if the
    actor is killed and starts again. The other calls wait for an answer and raise `MetricsUnavailable` if there is
    none. `mark_resume`, `flush` and `close` first wait until the actor has taken the records of this process.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._outbox = Outbox(self._send)

    @property
    def errors(self) -> int:
        """Returns the number of records that were left out."""
        return self._outbox.left_out

    @property
    def last_error(self) -> str:
        """Returns the text of the newest failure, or "" if there was none."""
        return self._outbox.last_error

    def record(self, source: str, step: int, values: Mapping[str, float]) -> None:
        """Reports numbers and returns at once. Raises TypeError or ValueError if a value is not a number."""
        self.put(metric_record(source, step, values))

    def record_texts(self, kind: str, step: int, rows: Sequence[Mapping[str, TextCell]]) -> None:
        """Reports texts and returns at once."""
        self.put(text_record(kind, step, rows))

    def put(self, *records: Record) -> None:
        """Reports records that the caller made, and returns at once."""
        self._outbox.put(*records)

    def mark_resume(self, step: int, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Marks a resume (`MetricsService.mark_resume`) and waits for it, so that it precedes all later records."""
        self._call_in_order("mark_resume", step, timeout_s=timeout_s)

    def send_mark(self, step: int, *, timeout_s: float = CALL_TIMEOUT_S) -> Callable[[], None]:
        """Sends the mark of a resume and returns at once. Calling the returned function waits for the answer."""
        reference = self._handle.mark_resume.remote(step)
        return lambda: self._answer("mark_resume", reference, timeout_s=timeout_s)

    def poll(self, since: int, *, timeout_s: float = CALL_TIMEOUT_S) -> tuple[int, list[MetricRecord]]:
        """Returns the next cursor and the records since cursor ``since`` (`MetricsService.poll`)."""
        return self._call("poll", since, timeout_s=timeout_s)

    def texts(self, kind: str, *, timeout_s: float = CALL_TIMEOUT_S) -> list[TextRecord]:
        """Returns the first and the newest texts of ``kind`` (`MetricsService.texts`)."""
        return self._call("texts", kind, timeout_s=timeout_s)

    def health(self, *, timeout_s: float = CALL_TIMEOUT_S) -> MetricsHealth:
        """Returns the state of the sinks (`MetricsHealth`)."""
        return self._call("health", timeout_s=timeout_s)

    def flush(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Waits until all records of this process are in the run's own files.

        It does not wait for other sinks.

        Raises `MetricsUnavailable` if a file hangs.
        """
        import ray

        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                receipt = self._call_in_order("flush", left_s / 2, timeout_s=left_s)
            except ray.exceptions.RayTaskError as error:
                raise MetricsUnavailable(str(error.cause)) from error
            if self._outbox.settle(receipt):
                return

    def close(self, *, timeout_s: float = CALL_TIMEOUT_S) -> MetricsHealth:
        """Closes the sinks, ends the service and returns the problems that were not returned before.

        This process cannot report records any more.
        """
        try:
            return self._call_in_order("close", timeout_s / 2, timeout_s=timeout_s)
        finally:
            self.end()

    def end(self) -> None:
        """Ends reporting from this process and drops the records that it still keeps."""
        self._outbox.end()

    def restart(self) -> None:
        """Kills the actor; Ray restarts it if ``max_restarts`` allows. This takes seconds for a stopped process."""
        import ray

        ray.kill(self._handle, no_restart=False)

    def _send(self, records: Sequence[Record], left_out: int) -> Receipt:
        import ray

        if not ray.is_initialized():  # a call would start another Ray
            raise Refused("Ray has ended")
        try:
            return self._answer("take", self._handle.take.remote(list(records), left_out), timeout_s=CALL_TIMEOUT_S)
        except ray.exceptions.RayTaskError as error:
            raise Refused(str(error.cause)) from error
        except (MetricsUnavailable, ray.exceptions.RayError) as error:
            raise Undelivered(str(error)) from error

    def _call_in_order(self, name: str, *args: Any, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        if not self._outbox.wait_sent(timeout_s=timeout_s):
            raise MetricsUnavailable(f"{name} waits for earlier reports: {self.last_error or 'there is no answer yet'}")
        return self._call(name, *args, timeout_s=max(0.0, deadline - time.monotonic()))

    def _call(self, name: str, *args: Any, timeout_s: float) -> Any:
        return self._answer(name, getattr(self._handle, name).remote(*args), timeout_s=timeout_s)

    def _answer(self, name: str, reference: Any, *, timeout_s: float) -> Any:
        import ray

        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise MetricsUnavailable(f"the metrics actor did not answer {name} within {timeout_s:g} s") from error
        except ray.exceptions.RayActorError as error:
            raise MetricsUnavailable(
                f"the metrics actor has exited or is restarting, {name} had no answer: {error}"
            ) from error


def start_metrics(
    tracker: TrackerConfig, run_dir: Path, *, name: str, namespace: str, max_restarts: int
) -> MetricsClient:
    """Starts the run's metrics actor under ``name``, without a logical CPU, and returns its client."""
    import ray

    options = {"name": name, "namespace": namespace, "max_restarts": max_restarts, "num_cpus": 0}
    return MetricsClient(ray.remote(MetricsActor).options(**options).remote(tracker, run_dir))


def connect_metrics(name: str, *, namespace: str) -> MetricsClient:
    """Returns a client of the actor that `start_metrics` started. Raises ValueError if there is none."""
    import ray

    return MetricsClient(ray.get_actor(name, namespace=namespace))
