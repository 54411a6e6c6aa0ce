"""Compares the engine with transformers on image and video prompts: chunked prefill, moving slots, cached features."""

from __future__ import annotations

import copy
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_core.contracts.media import Media, MediaGone, MediaItem
from relax_core.contracts.media_file import FolderReader
from relax_core.engines.embedded import prefill, tower_features
from relax_core.engines.embedded.decoder import Decoder, Prefix, ScoreItem
from relax_core.engines.embedded.decoder_model import LanguageModel
from relax_core.engines.embedded.embedded_spec import ROOT
from relax_core.engines.embedded.fused_weights import FusedWeights
from relax_core.engines.embedded.model_config import read_model_config
from relax_core.engines.embedded.prefill import SequenceMedia
from relax_core.engines.embedded.token_sampler import SamplingSettings, sample_keys
from relax_core.engines.embedded.tower_features import ItemFeatures, MediaFeatures
from relax_core.families.towers import Towers
from relax_core.tools.tiny_text import VISION_TOKENS, token_ids
from relax_core.weights.folder_stream import read_safetensors
from tests.contracts.engine.harness import make_model
from tests.vision_models import DENSE, EXPERTS, Seen, make_tiny_vision_model, text

TOLERANCE = 2e-5
CONTEXT = 600
BANNED = tuple(token_ids(vision=True)[token] for token in VISION_TOKENS)


class Seer:
    """Holds a multimodal model in this process, and transformers' model with the same weights."""

    def __init__(self, folder: Path, name: str, *, layers: int | None = None) -> None:
        self.reference = make_tiny_vision_model(folder / "model", name=name, layers=layers)
        self.seen = Seen(folder / "model", folder / "media")
        self.config = read_model_config(folder / "model")
        self.weights = FusedWeights(self.config, torch.float32)
        self.weights.apply(self.weights.checked(read_safetensors(folder / "model")))
        self.model = LanguageModel(self.config, self.weights, context_length=CONTEXT)

    def features(self, **options: Any) -> MediaFeatures:
        towers = Towers.of(self.config)
        assert towers is not None
        reader = FolderReader(self.seen.folder)
        return MediaFeatures(towers, reader, vision=self.weights.vision, audio=self.weights.audio, **options)

    def decoder(self, *, max_samples: int = 16, max_tokens: int = 16 * CONTEXT) -> Decoder:
        return Decoder(
            self.model,
            dtype=torch.float32,
            max_samples=max_samples,
            max_tokens=max_tokens,
            context_length=CONTEXT,
            features=self.features(),
        )

    def scores(self, *prompts: tuple[list[int], list[Media]]) -> torch.Tensor:
        items = [ScoreItem(token_ids=ids, start=0, top_k=1, temperature=1.0, media=media) for ids, media in prompts]
        with torch.inference_mode():
            return torch.cat([torch.tensor(scores.logprobs) for scores in self.decoder().score(items)])

    def expected(self, *prompts: tuple[list[int], list[Media]]) -> torch.Tensor:
        return torch.cat([self.seen.logprobs(self.reference, ids, media) for ids, media in prompts])


@pytest.fixture(scope="module", params=[DENSE, EXPERTS])
def seer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seer:
    return Seer(tmp_path_factory.mktemp("seer"), request.param)


