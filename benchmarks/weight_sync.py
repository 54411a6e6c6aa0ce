"""One weight update of the embedded engine by each transport, by model size; `python -m benchmarks.engines` prints it.

The transports take turns in every round. "Written" is what the trainer waits for: the file and its digest. "Served" is
from tensors in the trainer's hands until the engine serves them (writing, sending, checking, copying in). "Stall" is
how long decoding stands still for it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.tiny_model import demo_model, engine_config
from relax_core.config.choices import WeightTransportName
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.weights.publisher import WeightPublisher
from relax_core.weights.transports.choice import build_transport

TRANSPORTS = ("shared_memory", "gloo", "disk")
SHARED_MEMORY = Path("/dev/shm")
TOKEN = "benchmark"
DEMO_PARAMETERS = 0.1e6


def model_of(parameters: float) -> Any:
    """A model of about this size in float32."""
    if parameters <= DEMO_PARAMETERS:
        return demo_model()
    hidden = 256 if parameters < 20e6 else 512
    per_layer = 12 * hidden * hidden
    return demo_model(hidden=hidden, layers=max(1, round(parameters / per_layer)), inter=3 * hidden)


def sync_rows(parameters: float, *, rounds: int) -> Iterator[str]:
    """One row a transport: medians of what is written, served and stalled, and the spread of the last two."""
    model = model_of(parameters)
    tensors = [(name, value) for name, value in model.state_dict().items() if name != "lm_head.weight"]
    count = sum(value.numel() for _, value in tensors)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = _engine(stack, model, folder)
        publishers = {name: _publisher(stack, name, engine, folder) for name in TRANSPORTS}
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in TRANSPORTS}
        version = 0
        for _ in range(rounds + 1):
            for name, publisher in publishers.items():
                start = time.perf_counter()
                report = publisher.publish(version, tensors).result(timeout=120.0)
                assert not report.refused, report.refused
                found[name].append((report.write_ms, 1e3 * (time.perf_counter() - start), report.stall_ms))
                version += 1
    for name, values in found.items():
        written, served, stall = (sorted(column) for column in zip(*values[1:], strict=True))
        yield (
            f"{count / 1e6:>6.1f}M {name:>14} {statistics.median(written):>10.2f} {_middle(served):>26} "
            f"{_middle(stall):>26}"
        )


def _middle(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"


def _engine(stack: ExitStack, model: Any, folder: Path) -> EngineClient:
    model.save_pretrained(folder)
    (folder / "token").write_text(TOKEN)
    launch = EngineLaunch(
        model_folder=folder,
        engine=engine_config(),
        dtype="float32",
        token_file=folder / "token",
        log_file=folder / "engine.log",
    )
    process = EngineProcess.start(launch)
    stack.callback(process.stop, timeout_s=5.0)
    client = EngineClient(process.url, TOKEN, request_timeout_s=60.0, control_timeout_s=60.0)
    stack.callback(client.close)
    return client


def _publisher(stack: ExitStack, name: str, engine: EngineClient, model_folder: Path) -> WeightPublisher:
    """As in a run: disk lies on a disk, the others in shared memory."""
    where = None if name == "disk" else SHARED_MEMORY
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=where)))
    transport = build_transport(WeightTransportName(name), host="127.0.0.1", timeout_s=60.0)
    publisher = WeightPublisher(folder, lambda: [engine], transport=transport, model_folder=model_folder)
    stack.callback(publisher.close)
    return publisher
