"""Tests every weight transport with real engine processes: engines serve verified weights only."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_core.config.choices import WeightTransportName
from relax_core.contracts.engine import SamplingParams, TensorSpec, WeightManifest
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.weights.publisher import SyncReport, WeightPublisher
from relax_core.weights.transport_choice import build_transport
from relax_core.weights.transports import buckets
from relax_core.weights.version_folder import read_latest
from relax_core.weights.version_writer import WEIGHTS
from tests.contracts.engine.harness import (
    LONG,
    TOKEN,
    Engine,
    hf_weights,
    long_request,
    make_model,
    prompts_of,
    random_prompt,
)
from tests.ports import free_port

TRANSPORTS = ("shared_memory", "disk", "gloo")
PROMPT = random_prompt(12)
TIMEOUT_S = 120.0
HANGS_S = 3600.0  # Waiting for the end of a hanging broadcast would exceed TIMEOUT_S.
SAMPLES = 16  # With this size a broadcast takes far longer than a push, even on a fast machine.
CONTEXT = 64


def publisher_of(name: str, folder: Path, receivers: Callable[[], Sequence[Any]], model: Path) -> WeightPublisher:
    transport = build_transport(WeightTransportName(name), host="127.0.0.1", timeout_s=HANGS_S)
    return WeightPublisher(folder, receivers, transport=transport, model_folder=model)


def publish(publisher: WeightPublisher, version: int) -> SyncReport:
    """Publishes the model of this seed as the weights of the version."""
    return publisher.publish(version, hf_weights(make_model(None, seed=version))).result(timeout=2 * TIMEOUT_S)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)


def serves(engine: Engine, version: int) -> None:
    response = engine.generate(prompts_of(PROMPT), SamplingParams(max_new_tokens=6, temperature=0.0))[0]
    ids = response.output_ids.tolist()
    with torch.no_grad():
        logits = make_model(None, seed=version)(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
    assert float((expected - torch.tensor(response.logprobs)).abs().max()) <= 2e-5
    assert set(response.versions.tolist()) == {version}


@pytest.fixture(scope="module")
def pair(launch: Any) -> Any:
    """Starts two engines without weights, for all tests that do not kill engines."""
    from dataclasses import replace

    from relax_core.engines.engine_process import EngineProcess

    processes = [EngineProcess.start(replace(launch, load_weights=False)) for _ in range(2)]
    yield [Engine(process) for process in processes]
    for process in processes:
        process.stop(timeout_s=5.0)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_versions_reach_every_engine_and_a_wrong_digest_keeps_one_out(
    name: str, pair: list[Engine], tmp_path: Path, model_folder: Path
) -> None:
    first = 1 + 3 * TRANSPORTS.index(name)
    damage: list[Path] = []

    def receivers() -> list[EngineClient]:
        for path in damage:
            flip_a_byte(path)
        return [engine.client for engine in pair]

    publisher = publisher_of(name, tmp_path, receivers, model_folder)
    report = publish(publisher, first)
    assert (report.version, report.refused) == (first, {}) and report.stall_ms > 0.0
    assert report.bytes == sum(
        value.numel() * value.element_size() for _, value in hf_weights(make_model(None, seed=first))
    )
    for engine in pair:
        serves(engine, first)

    damage.append(tmp_path / f"{first + 1:08d}" / WEIGHTS)
    refused = publish(publisher, first + 1).refused
    assert refused.keys() == {engine.process.url for engine in pair}
    for why in refused.values():
        assert "409" in why and "digest" in why and f"weights version {first} stays in force" in why
    damage.clear()
    serves(pair[0], first)

    assert publish(publisher, first + 2).refused == {}
    for engine in pair:
        serves(engine, first + 2)
    publisher.close()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_what_runs_goes_on_under_the_new_version(
    name: str, pair: list[Engine], tmp_path: Path, model_folder: Path
) -> None:
    engine = pair[0]
    before = 1 + int(engine.client.model_info()["weight_version"])
    publisher = publisher_of(name, tmp_path, lambda: [engine.client], model_folder)
    assert publish(publisher, before).refused == {}
    request = long_request("over-the-change", tokens=LONG)
    request["sampling_params"]["n"] = SAMPLES
    with engine.stream(request) as events:
        next(events)
        assert publish(publisher, before + 1).refused == {}
        changed = engine.client.loads()["generated_tokens"]
        for event in events:
            spans = event["meta_info"]["weight_versions"]
            if len(spans) == 2:
                break
    assert [int(span["version"]) for span in spans] == [before, before + 1]
    assert spans[0]["end"] == spans[1]["start"] and changed > 0
    publisher.close()


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 64))
def test_buckets_hold_every_tensor_once_and_no_more_than_fits(sizes: list[int], bucket_bytes: int) -> None:
    offsets = [sum(sizes[:place]) for place in range(len(sizes))]
    specs = [
        TensorSpec(name=str(place), dtype="uint8", shape=[size], offset=offset, nbytes=size)
        for place, (size, offset) in enumerate(zip(sizes, offsets, strict=True))
    ]
    manifest = WeightManifest(
        version=0,
        path="",
        data_offset=0,
        total_bytes=sum(sizes),
        bucket_bytes=bucket_bytes,
        digests=[],
        digest="",
        tensors=specs,
    )
    found = list(buckets(manifest))
    assert [spec for bucket in found for spec in bucket] == specs
    assert all(len(bucket) == 1 or sum(spec.nbytes for spec in bucket) <= bucket_bytes for bucket in found)


@pytest.mark.sglang
def test_sglang_takes_every_transport(sglang_launch: Any, tmp_path: Path, model_folder: Path) -> None:
    """A version with a wrong digest is not served.

    If the engine has already loaded the wrong weights, it serves no version until the next version arrives.
    """
    from dataclasses import replace

    from relax_core.engines.engine_process import EngineProcess

    small = replace(sglang_launch.engine, context_length=CONTEXT, max_total_tokens=CONTEXT)
    process = EngineProcess.start(replace(sglang_launch, engine=small, load_weights=False))
    engine = Engine(process, "sglang")
    damage: list[Path] = []

    def receivers() -> list[EngineClient]:
        for path in damage:
            flip_a_byte(path)
        return [engine.client]

    try:
        for turn, name in enumerate(TRANSPORTS):
            first = 1 + 3 * turn
            publisher = publisher_of(name, tmp_path / name, receivers, model_folder)
            report = publish(publisher, first)
            assert report.refused == {} and report.stall_ms > 0.0
            serves(engine, first)
            damage.append(tmp_path / name / f"{first + 1:08d}" / WEIGHTS)
            assert "digest" in publish(publisher, first + 1).refused[process.url]
            assert int(engine.client.model_info()["weight_version"]) in (first, -1)
            damage.clear()
            assert publish(publisher, first + 2).refused == {}
            serves(engine, first + 2)
            publisher.close()
        for length in (1, CONTEXT - 1):
            response = engine.generate(
                prompts_of(random_prompt(length)), SamplingParams(max_new_tokens=CONTEXT - length, temperature=0.0)
            )[0]
            assert (len(response.output_ids), response.finish_reason) == (CONTEXT - length, "length"), (
                "the largest requests"
            )
    finally:
        process.stop(timeout_s=10.0)


class KilledWhileReceiving(EngineClient):
    """A receiver. Its engine is frozen at the first broadcast and killed a moment later."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.process.url, TOKEN, request_timeout_s=HANGS_S, control_timeout_s=HANGS_S)
        self._pid = engine.process.pid

    def receive_weights(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        os.kill(self._pid, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (self._pid, signal.SIGKILL)).start()
        return super().receive_weights(*arguments, **named)


def test_an_engine_that_is_killed_in_the_middle_of_a_broadcast_holds_up_nobody(
    start_engine: Callable[..., Engine], tmp_path: Path, model_folder: Path
) -> None:
    """One case sends more bytes than the sockets buffer. In this case our broadcast would wait for HANGS_S."""
    stays, dies, dies_of_more = start_engine(), start_engine(), start_engine()
    receivers: list[EngineClient] = [stays.client, KilledWhileReceiving(dies)]
    publisher = publisher_of("gloo", tmp_path / "weights", lambda: receivers, model_folder)
    report = publish(publisher, 1)
    assert list(report.refused) == [dies.process.url] and dies.process.url in report.refused[dies.process.url]
    serves(stays, 1)

    receivers[:] = [KilledWhileReceiving(dies_of_more)]
    many = [("many", torch.zeros(16 << 20))]
    assert list(publisher.publish(2, many).result(timeout=TIMEOUT_S).refused) == [dies_of_more.process.url]
    publisher.close()


def test_an_engine_that_was_restarted_joins_anew_and_a_late_one_reads_the_file(
    start_engine: Callable[..., Engine], tmp_path: Path, model_folder: Path, wait_until: Callable[..., None]
) -> None:
    engine = start_engine(port=free_port())
    publisher = publisher_of("gloo", tmp_path / "weights", lambda: [engine.client], model_folder)
    assert publish(publisher, 1).refused == {}
    os.kill(engine.process.pid, signal.SIGKILL)
    assert list(publish(publisher, 2).refused) == [engine.process.url]
    again = start_engine(after=engine.process, load_weights=False)
    latest = read_latest(tmp_path / "weights")
    assert latest is not None and latest.version == 2
    again.client.update_weights(latest)
    serves(again, 2)
    assert publish(publisher, 3).refused == {}
    serves(again, 3)
    publisher.forget(engine.process.url)
    wait_until(lambda: not publisher._transport._groups, what="the end of our side of the group")  # type: ignore[attr-defined]
    publisher.close()