def scene(seen: Seen) -> list[tuple[list[int], list[Media]]]:
    return [
        seen.prompt(text(70), seen.image(6, 7, seed=1), text(9), seen.video(3, 4, 3, seed=2), text(30)),
        seen.prompt(text(3), seen.image(1, 2, seed=3), text(2)),
        (text(64), []),
        seen.prompt(seen.image(2, 2, seed=4)),
    ]


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_a_prefill_in_pieces_gives_the_same(seer: Seer, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Chunks end inside items, and some chunks contain no row of an item."""
    prompts = scene(seer.seen)
    whole = seer.scores(*prompts)
    torch.testing.assert_close(whole, seer.expected(*prompts), atol=TOLERANCE, rtol=0)
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", tokens * len(prompts))
    torch.testing.assert_close(seer.scores(*prompts), whole, atol=TOLERANCE, rtol=0)


def test_text_keeps_its_bits_beside_a_picture(seer: Seer) -> None:
    """The text prompt shares both passes with the same other prompt: first with its image, then as text only."""
    picture = seer.seen.prompt(text(3), seer.seen.image(3, 3, seed=5), text(4))
    words = (text(len(picture[0])), [])
    beside = seer.scores(words, picture)[: len(words[0]) - 1]
    alone = seer.scores(words, (picture[0], []))[: len(words[0]) - 1]
    if seer.config.experts is None:
        assert torch.equal(beside, alone)
    else:  # the total number of tokens affects the rounding of an expert's product
        torch.testing.assert_close(beside, alone, atol=TOLERANCE, rtol=0)


def test_deepstack_rows_may_reach_the_last_layer(tmp_path: Path) -> None:
    """The engine then computes the last layer for all tokens, although few tokens are requested."""
    deep = Seer(tmp_path, DENSE, layers=2)
    assert deep.config.vision is not None and deep.config.vision.deepstack_layers == deep.config.num_layers == 2
    prompts = scene(deep.seen)
    torch.testing.assert_close(deep.scores(*prompts), deep.expected(*prompts), atol=TOLERANCE, rtol=0)


def prefix(decoder: Decoder, prompt: tuple[list[int], list[Media]], *, new: int, seed: int, n: int = 1) -> Prefix:
    settings = SamplingSettings(
        max_new_tokens=new, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(), banned_token_ids=BANNED
    )
    ids, media = prompt
    [seen] = decoder.media_inputs([(len(ids), media)])
    assert not isinstance(seen, MediaGone)
    return Prefix(token_ids=ids, settings=settings, keys=sample_keys([seed], n)[0], media=seen)


@torch.inference_mode()
def test_samples_decode_as_transformers_does_while_others_come_and_go(seer: Seer) -> None:
    """Slots move when samples end, and the rotary positions move with their samples."""
    rng = random.Random(5)
    decoder = seer.decoder(max_samples=6)
    prompts = [*scene(seer.seen), *scene(seer.seen)]
    waiting = [
        (prompt, prefix(decoder, prompt, new=rng.randint(3, 25), seed=index)) for index, prompt in enumerate(prompts)
    ]
    running: list[tuple[list[int], list[Media]]] = []
    checked = 0
    while waiting or running:
        finished = []
        if waiting and decoder.fits(samples=1, columns=waiting[0][1].columns):
            prompt, queued = waiting.pop(0)
            running.append(prompt)
            finished = decoder.admit([queued]).tolist()
        finished = finished or decoder.step().tolist()
        for slot in finished:
            ids, logprobs = decoder.slots.output(slot)
            before, media = running[slot]
            table = seer.seen.logits(seer.reference, before + ids, media).logits[0, len(before) - 1 : -1]
            table[:, list(BANNED)] = float("-inf")
            expected = table.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logprobs), expected, atol=TOLERANCE, rtol=0)
            checked += 1
        for source, target in decoder.remove(finished):
            running[target] = running[source]
        del running[decoder.slots.count :]
    assert checked == len(prompts)


@torch.inference_mode()
def test_positions_with_fractions_are_those_of_whole_ones_between_them(seer: Seer) -> None:
    """A media item moves positions by half a step. Decoding then computes angles that the rotary table lacks."""
    decoder = seer.decoder()
    prompt = scene(seer.seen)[0]
    first = prefix(decoder, prompt, new=4, seed=1)
    assert first.media is not None
    found = []
    for step in (0.0, 1e-7, 0.5, 1.0):
        alone = seer.decoder()
        alone.admit([replace(first, media=first.media._replace(following=first.media.following + step))])
        alone.step()
        found.append(alone.slots.output(0)[1])
    assert found[1] == pytest.approx(found[0], abs=TOLERANCE)
    assert found[2][0] == found[0][0] and found[2][1] != pytest.approx(found[0][1], abs=TOLERANCE)
    assert found[3][1] != pytest.approx(found[0][1], abs=TOLERANCE)


# -- features ---------------------------------------------------------------------------------------------------------
def of_item(features: MediaFeatures, item: MediaItem) -> ItemFeatures:
    found = features.of_items([item])[item.digest]
    assert isinstance(found, ItemFeatures)
    return found


@torch.inference_mode()
def test_features_are_kept_within_their_bytes(seer: Seer) -> None:
    images = [seer.seen.image(3, 3, seed=seed) for seed in range(4)]
    size = of_item(seer.features(), images[0]).nbytes
    features = seer.features(limit=2 * size)
    for image in (*images[:2], *images[:2]):
        of_item(features, image)
    assert (features.passes, features.nbytes) == (2, 2 * size)
    of_item(features, images[2])  # the first item's features are dropped
    of_item(features, images[1])
    assert features.passes == 3
    of_item(features, images[0])
    assert (features.passes, features.nbytes) == (4, 2 * size)
    features.forget()
    assert features.nbytes == 0
    of_item(features, images[0])
    assert features.passes == 5
    large = seer.features(limit=1)
    of_item(large, images[0])
    of_item(large, images[0])
    assert large.passes == 1, "the newest item is always kept"
    assert [len(found) for found in (large.of_items(images), large.of_items([]))] == [4, 0]
    assert (large.passes, large.nbytes) == (4, size), "more items than the cache holds are returned together"


@torch.inference_mode()
def test_items_that_are_asked_for_together_pass_the_tower_together(seer: Seer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An item gets the same features as in a separate pass, and its features do not keep other features alive."""
    seen = seer.seen
    items = [seen.image(3, 5, seed=7), seen.image(3, 5, seed=8), seen.video(2, 2, 2, seed=9), seen.image(6, 6, seed=10)]
    assert seer.weights.vision is not None
    passes: list[int] = []
    forward = seer.weights.vision.forward

    def counted(pixels: torch.Tensor, **others: Any) -> Any:
        passes.append(len(pixels))
        return forward(pixels, **others)

    monkeypatch.setattr(seer.weights.vision, "forward", counted)
    alone, together = seer.features(), seer.features()
    found = [of_item(alone, item) for item in items]
    assert passes == [item.patches for item in items]
    together.of_sequences([(100, seen.prompt(items[0], items[1])[1]), (9, []), (100, seen.prompt(*items[1:])[1])])
    assert passes[4:] == [sum(passes[:4])] and together.passes == 4
    for item, features in zip(items, found, strict=True):
        features_together = of_item(together, item)
        assert torch.equal(features.features, features_together.features)
        assert all(map(torch.equal, features.deepstack, features_together.deepstack))
        assert features_together.features.untyped_storage().nbytes() == features.features.untyped_storage().nbytes()
    monkeypatch.setattr(tower_features, "PASS_PATCHES", passes[0] + passes[1])
    seer.features().of_items(items)
    assert passes[5:] == [passes[0] + passes[1], passes[2], passes[3]]


@torch.inference_mode()
def test_an_item_that_is_gone_is_named_and_leaves_the_others(seer: Seer) -> None:
    gone, image = seer.seen.image(2, 2, seed=9), seer.seen.image(2, 2, seed=11)
    (seer.seen.folder / gone.digest).unlink()
    sequences = [(50, seer.seen.prompt(image, gone)[1]), (50, seer.seen.prompt(image)[1])]
    error, found = seer.features().of_sequences(sequences)
    assert re.match(rf"media {gone.digest} \[image 32×32\] cannot be read: .* no such item", str(error))
    assert isinstance(error, MediaGone) and isinstance(found, SequenceMedia)
    item = ScoreItem(token_ids=[7] * 50, start=0, top_k=1, temperature=1.0, media=sequences[0][1])
    with pytest.raises(MediaGone, match=gone.digest):
        seer.decoder().score([item])


# -- weights ----------------------------------------------------------------------------------------------------------
def test_experts_in_the_other_layout_are_refused(seer: Seer) -> None:
    tensors = dict(read_safetensors(seer.seen.model_folder))
    assert {tensors[name].ndim for name in tensors} >= {1, 2, 5}, "weights of any rank"
    if seer.config.experts is None:
        return
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name].transpose(1, 2)
    with pytest.raises(ValueError, match=r"misshapen: .*gate_up_proj is \[8, 80, 72\], the model has \[8, 72, 80\]"):
        seer.weights.checked(tensors.items())


