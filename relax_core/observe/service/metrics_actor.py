"""The metrics service as a Ray actor, and the client with which any process reports to it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.observe.service.metrics_service import MetricsHealth, MetricsService
from relax_core.observe.service.outbox import Outbox, Receipt, Refused, Undelivered
from relax_core.observe.service.records import MetricRecord, Record, TextCell, TextRecord, metric_record, text_record
from relax_core.observe.service.sinks import make_sinks, read_metrics, read_texts

if TYPE_CHECKING:
    from relax_core.config.schema import TrackerConfig

CALL_TIMEOUT_S = 10.0


class MetricsUnavailable(RuntimeError):
    """The metrics actor is gone, restarts, or does not answer; the text names the call. The run can go on."""


class MetricsActor:
    """`MetricsService` behind Ray. A restarted one, and one of a resumed run, takes up what the files hold."""

    def __init__(self, tracker: TrackerConfig, run_dir: Path) -> None:
        self._name = secrets.token_hex(8)
        self._service = MetricsService(
            make_sinks(tracker, run_dir), history=read_metrics(run_dir), texts=read_texts(run_dir)
        )

    def take(self, records: list[Record], left_out: int) -> Receipt:
        return self._receipt(self._service.take(records, left_out=left_out))

    def mark_resume(self, step: int) -> None:
        self._service.mark_resume(step)

    def poll(self, since: int) -> tuple[int, list[MetricRecord]]:
        return self._service.poll(since)

    def texts(self, kind: str) -> list[TextRecord]:
        return self._service.texts(kind)

    def health(self) -> MetricsHealth:
        return self._service.health()

    def flush(self, timeout_s: float) -> Receipt:
        return self._receipt(self._service.flush(timeout_s=timeout_s))

    def close(self, timeout_s: float) -> MetricsHealth:
        return self._service.close(timeout_s=timeout_s)

    def _receipt(self, counts: tuple[int, int]) -> Receipt:
        return Receipt(service=self._name, taken=counts[0], settled=counts[1])


class MetricsClient:
    """Usable from any process of the run; thread-safe.

    Reports are put into an `Outbox`, which keeps them until they are in the run's files, also while the actor is killed
    and starts again. ``errors`` counts those that were left out; ``last_error`` has the words of the newest failure.
    The other calls wait for an answer, and raise `MetricsUnavailable` when there is none; `mark_resume`, `flush` and
    `close` first wait until the actor has taken what this process has reported.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._outbox = Outbox(self._send)

    @property
    def errors(self) -> int:
        return self._outbox.left_out

    @property
    def last_error(self) -> str:
        return self._outbox.last_error

    def record(self, source: str, step: int, values: Mapping[str, float]) -> None:
        """Reports numbers and returns at once. Raises TypeError or ValueError for what is not a number."""
        self.put(metric_record(source, step, values))

    def record_texts(self, kind: str, step: int, rows: Sequence[Mapping[str, TextCell]]) -> None:
        """Reports texts and returns at once."""
        self.put(text_record(kind, step, rows))

    def put(self, *records: Record) -> None:
        """Reports records that the caller made, and returns at once."""
        self._outbox.put(*records)

    def mark_resume(self, step: int, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """See `MetricsService.mark_resume`; waits, so that it stands before the first report after the resume."""
        self._call_in_order("mark_resume", step, timeout_s=timeout_s)

    def send_mark(self, step: int, *, timeout_s: float = CALL_TIMEOUT_S) -> Callable[[], None]:
        """As `mark_resume`, but returns at once, with the call that waits."""
        reference = self._handle.mark_resume.remote(step)
        return lambda: self._answer("mark_resume", reference, timeout_s=timeout_s)

    def poll(self, since: int, *, timeout_s: float = CALL_TIMEOUT_S) -> tuple[int, list[MetricRecord]]:
        return self._call("poll", since, timeout_s=timeout_s)

    def texts(self, kind: str, *, timeout_s: float = CALL_TIMEOUT_S) -> list[TextRecord]:
        return self._call("texts", kind, timeout_s=timeout_s)

    def health(self, *, timeout_s: float = CALL_TIMEOUT_S) -> MetricsHealth:
        return self._call("health", timeout_s=timeout_s)

    def flush(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Waits until all that this process reported is in the run's own files; other sinks are not waited for. A file
        that hangs counts as unavailable."""
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
        """Closes the sinks and ends the service; returns what was not told yet. Nothing can be reported after it."""
        try:
            return self._call_in_order("close", timeout_s / 2, timeout_s=timeout_s)
        finally:
            self.end()

    def end(self) -> None:
        """This process reports nothing any more; what it still keeps is given up."""
        self._outbox.end()

    def restart(self) -> None:
        """Kills the actor, also a stopped one (seconds then); Ray starts another as often as it may."""
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
