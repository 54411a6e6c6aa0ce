"""Tests that hostile requests do not harm the embedded engine or other requests.

In earlier versions each of these requests ended the process or its other requests, made it unready, or blocked it
forever.
"""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from relax_core.config.ranges import RANGES
from relax_core.contracts.engine import MAX_TEMPERATURE, MAX_TOP_K, MIN_TEMPERATURE, TensorSpec, WeightManifest
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.weights.version_file import _names_digest
from tests.contracts.engine.harness import (
    TOKEN,
    VOCAB,
    Engine,
    hf_weights,
    long_request,
    make_model,
    publish,
)
from tests.ports import free_port

GREEDY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 24, "temperature": 0.0}}
SEEDED = {
    "input_ids": [[5, 6, 7], [8, 9]],
    "sampling_params": {"max_new_tokens": 24, "n": 2, "sampling_seed": 3, "ignore_eos": True},
}
SCORED = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
FLATTENED = "flattened_bucket"
IDLE = 1500
ROOM_MB = 40  # MB of allowed growth for other reasons


@contextmanager
def files_allowed(count: int) -> Iterator[None]:
    """Limits the open files of this process and of processes started in the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def door(launch: EngineLaunch) -> Iterator[Engine]:
    """Yields an engine with a soft limit of 1024 open files, the default of a shell. The engine may raise the limit."""
    with files_allowed(1024):
        process = EngineProcess.start(launch)
    yield Engine(process)
    process.stop(timeout_s=5.0)


def generations(engine: Engine) -> list[Any]:
    """Returns the tokens of a greedy and a seeded generation."""
    replies = [engine.post("/generate", GREEDY), *engine.post("/generate", SEEDED)]
    return [reply["output_ids"] for reply in replies]


@pytest.fixture
def unharmed(door: Engine) -> Iterator[Engine]:
    """Yields the engine. Checks afterwards that the engine runs and generates the same tokens."""
    before = generations(door)
    yield door
    assert door.process.poll() is None and door.client.ready()
    assert generations(door) == before


def sampling(**changed: Any) -> dict[str, Any]:
    return {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, **changed}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (sampling(top_k=1 << 63), f"sampling_params.top_k: {1 << 63}; give -1 (off), or 1 to {MAX_TOP_K}"),
        (sampling(top_k=MAX_TOP_K + 1), f"sampling_params.top_k: {MAX_TOP_K + 1}"),
        (sampling(top_k=1 << 70), "sampling_params.top_k"),
        (sampling(top_k=True), "Expected `int`, got `bool`"),
        (sampling(temperature=1e-40), "sampling_params.temperature: 1e-40; give 0 (greedy), or 1e-06 to 1e+06"),
        (sampling(temperature=5e-324), "sampling_params.temperature: 5e-324"),
        (sampling(temperature=1e300), "sampling_params.temperature: 1e+300"),
        (sampling(sampling_seed=1 << 64), "sampling_seed"),
        (sampling(stream_interval=-1), "sampling_params.stream_interval: -1"),
        (sampling(stop_token_ids=[-1]), "stop_token_ids: token id -1"),
        ({**sampling(), "min_version": 1 << 63}, "min_version"),
        ({**sampling(), "rid": "x" * 1025}, "rid: 1025 characters; give 1024 at most"),
        ({**sampling(), "rid": ["x" * 70000]}, "rid: 70000 characters"),
        ({"input_ids": [[5]] * 70000}, "70000 prompts; send 65536 at most"),
        ({**sampling(), "samples": [[0]] * 300000}, "lists and objects"),
        ({**sampling(), "text": [[[["x" * 10**6]]]]}, "text=[[[['xxx"),
        ({**SCORED, "input_ids": [[5] * 30000] * 12, "top_logprobs_num": VOCAB}, "top-k tokens in all"),
        ({**SCORED, **sampling(max_new_tokens=0, temperature=1e-40)}, "sampling_params.temperature: 1e-40"),
    ],
)
def test_numbers_and_lists_beyond_their_bounds_are_refused(
    unharmed: Engine, body: dict[str, Any], message: str
) -> None:
    status, answer = unharmed.call("/generate", body)
    assert status == 400, answer
    assert message in answer["error"]["message"]


def test_at_their_bounds_they_are_taken_alone_and_together(unharmed: Engine) -> None:
    """Each request shares a batch with a plain sample. The log-probs of the plain sample do not change."""
    alone = unharmed.post("/generate", SEEDED | {"return_logprob": True})
    for extreme in (
        {"top_k": MAX_TOP_K, "top_p": 5e-324},
        {"temperature": MIN_TEMPERATURE},
        {"temperature": MAX_TEMPERATURE, "top_k": 1},
        {"top_p": 1e-300, "temperature": 0.0},
    ):
        with ThreadPoolExecutor() as pool:
            unharmed.client.pause("in_place")
            calls = [pool.submit(unharmed.post, "/generate", SEEDED | {"return_logprob": True})]
            calls.append(pool.submit(unharmed.post, "/generate", sampling(max_new_tokens=24, **extreme)))
            unharmed.client.resume()
            plain, odd = [call.result(60) for call in calls]
        assert [reply["output_ids"] for reply in plain] == [reply["output_ids"] for reply in alone]
        assert odd["meta_info"]["finish_reason"]["type"] in ("stop", "length")


def test_the_configuration_has_the_engines_bounds() -> None:
    assert RANGES["rollout.temperature"].holds(MIN_TEMPERATURE) and RANGES["rollout.top_k"].holds(MAX_TOP_K)
    assert not RANGES["rollout.temperature"].holds(MIN_TEMPERATURE / 2)
    assert not RANGES["rollout.temperature"].holds(2 * MAX_TEMPERATURE)
    assert not RANGES["rollout.top_k"].holds(MAX_TOP_K + 1)


def test_logits_that_are_not_finite_end_their_own_request_alone(
    start_engine: Callable[..., Engine], tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """A request with a NaN embedding in its prompt or response fails. Other requests in the batch do not fail."""
    poison, model = 7, make_model(None, seed=0, tied=False)
    untied = tmp_path / "untied"
    untied.mkdir()
    make_model(untied, seed=0, tied=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = float("nan")
    engine = start_engine(model_folder=untied, load_weights=False)
    engine.client.update_weights(publish(model, tmp_path / "weights", version=1))
    clean = {**SEEDED, "input_ids": [[5, 6], [8, 9]], "banned_token_ids": [poison]}
    full = {**SEEDED, "input_ids": [[5, 6], [8] * 400], "banned_token_ids": [poison]}
    full["sampling_params"] = {**SEEDED["sampling_params"], "n": 16}  # attention then reads all cache columns
    expected, all_expected = (
        [reply["output_ids"] for reply in engine.post("/generate", body)] for body in (clean, full)
    )
    draws = {**sampling(max_new_tokens=80, n=64, ignore_eos=True, sampling_seed=1), "input_ids": [9, 10]}
    for bad in (
        {**sampling(n=3), "input_ids": [5, poison]},
        draws,
        {**sampling(n=64), "input_ids": [5] * 10 + [poison]},
    ):
        engine.client.pause("in_place")
        with ThreadPoolExecutor() as pool:
            good, second_call = pool.submit(engine.call, "/generate", clean), pool.submit(engine.call, "/generate", bad)
            queued = 4 + bad["sampling_params"]["n"]
            wait_until(lambda queued=queued: engine.client.loads()["queued"] == queued, what="both in one batch")
            engine.client.resume()
            status, answer = second_call.result(60)
            assert status == 500 and "weight version 1: " in answer["error"]["message"]
            assert "not finite" in answer["error"]["message"]
            status, answer = good.result(60)
            assert status == 200 and [reply["output_ids"] for reply in answer] == expected
    again = engine.post("/generate", full)  # these samples use the slots that had non-finite values
    assert [reply["output_ids"] for reply in again] == all_expected


def test_an_accept_header_of_any_bytes_is_read(unharmed: Engine) -> None:
    for accept in (b"\xff\xfe", b"\0", bytes(range(128, 256)), b"application/msgpack, \xff"):
        status = raw_status(unharmed, b"POST /generate HTTP/1.1\r\naccept: " + accept + b"\r\n", json.dumps(GREEDY))
        assert status in (200, 400)


def raw_status(engine: Engine, head: bytes, body: str) -> int:
    """Sends a request with the token and this raw head, and returns the status."""
    data = body.encode()
    head += f"authorization: Bearer {TOKEN}\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", engine.process.port)) as client:
        client.settimeout(60.0)
        client.sendall(head + data)
        return int(client.recv(1 << 16).split()[1])


@pytest.mark.parametrize("nested", ["[" * 50000 + "]" * 50000, '{"a":' * 50000 + "1" + "}" * 50000])
def test_a_body_that_is_nested_deep_is_refused(unharmed: Engine, nested: str) -> None:
    deep = {
        "/generate": f'{{"input_ids": [5], "sampling_params": {{"stop": {nested}}}}}',
        "/abort_request": f'{{"rid": {nested}}}',
        "/pause_generation": nested,
        "/update_weights_from_distributed": f'{{"names": {nested}}}',
    }
    for path, body in deep.items():
        assert unharmed.call(path, body=body.encode())[0] == 400, path


def odd_files(folder: Path) -> dict[str, Path]:
    """Makes folders with weights that are not regular files. Returns the folder of each kind."""
    found = {name: folder / name for name in ("pipe", "device", "folder", "loop", "empty", "noise")}
    for path in found.values():
        path.mkdir()
    os.mkfifo(found["pipe"] / "model.safetensors")
    (found["device"] / "model.safetensors").symlink_to("/dev/zero")
    (found["folder"] / "model.safetensors").mkdir()
    (found["loop"] / "model.safetensors").symlink_to(found["loop"] / "model.safetensors")
    (found["empty"] / "model.safetensors").write_bytes(b"")
    (found["noise"] / "model.safetensors").write_bytes(os.urandom(1000))
    return found


def test_weights_that_are_no_files_are_refused_and_hold_up_no_update(unharmed: Engine, tmp_path: Path) -> None:
    odd = odd_files(tmp_path)
    version = unharmed.version + 1
    manifest = publish(make_model(None, seed=0), tmp_path / "good", version=version)
    for path in [
        *odd.values(),
        "/dev",
        "/x" * 3000,
        "/" + "x" * 300,
        "a\0b",
        "",
        str(odd["pipe"] / "model.safetensors"),
    ]:
        status, answer = unharmed.call(
            "/update_weights_from_disk", {"model_path": str(path), "weight_version": version}
        )
        assert status == 400 and answer["error"]["message"], path
    for name in ("pipe", "device", "folder", "loop"):
        path = str(odd[name] / "model.safetensors")
        assert unharmed.call("/update_weights_from_shared_memory", as_json(manifest, path=path))[0] == 400, name
    assert unharmed.client.update_weights(manifest)["weight_version"] == version


def as_json(manifest: WeightManifest, **changed: Any) -> Any:
    return msgspec.to_builtins(msgspec.structs.replace(manifest, **changed))


def test_a_manifest_of_what_cannot_be_is_refused(unharmed: Engine, tmp_path: Path) -> None:
    """The manifest's digest is always right, because the sender has the token."""
    manifest = publish(make_model(None, seed=0), tmp_path / "good", version=unharmed.version + 1)
    first_tensor = manifest.tensors[0]
    for changed in (
        {"dtype": "nn"},
        {"dtype": "float999"},
        {"dtype": "int64"},
        {"shape": [-1, 64]},
        {"shape": [1 << 62, 1 << 62]},
        {"shape": [1 << 70, 0]},
        {"shape": [1] * 1000},
        {"name": "x" * 100000},
    ):
        tensors = [msgspec.structs.replace(first_tensor, **changed), *manifest.tensors[1:]]
        status, answer = unharmed.call(
            "/update_weights_from_shared_memory",
            as_json(manifest, tensors=tensors, digest=digest_of(tensors, manifest)),
        )
        assert status in (400, 409), answer
    for changed in ({"bucket_bytes": 0}, {"bucket_bytes": 1}, {"data_offset": -1}, {"total_bytes": 1 << 70}):
        assert unharmed.call("/update_weights_from_shared_memory", as_json(manifest, **changed))[0] in (400, 409)


