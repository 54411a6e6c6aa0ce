"""Tests the comparison of two real engines: an engine with another dtype is refused, and versions must be equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import relax_core.control.engine_changes as module
from relax_core.config.compose import load_config
from relax_core.control.engine_changes import EngineProbe, probe_tokens
from relax_core.engines.engine_process import EngineLaunch
from relax_core.preflight import settle
from tests.contracts.engine.conftest import launch, start_engine
from tests.contracts.engine.harness import Engine
from tests.roles.test_engine_owner import context_of

__all__ = ["launch", "start_engine"]


@pytest.fixture(scope="session")
def model_folder() -> Path:
    from relax_core.tools.make_tiny import tiny_model_folder

    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


def test_an_engine_that_computes_something_else_is_found(
    launch: EngineLaunch, start_engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(load_config(settle=settle), tmp_path)
    fits = replace(launch, engine=replace(launch.engine, context_length=512, max_total_tokens=8192))
    first, half_url = start_engine(fits).process.url, start_engine(fits, dtype="bfloat16").process.url
    probe = EngineProbe(context)
    assert probe.start(first, attached=False, reference=first).result(60.0) == ""
    why = probe.start(half_url, attached=False, reference=first).result(60.0)
    assert "computes other log-probs than the run's engines" in why and "at most 0.0001" in why
    print(why)
    with monkeypatch.context() as wide:
        wide.setattr(module, "TOLERANCE", 10.0)
        assert probe.start(half_url, attached=False, reference=first).result(60.0) == ""

    monkeypatch.setattr(module, "PROBE_S", 0.2)
    gone = probe.start("http://127.0.0.1:9", attached=False, reference=first).result(60.0)
    assert gone.startswith("engine http://127.0.0.1:9 was not compared with") and "within 0.2 s" in gone


def test_the_tokens_fit_into_the_vocabulary_and_into_a_sample() -> None:
    assert len(probe_tokens(50, context_tokens=4096)) == 64 and max(probe_tokens(50, context_tokens=4096)) < 50
    assert len(set(probe_tokens(100_000, context_tokens=4096))) == 64
    assert len(probe_tokens(50, context_tokens=12)) == 12
