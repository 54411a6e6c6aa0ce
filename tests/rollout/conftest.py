"""Real engine processes over a tiny random model, as the engine's contract suite starts them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_core.engines.engine_process import EngineLaunch
from relax_core.tools.make_tiny import tiny_model_folder
from tests.contracts.engine.conftest import launch, model_folder, start_engine
from tests.contracts.engine.harness import Engine
from tests.rollout.rollout_loop_harness import CONTEXT

__all__ = ["launch", "model_folder", "start_engine"]


@pytest.fixture(scope="module")
def tiny_folder() -> Path:
    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


@pytest.fixture
def engine(start_engine: Callable[..., Engine], launch: EngineLaunch, tiny_folder: Path) -> Engine:
    return start_engine(model_folder=tiny_folder, engine=dataclasses.replace(launch.engine, context_length=CONTEXT))
