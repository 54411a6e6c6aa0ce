"""Tests the SGLang client with invalid responses of a server, and with SGLang's aborts."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest

from relax_core.contracts.engine import EngineError, Generated, PromptRequest, SamplingParams
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.engines.protocol.generate_messages import VersionSpan
from relax_core.engines.sglang.sglang_client import SglangClient, finish_reason, prefilled_by_older
from tests.responses import check_arrays, response

TIMES = {"request_timeout_s": 5.0, "control_timeout_s": 5.0}


@contextmanager
def serving(info: bytes, *events: bytes) -> Iterator[str]:
    """Starts an HTTP server; yields its address.

    The server answers every GET with ``info``. It answers POSTs with ``events`` in order; the last event answers all
    later POSTs.
    """
    left = list(events)

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(info)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(left.pop(0) if len(left) > 1 else left[0])

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream" if self.command == "POST" else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(ConnectionError):  # after an error, the client closes its other call
                self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("versions", [(1, 1), (0, 1)])
@pytest.mark.parametrize(
    ("info", "events"),
    [
        (b"{}", b""),
        (b"<html>", b""),
        (b'{"weight_version": "3"}', b'data: {"output_ids": "many"}\n\n'),
        (b'{"weight_version": "3"}', b"data: \xff\xfe\n\n"),
    ],
)
def test_what_cannot_be_read_reaches_the_caller_in_words(versions: tuple[int, int], info: bytes, events: bytes) -> None:
    """The client raises the error even if the prompts of one call wait for different versions."""
    prompts = [PromptRequest(rid="a", input_ids=[1], sampling_seed=1, min_version=version) for version in versions]

    async def collect(url: str) -> list[Generated]:
        client = SglangClient(url, "token", **TIMES, ranks=1, vocab_size=50, seeds=True, attached=True)
        try:
            return [generated async for generated in client.generate(prompts, SamplingParams())]
        finally:
            await client.aclose()

    with serving(info, events) as url, pytest.raises(EngineError, match="cannot be read"):
        asyncio.run(asyncio.wait_for(collect(url), 20.0))


def finished(**meta: object) -> bytes:
    """Returns the only event of a response of two tokens."""
    of_all = {"completion_tokens": 2, "weight_version": "3", "finish_reason": {"type": "length"}}
    logprobs = {"output_token_logprobs": [[-1.0, 5, None], [-1.0, 6, None]]}
    return b"data: " + msgspec.json.encode({"output_ids": [5, 6], "meta_info": of_all | logprobs | meta}) + b"\n\n"


def kept_by(event: bytes) -> Generated:
    return response_by(event, params=SamplingParams(top_p=0.9, top_k=4, return_kept_tokens=True))


def response_by(*events: bytes, params: SamplingParams) -> Generated:
    """Returns the response of a server that answers requests with these events in order, under version 3."""

    async def collect(url: str) -> list[Generated]:
        client = SglangClient(url, "token", **TIMES, ranks=1, vocab_size=50, seeds=True, attached=True)
        try:
            return [
                generated
                async for generated in client.generate([PromptRequest(rid="a", input_ids=[1], sampling_seed=1)], params)
            ]
        finally:
            await client.aclose()

    with serving(b'{"weight_version": "3"}', *events) as url:
        (generated,) = asyncio.run(asyncio.wait_for(collect(url), 20.0))
    return generated


@pytest.mark.parametrize("reason", ["abort", "length"])
def test_tokens_that_no_attested_weights_have_sampled_are_cut_off(reason: str) -> None:
    """During sampling the server restarts or an update fails. The client requests the rest again, as after an abort."""
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "default", "start": 1, "end": 2}]
    generated = response_by(finished(weight_versions=spans, finish_reason={"type": reason}), params=SamplingParams())
    assert (generated.output_ids.tolist(), generated.versions.tolist(), generated.finish_reason) == ([5], [3], "abort")
    none = response_by(finished(weight_version="-1", finish_reason={"type": reason}), params=SamplingParams())
    assert (none.output_ids.size, none.finish_reason) == (0, "abort")


def test_kept_sets_come_with_the_log_probs_over_them() -> None:
    masks = {"output_token_sampling_mask": [[5, 9], [7, 6, 8]], "output_token_sampling_logprobs": [-0.5, -0.25]}
    generated = kept_by(finished(**masks))
    assert generated.kept == KeptTokens.of_lists([[5, 9], [6, 7, 8]], vocab_size=50)
    assert generated.logprobs.tolist() == [-0.5, -0.25]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({}, r"does not say which tokens top_p, top_k and min_p kept.*Use rollout\.top_p=1"),
        (
            {"output_token_sampling_mask": [[5], [50]]},
            r"a kept set has an id that is not in",
        ),
        ({"output_token_sampling_mask": [[5], []]}, r"the kept set of token 1 is empty"),
        ({"output_token_sampling_mask": [5, 6]}, r"cannot be read"),
    ],
)
def test_an_engine_that_cannot_tell_its_kept_sets_is_refused(meta: dict[str, object], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        kept_by(finished(**meta))


@pytest.mark.parametrize(
    ("ids", "generated", "found"),
    [([], 0, "abort"), ([5, 6], 0, "abort"), ([5, 3], 0, "stop"), ([5, 6, 7, 8], 0, "length"), ([5, 6], 2, "length")],
)
def test_an_abort_on_the_last_token_is_its_end(ids: list[int], generated: int, found: str) -> None:
    """As an abort, the response would continue after its stop token, or be requested again with no tokens left."""
    sampled = response(ids, versions=1, finish_reason="abort")
    params = SamplingParams(max_new_tokens=4, stop_token_ids=[3])
    assert finish_reason(sampled, params, generated=generated, limit=params.max_new_tokens) == found


@pytest.mark.parametrize(
    ("first", "cached", "found"),
    [
        (VersionSpan(0, 4, 7), 0, False),
        (VersionSpan(0, 4, 7), 3, False),  # version 7 computed the cached tokens and the response
        (VersionSpan(0, 4, 8), 0, False),  # the request waited until the next version was loaded
        (VersionSpan(0, 4, 8), 3, True),
        (VersionSpan(0, 0, 7), 0, True),  # version 7 prefilled a part of the prompt, version 8 sampled
    ],
)
def test_whose_prompt_older_weights_have_prefilled(first: VersionSpan, cached: int, found: bool) -> None:
    assert prefilled_by_older(first, 7, cached=cached) == found


def test_a_sample_whose_prompt_older_weights_have_prefilled_is_asked_for_again() -> None:
    def made(*spans: tuple[str, int, int], cached: int) -> bytes:
        spans_sent = [{"version": version, "start": start, "end": end} for version, start, end in spans]
        return finished(weight_versions=spans_sent, cached_tokens=cached)

    mixed = made(("3", 0, 0), ("4", 0, 2), cached=0), made(("5", 0, 2), cached=3)
    generated = response_by(*mixed, made(("5", 0, 1), ("6", 1, 2), cached=0), params=SamplingParams())
    check_arrays(generated, ids=[5, 6], versions=[5, 6])
