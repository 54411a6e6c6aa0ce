"""Compares prompts with images and videos with transformers, over HTTP, on every kind of engine that takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from relax_core.contracts.engine import EngineError, Generated, PromptRequest, SamplingParams
from relax_core.contracts.media import Media, MediaItem
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol import engine_client
from relax_core.engines.protocol.engine_client import generate_body
from relax_core.engines.protocol.frames import StreamEnd
from relax_core.engines.protocol.score_calls import TokensToScore
from relax_core.families.folder import folder_architecture
from relax_core.registry import find_engine
from relax_core.tools.tiny_vision import write_published
from relax_core.weights.folder_stream import read_safetensors
from relax_core.weights.version_file import write_weights
from tests.contracts.engine.harness import Engine, embedded_only
from tests.seeing import DENSE, EXPERTS, Seen, make_seeing_model, text

TOLERANCE = 2e-5
PARAMS = SamplingParams(n=2, max_new_tokens=10, temperature=0.9)


@dataclass
class Seeing:
    """Is a running engine that sees, with transformers' model of the same weights."""

    engine: Engine
    model: Any
    seen: Seen
    name: str
    folder: Path

    def prompts(self, *parts: Sequence[Sequence[int] | MediaItem]) -> list[PromptRequest]:
        found = []
        for index, one in enumerate(parts):
            ids, media = self.seen.prompt(*one)
            found.append(PromptRequest(rid=f"prompt-{index}", input_ids=ids, sampling_seed=3 + index, media=media))
        return found

    @property
    def passes(self) -> int:
        """Returns how many items have passed the engine's tower."""
        return int(self.engine.client.loads()["tower_passes"])

    @property
    def params(self) -> SamplingParams:
        """Never samples tokens that stand for media, and no token that ends a response."""
        tower = self.seen.tower
        special = [tower.image_token_id, tower.video_token_id, tower.vision_start_token_id, tower.vision_end_token_id]
        return msgspec.structs.replace(PARAMS, banned_token_ids=[*special, 3])

    def expected(self, prompt: PromptRequest, one: Generated, params: SamplingParams) -> torch.Tensor:
        """Returns transformers' log-prob of each generated token."""
        output = self.seen.logits(self.model, prompt.input_ids + one.output_ids.tolist(), prompt.media)
        logits = output.logits[0, len(prompt.input_ids) - 1 : -1]
        logits[:, params.banned_token_ids] = float("-inf")
        table = (logits / params.temperature).log_softmax(-1)
        return table.gather(-1, torch.tensor(one.output_ids.tolist())[:, None])[:, 0]

    def gap(self, prompts: Sequence[PromptRequest], found: Sequence[Generated], params: SamplingParams) -> float:
        """Returns the largest difference from transformers' log-probs."""
        gaps = [self.expected(prompts[one.prompt], one, params) - torch.tensor(one.logprobs) for one in found]
        return float(torch.cat(gaps).abs().max())

    def scores(self, prompts: Sequence[PromptRequest]) -> list[list[float]]:
        """Returns the log-probs of each prompt's tokens but the first."""
        items = [TokensToScore(input_ids=one.input_ids, first=1, media=one.media) for one in prompts]
        return [one.logprobs.tolist() for one in self.engine.client.score(items, top_k=0, temperature=1.0)]

    def publish(self, path: Path, model: Any) -> None:
        """Serves the weights of ``model`` as the next version."""
        path.mkdir()
        write_published(model, path)
        version = self.engine.version + 1
        manifest = write_weights(path / "version.bin", version=version, tensors=read_safetensors(path))
        self.engine.client.update_weights(manifest)


def start(launch: EngineLaunch, folder: Path, *, name: str, kind: str) -> Iterator[Seeing]:
    model = make_seeing_model(folder / "model", name=name)
    seen = Seen(folder / "model", folder / "media")
    process = EngineProcess.start(
        replace(
            launch,
            model_folder=folder / "model",
            media_folder=folder / "media",
            engine=replace(launch.engine, context_length=2048),
            return_routed_experts=name == EXPERTS,
        )
    )
    vocab_size = folder_architecture(folder / "model").vocab_size
    yield Seeing(Engine(process, kind, vocab_size=vocab_size), model, seen, name, folder)
    process.stop(timeout_s=5.0)


MODELS = [
    pytest.param((kind, name), id=f"{kind}-{name}", marks=marks)
    for kind, marks in (("embedded", ()), ("sglang", pytest.mark.sglang))
    for name in (DENSE, EXPERTS)
]


