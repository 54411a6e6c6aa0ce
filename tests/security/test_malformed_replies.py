"""Tests that any malformed response of an engine, a gateway or a judge raises an error about this server, in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from relax_core.contracts.engine import (
    EngineError,
    EngineUnreachable,
    Generated,
    MalformedReply,
    PromptRequest,
    SamplingParams,
    WeightManifest,
)
from relax_core.contracts.judge import JudgeConfig
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.protocol.engine_client import EngineClient, TokensToScore
from relax_core.engines.protocol.generate_messages import (
    FLOAT32,
    INT32,
    Experts,
    Finished,
    FrameReader,
    Grown,
    StreamEnd,
    VersionSpan,
    encode_frames,
)
from relax_core.engines.sglang.sglang_client import SglangClient
from relax_core.rollout.judges.judge_servers import JudgeRefused, JudgeUrl
from relax_core.server import gateway_client
from relax_core.server.gateway_client import FILE, GatewayAddress, GatewayClient, GatewayRefused, GatewayUnreachable
from tests.security.broken_server import ENDLESS, GARBAGE, TOKEN, BrokenServer, Endless, broken_server, http

VOCAB = 50
SHORT_S, LONG_S = 0.2, 20.0  # timeouts of calls without and with a response
MAX_S = 10.0  # limit of one call on a busy machine
PROMPT = PromptRequest(rid="a", input_ids=[1, 2, 3], sampling_seed=1)
PARAMS = SamplingParams(n=2, max_new_tokens=4)
MANIFEST = WeightManifest(
    version=1, path="/tmp/w/1/weights", data_offset=0, total_bytes=0, bucket_bytes=1, digests=[], digest="", tensors=[]
)
ITEM = TokensToScore(input_ids=[1, 2, 3], first=1)


@pytest.fixture(scope="module")
def server() -> Iterator[BrokenServer]:
    with broken_server() as found:
        yield found


def engine_client(url: str, *, timeout_s: float = SHORT_S) -> EngineClient:
    return EngineClient(url, TOKEN, request_timeout_s=timeout_s, control_timeout_s=timeout_s, vocab_size=VOCAB)


def sglang_client(url: str, *, timeout_s: float = SHORT_S) -> SglangClient:
    return SglangClient(
        url,
        TOKEN,
        request_timeout_s=timeout_s,
        control_timeout_s=timeout_s,
        ranks=1,
        vocab_size=VOCAB,
        seeds=True,
    )


CLIENTS = pytest.mark.parametrize("make", [engine_client, sglang_client])
Make = Callable[[str], EngineClient]


def in_time(work: Callable[[], Any]) -> Any:
    """Returns the result or the EngineError of a call. Any other exception fails the test."""
    began = time.monotonic()
    try:
        result = work()
    except EngineError as error:
        result = error
    assert time.monotonic() - began < MAX_S
    if isinstance(result, EngineError):
        assert len(str(result)) < 2000 and str(result).isprintable(), "the error must be one short printable line"
    return result


async def collected(client: EngineClient, params: SamplingParams, *prompts: PromptRequest) -> list[Generated]:
    """Collects the responses of a call. Also requests token callbacks and the engine's times."""
    told: list[Any] = []
    given = list(prompts) or [PROMPT]
    try:
        stream = client.generate(given, params, on_end=told.append, on_tokens=lambda *news: told.append(news))
        return [response async for response in stream]
    finally:
        await client.aclose()


def typed_calls(client: EngineClient) -> dict[str, Callable[[], Any]]:
    """Returns the calls with responses that have fields for the caller."""
    return {
        "model_info": client.model_info,
        "loads": client.loads,
        "update_weights": lambda: client.update_weights(MANIFEST),
        "end_weight_update": lambda: client.end_weight_update(version=1, digest="d"),
        "score": lambda: client.score([ITEM], top_k=2, temperature=1.0),
    }


def other_calls(client: EngineClient) -> dict[str, Callable[[], Any]]:
    return {
        "ready": client.ready,
        "server_info": client.server_info,
        "pause": lambda: client.pause("retract"),
        "abort": client.abort,
        "flush_cache": client.flush_cache,
        "forget_weights": client.forget_weights,
        "release_memory": client.release_memory,
        "begin_weight_update": client.begin_weight_update,
    }