def digest_of(tensors: list[TensorSpec], manifest: WeightManifest) -> str:
    try:
        return _names_digest(tensors, manifest.digests)
    except OverflowError:  # a digest of such a size is impossible
        return manifest.digest


def test_a_session_takes_the_models_tensors_alone(unharmed: Engine) -> None:
    name, value = hf_weights(make_model(None, seed=0))[0]
    unharmed.post("/begin_weight_update")
    for names, dtypes, shapes in (
        (["stranger"], ["float32"], [[1 << 40]]),
        ([name], ["nn"], [list(value.shape)]),
        ([name], ["float32"], [[1 << 62]]),
        ([name], ["int32"], [list(value.shape)]),
        ([name], ["float32"], [[8]]),
        ([name, name], ["float32"] * 2, [list(value.shape)] * 2),
    ):
        body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": "g", "load_format": FLATTENED}
        status, answer = unharmed.call("/update_weights_from_distributed", body)
        assert status == 400 and "group_name" not in answer["error"]["message"], answer


@pytest.mark.parametrize(
    "changed",
    [
        {"master_port": 70000},
        {"master_port": 1 << 70},
        {"master_port": -1},
        {"master_address": "a b\0"},
        {"master_address": "x" * 300},
        {"master_address": ""},
        {"rank_offset": 0},
        {"rank_offset": 2},
        {"world_size": 1 << 40},
        {"world_size": -2},
        {"timeout_s": 1e300},
        {"timeout_s": 0},
        {"group_name": ""},
        {"group_name": "x" * 10000},
        {"backend": "nccl"},
    ],
)
def test_groups_that_cannot_be_are_refused(unharmed: Engine, changed: dict[str, Any]) -> None:
    (key,) = changed
    status, answer = unharmed.call("/init_weights_update_group", group_body(**changed))
    assert status == 400 and f"{key}=" in answer["error"]["message"]


