"""Reuses engine processes: keeps an engine that a test left unchanged for the next test with the same launch."""

from __future__ import annotations

import time

from relax_core.contracts.engine import EngineError
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from tests.contracts.engine.harness import Engine

MOST = 4  # maximum idle processes
QUIET_S = 5.0


class SpareEngines:
    """Starts engines, and takes back engines that still have their first weights."""

    def __init__(self) -> None:
        self._spare: list[tuple[EngineLaunch, EngineProcess]] = []

    def start(self, launch: EngineLaunch) -> EngineProcess:
        """Returns a process of this launch. The process may have served an earlier test."""
        for place, (other_launch, process) in enumerate(self._spare):
            if other_launch == launch and process.poll() is None:
                del self._spare[place]
                return process
        return EngineProcess.start(launch)

    def take_back(self, launch: EngineLaunch, process: EngineProcess) -> None:
        """Keeps the process if it is unchanged, otherwise ends it."""
        if not launch.load_weights or not _is_as_it_started(process):
            process.stop(timeout_s=5.0)
            return
        self._spare.append((launch, process))
        if len(self._spare) > MOST:
            self._spare.pop(0)[1].stop(timeout_s=5.0)

    def close(self) -> None:
        """Ends all idle processes."""
        while self._spare:
            self._spare.pop()[1].stop(timeout_s=5.0)


def _is_as_it_started(process: EngineProcess) -> bool:
    """Resumes the engine, aborts its requests, and returns whether the engine still has its first weights."""
    if process.poll() is not None:
        return False
    engine = Engine(process)
    try:
        engine.client.resume()
        engine.client.resume_memory()
        engine.client.abort()
        deadline = time.monotonic() + QUIET_S
        while any((load := engine.client.loads())[name] for name in ("running", "queued", "held")):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return engine.version == 0 and load["prefix_cache_bytes"] == 0
    except EngineError:
        return False
    finally:
        engine.client.close()


SPARE_ENGINES = SpareEngines()
