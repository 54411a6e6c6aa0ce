"""Compares Qwen3-Omni's thinker with transformers, over HTTP, on every kind of engine and with all kinds of media."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.parity_media import WORDS, around_item
from benchmarks.parity_omni import OmniItems, make_omni_model, omni_logits
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.media_file import FolderReader
from relax_core.engines.build_client import build_client
from relax_core.engines.engine_process import EngineLaunch
from relax_core.families.folder import folder_architecture
from relax_core.families.towers import Towers
from relax_core.tools.tiny_media import published_omni
from relax_core.tools.tiny_text import build_tokenizer
from relax_core.weights.version_writer import VersionWriter
from tests.contracts.engine.harness import ENGINES, Engine, Started
from tests.contracts.engine.vision_engine import long_body, read, take

REACH = 2e-5
CONTEXT = 512
BANNED = list(range(WORDS, 60))  # includes the tokens that begin an item, because transformers searches for them
PARAMS = SamplingParams(n=2, max_new_tokens=6, banned_token_ids=BANNED)


class ServedThinker:
    """Holds a running engine with the tiny thinker, and transformers' model with the same weights."""

    def __init__(self, launch: EngineLaunch, started: Started, folder: Path) -> None:
        self.kind = launch.engine.name
        self.model = make_omni_model(folder / "model").eval()
        build_tokenizer(vision=True, audio=True).save_pretrained(folder / "model")
        self.items, self.reader = OmniItems(folder / "model", folder / "media"), FolderReader(folder / "media")
        towers = Towers.of(folder_architecture(folder / "model"))
        assert towers is not None
        self.towers, self.folder = towers, folder
        engine = replace(launch.engine, context_length=CONTEXT, max_total_tokens=8 * CONTEXT, start_timeout_s=900.0)
        if self.kind == "sglang":
            engine = replace(engine, flags={"chunked-prefill-size": 32})
        self.launch = replace(
            launch,
            model_folder=folder / "model",
            engine=engine,
            log_file=folder / "log",
            media_folder=folder / "media",
            return_routed_experts=True,
        )
        self.process = started.start(self.launch)
        self.engine = Engine(self.process, self.kind)  # for calls of SGLang's routes

    def client(self) -> Any:
        return build_client(
            self.launch.engine,
            self.process.url,
            model_folder=self.launch.model_folder,
            token_file=self.launch.token_file,
            media_folder=self.folder / "media",
        )

    def generate(self, requests: Sequence[PromptRequest], params: SamplingParams = PARAMS) -> list[Generated]:
        async def collect(client: Any) -> list[Generated]:
            try:
                return [response async for response in client.generate(requests, params)]
            finally:
                await client.aclose()

        return asyncio.run(collect(self.client()))

    def gap(self, *requests: PromptRequest) -> float:
        """Returns the largest log-prob difference to transformers. Checks that both have the same number of tokens."""
        found = self.generate(requests)
        assert len(found) == PARAMS.n * len(requests)
        for response in found:
            assert response.prompt_tokens == len(requests[response.prompt].input_ids)
        return max(
            self.difference(requests[response.prompt], response.output_ids.tolist(), response.logprobs)
            for response in found
        )

    def difference(self, request: PromptRequest, new: list[int], logprobs: Any) -> float:
        """Returns the largest log-prob difference of a response to transformers."""
        ids = np.array([*request.input_ids, *new])
        with torch.no_grad():
            logits = omni_logits(self.model, _tree(ids, request.media), self.reader, self.towers)
        logits[:, BANNED] = float("-inf")
        table = logits[len(request.input_ids) - 1 : -1].log_softmax(-1)
        expected = table.gather(-1, torch.tensor(new)[:, None])[:, 0]
        return float((torch.tensor(logprobs) - expected).abs().max())

    def publish(self, version: int) -> None:
        """Serves the model's weights without talker and code2wav, as the next version."""
        weights = [
            (f"thinker.{name}", tensor.contiguous()) for name, tensor in published_omni(self.model.state_dict().items())
        ]
        folder = self.folder / "versions" / f"v{version}"
        folder.mkdir(parents=True)
        manifest = VersionWriter(folder.parent, frozen=[], model_folder=None).write(folder, version, weights)
        self.client().update_weights(manifest)


def _tree(token_ids: np.ndarray, media: Sequence[Media]) -> Any:
    return SimpleNamespace(token_ids=token_ids, media=media)


class RouterChoices:
    """Records the experts that transformers' routers choose. ``layers``: int64 ``[rows, per token]`` per layer."""

    def __init__(self, model: Any) -> None:
        self.layers: list[np.ndarray] = []
        routers = [layer.mlp.gate for layer in model.model.layers]
        self._hooks = [router.register_forward_hook(self._keep) for router in routers]

    def __enter__(self) -> RouterChoices:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, router: Any, inputs: Any, outputs: Any) -> None:
        self.layers.append(outputs[-1].view(-1, outputs[-1].shape[-1]).numpy())


