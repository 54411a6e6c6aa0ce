"""Starts the tested engines, with a tiny random Qwen3: one process of each kind per session, more on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relax_core.config.schema import EngineConfig
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from tests.contracts.engine.harness import CONTEXT, ENGINES, SGLANG_PYTHON, TOKEN, Engine, Started, make_model, publish
from tests.contracts.engine.spare_engines import SPARE_ENGINES


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
            port=0,
            max_running_samples=128,
            max_total_tokens=64 * CONTEXT,
            context_length=CONTEXT,
            threads=1,
            start_timeout_s=120.0,
        ),
        dtype="float32",
        token_file=folder / "token",
        log_file=folder / "engine.log",
        load_weights=True,
    )


@pytest.fixture(scope="session")
def sglang_launch(launch: EngineLaunch, tmp_path_factory: pytest.TempPathFactory) -> EngineLaunch:
    """Returns the launch of SGLang's server with the same model."""
    if not SGLANG_PYTHON.is_file():
        pytest.fail(f"{SGLANG_PYTHON} is missing: make sglang-cpu")
    engine = replace(
        launch.engine,
        name="sglang",
        tp=1,
        python=str(SGLANG_PYTHON),
        deterministic=True,
        max_total_tokens=8 * CONTEXT,
        start_timeout_s=300.0,
    )
    log_file = tmp_path_factory.mktemp("sglang") / "engine.log"
    return replace(launch, engine=engine, log_file=log_file, return_routed_experts=False)


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Engine]]:
    """Starts the session's engine of each kind on first use. The engine serves the weights of the model folder."""
    processes: dict[str, EngineProcess] = {}
    with Started() as started:

        def engine_of(kind: str) -> Engine:
            if kind not in processes:
                fixture = "launch" if kind == "embedded" else "sglang_launch"
                processes[kind] = started.start(request.getfixturevalue(fixture))
            return Engine(processes[kind], kind)

        yield engine_of
        for process in processes.values():
            process.stop(timeout_s=5.0)
        assert not started.left(), "left by engines that were ended normally"


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest, engines: Callable[[str], Engine]) -> Engine:
    """Returns the session's engine of one kind. A test that changes the engine must restore it."""
    return engines(request.param)


@pytest.fixture
def engine_back(engine: Engine, tmp_path: Path) -> Iterator[Engine]:
    """Yields the session's engine. Afterwards makes the engine serve the model folder's weights as a newer version."""
    yield engine
    newer = max(engine.version, 1000) + 1
    engine.client.update_weights(publish(make_model(None, seed=0), tmp_path / "back.bin", version=newer))
    engine.flush()


@pytest.fixture
def start_engine(launch: EngineLaunch) -> Iterator[Callable[..., Engine]]:
    """Starts embedded engines for one test, by default with ``launch``. Keywords replace fields of the launch."""
    started: list[tuple[EngineLaunch | None, EngineProcess]] = []

    def start(given: EngineLaunch = launch, *, after: EngineProcess | None = None, **changes: object) -> Engine:
        """Starts an engine. With ``after`` the engine replaces an ended process."""
        wanted = replace(given, **changes)  # type: ignore[arg-type]
        if after is None and not changes:
            started.append((wanted, SPARE_ENGINES.start(wanted)))
        else:
            held_port = None if after is None else after.held_port
            started.append((None, EngineProcess.start(wanted, held_port=held_port)))
        return Engine(started[-1][1])

    yield start
    for wanted, process in started:
        if wanted is None:
            process.stop(timeout_s=5.0)
        else:
            SPARE_ENGINES.take_back(wanted, process)
