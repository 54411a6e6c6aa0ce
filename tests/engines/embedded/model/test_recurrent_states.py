"""Compares the engine with transformers on gated delta nets: chunked prefill, padding, moving slots, retraction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_core.contracts.media import Media
from relax_core.contracts.media_file import FolderReader
from relax_core.engines.embedded import prefill
from relax_core.engines.embedded.decoder import Decoder, Prefix, ScoreItem
from relax_core.engines.embedded.decoder_model import LanguageModel
from relax_core.engines.embedded.fused_weights import FusedWeights
from relax_core.engines.embedded.model_config import read_model_config
from relax_core.engines.embedded.token_sampler import SamplingSettings, sample_keys
from relax_core.engines.embedded.tower_features import MediaFeatures
from relax_core.families.towers import Towers
from relax_core.tools.tiny_text import VISION_TOKENS, token_ids
from relax_core.weights.folder_stream import read_safetensors
from tests.vision_models import Seen, make_tiny_vision_model, text

TOLERANCE = 2e-5
CONTEXT = 600
BANNED = tuple(token_ids(vision=True)[token] for token in VISION_TOKENS)
HYBRID, HYBRID_EXPERTS = "tiny_qwen3_5", "tiny_qwen3_5_moe"


class Hybrid:
    """Holds a model in this process, and transformers' model with the same weights."""

    def __init__(self, folder: Path, name: str) -> None:
        self.reference = make_tiny_vision_model(folder / "model", name=name)
        self.seen = Seen(folder / "model", folder / "media")
        self.config = read_model_config(folder / "model")
        self.weights = FusedWeights(self.config, torch.float32)
        self.weights.apply(self.weights.checked(read_safetensors(folder / "model")))
        self.model = LanguageModel(self.config, self.weights, context_length=CONTEXT)

    def decoder(self, *, max_samples: int = 16, max_tokens: int = 64 * CONTEXT) -> Decoder:
        towers = Towers.of(self.config)
        assert towers is not None
        return Decoder(
            self.model,
            dtype=torch.float32,
            max_samples=max_samples,
            max_tokens=max_tokens,
            context_length=CONTEXT,
            features=MediaFeatures(
                towers, FolderReader(self.seen.folder), vision=self.weights.vision, audio=self.weights.audio
            ),
        )

    def scores(self, prompts: list[Any]) -> torch.Tensor:
        items = [ScoreItem(token_ids=ids, start=0, top_k=1, temperature=1.0, media=media) for ids, media in prompts]
        with torch.inference_mode():
            return torch.cat([torch.tensor(scores.logprobs) for scores in self.decoder().score(items)])

    def answer(self, ids: list[int], answer: list[int], media: Sequence[Media] = ()) -> torch.Tensor:
        """Returns transformers' log-probs of an answer, without the probabilities of banned tokens."""
        logits = self.seen.logits(self.reference, [*ids, *answer], media).logits[0, len(ids) - 1 : -1]
        logits[:, list(BANNED)] = -torch.inf
        return logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]

    def expected(self, prompts: list[Any]) -> torch.Tensor:
        return torch.cat([self.seen.logprobs(self.reference, ids, media) for ids, media in prompts])


@pytest.fixture(scope="module", params=[HYBRID, HYBRID_EXPERTS])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return Hybrid(tmp_path_factory.mktemp("hybrid"), request.param)


def prompts_of(seen: Seen) -> list[Any]:
    return [
        seen.prompt(text(70), seen.image(6, 7, seed=1), text(9), seen.video(3, 4, 3, seed=2), text(30)),
        (text(2), []),
        (text(64), []),
        (text(131), []),
    ]


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_a_prefill_in_pieces_is_that_of_transformers(
    hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Sequences of very different lengths share a batch, so most rows of the last chunks are padding."""
    prompts = prompts_of(hybrid.seen) if tokens != 1 else [(text(40), []), (text(3), [])]
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", tokens * len(prompts))
    torch.testing.assert_close(hybrid.scores(prompts), hybrid.expected(prompts), atol=TOLERANCE, rtol=0)


def prefix(ids: list[int], *, samples: int, seed: int, new: int, media: Any = None, **more: Any) -> Prefix:
    settings = SamplingSettings(
        max_new_tokens=new, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(), banned_token_ids=BANNED
    )
    keys = more.pop("keys", sample_keys([seed], samples)[0])
    return Prefix(token_ids=ids, settings=settings, keys=keys, media=media, **more)


def decoded(decoder: Decoder, prefixes: list[Prefix]) -> dict[int, tuple[list[int], list[float]]]:
    """Decodes samples to their ends. Returns ids and log-probs in the samples' order of admission."""
    found: dict[int, tuple[list[int], list[float]]] = {}
    with torch.inference_mode():
        finished = decoder.admit(prefixes)
        running = list(range(decoder.slots.count))
        while True:
            for slot in finished:
                found[running[slot]] = decoder.slots.output(int(slot))
            for source, target in decoder.remove(finished.tolist()):
                running[target] = running[source]
            del running[decoder.slots.count :]
            if not running:
                return found
            finished = decoder.step()


def test_eight_samples_that_end_at_different_times(hybrid: Hybrid) -> None:
    """Two prompts share a batch with padding. States move when a sample in a lower slot ends."""
    long, short = text(75, seed=1), text(6, seed=2)
    lengths = [64, 3, 17, 40]
    prefixes = [prefix(ids, samples=1, seed=7 + new, new=new) for ids in (long, short) for new in lengths]
    found = decoded(hybrid.decoder(), prefixes)
    for index, sent_prefix in enumerate(prefixes):
        ids, logprobs = found[index]
        assert len(ids) == sent_prefix.settings.max_new_tokens
        expected = hybrid.answer(list(sent_prefix.token_ids), ids)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=TOLERANCE, rtol=0)


def test_all_samples_of_a_prompt_begin_from_its_state(hybrid: Hybrid) -> None:
    ids, media = hybrid.seen.prompt(text(9), hybrid.seen.image(3, 4, seed=3), text(5))
    decoder = hybrid.decoder()
    with torch.inference_mode():
        (seen,) = decoder.media_inputs([(len(ids), media)])
    found = decoded(decoder, [prefix(ids, samples=8, seed=3, new=20, media=seen)])
    assert len({tuple(tokens) for tokens, _ in found.values()}) > 1
    for tokens, logprobs in found.values():
        expected = hybrid.answer(ids, tokens, media)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=TOLERANCE, rtol=0)


def test_states_are_counted_in_admission_and_freed(hybrid: Hybrid) -> None:
    decoder = hybrid.decoder(max_samples=8, max_tokens=1000)
    assert decoder.states is not None and decoder.state_columns > 1
    columns = 1000 // 4 - decoder.state_columns
    assert decoder.fits(samples=4, columns=columns) and not decoder.fits(samples=4, columns=columns + 1)
    assert decoder.nbytes == 0
    decoded(decoder, [prefix(text(5), samples=3, seed=1, new=4)])
    sample_bytes = 4 * decoder.state_columns * 2 * hybrid.config.num_kv_heads * hybrid.config.head_dim
    assert decoder.states.nbytes <= 3 * sample_bytes < 1.05 * decoder.states.nbytes
    decoder.free_cache()
    assert decoder.nbytes == 0
