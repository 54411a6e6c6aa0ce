"""Tests aborts (they return the generated tokens), the three pause modes, and the release of memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts.engine import PauseMode
from tests.contracts.engine.harness import (
    LONG,
    Engine,
    embedded_only,
    long_request,
    make_model,
    publish,
    sglang_only,
)


@pytest.fixture(autouse=True)
def left_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """Resumes the shared engine after each test."""
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.client.resume()
        if engine.kind == "embedded":
            engine.client.resume_memory()
        engine.client.abort()


class Reader:
    """Collects the stream of one sample."""

    def __init__(self, events: Iterator[dict[str, Any]]) -> None:
        self._events = events
        self.tokens: list[int] = []
        self.meta: dict[str, Any] = {}

    def read(self, tokens: int | None = None) -> Reader:
        """Reads at least ``tokens`` more tokens, or to the end of the stream."""
        wanted = None if tokens is None else len(self.tokens) + tokens
        for event in self._events:
            self.tokens += event["output_ids"]
            self.meta = event["meta_info"]
            if wanted is not None and len(self.tokens) >= wanted:
                break
        return self

    @property
    def finish(self) -> str | None:
        reason = self.meta["finish_reason"]
        return reason and reason["type"]


def undisturbed(engine: Engine, tokens: int) -> list[int]:
    """Generates the same sample without an interruption."""
    ids: list[int] = engine.post("/generate", long_request("calm", tokens=tokens))["output_ids"]
    return ids


def test_abort_by_rid_gives_the_partial_output(engine: Engine) -> None:
    with engine.stream(long_request("keep")) as kept_events, engine.stream(long_request("aborted")) as aborted_events:
        kept, aborted = Reader(kept_events).read(1), Reader(aborted_events).read(1)
        engine.client.abort("aborted")
        aborted.read()
        assert aborted.finish == "abort"
        assert 1 <= aborted.meta["completion_tokens"] == len(aborted.tokens) < LONG
        assert kept.read(1).finish is None
        engine.client.abort()
        assert kept.read().finish == "abort"


@embedded_only
def test_abort_reaches_what_still_waits(engine: Engine) -> None:
    with engine.stream(long_request("held", min_version=10**6)) as events:
        assert engine.client.abort("held")["aborted_samples"] == 1
        held = Reader(events).read()
    assert held.tokens == [] and held.finish == "abort"
    assert engine.client.abort("nobody")["aborted_samples"] == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@sglang_only
def test_pause_update_resume_marks_sglangs_versions(engine: Engine, tmp_path: Path, mode: PauseMode) -> None:
    """SGLang's client pauses, updates and resumes in one call."""
    before = engine.version
    with engine.stream(long_request("spans")) as events:
        spans = Reader(events).read(5)
        engine.client.pause(mode)
        assert engine.call("/flush_cache")[0] == (400 if mode == "in_place" else 200)
        engine.client.update_weights(publish(make_model(None, seed=1), tmp_path / "one.bin", version=before + 1))
        while len(spans.meta.get("weight_versions", [])) < 2:
            spans.read(1)
            if spans.meta["weight_version"] == str(before + 1) and len(spans.tokens) > 50:
                engine.client.abort("spans")
    first, second = spans.meta["weight_versions"]
    assert (first["version"], second["version"]) == (str(before), str(before + 1))
    assert first["start"] == 0 and 5 <= first["end"] == second["start"] < second["end"] == len(spans.tokens)
    engine.client.update_weights(publish(make_model(None, seed=0), tmp_path / "back.bin", version=before + 2))
    engine.client.abort()
    engine.flush()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_update_resume_marks_the_versions(start_engine: Any, tmp_path: Path, mode: PauseMode) -> None:
    engine = start_engine()
    with engine.stream(long_request("spans")) as events:
        spans = Reader(events).read(5)
        engine.client.pause(mode)
        steps = engine.client.loads()["decode_steps"]
        assert engine.call("/flush_cache")[0] == (400 if mode == "in_place" else 200)
        with engine.stream(long_request("late", tokens=5)) as late:
            engine.client.update_weights(publish(make_model(None, seed=1), tmp_path / "one.bin", version=1))
            assert engine.client.loads()["decode_steps"] == steps
            engine.client.resume()
            assert Reader(late).read().meta["weight_versions"] == [{"version": "1", "start": 0, "end": 5}]
        while spans.meta["weight_version"] == "0":
            spans.read(1)
        engine.client.abort("spans")
        spans.read()
    first, second = spans.meta["weight_versions"]
    assert (first["version"], second["version"], spans.meta["weight_version"]) == ("0", "1", "1")
    assert first["start"] == 0 and 5 <= first["end"] == second["start"] < second["end"] == len(spans.tokens)


def test_retract_goes_on_as_if_nothing_had_happened(engine: Engine) -> None:
    """With the same weights, the engine recomputes the cache, and the tokens equal the tokens without interruption."""
    with engine.stream(long_request("retracted")) as events:
        retracted = Reader(events).read(20)
        engine.client.pause("retract")
        if engine.kind == "embedded":  # SGLang's load report is some steps late
            load = engine.client.loads()
            assert (load["running"], load["queued"]) == (0, 1)
        engine.client.resume()
        retracted.read(100)
        engine.client.abort("retracted")
        retracted.read()
    assert retracted.finish == "abort"
    assert retracted.tokens == undisturbed(engine, len(retracted.tokens))


def test_pause_abort_ends_everything(engine: Engine) -> None:
    with engine.stream(long_request("ended")) as events:
        ended = Reader(events).read(1)
        engine.client.pause("abort")
        assert ended.read().finish == "abort"


def test_memory_is_released_and_taken_again(engine: Engine) -> None:
    with engine.stream(long_request("through")) as events:
        through = Reader(events).read(20)
        if engine.kind == "embedded":
            assert engine.client.loads()["kv_cache_bytes"] > 0
        engine.client.release_memory()
        if engine.kind == "embedded":
            load = engine.client.loads()
            assert (load["kv_cache_bytes"], load["running"], load["queued"]) == (0, 0, 1)
        engine.client.resume_memory()
        through.read(100)
        engine.client.abort("through")
        through.read()
    assert through.finish == "abort"
    assert through.tokens == undisturbed(engine, len(through.tokens))


def test_a_client_that_hangs_up_has_its_samples_aborted(engine: Engine) -> None:
    steps = engine.client.loads().get("decode_steps", 0)
    for n in (1, 8):
        request = long_request(f"left-{n}")
        request["sampling_params"]["n"] = n
        with engine.stream(request) as events:
            next(events)
    deadline = time.monotonic() + 60.0
    while engine.client.loads()["running"]:
        assert time.monotonic() < deadline, "the engine still decodes for clients that hung up"
    assert engine.client.loads().get("decode_steps", 0) - steps < LONG