def group_body(**changed: Any) -> dict[str, Any]:
    body = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    return {**body, "group_name": "g", "timeout_s": 60.0, **changed}


def test_groups_that_nobody_joins_hold_up_no_update(door: Engine, tmp_path: Path) -> None:
    """Many such groups do not block an update, either. Their number is bounded."""
    with ThreadPoolExecutor(17) as pool:
        bodies = [group_body(group_name=f"lonely-{number}", timeout_s=4.0) for number in range(17)]
        calls = [pool.submit(door.call, "/init_weights_update_group", body) for body in bodies]
        manifest = publish(make_model(None, seed=0), tmp_path / "good", version=door.version + 1)
        assert door.client.update_weights(manifest)["weight_version"] == manifest.version
        assert not all(call.done() for call in calls), "the groups were removed earlier"
        words = [call.result(60)[1]["error"]["message"] for call in calls]
    assert sum("16 groups exist" in word for word in words) >= 1
    assert sum("joining at" in word for word in words) >= 1


@pytest.mark.parametrize("version", ["9" * 5000, 1 << 63, "-2", "1e3", "²", -1, True, "", "１２"])
def test_versions_that_are_none_are_refused(unharmed: Engine, version: Any) -> None:
    before = unharmed.version
    assert unharmed.call("/update_weight_version", {"new_version": version})[0] == 400
    assert unharmed.version == before