@pytest.fixture(scope="module", params=ENGINES)
def thinker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedThinker]:
    launch = request.getfixturevalue("launch" if request.param == "embedded" else "sglang_launch")
    with Started() as started:
        served = ServedThinker(launch, started, tmp_path_factory.mktemp("omni"))
        yield served
        served.process.stop(timeout_s=10.0)


def request(*parts: int | MediaItem) -> PromptRequest:
    random = np.random.default_rng(len(parts))
    ids, media = list[int](), list[Media]()
    for part in parts:
        if not isinstance(part, MediaItem):
            ids += random.integers(0, 50, part).tolist()
            continue
        before, behind = around_item(part)
        media.append(Media(part, len(ids) + len(before), len(ids) + len(before) + part.rows))
        ids += [*before, *part.ids.tolist(), *behind]
    return PromptRequest(rid="p", input_ids=ids, sampling_seed=1, media=media)


def pictures_and_sounds(items: OmniItems) -> list[PromptRequest]:
    """Returns text, a picture, clips (one is shorter than a chunk), and a picture between clips."""
    image, clips = items.image(4, 6), [items.clip(730), items.clip(10), items.clip(100)]
    return [
        request(9),
        request(4, image, 3),
        request(3, clips[0], 2, clips[1], 4),
        request(2, clips[2], 3, image, 2, clips[0], 5),
    ]


def videos(items: OmniItems) -> list[PromptRequest]:
    """Returns prompts: a video, a video with its sound, all kinds, and a video with positions beyond the context."""
    video, heard = items.video(3, 4, 4), items.video_with_sound(3, 2, 4, frames=250)
    return [
        request(4, video, 3),
        request(2, heard, 6),  # transformers accepts no other sound or video here
        request(7, items.image(4, 6), 3, items.clip(250), 2, video, 5),
        request(3, items.video(6, 2, 4, seconds=10.0), 5),
    ]


def test_the_engine_computes_what_transformers_computes(thinker: ServedThinker) -> None:
    for asked in pictures_and_sounds(thinker.items):
        assert thinker.gap(asked) <= REACH


def test_a_sync_brings_new_towers(thinker: ServedThinker) -> None:
    """The sync updates all tensors of the thinker, but no tensor of talker and code2wav: the server lacks them.

    Only the audio tower's weights change. The sound was used before, so old features in the cache would be noticed.
    """
    words, seen, heard, _ = pictures_and_sounds(thinker.items)
    kept = [words, seen] if thinker.kind == "embedded" else []
    before = [[response.logprobs.tolist() for response in thinker.generate([asked])] for asked in kept]
    with torch.no_grad():
        for parameter in thinker.model.audio_tower.parameters():
            parameter.mul_(1.1)
    assert thinker.gap(heard) > REACH, "the server has the old tower"
    thinker.publish(1)
    assert thinker.gap(heard) <= REACH
    after = [[response.logprobs.tolist() for response in thinker.generate([asked])] for asked in kept]
    assert before == after, "text and pictures are equal to the bit"


def test_videos_have_their_own_positions(thinker: ServedThinker) -> None:
    """The positions of a video's rows, and of all rows after them, have fractions."""
    asked = [*videos(thinker.items), *pictures_and_sounds(thinker.items)]
    assert any(medium.item.fractional for prompt in asked for medium in prompt.media)
    assert thinker.gap(*asked) <= REACH


def test_every_row_that_is_seen_or_heard_has_its_experts(thinker: ServedThinker) -> None:
    asked = videos(thinker.items)[:3]
    params = msgspec.structs.replace(PARAMS, n=1, return_routed_experts=True)
    for response in thinker.generate(asked, params):
        media = asked[response.prompt].media
        ids = np.array([*asked[response.prompt].input_ids, *response.output_ids.tolist()])
        with torch.no_grad(), RouterChoices(thinker.model) as chosen:
            omni_logits(thinker.model, _tree(ids, media), thinker.reader, thinker.towers)
        expected = np.stack(chosen.layers, 1)[:-1]
        assert response.prompt_experts is not None and response.response_experts is not None
        found = np.concatenate([response.prompt_experts, response.response_experts]).reshape(expected.shape)
        assert np.array_equal(np.sort(found, -1), np.sort(expected, -1))


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_sample_has_the_tokens_of_a_calm_one(thinker: ServedThinker, mode: Any) -> None:
    """A retracted sample encodes its items again. After a video the positions have fractions."""
    asked = videos(thinker.items)[2]
    tokens: list[int] = []
    logprobs: list[float] = []
    with thinker.engine.stream(long_body(asked, PARAMS, mode, new=300, kind=thinker.kind)) as events:
        read(events, tokens, logprobs, count=8)
        thinker.engine.client.pause(mode)
        thinker.engine.client.resume()
        read(events, tokens, logprobs, count=len(tokens) + 24)
    calm: list[int] = []
    take(
        thinker.engine.post("/generate", long_body(asked, PARAMS, f"calm: {mode}", new=len(tokens), kind=thinker.kind)),
        calm,
        [],
    )
    assert tokens == calm
    assert thinker.difference(asked, tokens, logprobs) <= REACH
