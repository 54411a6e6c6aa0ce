"""Compares SGLang's real server with transformers on images and videos, with tiny random models."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from relax_core.contracts.engine import EngineError, Generated, PromptRequest, SamplingParams
from relax_core.contracts.media import MediaItem
from relax_core.engines.build_client import build_client
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import EngineClient, TokensToScore
from relax_core.engines.sglang.sglang_client import SglangClient
from relax_core.families.architecture import VisionTower
from relax_core.families.folder import vision_tower
from relax_core.weights.version_writer import VersionWriter
from tests.contracts.engine.harness import TOKEN, Engine, Started
from tests.engines.sglang.media.vision_models import (
    encoded,
    frames_of,
    make_vision_model,
    prompt,
    published_weights,
    reference_logprobs,
)

pytestmark = pytest.mark.sglang
REACH = 2e-5
DENSE, EXPERTS = "tiny_qwen3_vl", "tiny_qwen3_vl_moe"
CONTEXT = 512
LEFT_OUT = "model.visual.merger.linear_fc1.weight"
PARAMS = SamplingParams(n=2, max_new_tokens=6)


@dataclass
class Served:
    """Holds a running server, its model, and the items in its media folder."""

    process: EngineProcess
    launch: EngineLaunch
    model: Any
    tower: VisionTower
    media: Path
    version: int = 0

    def client(self) -> EngineClient:
        return build_client(
            self.launch.engine,
            self.process.url,
            model_folder=self.launch.model_folder,
            token_file=self.launch.token_file,
            media_folder=self.media,
        )

    def generate(self, prompts: Sequence[PromptRequest], params: SamplingParams = PARAMS) -> list[Generated]:
        async def collect(client: EngineClient) -> list[Generated]:
            try:
                return [response async for response in client.generate(prompts, params)]
            finally:
                await client.aclose()

        return sorted(asyncio.run(collect(self.client())), key=lambda response: (response.prompt, response.sample))

    def publish(
        self, weights: list[tuple[str, torch.Tensor]], folder: Path, *, by_disk: bool = False, frozen: str = "-"
    ) -> None:
        """Publishes the next version. Weights with ``frozen`` in their name go to a separate file."""
        self.version += 1
        path = folder / f"v{self.version}"
        path.mkdir(parents=True)
        names = [name for name, _ in weights if frozen in name]
        manifest = VersionWriter(folder, frozen=names, model_folder=None).write(path, self.version, weights)
        client = self.client()
        (client.update_weights_from_disk if by_disk else client.update_weights)(manifest)

    def item(self, frames: np.ndarray, *, is_video: bool = False) -> MediaItem:
        return encoded(frames, self.tower, self.media, is_video=is_video)

    def shown(self, item: MediaItem, *, around: Sequence[int] = (5, 6)) -> list[list[int] | MediaItem]:
        """Returns the parts of a prompt with an item. A video already includes its marks."""
        if item.kind == "video":
            return [list(around), item]
        return [[*around, self.tower.vision_start_token_id], item, [self.tower.vision_end_token_id]]

    def gap(self, request: PromptRequest, frames: list[np.ndarray], params: SamplingParams = PARAMS) -> float:
        """Returns the largest log-prob difference to transformers. Checks that both count the same number of tokens."""
        worst = 0.0
        for response in self.generate([request], params):
            assert response.prompt_tokens == len(request.input_ids) - request.generated
            expected = reference_logprobs(self.model, self.tower, request, frames, response.output_ids.tolist())
            worst = max(worst, float((torch.tensor(response.logprobs) - expected).abs().max()))
        return worst


def serve(sglang_launch: EngineLaunch, started: Started, folder: Path, *, name: str) -> Served:
    """Starts a server with a tiny model. The prefill of the test prompts takes several chunks."""
    model_folder, media = folder / "model", folder / "media"
    model_folder.mkdir()
    media.mkdir()
    model = make_vision_model(model_folder, name=name, seed=0)
    tower = vision_tower(model_folder)
    assert tower is not None
    engine = replace(
        sglang_launch.engine, context_length=CONTEXT, max_total_tokens=8 * CONTEXT, flags={"chunked-prefill-size": 32}
    )
    launch = replace(
        sglang_launch, model_folder=model_folder, engine=engine, log_file=folder / "log", media_folder=media
    )
    return Served(started.start(launch), launch, model, tower, media)


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    with Started() as started:
        yield started


@pytest.fixture(scope="module")
def served(sglang_launch: EngineLaunch, started: Started, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    dense = serve(sglang_launch, started, tmp_path_factory.mktemp("dense"), name=DENSE)
    yield dense
    dense.process.stop(timeout_s=10.0)


def mixed_prompt(served: Served, seed: int = 0) -> tuple[PromptRequest, list[np.ndarray]]:
    """Returns a prompt of text, an image, a video of an odd number of frames, and another image."""
    frames = [frames_of(1, 32, 48, seed=seed), frames_of(5, 32, 32, seed=seed + 1), frames_of(1, 48, 32, seed=seed + 2)]
    items = [served.item(array, is_video=len(array) > 1) for array in frames]
    return prompt(*(part for item in items for part in served.shown(item)), [7, 8]), frames


def test_logprobs_and_prompt_counts_are_those_of_transformers(served: Served) -> None:
    """Tests text, an image, a video, all in one prompt, and the continuation of a response of an earlier request."""
    image, video = frames_of(1, 32, 48, seed=3), frames_of(4, 32, 32, seed=4)
    assert served.gap(prompt([5, 6, 7, 8]), []) <= REACH
    assert served.gap(prompt(*served.shown(served.item(image)), [9]), [image]) <= REACH
    assert served.gap(prompt(*served.shown(served.item(video, is_video=True)), [9]), [video]) <= REACH
    request, frames = mixed_prompt(served)
    assert len(request.input_ids) > 64, "the prefill takes three chunks"
    assert served.gap(request, frames) <= REACH
    (first,) = served.generate([request], replace_n(1))
    begun = msgspec.structs.replace(request, input_ids=request.input_ids + first.output_ids[:2].tolist(), generated=2)
    (rest,) = served.generate([begun], replace_n(1))
    assert rest.output_ids.tolist() == first.output_ids[2:].tolist()
    assert np.abs(rest.logprobs - first.logprobs[2:]).max() <= REACH


def replace_n(n: int) -> SamplingParams:
    return msgspec.structs.replace(PARAMS, n=n)


def test_given_tokens_are_scored_with_their_media(served: Served) -> None:
    """A different image changes the scores, and so do two exchanged images."""
    first, second = (served.item(frames_of(1, 32, 48, seed=seed)) for seed in (10, 11))
    rest = [7, 8, 9, 10]
    prompts = [
        prompt(*served.shown(first), *served.shown(second), rest),
        prompt(*served.shown(second), *served.shown(first), rest),
        prompt(*served.shown(first), *served.shown(first), rest),
    ]
    found = served.client().score(
        [
            TokensToScore(input_ids=request.input_ids, first=len(request.input_ids) - 3, media=request.media)
            for request in prompts
        ],
        top_k=0,
        temperature=1.0,
    )
    for request, scores in zip(prompts, found, strict=True):
        frames = [dict_frames(served, media.item) for media in request.media]
        cut = msgspec.structs.replace(request, input_ids=request.input_ids[:-3])
        expected = reference_logprobs(served.model, served.tower, cut, frames, rest[1:])
        assert float((torch.tensor(scores.logprobs) - expected).abs().max()) <= REACH
    assert np.abs(found[0].logprobs - found[1].logprobs).max() > 1e-3
    assert np.abs(found[0].logprobs - found[2].logprobs).max() > 1e-3


def test_the_embedded_engine_gives_the_same(served: Served, launch: EngineLaunch, started: Started) -> None:
    """Compares prompt counts, and the log-probs of SGLang's sampled tokens and of the last prompt tokens."""
    requests = [mixed_prompt(served, seed=60)[0], prompt([5, 6, 7, 8])]
    found = served.generate(requests, PARAMS)
    engine = replace(launch.engine, context_length=CONTEXT)
    folders = {"model_folder": served.launch.model_folder, "media_folder": served.media}
    process = started.start(replace(launch, engine=engine, **folders))  # type: ignore[arg-type]
    embedded = Engine(process)
    counts = {response.prompt: response.prompt_tokens for response in embedded.generate(requests, replace_n(1))}
    assert [response.prompt_tokens for response in found] == [counts[response.prompt] for response in found]
    given = [
        TokensToScore(
            input_ids=requests[response.prompt].input_ids + response.output_ids.tolist(),
            first=len(requests[response.prompt].input_ids) - 2,
            media=requests[response.prompt].media,
        )
        for response in found
    ]
    ours = embedded.client.score(given, top_k=0, temperature=1.0)
    theirs = served.client().score(given, top_k=0, temperature=1.0)
    process.stop(timeout_s=10.0)
    for response, mine, theirs_of_row in zip(found, ours, theirs, strict=True):
        assert np.abs(mine.logprobs - theirs_of_row.logprobs).max() <= REACH
        assert np.abs(mine.logprobs[2:] - response.logprobs).max() <= REACH


