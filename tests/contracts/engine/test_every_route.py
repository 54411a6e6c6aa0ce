"""Sends requests of every kind to every route of the embedded engine. It must answer each request and stay unchanged.

Concurrent requests must get the same tokens as single requests.
"""

from __future__ import annotations

import base64
import json
import math
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from tests.contracts.engine.harness import TOKEN, VOCAB, Engine, random_prompt

CONTEXT = 256
ANSWERS_S = 60.0
MAY_BE_UNREADY = ("/health_generate",)  # may report "not ready" while the engine is paused
OTHERS = {
    "input_ids": [random_prompt(12), random_prompt(5, seed=1)],
    "sampling_params": [
        {"max_new_tokens": 40, "n": 2, "ignore_eos": True, "temperature": temperature} for temperature in (1.0, 0.0)
    ],
    "sampling_seed": [3, 4],
    "return_logprob": True,
}

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([-1, 0, 1, 2, 2**31, 2**62, 2**63, 2**64, 10**300]),
    st.floats(),
    st.sampled_from([0.0, -0.0, 5e-324, 1e-40, 1e-6, 1.0, 1e308]),
    st.text(max_size=20),
    st.sampled_from(["", "\0", "9" * 5000, "/dev/zero", "/proc/self/mem", "..", "/x" * 3000, "é", "float32"]),
)
JUNK = st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)
NEW_TOKENS = st.integers(0, 30)
KEPT = st.tuples(  # the fields of `KeptTokens`
    st.sampled_from([VOCAB, 1, 0, 2**40]),
    st.lists(st.integers(-1, VOCAB), max_size=20).map(lambda counts: in_words(counts)),
    st.lists(st.integers(0, 2**32 - 1) | st.integers(0, VOCAB), max_size=40).map(lambda words: in_words(words)),
)


def in_words(numbers: list[int]) -> str:
    return base64.b64encode(b"".join((number % 2**32).to_bytes(4, "little") for number in numbers)).decode()


