"""Starts real engine processes with a tiny random model, like the engine's contract tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest

from relax_core.engines.engine_process import EngineLaunch
from tests.contracts.engine.conftest import launch, model_folder, start_engine
from tests.contracts.engine.harness import Engine
from tests.engines.slow_engine import SlowLaunch

__all__ = ["launch", "model_folder", "start_engine"]


@pytest.fixture
def start_slow_engine(launch: EngineLaunch, start_engine: Callable[..., Engine]) -> Callable[[], Engine]:
    """Returns a function that starts engines with slow decode steps."""
    values = {field.name: getattr(launch, field.name) for field in fields(launch)}
    return lambda: start_engine(SlowLaunch(**values))