def dict_frames(served: Served, item: MediaItem) -> np.ndarray:
    from relax_core.contracts.media_file import FolderReader

    return FolderReader(served.media).tensors(item)["frames"]


def test_a_new_tower_sees_the_same_picture_anew(served: Served, tmp_path: Path) -> None:
    """Changes only the tower: the scores of image prompts change, and the scores of text prompts keep their bits."""
    image = frames_of(1, 32, 48, seed=20)
    pictured, text = prompt(*served.shown(served.item(image)), [9], rid="image"), prompt([11, 12, 13], rid="text")
    greedy = SamplingParams(max_new_tokens=4, temperature=0.0)
    before = [served.generate([request], greedy)[0] for request in (pictured, text)]
    weights = published_weights(served.model)
    with torch.no_grad():
        for name, parameter in served.model.named_parameters():
            if "visual" in name:
                parameter.mul_(1.5)
    try:
        served.publish(published_weights(served.model), tmp_path)
        after = [served.generate([request], greedy)[0] for request in (pictured, text)]
        assert abs(float(after[0].logprobs[0]) - float(before[0].logprobs[0])) > 1e-3
        assert after[1].logprobs.tobytes() == before[1].logprobs.tobytes()
        assert {int(response.versions[0]) for response in after} == {served.version}
        assert served.gap(pictured, [image]) <= REACH
    finally:
        served.model.load_state_dict(dict(weights), strict=False)