@pytest.fixture(scope="module", params=MODELS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind, name = request.param
    if not find_engine(kind).media:
        pytest.skip(f"{kind} takes no media")
    launch = request.getfixturevalue("launch" if kind == "embedded" else "sglang_launch")
    yield from start(launch, tmp_path_factory.mktemp("seeing"), name=name, kind=kind)


# The other tests read what only the embedded engine reports; tests/engines/sglang/media has SGLang's own.
ON_SGLANG = (
    "test_every_token_is_that_of_transformers",
    "test_an_item_may_stand_behind_generated_tokens",
    "test_a_response_goes_on_from_its_own_prefix",
    "test_every_row_of_an_item_has_its_experts",
)


@pytest.fixture(autouse=True)
def _fits(request: pytest.FixtureRequest) -> None:
    if "seeing" in request.fixturenames:
        kind = request.getfixturevalue("seeing").engine.kind
        if kind == "sglang" and request.node.originalname not in ON_SGLANG:
            pytest.skip("SGLang has a test of its own")


def scene(seeing: Seeing) -> list[PromptRequest]:
    """Returns prompts with images of several sizes, videos, both, and text alone."""
    seen = seeing.seen
    return seeing.prompts(
        (text(5), seen.image(2, 2), text(4)),
        (text(1), seen.image(5, 3, seed=1), text(6)),
        (text(3), seen.video(3, 2, 2), text(2)),
        (text(12),),
        (seen.image(3, 3, seed=2), text(4), seen.image(3, 3, seed=3), text(1), seen.video(2, 2, 3, seed=4), text(7)),
    )


def test_every_token_is_that_of_transformers(seeing: Seeing) -> None:
    prompts, params = scene(seeing), seeing.params
    responses = seeing.engine.generate(prompts, params)
    assert len(responses) == 2 * len(prompts)
    assert [one.prompt_tokens for one in responses] == [len(prompts[one.prompt].input_ids) for one in responses]
    assert all(len(one.output_ids) == params.max_new_tokens for one in responses)
    assert seeing.gap(prompts, responses, params) <= TOLERANCE


def test_given_tokens_are_scored_as_transformers_does(seeing: Seeing) -> None:
    prompts = scene(seeing)
    for prompt, found in zip(prompts, seeing.scores(prompts), strict=True):
        expected = seeing.seen.logprobs(seeing.model, prompt.input_ids, prompt.media)
        torch.testing.assert_close(torch.tensor(found), expected, atol=TOLERANCE, rtol=0)


def test_an_item_may_stand_behind_generated_tokens(seeing: Seeing) -> None:
    """An environment answers with a picture: the second turn's prompt is the first one, its answer and the picture."""
    params = seeing.params
    (first,) = seeing.prompts((text(4), seeing.seen.image(2, 3, seed=5), text(3)))
    answer = seeing.engine.generate([first], params)[0].output_ids.tolist()
    ids, media = seeing.seen.prompt(text(2), seeing.seen.image(4, 2, seed=6), text(5))
    before = len(first.input_ids) + len(answer)
    moved = [Media(one.item, one.start + before, one.end + before) for one in media]
    second = PromptRequest(
        rid="turn-2", input_ids=first.input_ids + answer + ids, sampling_seed=4, media=first.media + moved
    )
    responses = seeing.engine.generate([second], params)
    assert seeing.gap([second], responses, params) <= TOLERANCE


def test_a_response_goes_on_from_its_own_prefix(seeing: Seeing) -> None:
    prompts, params = scene(seeing), seeing.params
    calm = seeing.engine.generate(prompts, params)
    again = [
        msgspec.structs.replace(
            prompts[one.prompt],
            input_ids=prompts[one.prompt].input_ids + one.output_ids[:4].tolist(),
            samples=[one.sample],
            generated=4,
        )
        for one in calm
    ]
    rests = seeing.engine.generate(again, params)
    for whole, rest in zip(calm, rests, strict=True):
        assert rest.output_ids.tolist() == whole.output_ids[4:].tolist()
        assert rest.logprobs == pytest.approx(whole.logprobs[4:], abs=TOLERANCE)
        assert rest.prompt_tokens == whole.prompt_tokens == len(prompts[whole.prompt].input_ids)


def test_every_row_of_an_item_has_its_experts(seeing: Seeing) -> None:
    if seeing.name != EXPERTS:
        pytest.skip("a dense model has no experts")
    prompts = scene(seeing)
    params = msgspec.structs.replace(seeing.params, return_routed_experts=True)
    for one in seeing.engine.generate(prompts, params):
        prompt = prompts[one.prompt]
        ids = prompt.input_ids + one.output_ids.tolist()
        logits = seeing.seen.logits(seeing.model, ids, prompt.media).router_logits
        chosen = torch.stack([layer.view(len(ids), -1).topk(2, -1).indices for layer in logits], 1)[:-1].numpy()
        assert one.prompt_experts is not None and one.response_experts is not None
        assert len(one.prompt_experts) == len(prompt.input_ids)
        found = np.concatenate([one.prompt_experts, one.response_experts]).reshape(chosen.shape)
        assert np.array_equal(np.sort(found, -1), np.sort(chosen, -1))


# -- sight ------------------------------------------------------------------------------------------------------------
def test_what_is_seen_decides(seeing: Seeing) -> None:
    """Another picture, and two pictures in the other order, change the log-probs of the tokens after them."""
    seen = seeing.seen
    left, right, other = (seen.image(3, 3, seed=seed) for seed in (11, 12, 13))
    prompts = seeing.prompts(
        *((text(4), first, text(2), second, text(6)) for first, second in ((left, right), (right, left), (left, other)))
    )
    assert prompts[0].input_ids == prompts[1].input_ids == prompts[2].input_ids
    ends = [line[-6:] for line in seeing.scores(prompts)]
    for one, two in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(np.subtract(ends[one], ends[two])).max() > 1e-2


def test_new_towers_are_seen_and_leave_text_alone(seeing: Seeing, tmp_path: Path) -> None:
    """Only the tower's weights change. The picture was seen before, so that old features would show."""
    pictures, words = seeing.prompts((text(4), seeing.seen.image(3, 4, seed=21), text(6))), seeing.prompts((text(40),))
    before, before_words = seeing.scores(pictures)[0], seeing.scores(words)[0]
    other = make_seeing_model(None, name=seeing.name)
    with torch.no_grad():
        for parameter in other.model.visual.parameters():
            parameter.mul_(1.2)
    seeing.publish(tmp_path / "other", other)
    after, after_words = seeing.scores(pictures)[0], seeing.scores(words)[0]
    expected = seeing.seen.logprobs(other, pictures[0].input_ids, pictures[0].media)
    torch.testing.assert_close(torch.tensor(after), expected, atol=TOLERANCE, rtol=0)
    assert np.abs(np.subtract(before, after))[-6:].max() > 1e-2
    assert before_words == after_words, "to the last bit"
    seeing.publish(tmp_path / "first", seeing.model)
    assert seeing.scores(pictures)[0] == before


def test_an_item_passes_the_tower_once_for_each_weight_version(seeing: Seeing, tmp_path: Path) -> None:
    item = seeing.seen.image(4, 4, seed=31)
    prompts = seeing.prompts((text(4), item, text(6)), (text(2), item), (item, text(9), item, text(1)))
    start = seeing.passes
    for _ in range(2):
        seeing.engine.generate(prompts, msgspec.structs.replace(seeing.params, n=4))
        seeing.scores(prompts)
    assert seeing.passes - start == 1
    seeing.publish(tmp_path / "same", seeing.model)
    ends: list[StreamEnd] = []
    seeing.engine.generate(prompts, seeing.params, on_end=ends.append)
    assert seeing.passes - start == 2 and ends[-1].tower_passes == seeing.passes
    assert ends[-1].media_feature_bytes == seeing.engine.client.loads()["media_feature_bytes"] > 0
    seeing.engine.post("/flush_cache")
    assert seeing.engine.client.loads()["media_feature_bytes"] == 0


# -- while samples run ------------------------------------------------------------------------------------------------
def long_body(prompt: PromptRequest, params: SamplingParams, rid: str) -> dict[str, Any]:
    sampling = {"max_new_tokens": 1500, "ignore_eos": True, "temperature": 0.9, "sampling_seed": 1}
    return {
        "rid": rid,
        "input_ids": prompt.input_ids,
        "media": [[(one.item.digest, one.start) for one in prompt.media]],
        "sampling_params": sampling,
        "banned_token_ids": params.banned_token_ids,
        "return_logprob": True,
    }


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_weights_change_while_a_picture_prompt_runs(seeing: Seeing, tmp_path: Path, mode: Any) -> None:
    """A retracted sample sees its picture with the new tower; one that stays keeps its cache of the old one."""
    (prompt,) = seeing.prompts((text(3), seeing.seen.image(4, 3, seed=41), text(4)))
    other = make_seeing_model(None, name=seeing.name, seed=9)
    tokens: list[int] = []
    logprobs: list[float] = []
    with seeing.engine.stream(long_body(prompt, seeing.params, mode)) as events:
        while len(tokens) < 8:
            _take(next(events), tokens, logprobs)
        seeing.engine.client.pause(mode)
        seeing.publish(tmp_path / "other", other)
        seeing.engine.client.resume()
        for event in events:
            meta = _take(event, tokens, logprobs)
            if len(tokens) - meta["weight_versions"][0]["end"] >= 8:
                seeing.engine.client.abort(mode)
    assert meta["finish_reason"]["type"] == "abort" and len(meta["weight_versions"]) == 2
    change = meta["weight_versions"][0]["end"]
    one = Generated(
        rid=mode,
        prompt=0,
        sample=0,
        output_ids=np.array(tokens),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=np.zeros(len(tokens)),
        finish_reason="abort",
    )
    first = (seeing.expected(prompt, one, seeing.params) - torch.tensor(logprobs)).abs()
    assert float(first[:change].max()) <= TOLERANCE
    with_other = replace(seeing, model=other)
    second = (with_other.expected(prompt, one, seeing.params) - torch.tensor(logprobs)).abs()
    if mode == "retract":
        assert float(second[change:].max()) <= TOLERANCE
    else:
        assert float(second[change:].max()) > 1e-2, "the cache of the old weights is still in use"
    seeing.publish(tmp_path / "first", seeing.model)


def _take(event: dict[str, Any], tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
    """Appends an event's tokens and log-probs; returns its meta_info."""
    tokens += event["output_ids"]
    meta: dict[str, Any] = event["meta_info"]
    logprobs += [entry[0] for entry in meta["output_token_logprobs"]]
    return meta


# -- refusals ---------------------------------------------------------------------------------------------------------
def test_digests_that_are_not_there_are_refused(seeing: Seeing) -> None:
    (prompt,) = seeing.prompts((text(3), seeing.seen.image(2, 2, seed=51), text(4)))
    place = prompt.media[0].start
    body = long_body(prompt, seeing.params, "refused")
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
            status, answer = seeing.engine.call("/generate", {**body, "media": [media], "sampling_params": sampling})
            assert status == 400, answer
            assert words in answer["error"]["message"]
    for media in ([], [[], []], "text", [[["a", "b"]]], [[[1, 2]]]):
        assert seeing.engine.call("/generate", {**body, "media": media})[0] == 400


def test_an_item_that_disappears_fails_its_own_request_only(seeing: Seeing) -> None:
    """The bus keeps the files of open requests, so that this is a fault; the engine goes on."""
    gone, stays = seeing.prompts(
        (text(3), seeing.seen.image(2, 4, seed=61), text(4)), (text(3), seeing.seen.image(2, 4, seed=62), text(4))
    )
    seeing.engine.client.pause("in_place")
    held = msgspec.structs.replace(gone, min_version=seeing.engine.version)
    with seeing.engine.stream(long_body(held, seeing.params, "gone")) as events:
        (seeing.seen.folder / gone.media[0].item.digest).unlink()
        seeing.engine.client.resume()
        (event,) = events
    assert "there is no such item" in event["error"]["message"]
    assert seeing.gap([stays], seeing.engine.generate([stays], seeing.params), seeing.params) <= TOLERANCE


def test_an_engine_that_saw_another_number_of_tokens_is_refused(
    seeing: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token is lost on the way, as if the engine had expanded the image to another number of rows."""
    (prompt,) = seeing.prompts((text(3), seeing.seen.image(2, 2, seed=71), text(4)))
    count = len(prompt.input_ids)

    def short(prompts: Sequence[PromptRequest], params: SamplingParams) -> dict[str, Any]:
        return generate_body([msgspec.structs.replace(one, input_ids=one.input_ids[:-1]) for one in prompts], params)

    monkeypatch.setattr(engine_client, "generate_body", short)
    with pytest.raises(EngineError, match=f"saw {count - 1} prompt tokens and the request has {count}"):
        seeing.engine.generate([prompt], seeing.params)


@embedded_only
def test_a_model_that_reads_text_takes_no_media(engine: Engine) -> None:
    body = {"input_ids": [5, 6, 7], "media": [[["0" * 32, 1]]]}
    status, answer = engine.call("/generate", body)
    assert status == 400 and "the model reads text only" in answer["error"]["message"]
    assert engine.call("/generate", {**body, "media": [None], "sampling_params": {"max_new_tokens": 1}})[0] == 200


def test_an_engine_without_a_media_folder_says_so(
    start_engine: Callable[..., Engine], launch: EngineLaunch, tmp_path: Path
) -> None:
    make_seeing_model(tmp_path / "model")
    seen = Seen(tmp_path / "model", tmp_path / "media")
    ids, media = seen.prompt(text(3), seen.image(2, 2))
    engine = start_engine(model_folder=tmp_path / "model", engine=replace(launch.engine, context_length=512))
    status, answer = engine.call("/generate", {"input_ids": ids, "media": [[[media[0].item.digest, media[0].start]]]})
    assert status == 400 and "without --media-folder" in answer["error"]["message"]