def test_a_header_of_150_mb_is_not_kept(unharmed: Engine) -> None:
    """The attack needs no token."""
    before, sent = peak_mb(unharmed), 0
    with socket.create_connection(("127.0.0.1", unharmed.process.port)) as client:
        client.settimeout(60.0)
        client.sendall(b"GET /ready HTTP/1.1\r\nx: ")
        try:
            while sent < 150:
                client.sendall(b"x" * (1 << 20))
                sent += 1
            assert b" 431 " in client.recv(1 << 16)
        except ConnectionError:
            pass  # the engine closed the connection
    assert peak_mb(unharmed) - before < ROOM_MB
    with ThreadPoolExecutor() as pool:
        assert pool.submit(unharmed.client.ready).result(60)


def peak_mb(engine: Engine) -> int:
    lines = Path(f"/proc/{engine.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM"))


def test_idle_connections_keep_nobody_out(unharmed: Engine) -> None:
    """Idle connections need no token. A running stream continues, and the engine answers the owner's request."""
    idle: list[socket.socket] = []
    try:
        with files_allowed(IDLE + 1000), unharmed.stream(long_request("running", tokens=3000)) as events:
            next(events)
            for number in range(IDLE):
                idle.append(socket.create_connection(("127.0.0.1", unharmed.process.port)))
                if number % 2:
                    idle[-1].sendall(b"GET /ready HTTP/1.1\r\nx: ")  # sends only a part of the request
            assert unharmed.new_client().ready()
            assert unharmed.call("/health", method="GET", token=None)[0] == 200
            assert list(events)[-1]["meta_info"]["finish_reason"]["type"] == "length"
    finally:
        for connection in idle:
            connection.close()


