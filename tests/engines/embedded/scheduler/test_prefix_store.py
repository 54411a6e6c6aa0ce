"""Tests the cache of prefixes of finished responses: hits, misses, and the log-probs of later turns."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from relax_core.contracts.media import Media, MediaItem
from relax_core.engines.embedded.decoder import Decoder, PromptRoutes, ScoreItem
from relax_core.engines.embedded.decoder_model import LanguageModel
from relax_core.engines.embedded.fused_weights import FusedWeights
from relax_core.engines.embedded.kv_cache import BLOCK, KeptPrefix, PrefixStore
from relax_core.engines.embedded.model_config import read_model_config
from relax_core.engines.embedded.scheduler import Call, Progress, Prompt, Scheduler
from relax_core.engines.embedded.token_sampler import SamplingSettings
from relax_core.weights.folder_stream import read_safetensors
from tests.contracts.engine.harness import make_model, make_moe_model, random_prompt
from tests.vision_models import make_tiny_vision_model

GAP = 2e-5  # natural logs, float32
CONTEXT = 512


# -- the store ---------------------------------------------------------------------------------------------------------
def kept(token_ids: list[int], media: tuple[Media, ...] = ()) -> KeptPrefix:
    return KeptPrefix(token_ids=np.array(token_ids), media=media, kv=torch.zeros(1, 2, 1, len(token_ids), 4))


def found(store: PrefixStore, token_ids: list[int], media: tuple[Media, ...] = ()) -> int:
    """Returns the number of a prompt's tokens that the store serves."""
    kept_prefix = store.find(token_ids, media)
    return 0 if kept_prefix is None else kept_prefix.tokens


def test_the_longest_common_prefix_is_served_to_the_token_and_never_a_prompts_last() -> None:
    store = PrefixStore(1000)
    first, second = random_prompt(100, seed=1), random_prompt(60, seed=2)
    store.keep(kept(first))
    store.keep(kept(first[:70] + second))
    assert found(store, first[:90] + [0] * 20) == 90
    assert found(store, first[:70] + second[:5] + [0] * 9) == 75
    assert found(store, first) == 99
    assert found(store, second) == 0
    assert found(store, first[: BLOCK - 1] + second) == 0, "too short to be worth a copy"
    kept_prefix = store.find([*first, 4], ())
    assert kept_prefix is not None and kept_prefix.whole and not store.find(first, ()).whole  # type: ignore[union-attr]


def test_the_least_recently_used_is_dropped_and_a_longer_one_replaces_its_beginning() -> None:
    store = PrefixStore(300)
    a, b, c = (random_prompt(100, seed=seed) for seed in (1, 2, 3))
    for ids in (a, b):
        store.keep(kept(ids))
    store.keep(kept([*b, *c[:50]]))  # 250 tokens that begin with b
    assert store.nbytes == 250 * 2 * 4 * 4
    assert found(store, [*a, 0]) == 100  # now a is the most recently used entry
    store.keep(kept(c))
    assert (found(store, [*b, 0]), found(store, [*a, 0]), found(store, [*c, 0])) == (0, 100, 100)
    assert store.covers(a, ()) and store.covers(a[:80], ()) and not store.covers([*a, 1], ())
    assert store.covers(random_prompt(301), ()), "a prefix larger than the store is not copied"
    store.forget()
    assert (store.nbytes, found(store, [*a, 0])) == (0, 0)


def image(digest: str, start: int) -> Media:
    item = MediaItem(
        kind="image",
        digest=digest,
        token_ids=np.full(8, 9, dtype="<i4").tobytes(),
        offsets=np.zeros((3, 8), dtype="<i4").tobytes(),
        advance=1,
        placeholder=[9],
        grid=[1, 2, 16],
        width=1,
        height=1,
    )
    return Media(item, start, start + 8)


def test_another_image_of_the_same_ids_ends_the_common_prefix() -> None:
    store = PrefixStore(1000)
    ids = [*random_prompt(40), *[9] * 8, *random_prompt(40, seed=1)]
    store.keep(kept(ids, (image("a", 40),)))
    assert found(store, [*ids, 0], (image("a", 40),)) == 88
    assert found(store, [*ids, 0], (image("b", 40),)) == 40
    assert found(store, [*ids, 0]) == 40


