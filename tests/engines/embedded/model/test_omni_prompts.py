"""Compares Qwen3-Omni's thinker in the embedded engine with transformers: all media kinds, in prefill and decode."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.parity_media import AUDIO, AUDIO_BEGIN, BEGIN, IMAGE, VIDEO, around_item
from benchmarks.parity_omni import OmniItems, make_omni_model, omni_logits
from relax_core.contracts.media import Media, MediaGone, MediaItem
from relax_core.contracts.media_file import FolderReader
from relax_core.engines.embedded import prefill
from relax_core.engines.embedded.decoder import Decoder, Prefix, ScoreItem
from relax_core.engines.embedded.decoder_model import LanguageModel
from relax_core.engines.embedded.fused_weights import FusedWeights
from relax_core.engines.embedded.model_config import read_model_config
from relax_core.engines.embedded.token_sampler import SamplingSettings, sample_keys
from relax_core.engines.embedded.tower_features import MediaFeatures
from relax_core.families.towers import Towers
from relax_core.weights.folder_stream import read_safetensors

OMNI_THINKER = Path(__file__).resolve().parents[4] / "examples" / "plugins" / "omni_thinker.py"
TOLERANCE = 2e-5
CONTEXT = 700
DECODED = 24
BANNED = (IMAGE, VIDEO, AUDIO, BEGIN, AUDIO_BEGIN)
Prompt = tuple[list[int], list[Media]]


class Thinker:
    """Holds the model in this process, and transformers' thinker with the same weights."""

    def __init__(self, folder: Path, *, alone: bool = False) -> None:
        """Loads a published folder. With ``alone`` loads transformers' folder of a thinker, with the plug-in family."""
        self.reference = make_omni_model(folder / "model").eval()
        self.items = OmniItems(folder / "model", folder / "media")
        self.reader = FolderReader(folder / "media")
        own = folder / "model"
        if alone:
            own = folder / "alone"
            self.reference.save_pretrained(own)
            for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
                shutil.copy(folder / "model" / name, own)
        config = read_model_config(own, family=str(OMNI_THINKER) if alone else None)
        towers = Towers.of(config)
        assert towers is not None
        self.towers = towers
        self.weights = FusedWeights(config, torch.float32)
        self.weights.apply(self.weights.checked(read_safetensors(own)))
        self.model = LanguageModel(config, self.weights, context_length=CONTEXT)

    def decoder(self) -> Decoder:
        vision, audio = self.weights.vision, self.weights.audio
        return Decoder(
            self.model,
            dtype=torch.float32,
            max_samples=8,
            max_tokens=8 * CONTEXT,
            context_length=CONTEXT,
            features=MediaFeatures(self.towers, self.reader, vision=vision, audio=audio),
        )

    def scores(self, *prompts: Prompt) -> torch.Tensor:
        items = [ScoreItem(token_ids=ids, start=0, top_k=1, temperature=1.0, media=media) for ids, media in prompts]
        with torch.inference_mode():
            return torch.cat([torch.tensor(scores.logprobs) for scores in self.decoder().score(items)])

    def logits(self, ids: Sequence[int], media: Sequence[Media]) -> torch.Tensor:
        tree: Any = SimpleNamespace(token_ids=np.array(ids), media=media)
        with torch.no_grad():
            return omni_logits(self.reference, tree, self.reader, self.towers)

    def expected(self, *prompts: Prompt) -> torch.Tensor:
        tables = [self.logits(*asked)[:-1].log_softmax(-1) for asked in prompts]
        wanted = [torch.tensor(ids[1:])[:, None] for ids, _ in prompts]
        return torch.cat([table.gather(-1, ids)[:, 0] for table, ids in zip(tables, wanted, strict=True)])

    def scene(self) -> list[Prompt]:
        """Returns prompts of all kinds: a video with audio, a clip of 0.1 s and a longer clip, and only text."""
        items = self.items
        image, video, clips = items.image(4, 6), items.video(3, 4, 4), [items.clip(730), items.clip(10)]
        return [
            prompt(7, image, 3, clips[0], 2, video, 5, clips[1], 4),
            prompt(2, items.video_with_sound(3, 2, 4, frames=250), 6),
            prompt(1, items.clip(100), 2),
            prompt(9),
        ]


def prompt(*parts: int | MediaItem) -> Prompt:
    random = np.random.default_rng(len(parts))
    ids, media = list[int](), list[Media]()
    for part in parts:
        if not isinstance(part, MediaItem):
            ids += random.integers(0, 50, part).tolist()
            continue
        before, behind = around_item(part)
        first = len(ids) + len(before)
        media.append(Media(part, first, first + part.rows))
        ids += [*before, *part.ids.tolist(), *behind]
    return ids, media


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Thinker:
    return Thinker(tmp_path_factory.mktemp("thinker"))


