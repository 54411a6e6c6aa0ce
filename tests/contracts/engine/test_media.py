"""Compares prompts with images and videos with transformers, over HTTP, on every kind of engine that takes them."""

from __future__ import annotations

import json
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
from relax_core.engines.protocol.score_calls import TokensToScore
from relax_core.registry import find_engine
from relax_core.weights.version_file import write_weights
from tests.contracts.engine.harness import ENGINES, Engine, embedded_only
from tests.seeing import DENSE, EXPERTS, Seen, make_seeing_model, text
from relax_core.weights.folder_stream import read_safetensors

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
            banned = f"prompt-{index}"
            found.append(PromptRequest(rid=banned, input_ids=ids, sampling_seed=3 + index, media=media))
        return found

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
        from relax_core.tools.tiny_vision import write_published

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
    yield Seeing(Engine(process, kind), model, seen, name, folder)
    process.stop(timeout_s=5.0)


@pytest.fixture(scope="module", params=[(kind, name) for kind in ("embedded",) for name in (DENSE, EXPERTS)], ids=str)
def seeing(request: pytest.FixtureRequest, launch: EngineLaunch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind, name = request.param
    if not find_engine(kind).media:
        pytest.skip(f"{kind} takes no media")
    yield from start(launch, tmp_path_factory.mktemp("seeing"), name=name, kind=kind)


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