@CLIENTS
@pytest.mark.parametrize("kind", GARBAGE)
def test_a_control_call_sees_garbage_as_the_engines_error(server: BrokenServer, make: Make, kind: str) -> None:
    server.reply = GARBAGE[kind]
    client = make(server.url)
    for name, call in typed_calls(client).items():
        found = in_time(call)
        if isinstance(client, SglangClient) and name == "model_info" and not isinstance(found, EngineError):
            assert found["weight_version"] == "-1", "a version that is not a number is unknown"
        elif not (isinstance(client, SglangClient) and name in ("update_weights", "end_weight_update")):
            assert isinstance(found, EngineError), name
    for call in other_calls(client).values():
        in_time(call)
    client.close()


@CLIENTS
@pytest.mark.parametrize("kind", GARBAGE)
def test_generate_sees_garbage_as_the_engines_loss(server: BrokenServer, make: Make, kind: str) -> None:
    server.reply = GARBAGE[kind]
    error = in_time(lambda: asyncio.run(collected(make(server.url), PARAMS)))
    assert isinstance(error, EngineError)
    assert isinstance(error, EngineUnreachable) or "refusal" in kind


@CLIENTS
@pytest.mark.parametrize("kind", ENDLESS)
def test_a_reply_without_an_end_keeps_no_caller(server: BrokenServer, make: Make, kind: str) -> None:
    server.reply = ENDLESS[kind]
    client = make(server.url)
    assert isinstance(in_time(client.model_info), EngineUnreachable)
    client.close()
    assert isinstance(in_time(lambda: asyncio.run(collected(make(server.url), PARAMS))), EngineUnreachable)


# -- the stream of frames ---------------------------------------------------------------------------------------------
def finished(sample: int, *, ids: list[int] | None = None, **changes: Any) -> Finished:
    tokens = [5, 6] if ids is None else ids
    frame = Finished(
        rid="a",
        prompt=0,
        sample=sample,
        output_ids=np.array(tokens, dtype=np.int64).astype(INT32).tobytes(),
        logprobs=np.full(len(tokens), -0.5, dtype=FLOAT32).tobytes(),
        weight_versions=[VersionSpan(0, len(tokens), 3)],
        finish_reason="length",
        prompt_tokens=3,
    )
    return msgspec.structs.replace(frame, **changes)


def floats(*values: float) -> bytes:
    return np.array(values, dtype=FLOAT32).tobytes()


def experts(*shape: int, data: bytes | None = None) -> Experts:
    return Experts("uint8", shape, bytes(max(0, int(np.prod(shape)))) if data is None else data)  # type: ignore[arg-type]


END = StreamEnd(held_ms=0.0, prefill_ms=0.0, decode_ms=0.0)
BAD_FRAMES: dict[str, Finished] = {
    "no such prompt": finished(0, prompt=1),
    "prompt -1": finished(0, prompt=-1),
    "prompt 2^40": finished(0, prompt=1 << 40),
    "no such sample": finished(2),
    "sample -1": finished(-1),
    "another rid": finished(0, rid="b"),
    "odd bytes of ids": finished(0, output_ids=b"12345"),
    "odd bytes of log-probs": finished(0, logprobs=b"12345"),
    "fewer log-probs": finished(0, logprobs=floats(-0.5)),
    "more log-probs": finished(0, logprobs=floats(-0.5, -0.5, -0.5)),
    "NaN": finished(0, logprobs=floats(-0.5, float("nan"))),
    "minus infinity": finished(0, logprobs=floats(-0.5, float("-inf"))),
    "a probability of 3": finished(0, logprobs=floats(-0.5, 1.1)),
    "id -1": finished(0, ids=[5, -1]),
    "id beyond the vocabulary": finished(0, ids=[5, VOCAB]),
    "more tokens than asked for": finished(0, ids=[5] * 5),
    "a version short": finished(0, weight_versions=[VersionSpan(0, 1, 3)]),
    "a version twice": finished(0, weight_versions=[VersionSpan(0, 2, 3), VersionSpan(0, 2, 3)]),
    "no versions": finished(0, weight_versions=[]),
    "a span of 2^62 tokens": finished(0, weight_versions=[VersionSpan(0, 1 << 62, 3)]),
    "a backward span": finished(0, weight_versions=[VersionSpan(0, 2, 3), VersionSpan(2, 1, 3)]),
    "version -1": finished(0, weight_versions=[VersionSpan(0, 2, -1)]),
    "version -9": finished(0, weight_versions=[VersionSpan(0, 2, -9)]),
    "version 2^31": finished(0, weight_versions=[VersionSpan(0, 2, 1 << 31)]),
    "another prompt": finished(0, prompt_tokens=4),
    "no experts of the prompt": finished(0, response_experts=experts(1, 2, 2)),
    "experts of shape -1": finished(
        0, prompt_experts=experts(3, 2, -1, data=bytes(6)), response_experts=experts(1, 2, 1)
    ),
    "experts without bytes": finished(0, prompt_experts=experts(3, 2, 2, data=b""), response_experts=experts(1, 2, 2)),
    "experts of fewer tokens": finished(0, prompt_experts=experts(2, 2, 2), response_experts=experts(1, 2, 2)),
    "experts of other layers": finished(0, prompt_experts=experts(3, 2, 2), response_experts=experts(1, 3, 2)),
    "kept sets of fewer tokens": finished(0, kept=KeptTokens.of_lists([[5]], vocab_size=VOCAB)),
    "a kept set without the token": finished(0, kept=KeptTokens.of_lists([[5], [7]], vocab_size=VOCAB)),
    "kept sets that are cut": finished(0, kept=KeptTokens(VOCAB, floats(1.0), b"123")),
    "kept sets of another vocabulary": finished(0, kept=KeptTokens.of_lists([[5], [6]], vocab_size=VOCAB + 1)),
    "kept sets of vocabulary -1": finished(0, kept=KeptTokens(-1, bytes(8), b"")),
    "a duration of NaN": finished(0, prefill_ms=float("nan")),
    "a negative duration": finished(0, queue_ms=-1.0),
    "negative cached tokens": finished(0, cached_tokens=-1),
}
GOOD = encode_frames([finished(0), finished(1), END])


