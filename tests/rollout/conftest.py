"""Starts real engine processes with a tiny random model, like the engine's contract suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_core.config.schema import EngineConfig
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.tools.make_tiny import tiny_model_folder
from tests.contracts.engine.conftest import launch, model_folder
from tests.contracts.engine.harness import Engine
from tests.rollout.rollout_loop_harness import CONTEXT

__all__ = ["launch", "model_folder"]


@pytest.fixture(scope="module")
def tiny_folder() -> Path:
    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


@pytest.fixture(scope="module")
def engine_settings(launch: EngineLaunch) -> EngineConfig:
    """Returns the engine settings for a test file. A file may override this fixture."""
    return dataclasses.replace(launch.engine, context_length=CONTEXT)


@pytest.fixture(scope="module")
def engine_process(launch: EngineLaunch, engine_settings: EngineConfig, tiny_folder: Path) -> Iterator[EngineProcess]:
    process = EngineProcess.start(dataclasses.replace(launch, model_folder=tiny_folder, engine=engine_settings))
    yield process
    process.stop(timeout_s=5.0)


@pytest.fixture
def engine(engine_process: EngineProcess) -> Engine:
    """Returns the test file's engine in the initial state: idle, with an empty cache, at version 0."""
    engine = Engine(engine_process)
    engine.post("/abort_request", {"abort_all": True})
    engine.post("/continue_generation", {})
    engine.flush()
    engine.post("/update_weight_version", {"new_version": 0})
    return engine