@pytest.mark.parametrize("tokens", [7, 512])
def test_prefill_in_pieces_is_that_of_transformers(
    thinker: Thinker, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    prompts = thinker.scene()
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", tokens * len(prompts))
    torch.testing.assert_close(thinker.scores(*prompts), thinker.expected(*prompts), atol=TOLERANCE, rtol=0)


def assert_decoded_as_transformers(thinker: Thinker, prompts: Sequence[Prompt]) -> list[float]:
    """Decodes a sample of each prompt. Returns the rotary position after each prompt, minus the prompt's tokens."""
    decoder = thinker.decoder()
    settings = SamplingSettings(
        max_new_tokens=DECODED, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(), banned_token_ids=BANNED
    )
    prefixes = []
    for number, (ids, media) in enumerate(prompts):
        [seen] = decoder.media_inputs([(len(ids), media)])
        assert not isinstance(seen, MediaGone)
        prefixes.append(Prefix(token_ids=ids, settings=settings, keys=sample_keys([number], 1)[0], media=seen))
    decoder.admit(prefixes)
    while not len(decoder.step()):
        pass
    for slot, (ids, media) in enumerate(prompts):
        new, logprobs = decoder.slots.output(slot)
        table = thinker.logits([*ids, *new], media)[len(ids) - 1 : -1]
        table[:, list(BANNED)] = float("-inf")
        expected = table.log_softmax(-1).gather(-1, torch.tensor(new)[:, None])[:, 0]
        assert len(new) == DECODED
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=TOLERANCE, rtol=0)
    return [0.0 if prefix.media is None else prefix.media.following for prefix in prefixes]


def test_a_thinker_alone_of_a_family_in_a_file_is_that_of_transformers(tmp_path: Path) -> None:
    """The family's file is shown in docs/plugins/audio_family.md."""
    alone = Thinker(tmp_path, alone=True)
    assert not alone.model.config.copied_prefixes
    prompts = alone.scene()
    torch.testing.assert_close(alone.scores(*prompts), alone.expected(*prompts), atol=TOLERANCE, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("seconds", [10.0, 10.03])
def test_seconds_may_move_positions_far_beyond_the_rows(thinker: Thinker, seconds: float) -> None:
    """The positions exceed the context length, both as whole numbers and as fractions."""
    long = prompt(3, thinker.items.video(8, 4, 4, seconds=seconds), 5)
    [beyond] = assert_decoded_as_transformers(thinker, [long])
    assert beyond > CONTEXT and bool(beyond % 1) == (seconds == 10.03)
    torch.testing.assert_close(thinker.scores(long), thinker.expected(long), atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_a_clip_keeps_the_bits_of_its_features_in_any_company(thinker: Thinker) -> None:
    clip, other_items = thinker.items.clip(250), [thinker.items.clip(3000), thinker.items.image(2, 2)]
    vision, audio = thinker.weights.vision, thinker.weights.audio

    def features(items: list[MediaItem]) -> torch.Tensor:
        found = MediaFeatures(thinker.towers, thinker.reader, vision=vision, audio=audio).of_items(items)
        features_of_clip = found[clip.digest]
        assert not isinstance(features_of_clip, MediaGone)
        assert not any(layer.any() for layer in features_of_clip.deepstack), "audio has no deepstack features"
        return features_of_clip.features

    alone = features([clip])
    assert torch.equal(alone, features([other_items[0], clip, other_items[1]])) and len(alone) == 2 * 13 + 7
    placed = [prompt(3, clip, 5), prompt(40, other_items[1], 2, other_items[0], 1, clip, 5)]
    decoder = thinker.decoder()
    for [seen] in (decoder.media_inputs([(len(ids), media)]) for ids, media in placed):
        assert seen is not None and not isinstance(seen, MediaGone)
        assert torch.equal(seen.features[-len(alone) :], alone), "at another place of a prompt"


def test_another_clip_and_two_clips_swapped_change_what_follows(thinker: Thinker) -> None:
    """The clips have equal lengths, so all prompts have the same tokens."""
    left, right, third = (thinker.items.clip(250) for _ in range(3))
    prompts = [prompt(3, *both, 5) for both in ((left, right), (right, left), (left, third))]
    assert prompts[0][0] == prompts[1][0] == prompts[2][0]
    answers = [thinker.scores(asked)[-5:] for asked in prompts]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (answers[i] - answers[j]).abs().max() > 1e-3