def stream(data: bytes, *, kind: str = "application/msgpack") -> bytes:
    return http(data, kind=kind)


def framed(payload: Any) -> bytes:
    data = msgspec.msgpack.encode(payload)
    return len(data).to_bytes(4, "big") + data


def deep_msgpack() -> bytes:
    data = b"\x91" * 100_000 + b"\xc0"
    return len(data).to_bytes(4, "big") + data


ENDED = encode_frames([finished(0), finished(1)])
BAD_STREAMS: dict[str, bytes] = {
    "no frame": stream(b""),
    "one response of two": stream(encode_frames([finished(0), END])),
    "a response twice": stream(encode_frames([finished(0), finished(0), END])),
    "three responses": stream(encode_frames([finished(0), finished(1), finished(1), END])),
    "frames of length 0": stream(bytes(400)),
    "a frame of 4 GB": stream(b"\xff\xff\xff\xff" + bytes(100)),
    "half a frame": stream(GOOD[:30]),
    "an unknown frame": stream(framed(["other", 1])),
    "a number": stream(framed(1)),
    "a map": stream(framed({"finished": 1})),
    "a field too few": stream(framed(["finished", "a", 0])),
    "an unknown reason": stream(framed(["finished", "a", 0, 0, b"", b"", [], "bored"])),
    "nested frames": stream(deep_msgpack()),
    "a broken gzip": stream(GOOD[:10], kind="application/msgpack\r\nContent-Encoding: gzip"),
    "text": stream(b"Internal Server Error", kind="text/plain"),
    "another type": stream(GOOD, kind="application/octet-stream"),
    "no type": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(GOOD) + GOOD,
    "a time of NaN": stream(ENDED + encode_frames([msgspec.structs.replace(END, held_ms=float("nan"))])),
    "told tokens of no sample": stream(encode_frames([Grown(0, 7, 0, bytes(4)), finished(0), finished(1), END])),
    "told tokens of no prompt": stream(encode_frames([Grown(-1, 0, 0, bytes(4)), finished(0), finished(1), END])),
    "told tokens beyond the limit": stream(encode_frames([Grown(0, 0, 4, bytes(4)), finished(0), finished(1), END])),
    "told tokens before the first": stream(encode_frames([Grown(0, 0, -1, bytes(4)), finished(0), finished(1), END])),
    "told tokens of odd bytes": stream(encode_frames([Grown(0, 0, 0, b"123"), finished(0), finished(1), END])),
    "told tokens of no vocabulary": stream(encode_frames([Grown(0, 0, 0, b"\xff" * 4), finished(0), finished(1), END])),
    "a word of failure": stream(framed(["failure", 7])),
    **{f"frame: {name}": stream(encode_frames([frame, finished(1), END])) for name, frame in BAD_FRAMES.items()},
}


