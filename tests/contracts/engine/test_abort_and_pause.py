"""Abort gives back what was generated; the three ways to pause; memory given up and taken again."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts.engine import PauseMode
from tests.contracts.engine.harness import Engine, long_request, make_model, publish


def gather(events: Any) -> dict[str, Any]:
    """The rest of a stream of one sample: all its tokens and the last event's meta_info."""
    tokens: list[int] = []
    meta: dict[str, Any] = {}
    for event in events:
        tokens += event["output_ids"]
        meta = event["meta_info"]
    return {"tokens": tokens, "meta": meta}


def test_abort_by_rid_gives_the_partial_output(engine: Engine) -> None:
    with engine.stream(long_request("keep")) as kept, engine.stream(long_request("gone")) as gone:
        first = [next(kept), next(gone)]
        assert engine.client.abort("gone")["aborted_samples"] == 1
        rest = gather(gone)
        count = rest["meta"]["completion_tokens"]
        assert rest["meta"]["finish_reason"]["type"] == "abort"
        assert count == len(rest["tokens"]) + len(first[1]["output_ids"]) < 2000
        assert next(kept)["meta_info"]["finish_reason"] is None
        engine.client.abort()
        assert gather(kept)["meta"]["finish_reason"]["type"] == "abort"


def test_abort_reaches_what_still_waits(engine: Engine) -> None:
    with engine.stream(long_request("held", min_version=10**6)) as events:
        assert engine.client.abort("held")["aborted_samples"] == 1
        event = next(events)
    assert event["output_ids"] == [] and event["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.client.abort("nobody")["aborted_samples"] == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_update_resume_marks_the_versions(
    start_engine: Any, tmp_path: Path, model_folder: Path, mode: PauseMode
) -> None:
    engine = start_engine()
    with engine.stream(long_request("spans", tokens=400)) as events:
        begin = list(itertools.islice(events, 5))
        engine.client.pause(mode)
        steps = engine.client.loads()["decode_steps"]
        status, _ = engine.call("/flush_cache")
        assert status == (400 if mode == "in_place" else 200)
        with engine.stream(long_request("late", tokens=5)) as late:
            engine.client.update_weights(publish(make_model(None, seed=1), tmp_path / "one.bin", version=1))
            assert engine.client.loads()["decode_steps"] == steps
            engine.client.resume()
            rest = gather(events)
            assert gather(late)["meta"]["weight_versions"] == [{"version": "1", "start": 0, "end": 5}]
    spans = rest["meta"]["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "1"]
    assert spans[0]["start"] == 0 and spans[0]["end"] == spans[1]["start"] >= 5 and spans[1]["end"] == 400
    assert rest["meta"]["weight_version"] == "1"
    assert len(rest["tokens"]) + sum(len(event["output_ids"]) for event in begin) == 400


def test_retract_goes_on_as_if_nothing_had_happened(engine: Engine) -> None:
    """Same weights: its cache is computed anew, and the tokens are those of an undisturbed run."""
    with engine.stream(long_request("calm", tokens=300)) as events:
        calm = gather(events)["tokens"]
    with engine.stream(long_request("retracted", tokens=300)) as events:
        begin = next(events)["output_ids"]
        engine.client.pause("retract")
        assert engine.client.loads()["running"] == 0
        engine.client.resume()
        assert begin + gather(events)["tokens"] == calm


def test_pause_abort_ends_everything(engine: Engine) -> None:
    with engine.stream(long_request("ended")) as events:
        next(events)
        engine.client.pause("abort")
        assert gather(events)["meta"]["finish_reason"]["type"] == "abort"
    engine.client.resume()


def test_memory_is_released_and_taken_again(engine: Engine) -> None:
    with engine.stream(long_request("calm", tokens=200)) as events:
        calm = gather(events)["tokens"]
    with engine.stream(long_request("through", tokens=200)) as events:
        begin = next(events)["output_ids"]
        assert engine.client.loads()["kv_cache_bytes"] > 0
        engine.client.release_memory()
        load = engine.client.loads()
        assert load["kv_cache_bytes"] == 0 and load["running"] == 0 and load["queued"] == 1
        engine.client.resume_memory()
        assert begin + gather(events)["tokens"] == calm


def test_a_client_that_hangs_up_has_its_samples_aborted(engine: Engine) -> None:
    for n in (1, 8):
        request = long_request("left")
        request["sampling_params"]["n"] = n
        with engine.stream(request) as events:
            next(events)
    steps = engine.client.loads()["decode_steps"]
    deadline = time.monotonic() + 30.0
    while engine.client.loads()["running"]:
        assert time.monotonic() < deadline, "the engine still decodes for clients that hung up"
    assert engine.client.loads()["decode_steps"] - steps < 1500