# -- the engine --------------------------------------------------------------------------------------------------------
class Played:
    """Runs a scheduler with a model in this process, and plays episodes of several turns."""

    def __init__(self, folder: Path, *, keeps: int = 16384) -> None:
        config = read_model_config(folder)
        self.weights = FusedWeights(config, torch.float32)
        self.load(folder)
        self.decoder = Decoder(
            LanguageModel(config, self.weights, context_length=CONTEXT),
            dtype=torch.float32,
            max_samples=16,
            max_tokens=128 * CONTEXT,
            context_length=CONTEXT,
            prefix_cache_tokens=keeps,
        )
        self.scheduler = Scheduler(self.decoder, version=0)
        self.experts = config.experts is not None
        self.failures: list[str] = []

    def load(self, folder: Path) -> None:
        self.weights.apply(self.weights.checked(read_safetensors(folder)))

    def update(self, folder: Path, version: int) -> None:
        self.scheduler.replace_weights(lambda: self.load(folder), version)

    def ask(self, prompts: list[list[int]], *, new: int, seed: int = 0) -> list[Progress]:
        """Submits prompts. Returns a list, to which `work` adds the responses."""
        ended: list[Progress] = []
        call = Call(n=1)
        settings = SamplingSettings(
            max_new_tokens=new, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(), banned_token_ids=()
        )
        asked = [
            Prompt(call, index, "g", ids, settings, seed + index, 0, routes=PromptRoutes() if self.experts else None)
            for index, ids in enumerate(prompts)
        ]
        self.scheduler.submit(call.add(asked).submit(ended.extend, self.failures.append))
        return ended

    def work(self, steps: int = 1000) -> None:
        with torch.inference_mode():
            for _ in range(steps):
                while not self.scheduler._inbox.empty():
                    self.scheduler._inbox.get()()
                if self.scheduler._idle():
                    return
                self.scheduler._work()
                self.scheduler._deliver()

    def answers(self, prompts: list[list[int]], *, new: int, seed: int = 0) -> list[Progress]:
        ended = self.ask(prompts, new=new, seed=seed)
        self.work()
        assert not self.failures and len(ended) == len(prompts)
        return sorted(ended, key=lambda progress: progress.sample.prompt.index)

    def gap(self, progress: Progress) -> float:
        """Returns the largest log-prob difference to a complete prefill under the current weights."""
        prompt = progress.sample.prompt.token_ids
        item = ScoreItem(token_ids=prompt + progress.ids, start=len(prompt) - 1, top_k=1, temperature=1.0)
        with torch.inference_mode():
            (scores,) = self.decoder.score([item])
        return max(abs(a - b) for a, b in zip(progress.logprobs, scores.logprobs, strict=True))