def test_the_frames_of_this_file_are_good_unless_they_are_changed(server: BrokenServer) -> None:
    server.reply = stream(GOOD)
    found = asyncio.run(collected(engine_client(server.url, timeout_s=LONG_S), PARAMS))
    assert [response.output_ids.tolist() for response in found] == [[5, 6], [5, 6]]


@pytest.mark.parametrize("kind", BAD_STREAMS)
def test_a_stream_of_frames_that_is_wrong_is_the_engines_loss(server: BrokenServer, kind: str) -> None:
    server.reply = BAD_STREAMS[kind]
    error = in_time(lambda: asyncio.run(collected(engine_client(server.url), PARAMS)))
    assert isinstance(error, EngineUnreachable), error


BEGUN = b"HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\n\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
GROWN = encode_frames([Grown(0, 0, 0, bytes(4))])
ENDLESS_STREAMS = {
    "told tokens": Endless(BEGUN, GROWN * 64),
    "ends": Endless(BEGUN, encode_frames([END]) * 64),
    "slow told tokens": Endless(BEGUN, GROWN * 8, pause_s=0.01),
    "a frame byte by byte": Endless(BEGUN + b"\x0f\xff\xff\xff", b"a", pause_s=0.02),
    "a frame at full speed": Endless(BEGUN + b"\x0f\xff\xff\xff", b"a" * (1 << 20)),
    "an event byte by byte": Endless(EVENTS + b"data: ", b"a", pause_s=0.02),
    "an event at full speed": Endless(EVENTS + b"data: ", b"a" * (1 << 20)),
    "empty events": Endless(EVENTS, b"data: {}\n\n"),
    "comments": Endless(EVENTS, b"\n\n" * 100),
    "events without tokens": Endless(EVENTS, b'data: {"meta_info": {"completion_tokens": 0}}\n\n' * 10),
}


@CLIENTS
@pytest.mark.parametrize("kind", ENDLESS_STREAMS)
def test_a_stream_without_an_end_keeps_no_caller(
    server: BrokenServer, make: Make, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SglangClient, "_weight_version", version_3)
    server.reply = ENDLESS_STREAMS[kind]
    assert isinstance(in_time(lambda: asyncio.run(collected(make(server.url), PARAMS))), EngineUnreachable)


def test_a_large_frame_in_small_pieces_is_read_in_linear_time() -> None:
    """An old version of the reader copied all received bytes for each piece: 24 MiB took minutes."""
    data = encode_frames([Grown(0, 0, 0, bytes(24 << 20))])
    reader, began = FrameReader(), time.monotonic()
    found = [frame for cut in range(0, len(data), 1 << 12) for frame in reader.feed(data[cut : cut + (1 << 12)])]
    assert len(found) == 1 and time.monotonic() - began < 5.0


# -- SGLang's events --------------------------------------------------------------------------------------------------
async def version_3(client: SglangClient) -> int:
    return 3


def event(index: int = 0, **changes: Any) -> dict[str, Any]:
    meta = {
        "completion_tokens": 2,
        "weight_version": "3",
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-0.5, 5, None], [-0.5, 6, None]],
        "prompt_tokens": 3,
    }
    outer = {name: changes.pop(name) for name in ("output_ids", "index") if name in changes}
    return {"output_ids": [5, 6], "index": index, "meta_info": meta | changes} | outer


def events(*found: dict[str, Any] | bytes) -> bytes:
    lines = [entry if isinstance(entry, bytes) else msgspec.json.encode(entry) for entry in found]
    return http(b"".join(b"data: " + line + b"\n\n" for line in lines), kind="text/event-stream")


def span(version: Any, start: int = 0, end: int = 2) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end}]


