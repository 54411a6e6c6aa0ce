"""Frames and events survive any cut of the byte stream."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_core.contracts.engine import Generated, PromptRequest
from relax_core.contracts.sample import VersionSpan
from relax_core.engines.events import UNKNOWN_VERSION, EventReader
from relax_core.engines.wire import Finished, FrameReader, StreamEnd, StreamFailure, encode_frames

PROMPTS = [
    PromptRequest(rid="a", input_ids=[1], sampling_seed=0),
    PromptRequest(rid="b", input_ids=[2], sampling_seed=0),
]


def response(sample: int) -> Generated:
    return Generated(
        rid="a",
        prompt=0,
        sample=sample,
        output_ids=list(range(sample)),
        logprobs=[-0.5] * sample,
        weight_versions=[VersionSpan(0, sample, 7)],
        finish_reason="stop",
    )


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(1, 97))
def test_frames_come_back_whatever_the_cuts(sizes: list[int], cut: int) -> None:
    frames = [*[Finished(response(size)) for size in sizes], StreamFailure("no"), StreamEnd(1.0, 2.0, 3.0)]
    data = encode_frames(frames)
    reader = FrameReader()
    found = [frame for start in range(0, len(data), cut) for frame in reader.feed(data[start : start + cut])]
    assert found == frames


def test_what_is_no_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="no stream of the embedded engine"):
        list(FrameReader().feed(b"data: {}\n\n"))


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
    """SGLang sends all tokens so far by default, and only the new ones with incremental_streaming_output."""
    parts = [[5, 6], [7], [8, 9, 10]]
    raw = b""
    sent: list[int] = []
    for place, part in enumerate(parts):
        sent = sent + part
        finish = "stop" if place == 2 else None
        for index in (3, 0):
            raw += event(index, sent if cumulative else part, len(sent), finish=finish)
    raw += b"data: [DONE]\n\n"
    reader = EventReader(PROMPTS, n=2)
    found = [one for start in range(0, len(raw), cut) for one in reader.feed(raw[start : start + cut])]
    assert [(one.rid, one.prompt, one.sample) for one in found if isinstance(one, Generated)] == [
        ("b", 1, 1),
        ("a", 0, 0),
    ]
    for one in found:
        assert isinstance(one, Generated)
        assert one.output_ids == sent and one.logprobs == pytest.approx([-0.1 * token for token in sent])
        assert one.weight_versions == [VersionSpan(0, 6, 4)]


def test_an_error_event_is_told_and_an_unnumbered_version_is_unknown() -> None:
    reader = EventReader(PROMPTS, n=1)
    assert list(reader.feed(b'data: {"error": {"message": "out of memory"}}\n\n')) == ["out of memory"]
    (one,) = reader.feed(event(0, [1, 2], 2, finish="length", spans=False))
    assert isinstance(one, Generated)
    assert one.weight_versions == [VersionSpan(0, 2, UNKNOWN_VERSION)]


def test_an_abort_with_a_status_is_a_failure_and_one_without_is_a_partial_response() -> None:
    reader = EventReader(PROMPTS, n=1)
    plain = event(0, [1, 2], 2, finish="abort")
    failed = plain.replace(b'"matched": 3', b'"status_code": 500, "message": "Out of memory even after retracting"')
    assert failed != plain
    assert list(reader.feed(failed)) == ["500: Out of memory even after retracting"]
    (one,) = EventReader(PROMPTS, n=1).feed(
        plain.replace(b'"matched": 3', b'"status_code": null, "message": "Aborted"')
    )
    assert isinstance(one, Generated) and one.finish_reason == "abort" and one.output_ids == [1, 2]
