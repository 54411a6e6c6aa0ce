"""Tests Qwen3-Omni's thinker on a real SGLang server against transformers: pictures, sounds, a sync."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from relax_core.tools.tiny_hearing import published_omni
from relax_core.tools.tiny_tokenizer import build_tokenizer
from relax_core.weights.version_writer import VersionWriter
from tests.contracts.engine.harness import Started

pytestmark = pytest.mark.sglang
REACH = 2e-5
CONTEXT = 512
BANNED = list(range(WORDS, 60))  # among them the tokens that begin an item, which transformers would look for
PARAMS = SamplingParams(n=2, max_new_tokens=6, banned_token_ids=BANNED)


class ServedThinker:
    """Is a running server of the tiny thinker, and transformers' model of the same weights."""

    def __init__(self, launch: EngineLaunch, started: Started, folder: Path) -> None:
        self.model = make_omni_model(folder / "model").eval()
        build_tokenizer(vision=True, audio=True).save_pretrained(folder / "model")
        self.items, self.reader = OmniItems(folder / "model", folder / "media"), FolderReader(folder / "media")
        towers = Towers.of(folder_architecture(folder / "model"))
        assert towers is not None
        self.towers, self.folder = towers, folder
        engine = replace(
            launch.engine,
            context_length=CONTEXT,
            max_total_tokens=8 * CONTEXT,
            flags={"chunked-prefill-size": 32},
            start_timeout_s=900.0,
        )
        self.launch = replace(
            launch,
            model_folder=folder / "model",
            engine=engine,
            log_file=folder / "log",
            media_folder=folder / "media",
        )
        self.process = started.start(self.launch)

    def client(self) -> Any:
        return build_client(
            self.launch.engine,
            self.process.url,
            model_folder=self.launch.model_folder,
            token_file=self.launch.token_file,
            media_folder=self.folder / "media",
        )

    def generate(self, request: PromptRequest) -> list[Generated]:
        async def collect(client: Any) -> list[Generated]:
            try:
                return [one async for one in client.generate([request], PARAMS)]
            finally:
                await client.aclose()

        return asyncio.run(collect(self.client()))

    def gap(self, request: PromptRequest) -> float:
        """Returns the largest log-prob difference to transformers; checks that both saw equally many tokens."""
        worst = 0.0
        for one in self.generate(request):
            assert one.prompt_tokens == len(request.input_ids)
            new = one.output_ids.tolist()
            tree: Any = SimpleNamespace(token_ids=np.array([*request.input_ids, *new]), media=request.media)
            with torch.no_grad():
                logits = omni_logits(self.model, tree, self.reader, self.towers)
            logits[:, BANNED] = float("-inf")
            table = logits[len(request.input_ids) - 1 : -1].log_softmax(-1)
            expected = table.gather(-1, torch.tensor(new)[:, None])[:, 0]
            worst = max(worst, float((torch.tensor(one.logprobs) - expected).abs().max()))
        return worst


@pytest.fixture(scope="module")
def thinker(sglang_launch: EngineLaunch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedThinker]:
    with Started() as started:
        one = ServedThinker(sglang_launch, started, tmp_path_factory.mktemp("omni"))
        yield one
        one.process.stop(timeout_s=10.0)


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


def requests(items: OmniItems) -> Sequence[PromptRequest]:
    """Text, a picture, clips of which one is shorter than a chunk, a picture between clips."""
    image, clips = items.image(4, 6), [items.clip(730), items.clip(10), items.clip(100)]
    return [
        request(9),
        request(4, image, 3),
        request(3, clips[0], 2, clips[1], 4),
        request(2, clips[2], 3, image, 2, clips[0], 5),
    ]


def test_the_server_computes_what_transformers_computes(thinker: ServedThinker) -> None:
    for one in requests(thinker.items):
        assert thinker.gap(one) <= REACH


def test_a_sync_brings_new_towers(thinker: ServedThinker) -> None:
    """All tensors of the thinker come, and none of talker and code2wav, which the server does not have."""
    heard = requests(thinker.items)[2]
    with torch.no_grad():
        for parameter in thinker.model.audio_tower.parameters():
            parameter.mul_(1.1)
    assert thinker.gap(heard) > REACH, "the server has the old tower"
    weights = [
        (f"thinker.{name}", one.contiguous()) for name, one in published_omni(thinker.model.state_dict().items())
    ]
    folder = thinker.folder / "versions" / "v1"
    folder.mkdir(parents=True)
    manifest = VersionWriter(folder.parent, frozen=[], model_folder=None).write(folder, 1, weights)
    thinker.client().update_weights(manifest)
    assert thinker.gap(heard) <= REACH


def test_a_video_between_whole_positions_is_refused(thinker: ServedThinker) -> None:
    with pytest.raises(Exception, match="fractions"):
        thinker.generate(request(2, thinker.items.video(3, 4, 4), 3))
