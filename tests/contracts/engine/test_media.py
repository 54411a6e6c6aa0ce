"""Compares prompts with images and videos with transformers, over HTTP, on every kind of engine with vision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from relax_core.contracts.engine import EngineError, Generated, PromptRequest, SamplingParams
from relax_core.contracts.media import Media
from relax_core.engines.engine_process import EngineLaunch
from relax_core.engines.protocol import engine_client
from relax_core.engines.protocol.generate_messages import StreamEnd, generate_body
from relax_core.registry import find_engine
from tests.contracts.engine.harness import Engine, embedded_only
from tests.contracts.engine.vision_engine import (
    CONTEXT,
    MAX_TOTAL_TOKENS,
    TOLERANCE,
    VisionEngine,
    long_body,
    read,
    scene,
    start,
    take,
)
from tests.vision_models import DENSE, EXPERTS, HYBRIDS, Seen, make_tiny_vision_model, text

MODELS = [
    pytest.param((kind, name), id=f"{kind}-{name}", marks=marks)
    for kind, marks, names in (
        ("embedded", (), (DENSE, EXPERTS, *HYBRIDS)),
        # tests/engines/sglang/media tests the dense model.
        ("sglang", pytest.mark.sglang, (EXPERTS, *HYBRIDS)),
    )
    for name in names
]
INTERRUPTIONS = ("pause in place", "retract", "memory released", "same weights", "abort of another")


@pytest.fixture(scope="module", params=MODELS)
def vision_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind, name = request.param
    if not find_engine(kind).media:
        pytest.skip(f"{kind} takes no media")
    launch = request.getfixturevalue("launch" if kind == "embedded" else "sglang_launch")
    yield from start(launch, tmp_path_factory.mktemp("seeing"), name=name, kind=kind)


# The other tests use reports that only the embedded engine has. tests/engines/sglang/media tests SGLang.
ON_SGLANG = (
    "test_tokens_equal_those_of_transformers",
    "test_an_item_may_stand_behind_generated_tokens",
    "test_a_response_goes_on_from_its_own_prefix",
    "test_every_row_of_an_item_has_its_experts",
    "test_the_response_depends_on_the_image",
    "test_weights_change_while_a_picture_prompt_runs",
    "test_an_interrupted_sample_has_the_tokens_of_a_calm_one",
)


@pytest.fixture(autouse=True)
def _fits(request: pytest.FixtureRequest) -> None:
    if "vision_engine" in request.fixturenames:
        kind = request.getfixturevalue("vision_engine").engine.kind
        if kind == "sglang" and request.node.originalname not in ON_SGLANG:
            pytest.skip("SGLang has a test of its own")


def test_tokens_equal_those_of_transformers(vision_engine: VisionEngine) -> None:
    prompts, params = scene(vision_engine), vision_engine.params
    responses = vision_engine.engine.generate(prompts, params)
    assert len(responses) == 2 * len(prompts)
    assert [response.prompt_tokens for response in responses] == [
        len(prompts[response.prompt].input_ids) for response in responses
    ]
    assert all(len(response.output_ids) == params.max_new_tokens for response in responses)
    assert vision_engine.gap(prompts, responses, params) <= TOLERANCE


def test_given_tokens_are_scored_as_transformers_does(vision_engine: VisionEngine) -> None:
    prompts = scene(vision_engine)
    for prompt, found in zip(prompts, vision_engine.scores(prompts), strict=True):
        expected = vision_engine.seen.logprobs(vision_engine.model, prompt.input_ids, prompt.media)
        torch.testing.assert_close(torch.tensor(found), expected, atol=TOLERANCE, rtol=0)


def test_an_item_may_stand_behind_generated_tokens(vision_engine: VisionEngine) -> None:
    """An environment returns a picture: the second turn's prompt is the first turn followed by the picture."""
    params = vision_engine.params
    (first,) = vision_engine.prompts((text(4), vision_engine.seen.image(2, 3, seed=5), text(3)))
    answer = vision_engine.engine.generate([first], params)[0].output_ids.tolist()
    ids, media = vision_engine.seen.prompt(text(2), vision_engine.seen.image(4, 2, seed=6), text(5))
    before = len(first.input_ids) + len(answer)
    moved = [Media(medium.item, medium.start + before, medium.end + before) for medium in media]
    second = PromptRequest(
        rid="turn-2", input_ids=first.input_ids + answer + ids, sampling_seed=4, media=first.media + moved
    )
    responses = vision_engine.engine.generate([second], params)
    assert vision_engine.gap([second], responses, params) <= TOLERANCE


