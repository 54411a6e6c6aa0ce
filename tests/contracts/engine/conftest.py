"""The engine under test: a real process over a tiny random Qwen3, one for the session and fresh ones on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relax_core.config.schema import EngineConfig
from relax_core.engines.process import EngineLaunch, EngineProcess
from tests.contracts.engine.harness import CONTEXT, TOKEN, Engine, make_model

ENGINES = ("embedded",)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    make_model(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def launch(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineLaunch:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "token").write_text(TOKEN)
    return EngineLaunch(
        model_folder=model_folder,
        engine=EngineConfig(
            name="embedded",
            count=1,
            host="127.0.0.1",
            port=0,
            max_running_samples=128,
            max_total_tokens=64 * CONTEXT,
            context_length=CONTEXT,
            admission_window_ms=1.0,
            threads=1,
            start_timeout_s=60.0,
            request_timeout_s=60.0,
            sync_timeout_s=30.0,
        ),
        dtype="float32",
        token_file=folder / "token",
        log_file=folder / "engine.log",
        load_weights=True,
    )


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest, launch: EngineLaunch) -> Iterator[Engine]:
    """An engine that serves the folder's weights as version 0. A test that changes it puts it back."""
    process = EngineProcess.start(launch)
    yield Engine(process)
    process.stop(timeout_s=5.0)


@pytest.fixture(params=ENGINES)
def start_engine(request: pytest.FixtureRequest, launch: EngineLaunch) -> Iterator[Callable[..., Engine]]:
    """Starts engines of its own for a test; keywords replace fields of `EngineLaunch`."""
    started: list[EngineProcess] = []

    def start(**changes: object) -> Engine:
        process = EngineProcess.start(replace(launch, **changes))  # type: ignore[arg-type]
        started.append(process)
        return Engine(process)

    yield start
    for process in started:
        process.stop(timeout_s=5.0)