BAD_EVENTS: dict[str, bytes] = {
    "index -1": events(event(index=-1), event(1)),
    "index 2": events(event(index=2), event(1)),
    "index 2^70": events(event(1), b'{"index": 1180591620717411303424}'),
    "twice": events(event(0), event(0)),
    "no meta_info": events({"output_ids": [5]}),
    "no object": events(b"[]"),
    "no JSON": events(b"{"),
    "NaN": events(msgspec.json.encode(event()).replace(b"-0.5", b"NaN")),
    "1e999": events(msgspec.json.encode(event()).replace(b"-0.5", b"-1e999")),
    "400 digits": events(msgspec.json.encode(event()).replace(b"-0.5", b"-" + b"9" * 400)),
    "1e39": events(msgspec.json.encode(event()).replace(b"-0.5", b"-1e39")),
    "a probability of 3": events(msgspec.json.encode(event()).replace(b"-0.5", b"1.1")),
    "nested": events(b'{"meta_info": ' * 100_000),
    "nested in an unknown field": events(b'{"x": ' + b"[" * 100_000),
    "id beyond the vocabulary": events(event(output_ids=[5, VOCAB])),
    "fewer log-probs": events(event(output_token_logprobs=[[-0.5, 5, None]])),
    "an unknown reason": events(event(finish_reason={"type": "bored"})),
    "more tokens than asked for": events(event(output_ids=[5] * 5, completion_tokens=5)),
    "a span of 2^62 tokens": events(event(weight_versions=span("3", 0, 1 << 62))),
    "a span of a number": events(event(weight_versions=span(3))),
    "another prompt": events(event(prompt_tokens=9)),
    "experts of no base64": events(event(routed_experts="?")),
    "experts of other tokens": events(event(routed_experts="AAAA")),
    "kept sets of huge ids": events(event(output_token_sampling_mask=[[1 << 70], [6]])),
    "empty kept sets": events(event(output_token_sampling_mask=[[5], []])),
    "negative cached tokens": events(event(cached_tokens=-1)),
    "nothing": events(),
}


@pytest.mark.parametrize("kind", BAD_EVENTS)
def test_events_that_are_wrong_are_the_engines_loss(
    server: BrokenServer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SglangClient, "_weight_version", version_3)
    server.reply = BAD_EVENTS[kind]
    params = msgspec.structs.replace(PARAMS, top_p=0.9, return_kept_tokens="kept" in kind)
    error = in_time(lambda: asyncio.run(collected(sglang_client(server.url), params)))
    assert isinstance(error, EngineUnreachable), error