def test_the_health_of_generation_is_asked_often_and_disturbs_nobody(unharmed: Engine) -> None:
    """The route needs no token and generates no tokens. It returns immediately why the engine does not generate."""
    before = unharmed.client.loads()
    with ThreadPoolExecutor(16) as pool:
        asked = list(pool.map(lambda _: unharmed.call("/health_generate", method="GET", token=None), range(200)))
    assert {status for status, _ in asked} == {200}
    after = unharmed.client.loads()
    assert (after["generated_tokens"], after["decode_steps"]) == (before["generated_tokens"], before["decode_steps"])
    unharmed.client.pause("in_place")
    status = 200
    while status == 200:  # the engine caches the last response for a second
        status, answer = unharmed.call("/health_generate", method="GET", token=None)
    unharmed.client.resume()
    assert status == 503 and "paused" in answer["error"]["message"]


def test_a_client_that_hangs_up_in_the_middle_of_a_body_or_a_stream_leaves_nothing(
    unharmed: Engine, wait_until: Callable[..., None]
) -> None:
    head = f"POST /generate HTTP/1.1\r\nauthorization: Bearer {TOKEN}\r\n".encode()
    for rest in (b"content-length: 1000\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n5\r\n{", b"content-le", b""):
        with socket.create_connection(("127.0.0.1", unharmed.process.port)) as client:
            client.sendall(head + rest)
    body = json.dumps(long_request("left", stream=True)).encode()
    with socket.create_connection(("127.0.0.1", unharmed.process.port)) as client:
        client.sendall(head + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        client.recv(100)
        client.shutdown(socket.SHUT_WR)  # the client closes its side of the connection
        wait_until(lambda: unharmed.client.loads()["running"] == 0, what="the end of what it asked for")


def test_two_of_one_rid_are_two(unharmed: Engine) -> None:
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(unharmed.post, "/generate", {**GREEDY, "rid": "same"}) for _ in range(2)]
        first, second = [call.result(60)["output_ids"] for call in calls]
    assert first == second
