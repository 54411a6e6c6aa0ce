"""What kept sets cost: telling them while decoding, and training over them. One thread, all ways in turns.

    python -m benchmarks.kept_sets [--vocab 56 151936] [--top-k 20] [--rounds 5] [--samples 32] [--tokens 32]

Decoding, in this process: everything kept; top_k and top_p alone, as an engine that tells nothing; these with their
kept sets. The model is random, 100k parameters beside its vocabulary; at --top-k -1 it keeps half of a large one.
Training: steps over the same tokens, with and without their kept sets. CPU seconds: the median of the rounds, and the
median of the ratios of each round to its first way.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import numpy as np
import torch

from benchmarks.one_rank import one_rank_setup
from benchmarks.tiny_model import demo_model
from relax_core.contracts.tree import TokenTree
from relax_core.contracts.trees.kept_tokens import KeptTokens
from relax_core.engines.embedded.model.decoder_model import LanguageModel
from relax_core.engines.embedded.model.fused_weights import FusedWeights
from relax_core.engines.embedded.model.model_config import read_model_config
from relax_core.engines.embedded.scheduler.decoder import Decoder
from relax_core.engines.embedded.scheduler.slots import Prefix
from relax_core.engines.embedded.scheduler.token_sampler import SamplingSettings, sample_keys
from relax_core.train.policy_backend import MegatronBackend
from relax_core.weights.folder_stream import read_safetensors
from tests.trees import answers_tree

PROMPT = list(range(4, 20))
STRETCH = 7.0
TOP_P = 0.95
TRUNCATED, TOLD = "truncated", "and told"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[56, 151_936])
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32, help="of a response")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for vocab in arguments.vocab:
        with tempfile.TemporaryDirectory() as name:
            _stretched_model(Path(name), vocab=vocab)
            _compare(Path(name), arguments)


def _stretched_model(folder: Path, *, vocab: int) -> None:
    model = demo_model(vocab=vocab)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    with torch.no_grad():
        model.model.norm.weight.mul_(STRETCH)
    model.save_pretrained(folder)


def _compare(folder: Path, arguments: argparse.Namespace) -> None:
    samples, tokens, rounds = arguments.samples, arguments.tokens, arguments.rounds
    decoder = _decoder(folder, samples)
    whole: dict[str, Any] = {"top_p": 1.0, "top_k": -1}
    truncated: dict[str, Any] = {"top_p": TOP_P, "top_k": arguments.top_k}
    ways = {"everything": whole, TRUNCATED: truncated, TOLD: {**truncated, "tells_kept": True}}

    def decode(way: str) -> TokenTree:
        settings = SamplingSettings(
            max_new_tokens=tokens, temperature=1.0, stop_token_ids=(), banned_token_ids=(), **ways[way]
        )
        return _decode(decoder, settings, samples)

    group = decode(TOLD)
    assert group.kept is not None
    sets = group.kept.take(group.tokens[1])
    sizes = sets.mask().sum(1)
    nbytes = sets.nbytes / sets.tokens
    print(
        f"\nvocabulary {group.kept.vocab_size:,}, {samples} samples of {tokens} tokens; a kept set has "
        f"{np.median(sizes):.0f} tokens in the median, {sizes.mean():.0f} in the mean, and takes {nbytes:.0f} bytes"
    )
    _table("decode", {way: partial(decode, way) for way in ways}, rounds)
    backend = MegatronBackend(one_rank_setup(folder), temperature=1.0)

    def step(of: TokenTree) -> None:
        backend.begin_step(0)
        backend.accumulate([of])
        backend.finish_step()

    without = replace(group, kept=None)
    _table("train step", {"everything": lambda: step(without), "kept sets": lambda: step(group)}, rounds)


def _decoder(folder: Path, samples: int) -> Decoder:
    config = read_model_config(folder)
    weights = FusedWeights(config, torch.float32)
    weights.apply(weights.checked(read_safetensors(folder)))
    return Decoder(
        LanguageModel(config, weights, context_length=512),
        dtype=torch.float32,
        max_samples=samples,
        max_tokens=samples * 512,
        context_length=512,
    )


def _decode(decoder: Decoder, settings: SamplingSettings, samples: int) -> TokenTree:
    """All samples of one prompt, as the trainer gets them."""
    with torch.inference_mode():
        decoder.admit([Prefix(token_ids=PROMPT, settings=settings, keys=sample_keys([0], samples)[0])])
        while len(decoder.step()) == 0:
            pass
        ids, logprobs = zip(*(decoder.slots.output(slot) for slot in range(samples)), strict=True)
        kept = [decoder.kept.of_slot(slot) for slot in range(samples)] if settings.tells_kept else None
        decoder.remove(range(samples))
    tokens = samples * settings.max_new_tokens
    return answers_tree(
        "g",
        PROMPT,
        [settings.max_new_tokens] * samples,
        np.concatenate(ids),
        logprobs=np.concatenate(logprobs),
        advantages=np.tile(np.array([1.0, -1.0], dtype=np.float32), tokens // 2),
        kept=None if kept is None else KeptTokens.joined(kept),
    )


def _table(what: str, ways: Mapping[str, Callable[[], object]], rounds: int) -> None:
    """The first round is warm-up."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, run in ways.items():
            start = time.process_time()
            run()
            if turn:
                seconds[way].append(time.process_time() - start)
    base = next(iter(seconds.values()))
    for way, found in seconds.items():
        ratio = statistics.median(one / other for one, other in zip(found, base, strict=True))
        print(f"  {what:11} {way:12} {1e3 * statistics.median(found):9.1f} ms {ratio:6.2f}")


if __name__ == "__main__":
    main()