def test_an_update_without_the_tower_is_refused(seer: Seer) -> None:
    tensors = [(name, tensor) for name, tensor in read_safetensors(seer.seen.model_folder) if ".visual." not in name]
    with pytest.raises(ValueError, match=r"missing: model\.visual\."):
        seer.weights.checked(tensors)


def test_a_text_model_imports_neither_transformers_nor_the_tower(tmp_path: Path) -> None:
    make_model(tmp_path, seed=0)
    (tmp_path / "token").write_text("token")
    options = ["--model-path", str(tmp_path), "--token-file", str(tmp_path / "token"), "--load-weights"]
    code = f"""
import sys
from relax_core.engines.embedded.__main__ import _arguments
from relax_core.engines.embedded.assembly import build_app
build_app(_arguments({options}), token="token")
print([name for name in ("transformers", "PIL", "av", "relax_core.families.tower_passes") if name in sys.modules])
"""
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert found.stdout.strip() == "[]"


@torch.inference_mode()
def test_bfloat16_is_no_further_off_than_that_of_transformers(seer: Seer) -> None:
    """The reference is float32 with the same weights rounded to bfloat16. Rotary frequencies are not rounded."""
    reference = copy.deepcopy(seer.reference)
    for parameter in reference.parameters():
        parameter.data = parameter.data.bfloat16()
    prompts = scene(seer.seen)[:2]
    theirs = torch.cat([seer.seen.logprobs(reference, ids, media).float() for ids, media in prompts])
    exact = torch.cat([seer.seen.logprobs(reference.float(), ids, media) for ids, media in prompts])
    half = copy.copy(seer)
    half.weights = FusedWeights(seer.config, torch.bfloat16)
    half.weights.apply(half.weights.checked(read_safetensors(seer.seen.model_folder)))
    assert half.weights.vision is not None
    assert {buffer.dtype for buffer in half.weights.vision.buffers()} == {torch.float32}
    decoder = Decoder(
        LanguageModel(seer.config, half.weights, context_length=CONTEXT),
        dtype=torch.bfloat16,
        max_samples=4,
        max_tokens=4 * CONTEXT,
        context_length=CONTEXT,
        features=half.features(),
    )
    items = [ScoreItem(token_ids=ids, start=0, top_k=1, temperature=1.0, media=media) for ids, media in prompts]
    ours = torch.cat([torch.tensor(scores.logprobs) for scores in decoder.score(items)])
    assert 0 < float((ours - exact).abs().mean()) <= 1.1 * float((theirs - exact).abs().mean())