@pytest.mark.parametrize("by_disk", [False, True])
def test_weights_without_a_part_of_the_tower_are_never_served(served: Served, tmp_path: Path, by_disk: bool) -> None:
    """SGLang skips unknown names. The version is refused because some parameters received no weights."""
    weights = published_weights(served.model)
    renamed = [(name.replace(".visual.", ".vision.") if name == LEFT_OUT else name, tensor) for name, tensor in weights]
    with pytest.raises(EngineError, match=r"1 of its parameters: visual\.merger\.linear_fc1\.weight; it serves"):
        served.publish(renamed, tmp_path, by_disk=by_disk)
    assert served.client().model_info()["weight_version"] == "-1"
    served.publish(weights, tmp_path)
    request, frames = mixed_prompt(served, seed=30)
    assert served.gap(request, frames) <= REACH


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{missing}:3", "there is no such item"),
        ("../secret:3", "32 hexadecimal digits"),
        ("/etc/passwd", "digest:row"),
        ("{there}:2", "are not the item's"),
        ("{there}:-1", "digest:row"),
        (None, "stands for an image, video or sound"),
    ],
)
def test_an_item_that_is_not_there_is_status_400(served: Served, entry: str | None, message: str) -> None:
    item = served.item(frames_of(1, 32, 48, seed=40))
    request = prompt(*served.shown(item), [7])
    names = [entry.format(missing="0" * 32, there=item.digest)] if entry is not None else []
    other_item = served.item(frames_of(1, 32, 32, seed=41))  # then the other image gets another position
    more = prompt(*served.shown(other_item), [7])
    body = {
        "input_ids": [request.input_ids, more.input_ids],
        "image_data": [names or [f"{other_item.digest}:3"], [f"{other_item.digest}:{more.media[0].start}"]],
        "sampling_params": {"max_new_tokens": 1},
    }
    if entry is None:
        body["input_ids"] = [[*request.input_ids, *more.input_ids], more.input_ids]
        body["image_data"][0] = [f"{other_item.digest}:{len(request.input_ids) + more.media[0].start}"]  # type: ignore[index]
    status, answer = post(served, body)
    assert (status, message in answer) == (400, True), answer