@pytest.fixture(scope="module", params=["dense", "experts", "states"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    if request.param == "dense":
        make_model(path, seed=2)
    elif request.param == "experts":
        make_moe_model(path, seed=2)
    else:
        make_tiny_vision_model(path, name="tiny_qwen3_5")
    return path


def turns(played: Played, *, count: int = 3) -> Iterator[list[Progress]]:
    """Plays four episodes with the same prompt and observations of different lengths. Each turn adds a new prompt."""
    prompts = [random_prompt(70) for _ in range(4)]
    for turn in range(count):
        asked = [*prompts, random_prompt(90, seed=50 + turn)]
        answers = played.answers(asked, new=9, seed=100 * turn)
        yield answers
        prompts = [
            prompt + answer.ids + random_prompt(5 + 8 * index, seed=10 * turn + index)
            for index, (prompt, answer) in enumerate(zip(prompts, answers[:4], strict=True))
        ]


def test_turns_are_served_and_tokens_log_probs_and_experts_are_those_without_a_store(folder: Path) -> None:
    with_it, without = Played(folder), Played(folder, keeps=0)
    for number, (ours, theirs) in enumerate(zip(turns(with_it), turns(without), strict=True)):
        for progress, reference in zip(ours, theirs, strict=True):
            assert progress.ids == reference.ids
            np.testing.assert_allclose(progress.logprobs, reference.logprobs, atol=GAP, rtol=0)
            if with_it.experts:
                assert progress.routes is not None and reference.routes is not None
                assert (progress.routes == reference.routes).all()
                mine, their = progress.sample.prompt.routes, reference.sample.prompt.routes
                assert mine is not None and their is not None
                assert (np.asarray(mine.experts) == np.asarray(their.experts)).all()
            assert with_it.gap(progress) <= GAP
        cached = [progress.sample.prompt.cached_tokens for progress in ours]
        lengths = [len(progress.sample.prompt.token_ids) for progress in ours]
        if number == 0:  # the four episodes share one computation of the prompt
            assert cached == [0, 70, 70, 70, 0]
        else:  # without the observation and the answer's last token, which is never computed
            assert cached == [length - (6 + 8 * index) for index, length in enumerate(lengths[:4])] + [0]
        assert [progress.sample.prompt.cached_tokens for progress in theirs] == [0] * 5
    load = with_it.scheduler.load()
    assert load.prefill_tokens + load.cached_tokens == without.scheduler.load().prefill_tokens
    assert load.kv_cache_bytes > with_it.decoder.prefixes.nbytes > 0


def changed(folder: Path, into: Path) -> Path:
    """Copies a model's folder and changes the copy's weights."""
    shutil.copytree(folder, into)
    torch.manual_seed(0)
    for file in into.glob("*.safetensors"):
        tensors = {
            name: value + 0.1 * value.abs().mean() * torch.randn_like(value) for name, value in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    return into


def test_nothing_that_older_weights_computed_is_served(folder: Path, tmp_path: Path) -> None:
    """The second half of the test shows that the comparison detects a store that serves old entries."""
    newer = changed(folder, tmp_path / "newer")
    played = Played(folder)
    prompt, running = random_prompt(70), random_prompt(80, seed=1)
    (answer,) = played.answers([prompt], new=9)
    ended = played.ask([running], new=60)
    played.work(20)  # a response is running, and version 0 computed its prompt
    assert not ended
    played.update(newer, 1)
    played.work()
    for before in (answer, ended[0]):
        (after,) = played.answers([before.sample.prompt.token_ids + before.ids + random_prompt(6, seed=2)], new=9)
        states_again = before is ended[0] and played.decoder.states is not None  # version 1 prefilled again
        assert (after.sample.prompt.cached_tokens > 0) == states_again
        assert played.gap(after) <= GAP
    if played.decoder.states is not None:
        return  # with recurrent states, states of older weights are never served
    (before,) = played.answers([prompt], new=9, seed=7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "forget", lambda self: None)
        played.update(folder, 2)
    (after,) = played.answers([prompt + before.ids + random_prompt(6, seed=2)], new=9)
    assert played.gap(after) > 100 * GAP


def test_a_running_episodes_turn_goes_before_new_prompts(folder: Path) -> None:
    played = Played(folder)
    prompt = random_prompt(70)
    (answer,) = played.answers([prompt], new=9)
    filling = played.ask([random_prompt(20, seed=seed) for seed in range(16)], new=6)
    played.work(1)
    new = played.ask([random_prompt(20, seed=seed) for seed in range(40, 56)], new=30)
    played.work(1)
    turn = played.ask([prompt + answer.ids + [5] * 4], new=30)
    played.work(8)  # the first sixteen samples have ended
    assert len(filling) == 16 and not new and not turn
    load = played.scheduler.load()
    assert (load.running, load.queued) == (16, 1)
    played.work()
    assert turn[0].sample.prompt.call.first_prefill <= new[0].sample.prompt.call.first_prefill
    assert turn[0].sample.prompt.cached_tokens == 78


def test_one_turn_without_common_prefixes_keeps_its_bits(folder: Path) -> None:
    with_it, without = Played(folder), Played(folder, keeps=0)
    for step in range(3):
        prompts = [random_prompt(40 + 7 * index, seed=100 * step + index) for index in range(8)]
        for answer, reference in zip(with_it.answers(prompts, new=20), without.answers(prompts, new=20), strict=True):
            assert (answer.ids, answer.logprobs) == (reference.ids, reference.logprobs)