def test_a_response_goes_on_from_its_own_prefix(vision_engine: VisionEngine) -> None:
    prompts, params = scene(vision_engine), vision_engine.params
    calm = vision_engine.engine.generate(prompts, params)
    again = [
        msgspec.structs.replace(
            prompts[response.prompt],
            input_ids=prompts[response.prompt].input_ids + response.output_ids[:4].tolist(),
            samples=[response.sample],
            generated=4,
        )
        for response in calm
    ]
    rests = vision_engine.engine.generate(again, params)
    for whole, rest in zip(calm, rests, strict=True):
        assert rest.output_ids.tolist() == whole.output_ids[4:].tolist()
        assert rest.logprobs == pytest.approx(whole.logprobs[4:], abs=TOLERANCE)
        assert rest.prompt_tokens == whole.prompt_tokens == len(prompts[whole.prompt].input_ids)


def test_every_row_of_an_item_has_its_experts(vision_engine: VisionEngine) -> None:
    if not vision_engine.has_experts:
        pytest.skip("a dense model has no experts")
    prompts = scene(vision_engine)
    params = msgspec.structs.replace(vision_engine.params, return_routed_experts=True)
    for response in vision_engine.engine.generate(prompts, params):
        prompt = prompts[response.prompt]
        ids = prompt.input_ids + response.output_ids.tolist()
        logits = vision_engine.seen.logits(vision_engine.model, ids, prompt.media).router_logits
        chosen = torch.stack([layer.view(len(ids), -1).topk(2, -1).indices for layer in logits], 1)[:-1].numpy()
        assert response.prompt_experts is not None and response.response_experts is not None
        assert len(response.prompt_experts) == len(prompt.input_ids)
        found = np.concatenate([response.prompt_experts, response.response_experts]).reshape(chosen.shape)
        assert np.array_equal(np.sort(found, -1), np.sort(chosen, -1))