@pytest.mark.parametrize("version", ["9" * 5000, str(1 << 31), "-5", "٣", "²", "1e3", ""])
def test_a_version_that_is_no_number_counts_as_unknown(
    server: BrokenServer, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang has such versions before its first update. The response is aborted and requested again."""
    monkeypatch.setattr(SglangClient, "_weight_version", version_3)
    server.reply = events(event(0, weight_version=version), event(1, weight_versions=span(version)))
    found = asyncio.run(collected(sglang_client(server.url, timeout_s=LONG_S), PARAMS))
    assert [(response.output_ids.size, response.finish_reason) for response in found] == [(0, "abort")] * 2


def score_reply(*entries: Any, **changes: Any) -> bytes:
    tops = [None, [[-0.1, 1, None], [-0.2, 2, None]], [[-0.1, 1, None], [-0.2, 2, None]]]
    meta = {"input_token_logprobs": [[None, 1, None], *entries], "input_top_logprobs": tops, "weight_version": "3"}
    return msgspec.json.encode([{"meta_info": meta | changes}])


def test_scores_that_are_impossible_are_the_engines_error(server: BrokenServer) -> None:
    good = score_reply([-0.5, 2, None], [-0.5, 3, None])
    client = engine_client(server.url, timeout_s=LONG_S)
    server.reply = http(good)
    (found,) = client.score([ITEM], top_k=2, temperature=1.0)
    assert found.version == 3 and found.logprobs.tolist() == [-0.5, -0.5]
    bad = {
        "one of two": score_reply([-0.5, 2, None]),
        "1e39": good.replace(b"-0.5", b"-1e39", 1),
        "a probability of 3": good.replace(b"-0.5", b"1.1", 1),
        "NaN": good.replace(b"-0.5", b"NaN", 1),
        "a top token of 2^40": good.replace(b"[-0.2,2,", b"[-0.2,1099511627776,", 1),
        "a top token -1": good.replace(b"[-0.2,2,", b"[-0.2,-1,", 1),
        "a top token beyond the vocabulary": good.replace(b"[-0.2,2,", b"[-0.2,%d," % VOCAB, 1),
        "a top probability of 3": good.replace(b"[-0.1,", b"[1.1,", 1),
        "another prompt": score_reply([-0.5, 2, None], [-0.5, 3, None], prompt_tokens=9),
        "no list": good[1:-1],
        "two replies": b"[" + good[1:-1] + b"," + good[1:-1] + b"]",
    }
    for kind, body in bad.items():
        assert body != good
        server.reply = http(body)
        error = in_time(lambda: client.score([ITEM], top_k=2, temperature=1.0))
        assert isinstance(error, MalformedReply), kind
    server.reply = http(good.replace(b'"3"', b'"' + b"9" * 5000 + b'"'))
    assert client.score([ITEM], top_k=2, temperature=1.0)[0].version == -1


# -- the pool ---------------------------------------------------------------------------------------------------------
class GoodEngine(EngineClient):
    """Answers each prompt at once, in place of a second engine process."""

    async def generate(self, prompts: Any, params: SamplingParams, **_: Any) -> AsyncIterator[Generated]:
        for index, prompt in enumerate(prompts):
            for sample in range(params.n):
                yield msgspec.structs.replace(finished(sample, prompt=index).response(prompt_tokens=3), rid=prompt.rid)


@pytest.mark.parametrize("reply", [GARBAGE["object"], GARBAGE["redirect"], BAD_STREAMS["frame: NaN"]])
def test_prompts_of_an_engine_with_malformed_replies_go_to_another(server: BrokenServer, reply: bytes) -> None:
    server.reply = reply
    told: list[int] = []

    async def scene() -> list[int]:
        clients = [
            engine_client(server.url, timeout_s=LONG_S),
            GoodEngine(server.url, TOKEN, request_timeout_s=LONG_S, control_timeout_s=LONG_S),
        ]

        async def client_for(engine: int, anew: bool) -> EngineClient:
            return clients[engine]

        async def on_malformed(engine: int, why: str) -> None:
            told.append(engine)

        pool = EnginePool(2, client_for, timeout_s=60.0, on_malformed=on_malformed)
        prompts = [msgspec.structs.replace(PROMPT, rid=f"p{index}") for index in range(8)]
        try:
            return [index async for index, _ in pool.generate(prompts, PARAMS, places=range(8))]
        finally:
            for client in clients:
                await client.aclose()

    assert sorted(asyncio.run(asyncio.wait_for(scene(), 60.0))) == list(range(8))
    assert set(told) == {0}, "its owner must be notified to restart it"


# -- the gateway and judges -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [*GARBAGE, *ENDLESS])
def test_the_gateways_client_sees_garbage_as_the_gateways_failure(
    server: BrokenServer, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_client, "AGAIN_S", 0.0)
    monkeypatch.setattr(gateway_client, "ANSWER_S", SHORT_S)
    server.reply = (GARBAGE | ENDLESS)[kind]
    address = GatewayAddress(url=server.url, token=TOKEN, page="", pid=1)
    (tmp_path / FILE).write_bytes(msgspec.json.encode(address))
    try:
        found = GatewayClient(tmp_path).ask("GET", "/run")
    except (GatewayRefused, GatewayUnreachable) as error:
        found = {"error": str(error)}
    assert isinstance(found, dict) and len(str(found.get("error", ""))) < 2000


def completion(**changes: Any) -> bytes:
    choice = {"message": {"content": "yes"}, "finish_reason": "stop"}
    return http(msgspec.json.encode({"choices": [choice], "usage": {"total_tokens": 7}} | changes))


BAD_COMPLETIONS = {
    "no choices": completion(choices=[]),
    "null": completion(choices=None),
    "a number": completion(choices=[1]),
    "no content": completion(choices=[{"message": {"content": None}}]),
    "a list": completion(choices=[{"message": {"content": ["yes"]}}]),
    "tokens of 1e999": completion().replace(b"7}", b"1e999}").replace(b"Content-Length: ", b"X: "),
    "tokens of -1": completion(usage={"total_tokens": -1}),
    "tokens of text": completion(usage={"total_tokens": "many"}),
    "usage of a list": completion(usage=[7]),
    "half a surrogate": http(rb'{"choices": [{"message": {"content": "\ud800 yes"}}]}'),
}


@pytest.mark.parametrize("kind", [*BAD_COMPLETIONS, *list(GARBAGE)[::4]])
def test_a_judge_that_cannot_be_read_refuses_and_ends_nothing(server: BrokenServer, kind: str) -> None:
    server.reply = (BAD_COMPLETIONS | GARBAGE)[kind]

    async def asked() -> str:
        judge = JudgeUrl(JudgeConfig(url=f"{server.url}/v1", model="m"))
        try:
            async with asyncio.timeout(SHORT_S):
                return (await judge.answer("?", seed=1, temperature=0.0)).text
        except (JudgeRefused, TimeoutError) as error:  # the caller retries until its timeout
            return type(error).__name__
        finally:
            await judge.close()

    assert asyncio.run(asked()) in ("JudgeRefused", "TimeoutError")