def body_of(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draws any of these fields, most of them valid."""
    mostly = {name: st.one_of(*[strategy] * 9, JUNK) for name, strategy in fields.items()}
    return st.fixed_dictionaries({}, optional=mostly)


def whole_body_of(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draws all of these fields, most of them valid."""
    return st.fixed_dictionaries({name: st.one_of(*[strategy] * 4, ODD) for name, strategy in fields.items()})


SAMPLING = body_of(
    n=st.integers(1, 4),
    max_new_tokens=NEW_TOKENS,
    temperature=st.floats(0.0, 4.0),
    top_p=st.floats(0.0, 1.0),
    top_k=st.integers(-1, 60),
    stop_token_ids=TOKENS,
    sampling_seed=st.integers(0, 2**62),
    ignore_eos=st.booleans(),
    stream_interval=st.integers(1, 9),
    stop=st.none(),
    min_p=st.floats(0.0, 1.0),
)
GENERATE = body_of(
    rid=st.one_of(st.sampled_from(["a", "b"]), st.lists(st.sampled_from(["a", "b"]), max_size=2)),
    sampling_params=st.one_of(SAMPLING, SAMPLING, st.lists(SAMPLING, max_size=2)),
    return_logprob=st.booleans(),
    stream=st.booleans(),
    min_version=st.one_of(st.integers(-1, 0), st.lists(st.integers(-1, 0), max_size=2)),
    sampling_seed=st.integers(0, 2**62),
    banned_token_ids=TOKENS,
    return_routed_experts=st.just(False),
    return_sampling_mask=st.booleans(),
    samples=st.lists(st.one_of(st.none(), st.lists(st.integers(0, 3), max_size=3)), max_size=2),
    generated=st.integers(0, 9),
    logprob_start_len=st.integers(-1, 9),
    top_logprobs_num=st.integers(0, VOCAB),
    kept_tokens=st.lists(st.none() | KEPT, max_size=3),
    media=st.lists(st.none() | st.just([]), max_size=2) | st.just([[["0" * 32, 0]]]),
)
PROMPTS = st.one_of(TOKENS, TOKENS, st.lists(TOKENS, min_size=1, max_size=3), JUNK)
VERSION = st.integers(0, 10**6)
NAMES = st.lists(st.sampled_from(["model.norm.weight", "model.embed_tokens.weight", "a"]), max_size=2)
CONTROL = {
    "/abort_request": whole_body_of(rid=st.sampled_from(["a", "b", "nobody"]), abort_all=st.just(False)),
    "/pause_generation": whole_body_of(mode=st.sampled_from(["in_place", "retract", "abort"])),
    "/continue_generation": whole_body_of(),
    "/flush_cache": whole_body_of(),
    "/release_memory_occupation": whole_body_of(tags=st.just(["kv_cache"])),
    "/resume_memory_occupation": whole_body_of(tags=st.just(["kv_cache"])),
    "/update_weights_from_shared_memory": whole_body_of(
        version=VERSION,
        path=st.just("/dev/null"),
        data_offset=st.just(0),
        total_bytes=st.integers(0, 9),
        bucket_bytes=st.integers(0, 9),
        digests=st.just([]),
        digest=st.just(""),
        tensors=st.lists(
            whole_body_of(
                name=st.just("a"),
                dtype=st.just("float32"),
                shape=st.lists(st.integers(0, 9), max_size=2),
                offset=st.just(0),
                nbytes=st.just(0),
            ),
            max_size=2,
        ),
    ),
    "/update_weights_from_disk": whole_body_of(
        model_path=st.sampled_from(["/tmp", "/dev", "/proc/self/fd"]), weight_version=VERSION, digest=st.just("")
    ),
    "/begin_weight_update": whole_body_of(selector=st.none()),
    "/update_weights_from_distributed": whole_body_of(
        names=NAMES,
        dtypes=st.lists(st.sampled_from(["float32", "torch.bfloat16", "nn"]), max_size=2),
        shapes=st.lists(st.lists(st.integers(-1, 64), max_size=2), max_size=2),
        group_name=st.just("a"),
        load_format=st.just("flattened_bucket"),
    ),
    "/end_weight_update": whole_body_of(weight_version=VERSION, digest=st.just("")),
    "/update_weight_version": whole_body_of(new_version=VERSION),
    "/init_weights_update_group": whole_body_of(  # an impossible size, because otherwise the engine waits for the group
        master_address=st.just("127.0.0.1"),
        master_port=st.integers(0, 70000),
        rank_offset=st.integers(-1, 3),
        world_size=st.integers(-1, 1),
        group_name=st.just("a"),
        backend=st.just("gloo"),
        timeout_s=st.floats(0.01, 0.02),
    ),
    "/destroy_weights_update_group": whole_body_of(group_name=st.just("a")),
}
TELLING = ("/ready", "/health", "/health_generate", "/model_info", "/server_info", "/v1/loads")
HEADER = st.tuples(
    st.sampled_from(
        [b"accept", b"content-type", b"authorization", b"expect", b"cookie", b"host", b"upgrade", b"x" * 300]
    ),
    st.one_of(
        st.sampled_from(
            [
                b"application/msgpack",
                b"text/event-stream",
                b"100-continue",
                b"websocket",
                b"Bearer x",
                b"*/*",
                b"\xff\xfe",
            ]
        ),
        st.binary(max_size=40).map(lambda raw: raw.replace(b"\r", b"").replace(b"\n", b"")),
    ),
)
HEADERS = st.lists(HEADER, max_size=3)
BODY_KINDS = st.sampled_from(["json", "json", "json", "cut"])


@pytest.fixture(scope="module")
def engine(launch: EngineLaunch) -> Iterator[Engine]:
    small = replace(launch.engine, context_length=CONTEXT, max_total_tokens=64 * CONTEXT)
    process = EngineProcess.start(replace(launch, engine=small))
    yield Engine(process)
    process.stop(timeout_s=5.0)


class Neighbour:
    """Repeats the same request and compares the tokens. An aborted response must be a prefix of these tokens."""

    def __init__(self, engine: Engine) -> None:
        self.compared = 0
        self.wrong: list[Any] = []
        self._engine = engine
        self._expected = tokens_of(engine)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        try:
            while not self._ended.is_set():
                found = tokens_of(self._engine)
                for ids, whole in zip(found, self._expected, strict=True):
                    if ids != whole[: len(ids)]:
                        self.wrong.append((ids, whole))
                self.compared += found == self._expected
        except Exception as error:  # the test raises it later
            self.wrong.append(error)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        assert not self.wrong and tokens_of(self._engine) == self._expected
        assert self.compared > 0, "no request finished without an abort"


def tokens_of(engine: Engine) -> list[list[int]]:
    return [reply["output_ids"] for reply in engine.post("/generate", OTHERS)]


@pytest.fixture
def neighbour(engine: Engine) -> Iterator[Neighbour]:
    """Sends other requests during the test. Checks afterwards that the engine is still the same process."""
    begun = Neighbour(engine)
    yield begun
    begun.end()
    assert engine.process.poll() is None and engine.client.ready()


def request(
    method: bytes,
    target: bytes,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    *,
    token: bool = True,
    whole: bool = True,
) -> bytes:
    """Returns a request's bytes. With ``whole`` the length of the body agrees with the head."""
    lines = [b"%s %s HTTP/1.1" % (method, target), *(b"%s: %s" % header for header in headers), b"connection: close"]
    if token:
        lines.append(b"authorization: Bearer %s" % TOKEN.encode())
    lines.append(b"content-length: %d" % (len(body) + (0 if whole else 7)))
    return b"\r\n".join([*lines, b"", body])


def status_of(engine: Engine, data: bytes, *, whole: bool = True) -> int | None:
    """Returns the response's status, or None without a response. ``whole`` says that the request is complete."""
    with socket.create_connection(("127.0.0.1", engine.process.port)) as client:
        client.settimeout(ANSWERS_S)
        client.sendall(data)
        if not whole:
            client.shutdown(socket.SHUT_WR)
        found = b""
        try:
            while part := client.recv(1 << 16):
                found += part
        except ConnectionResetError:  # the engine closed the connection before it read the complete request
            pass
    found = found.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    return int(found.split()[1]) if found else None


def encoded(body: Any, kind: str) -> bytes:
    data = json.dumps(body).encode()
    return data[: len(data) // 2] if kind == "cut" else data


def check(status: int | None, path: str, body: object) -> None:
    assert status is not None, f"{path}: no answer to {body!r}"
    assert status < 500 or (status == 503 and path in MAY_BE_UNREADY), f"{path}: {status} to {body!r}"


@settings(max_examples=200, deadline=None)
@given(PROMPTS, GENERATE, HEADERS, BODY_KINDS)
def generates(
    engine: Engine, prompts: Any, fields: dict[str, Any], headers: list[tuple[bytes, bytes]], kind: str
) -> None:
    body = {"input_ids": prompts, **fields}
    data = request(b"POST", b"/generate", headers, encoded(body, kind))
    check(status_of(engine, data), "/generate", body)


def test_generate(engine: Engine, neighbour: Neighbour) -> None:
    generates(engine)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(sorted(CONTROL)).flatmap(lambda path: st.tuples(st.just(path), CONTROL[path] | JUNK)), HEADERS)
def controls(engine: Engine, asked: tuple[str, Any], headers: list[tuple[bytes, bytes]]) -> None:
    path, body = asked
    if isinstance(body, dict) and body.get("abort_all") is True:
        return  # this body would abort all requests
    engine.post("/begin_weight_update")
    try:
        check(status_of(engine, request(b"POST", path.encode(), headers, encoded(body, "json"))), path, body)
    finally:
        engine.post("/continue_generation")
        engine.post("/resume_memory_occupation")


def test_control(engine: Engine, neighbour: Neighbour) -> None:
    before = engine.client.model_info()["model_path"]
    controls(engine)
    assert engine.client.model_info()["model_path"] == before


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([b"GET", b"GET", b"POST", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"CONNECT", b"TRACE", b"foo"]),
    st.one_of(
        st.sampled_from([path.encode() for path in (*TELLING, *TELLING, *CONTROL, "/generate", "/", "*", "//", "")]),
        st.binary(max_size=20).map(lambda raw: b"/" + raw.replace(b"\r", b"").replace(b"\n", b"")),
    ),
    st.sampled_from([b"", b"?a=b", b"?\xff", b"#x", b"/../x", b"%00", b"%ff%2e"]),
    HEADERS,
    st.binary(max_size=200),
    st.booleans(),
)
def asks(
    engine: Engine,
    method: bytes,
    path: bytes,
    more: bytes,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    whole: bool,
) -> None:
    """Sends requests without the token, requests of any bytes, and requests with incomplete bodies."""
    data = request(method, path + more, headers, body, token=False, whole=whole)
    status = status_of(engine, data, whole=whole)
    if status is None:
        assert not whole or b"\0" in data or status_of(engine, data, whole=whole) is None
    else:
        check(status, path.decode(errors="replace"), data)


def test_anything_without_the_token(engine: Engine, neighbour: Neighbour) -> None:
    asks(engine)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def sends(engine: Engine, data: bytes, head: bool) -> None:
    """Sends arbitrary bytes, usually no valid HTTP."""
    data = b"POST /generate HTTP/1.1\r\n" + data if head else data
    status = status_of(engine, data, whole=False)
    assert status is None or status < 500


def test_any_bytes(engine: Engine, neighbour: Neighbour) -> None:
    sends(engine)


def test_answers_are_json_that_all_can_read(engine: Engine) -> None:
    """Log-probs of greedy and scored tokens are within the range of floats."""
    reply = engine.post("/generate", {"input_ids": [5, 6], "return_logprob": True, "sampling_params": {"top_k": 1}})
    assert all(math.isfinite(logprob) for logprob, _, _ in reply["meta_info"]["output_token_logprobs"])
