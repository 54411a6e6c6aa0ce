"""Tests that frames and events can be parsed from any split of the byte stream."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_core.contracts.engine import Generated, PromptRequest
from relax_core.engines.protocol.generate_messages import (
    Experts,
    Finished,
    FrameReader,
    StreamEnd,
    StreamFailure,
    VersionSpan,
    encode_frames,
)
from relax_core.engines.protocol.server_sent_events import UNKNOWN_VERSION, EventReader, ReceivedTokens
from tests.responses import check_arrays

PROMPTS = [
    PromptRequest(rid="a", input_ids=[1], sampling_seed=0),
    PromptRequest(rid="b", input_ids=[2], sampling_seed=0),
]


def reader_of(*, n: int) -> EventReader:
    return EventReader(PROMPTS, samples=[(prompt, sample) for prompt in range(2) for sample in range(n)])


EXPERTS = np.arange(12, dtype=np.uint16).reshape(3, 2, 2)


def finished(sample: int) -> Finished:
    """Returns a response of ``sample`` tokens. Newer weights generated the last token."""
    return Finished(
        rid="a",
        prompt=1,
        sample=sample,
        output_ids=np.arange(sample, dtype="<i4").tobytes(),
        logprobs=np.full(sample, -0.1, dtype="<f4").tobytes(),
        weight_versions=[VersionSpan(0, sample - 1, 7), VersionSpan(sample - 1, sample, 8)] if sample else [],
        finish_reason="stop",
        response_experts=Experts.of(EXPERTS),
    )


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(1, 97))
def test_frames_come_back_whatever_the_cuts(sizes: list[int], cut: int) -> None:
    frames = [*[finished(size) for size in sizes], StreamFailure("no"), StreamEnd(1.0, 2.0, 3.0)]
    data = encode_frames(frames)
    reader = FrameReader()
    found = [frame for start in range(0, len(data), cut) for frame in reader.feed(data[start : start + cut])]
    assert found == frames


def test_a_frame_becomes_arrays() -> None:
    (frame,) = FrameReader().feed(encode_frames([finished(4)]))
    assert isinstance(frame, Finished)
    response = frame.response(prompt_experts=EXPERTS)
    check_arrays(response, ids=[0, 1, 2, 3], versions=[7, 7, 7, 8])
    assert (response.rid, response.prompt, response.sample, response.finish_reason) == ("a", 1, 4, "stop")
    assert response.logprobs.tolist() == [np.float32(-0.1)] * 4
    assert response.prompt_experts is EXPERTS and response.response_experts is not None
    assert response.response_experts.dtype == np.uint16 and np.array_equal(response.response_experts, EXPERTS)
    check_arrays(finished(0).response(), ids=[], versions=[])


def event(index: int, ids: list[int], count: int, *, finish: str | None, spans: bool = True) -> bytes:
    meta = {
        "id": "x",
        "completion_tokens": count,
        "finish_reason": {"type": finish, "matched": 3} if finish else None,
        "weight_version": "default",
        "output_token_logprobs": [[-0.1 * token, token, None] for token in ids],
    }
    if spans:
        meta["weight_versions"] = [{"version": "4", "start": 0, "end": count}]
    return b"data: " + json.dumps({"text": "", "output_ids": ids, "meta_info": meta, "index": index}).encode() + b"\n\n"


@pytest.mark.parametrize("cut", [1, 7, 10_000])
@pytest.mark.parametrize("cumulative", [True, False])
def test_events_of_both_kinds_are_gathered(cumulative: bool, cut: int) -> None:
    """By default SGLang sends all tokens so far. With incremental_streaming_output it sends new tokens only."""
    parts = [[5, 6], [7], [8, 9, 10]]
    raw = b""
    sent: list[int] = []
    for number, part in enumerate(parts):
        sent = sent + part
        finish = "stop" if number == 2 else None
        for index in (3, 0):
            raw += event(index, sent if cumulative else part, len(sent), finish=finish)
    raw += b"data: [DONE]\n\n"
    reader = reader_of(n=2)
    found = [response for start in range(0, len(raw), cut) for response in reader.feed(raw[start : start + cut])]
    assert [
        (response.rid, response.prompt, response.sample) for response in found if isinstance(response, Generated)
    ] == [
        ("b", 1, 1),
        ("a", 0, 0),
    ]
    for response in found:
        assert isinstance(response, Generated)
        check_arrays(response, ids=sent, versions=[4] * 6)
        assert response.logprobs.tolist() == pytest.approx([-0.1 * token for token in sent])


def test_an_error_event_is_told_and_an_unnumbered_version_is_unknown() -> None:
    reader = reader_of(n=1)
    assert list(reader.feed(b'data: {"error": {"message": "out of memory"}}\n\n')) == ["out of memory"]
    (response,) = reader.feed(event(0, [1, 2], 2, finish="length", spans=False))
    assert isinstance(response, Generated)
    check_arrays(response, ids=[1, 2], versions=[UNKNOWN_VERSION] * 2)


def replaced(event: bytes, old: bytes, new: bytes) -> bytes:
    assert old in event
    return event.replace(old, new)


def test_each_token_has_its_version_and_the_reader_tells_how_the_prompt_was_computed() -> None:
    """The first version computed a part of the prompt, and ended before it sampled a token."""
    whole = event(0, [5, 6, 7], 3, finish="stop")
    spans = (
        b'{"version": "3", "start": 0, "end": 0}, {"version": "4", "start": 0, "end": 2}, '
        b'{"version": "9", "start": 2, "end": 3}'
    )
    reader = reader_of(n=1)
    (response,) = reader.feed(replaced(whole, b'{"version": "4", "start": 0, "end": 3}', spans))
    assert isinstance(response, Generated)
    check_arrays(response, ids=[5, 6, 7], versions=[4, 4, 9])
    assert reader.prefills == {(0, 0): (0, VersionSpan(0, 0, 3))}


def test_an_abort_with_a_status_is_a_failure_and_one_without_is_a_partial_response() -> None:
    reader = reader_of(n=1)
    plain = event(0, [1, 2], 2, finish="abort")
    failed = plain.replace(b'"matched": 3', b'"status_code": 500, "message": "Out of memory even after retracting"')
    assert failed != plain
    assert list(reader.feed(failed)) == ["500: Out of memory even after retracting"]
    (response,) = reader_of(n=1).feed(plain.replace(b'"matched": 3', b'"status_code": null, "message": "Aborted"'))
    assert isinstance(response, Generated) and response.finish_reason == "abort"
    check_arrays(response, ids=[1, 2], versions=[4, 4])


def test_the_number_of_prompt_tokens_is_compared_with_the_request() -> None:
    """The count includes the earlier tokens of a continued response, which are not part of the prompt."""
    again = PromptRequest(rid="a", input_ids=[1, 2, 3], sampling_seed=0, generated=1)

    def found(tokens: int) -> Generated | ReceivedTokens | str:
        meta = {"completion_tokens": 0, "finish_reason": {"type": "abort"}, "prompt_tokens": tokens}
        (response,) = EventReader([again], samples=[(0, 0)]).feed(
            f"data: {json.dumps({'meta_info': meta})}\n\n".encode()
        )
        return response

    for tokens, count in ((3, 2), (0, 0)):
        response = found(tokens)
        assert isinstance(response, Generated) and response.prompt_tokens == count
    with pytest.raises(ValueError, match="saw 9 prompt tokens and the request has 3"):
        found(9)