def post(served: Served, body: dict[str, Any]) -> tuple[int, str]:
    call = urllib.request.Request(
        f"{served.process.url}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"},
    )
    try:
        with urllib.request.urlopen(call, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_experts_see_too(sglang_launch: EngineLaunch, started: Started, tmp_path: Path) -> None:
    """Compares at the start, and after an update in the published layout of fused, transposed experts."""
    served = serve(sglang_launch, started, tmp_path, name=EXPERTS)
    try:
        request, frames = mixed_prompt(served)
        assert served.gap(request, frames) <= REACH
        served.model = make_vision_model(None, name=EXPERTS, seed=1)
        served.publish(published_weights(served.model), tmp_path)
        assert served.gap(request, frames) <= REACH
    finally:
        served.process.stop(timeout_s=10.0)


def test_a_server_of_somebody_elses_gets_images_and_no_video(
    sglang_launch: EngineLaunch, started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses SGLang's processor of Qwen3-VL. Weights are loaded from disk, and SGLang's feature cache survives updates.

    The first version that the server receives shows whether it loads all parameters.
    """
    monkeypatch.setattr("relax_core.engines.sglang.sglang_spec.MEDIA_PACKAGE", "")
    served = serve(sglang_launch, started, tmp_path, name=DENSE)
    try:
        served.launch = replace(
            served.launch,
            engine=replace(served.launch.engine, urls=[served.process.url], token_file=str(served.launch.token_file)),
        )
        client = served.client()
        assert isinstance(client, SglangClient) and not client.has_loader
        client.forget_weights()
        without_a_part = [weight for weight in published_weights(served.model) if weight[0] != LEFT_OUT]
        with pytest.raises(EngineError, match=r"1 of its parameters: visual\.merger\.linear_fc1\.weight$"):
            served.publish(without_a_part, tmp_path, by_disk=True)
        assert served.client().model_info()["weight_version"] == "-1"
        served.publish(published_weights(served.model), tmp_path, by_disk=True)
        first, second = frames_of(1, 32, 48, seed=50), frames_of(1, 48, 32, seed=51)
        request = prompt(*served.shown(served.item(first)), *served.shown(served.item(second)), [7])
        assert served.gap(request, [first, second]) <= REACH
        with torch.no_grad():
            for name, parameter in served.model.named_parameters():
                if "visual" in name:
                    parameter.mul_(1.5)
        served.publish(published_weights(served.model), tmp_path, by_disk=True, frozen=".visual.")
        assert served.gap(request, [first, second]) <= REACH
        video = served.item(frames_of(4, 32, 32, seed=52), is_video=True)
        with pytest.raises(EngineError, match=r"engine\.urls names takes images only, and the prompt has a video"):
            served.generate([prompt(*served.shown(video), [7])])
        with pytest.raises(EngineError, match=r"scores of prompts with images are not possible at a server that"):
            client.score(
                [TokensToScore(input_ids=request.input_ids, first=1, media=request.media)], top_k=0, temperature=1.0
            )
    finally:
        served.process.stop(timeout_s=10.0)
