"""A full disk: recording goes on, the problem is reported once, and the files stay readable to their ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from relax_core.observe.service.metrics_service import MetricsService
from relax_core.observe.service.sinks import JsonlSink, TensorBoardSink, read_metrics

UNDER_A_LIMIT = """
import json, resource, sys, time
from pathlib import Path
from relax_core.observe.service.metrics_service import MetricsService
from relax_core.observe.service.sinks import JsonlSink

service = MetricsService([JsonlSink(Path(sys.argv[1]))], batch_s=0.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for step in range(200):  # some 70 bytes each
    service.record("actor", step, {"reward": 0.5})
problems = []
deadline = time.monotonic() + 120
while not problems and time.monotonic() < deadline:
    problems += service.health().problems
for step in range(200, 300):
    service.record("actor", step, {"reward": 0.5})
last = service.close(timeout_s=120)
told = {"kept": service.poll(0)[0], "first": problems, "last": last.problems, "dropped": last.dropped}
print(json.dumps(told))
"""


def test_a_file_that_may_not_grow_does_not_stop_recording(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT, str(tmp_path)], capture_output=True, text=True, timeout=400, check=True
    )
    told = json.loads(done.stdout)
    assert told["kept"] == 300
    (problem,) = told["first"]
    assert "metrics.jsonl cannot be written" in problem and "File too large" in problem
    (total,) = told["last"]
    written = len(read_metrics(tmp_path))
    assert total == f"metrics: metrics.jsonl lacks up to {300 - written} records"
    assert told["dropped"] == {"metrics.jsonl": 300 - written}
    kept = (tmp_path / "metrics.jsonl").read_bytes()
    assert len(kept) <= 4096 and len(kept.splitlines()) == written  # there is no partial line


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no leave to mount a tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def event_steps(folder: Path) -> list[int]:
    """Returns the steps of actor/reward as TensorBoard reads them; none if the file does not exist yet."""
    if not (folder / "tensorboard").exists():
        return []
    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return [event.step for event in reader.Scalars("actor/reward")] if "actor/reward" in tags else []


def test_a_disk_that_was_full_for_a_while_leaves_readable_files(
    tiny_disk: Path, wait_until: Callable[..., None]
) -> None:
    jsonl, tensorboard = JsonlSink(tiny_disk), TensorBoardSink(tiny_disk)
    service = MetricsService([jsonl, tensorboard], batch_s=0.0)
    service.record("actor", 0, {"reward": 0.5})
    wait_until(lambda: len(read_metrics(tiny_disk)) == 1, what="the first line")
    wait_until(lambda: event_steps(tiny_disk) == [0], what="the first event")
    ballast = tiny_disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(b"x" * (256 << 10))
    problems: list[str] = []
    step = 0

    def both_failed() -> bool:
        nonlocal step
        step += 1
        service.record("actor", step, {"reward": 0.5})
        problems.extend(service.health().problems)
        return len(problems) >= 2

    wait_until(both_failed, what="a failure of both sinks")
    assert all("No space left" in problem for problem in problems)
    assert {problem.split()[1] for problem in problems} == {"metrics.jsonl", "tensorboard"}
    ballast.unlink()
    service.record("actor", 1_000_000, {"reward": 0.75})
    end = service.close(timeout_s=120)

    written = read_metrics(tiny_disk)
    assert (written[0].step, written[-1].step) == (0, 1_000_000)
    assert service.poll(0)[0] == step + 2
    steps = event_steps(tiny_disk)
    assert (steps[0], steps[-1]) == (0, 1_000_000)
    assert all("lacks up to" in problem for problem in end.problems)