# -- vision -----------------------------------------------------------------------------------------------------------
def test_the_response_depends_on_the_image(vision_engine: VisionEngine) -> None:
    """Another picture, or two pictures in another order, change the log-probs of later tokens."""
    seen = vision_engine.seen
    left, right, third = (seen.image(3, 3, seed=seed) for seed in (11, 12, 13))
    prompts = vision_engine.prompts(
        *((text(4), first, text(2), second, text(6)) for first, second in ((left, right), (right, left), (left, third)))
    )
    assert prompts[0].input_ids == prompts[1].input_ids == prompts[2].input_ids
    ends = [line[-6:] for line in vision_engine.scores(prompts)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(np.subtract(ends[a], ends[b])).max() > 1e-2


def test_new_towers_are_seen_and_leave_text_alone(vision_engine: VisionEngine, tmp_path: Path) -> None:
    """Only the tower's weights change. The picture was used before, so old features in the cache would be noticed."""
    pictures, words = (
        vision_engine.prompts((text(4), vision_engine.seen.image(3, 4, seed=21), text(6))),
        vision_engine.prompts((text(40),)),
    )
    before, before_words = vision_engine.scores(pictures)[0], vision_engine.scores(words)[0]
    other_model = make_tiny_vision_model(None, name=vision_engine.name)
    with torch.no_grad():
        for parameter in other_model.model.visual.parameters():
            parameter.mul_(1.2)
    vision_engine.publish(tmp_path / "other", other_model)
    after, after_words = vision_engine.scores(pictures)[0], vision_engine.scores(words)[0]
    expected = vision_engine.seen.logprobs(other_model, pictures[0].input_ids, pictures[0].media)
    torch.testing.assert_close(torch.tensor(after), expected, atol=TOLERANCE, rtol=0)
    assert np.abs(np.subtract(before, after))[-6:].max() > 1e-2
    assert before_words == after_words, "equal to the bit"
    vision_engine.publish(tmp_path / "first", vision_engine.model)
    assert vision_engine.scores(pictures)[0] == before


def test_an_item_passes_the_tower_once_for_each_weight_version(vision_engine: VisionEngine, tmp_path: Path) -> None:
    item = vision_engine.seen.image(4, 4, seed=31)
    prompts = vision_engine.prompts((text(4), item, text(6)), (text(2), item), (item, text(9), item, text(1)))
    start = vision_engine.passes
    for _ in range(2):
        vision_engine.engine.generate(prompts, msgspec.structs.replace(vision_engine.params, n=4))
        vision_engine.scores(prompts)
    assert vision_engine.passes - start == 1
    vision_engine.publish(tmp_path / "same", vision_engine.model)
    ends: list[StreamEnd] = []
    vision_engine.engine.generate(prompts, vision_engine.params, on_end=ends.append)
    assert vision_engine.passes - start == 2 and ends[-1].tower_passes == vision_engine.passes
    assert ends[-1].media_feature_bytes == vision_engine.engine.client.loads()["media_feature_bytes"] > 0
    vision_engine.engine.post("/flush_cache")
    assert vision_engine.engine.client.loads()["media_feature_bytes"] == 0


# -- while samples run ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_weights_change_while_a_picture_prompt_runs(vision_engine: VisionEngine, tmp_path: Path, mode: Any) -> None:
    """A retracted sample uses the new tower. A sample that is paused in place keeps its cache from the old tower.

    Recurrent states would preserve the effect of old weights, so a model with states recomputes them in both modes.
    """
    vision_engine.engine.flush()
    (prompt,) = vision_engine.prompts((text(3), vision_engine.seen.image(4, 3, seed=41), text(4)))
    other_model = make_tiny_vision_model(None, name=vision_engine.name, seed=9)
    tokens: list[int] = []
    logprobs: list[float] = []
    try:
        with vision_engine.engine.stream(vision_engine.body(prompt, mode)) as events:
            read(events, tokens, logprobs, count=8)
            vision_engine.engine.client.pause(mode)
            vision_engine.publish(tmp_path / "other", other_model)
            vision_engine.engine.client.resume()
            spans: list[dict[str, Any]] = []  # the engine may sample many tokens between the read and the pause
            while len(spans) < 2 or len(tokens) - spans[0]["end"] < 8:
                spans = take(next(events), tokens, logprobs)["weight_versions"]
            vision_engine.engine.client.abort(mode)
            for event in events:
                meta = take(event, tokens, logprobs)
        assert meta["finish_reason"]["type"] == "abort" and len(meta["weight_versions"]) == 2
        change = meta["weight_versions"][0]["end"]
        response = generated(tokens, logprobs)
        first = (vision_engine.expected(prompt, response, vision_engine.params) - torch.tensor(logprobs)).abs()
        assert float(first[:change].max()) <= TOLERANCE
        with_other = replace(vision_engine, model=other_model)
        second = (with_other.expected(prompt, response, vision_engine.params) - torch.tensor(logprobs)).abs()
        if mode == "retract" or vision_engine.name in HYBRIDS:
            assert float(second[change:].max()) <= TOLERANCE
        else:
            assert float(second[change:].max()) > 1e-2, "the cache of the old weights is still in use"
    finally:  # later tests use this engine
        vision_engine.publish(tmp_path / "first", vision_engine.model)


@pytest.mark.parametrize("what", INTERRUPTIONS)
def test_an_interrupted_sample_has_the_tokens_of_a_calm_one(
    vision_engine: VisionEngine, tmp_path: Path, what: str
) -> None:
    """Keys, values and states stay, move to another slot, or are recomputed. The tokens do not change."""
    vision_engine.engine.flush()
    seen, client = vision_engine.seen, vision_engine.engine.client
    leaves, stays = vision_engine.prompts(
        (text(9), seen.image(3, 4, seed=42), text(4)), (text(3), seen.video(3, 2, 3, seed=43), text(70))
    )
    tokens: list[int] = []
    logprobs: list[float] = []
    # Each case has its own request ids: SGLang ends the request of a closed connection by its id, a moment later.
    with vision_engine.engine.stream(vision_engine.body(leaves, f"leaves: {what}")) as stream:
        read(stream, [], [], count=1)
        with vision_engine.engine.stream(vision_engine.body(stays, f"stays: {what}")) as events:
            read(events, tokens, logprobs, count=8)
            if what == "pause in place":
                client.pause("in_place")
                client.resume()
            elif what == "retract":
                client.pause("retract")
                client.resume()
            elif what == "memory released":
                client.release_memory()
                client.resume_memory()
            elif what == "same weights":
                vision_engine.publish(tmp_path / "same", vision_engine.model)
            else:
                client.abort(f"leaves: {what}")
            read(events, tokens, logprobs, count=len(tokens) + 24)
        client.abort()
    calm = vision_engine.engine.post("/generate", vision_engine.body(stays, f"calm: {what}", new=len(tokens)))
    calm_tokens: list[int] = []
    calm_logprobs: list[float] = []
    take(calm, calm_tokens, calm_logprobs)
    assert tokens == calm_tokens
    assert logprobs == pytest.approx(calm_logprobs, abs=TOLERANCE)
    assert vision_engine.gap([stays], [generated(tokens, logprobs)], vision_engine.params) <= TOLERANCE


def generated(tokens: list[int], logprobs: list[float]) -> Generated:
    return Generated(
        rid="streamed",
        prompt=0,
        sample=0,
        output_ids=np.array(tokens),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=np.zeros(len(tokens)),
        finish_reason="abort",
    )


# -- refusals ---------------------------------------------------------------------------------------------------------
def test_a_request_that_fits_only_without_its_states_is_refused(vision_engine: VisionEngine) -> None:
    """The engine answers a request at the limit. With one more token the request would wait forever for space."""
    n, states = MAX_TOTAL_TOKENS // CONTEXT, vision_engine.state_tokens
    body = {"sampling_params": {"n": n, "max_new_tokens": 1}, "banned_token_ids": vision_engine.params.banned_token_ids}
    answers = vision_engine.engine.post("/generate", {**body, "input_ids": text(CONTEXT - states - 1)})
    assert [len(reply["output_ids"]) for reply in answers] == [1] * n
    status, answer = vision_engine.engine.call("/generate", {**body, "input_ids": text(CONTEXT - states)})
    assert status == 400
    words = answer["error"]["message"]
    if vision_engine.name in HYBRIDS:
        assert f"n={n} samples of up to {CONTEXT - states + 1} tokens, each with states of {states} more" in words
        assert f"need {n * (CONTEXT + 1)} cache tokens, there are {MAX_TOTAL_TOKENS}" in words
        assert "lower n or max_new_tokens, or raise engine.max_total_tokens" in words
    else:
        assert states == 0 and "is longer than the context" in words


def test_digests_that_are_not_there_are_refused(vision_engine: VisionEngine) -> None:
    (prompt,) = vision_engine.prompts((text(3), vision_engine.seen.image(2, 2, seed=51), text(4)))
    place = prompt.media[0].start
    body = long_body(prompt, vision_engine.params, "refused")
    for media, words in (
        ([["0" * 32, place]], "there is no such item"),
        ([["../" + prompt.media[0].item.digest, place]], "a digest has 32 hexadecimal digits"),
        ([["../../../../etc/passwd", place]], "a digest has 32 hexadecimal digits"),
        ([[prompt.media[0].item.digest, place - 1]], "are not the item's 4 ids"),
        ([[prompt.media[0].item.digest, -1]], "do not fit"),
        ([[prompt.media[0].item.digest, len(prompt.input_ids) - 2]], "do not fit"),
        ([[prompt.media[0].item.digest, place], [prompt.media[0].item.digest, place]], "do not fit"),
        ([], "no item of media is there"),
    ):
        for sampling in (body["sampling_params"], {"max_new_tokens": 0}):
            status, answer = vision_engine.engine.call(
                "/generate", {**body, "media": [media], "sampling_params": sampling}
            )
            assert status == 400, answer
            assert words in answer["error"]["message"]
    for media in ([], [[], []], "text", [[["a", "b"]]], [[[1, 2]]]):
        assert vision_engine.engine.call("/generate", {**body, "media": media})[0] == 400


def test_an_item_that_disappears_fails_its_own_request_only(vision_engine: VisionEngine) -> None:
    """The bus keeps the files of open requests, so a missing file is a fault. The engine continues."""
    gone, stays = vision_engine.prompts(
        (text(3), vision_engine.seen.image(2, 4, seed=61), text(4)),
        (text(3), vision_engine.seen.image(2, 4, seed=62), text(4)),
    )
    vision_engine.engine.client.pause("in_place")
    held = msgspec.structs.replace(gone, min_version=vision_engine.engine.version)
    with vision_engine.engine.stream(long_body(held, vision_engine.params, "gone")) as events:
        (vision_engine.seen.folder / gone.media[0].item.digest).unlink()
        vision_engine.engine.client.resume()
        (event,) = events
    assert "there is no such item" in event["error"]["message"]
    assert (
        vision_engine.gap([stays], vision_engine.engine.generate([stays], vision_engine.params), vision_engine.params)
        <= TOLERANCE
    )


def test_an_engine_that_saw_another_number_of_tokens_is_refused(
    vision_engine: VisionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test removes one token, as if the engine had expanded the image to another number of rows."""
    (prompt,) = vision_engine.prompts((text(3), vision_engine.seen.image(2, 2, seed=71), text(4)))
    count = len(prompt.input_ids)

    def short(prompts: Sequence[PromptRequest], params: SamplingParams) -> dict[str, Any]:
        return generate_body([msgspec.structs.replace(sent, input_ids=sent.input_ids[:-1]) for sent in prompts], params)

    monkeypatch.setattr(engine_client, "generate_body", short)
    with pytest.raises(EngineError, match=f"saw {count - 1} prompt tokens and the request has {count}"):
        vision_engine.engine.generate([prompt], vision_engine.params)


@embedded_only
def test_a_model_that_reads_text_takes_no_media(engine: Engine) -> None:
    body = {"input_ids": [5, 6, 7], "media": [[["0" * 32, 1]]]}
    status, answer = engine.call("/generate", body)
    assert status == 400 and "the model reads text only" in answer["error"]["message"]
    assert engine.call("/generate", {**body, "media": [None], "sampling_params": {"max_new_tokens": 1}})[0] == 200


def test_an_engine_without_a_media_folder_says_so(
    start_engine: Callable[..., Engine], launch: EngineLaunch, tmp_path: Path
) -> None:
    make_tiny_vision_model(tmp_path / "model")
    seen = Seen(tmp_path / "model", tmp_path / "media")
    ids, media = seen.prompt(text(3), seen.image(2, 2))
    engine = start_engine(model_folder=tmp_path / "model", engine=replace(launch.engine, context_length=512))
    status, answer = engine.call("/generate", {"input_ids": ids, "media": [[[media[0].item.digest, media[0].start]]]})
    assert status == 400 and "without --media-folder" in answer["error"]["message"]
