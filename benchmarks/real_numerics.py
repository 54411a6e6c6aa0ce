"""Compares log-probs and gradients on real weights with transformers: trainer, embedded engine and SGLang.

    python -m benchmarks.real_numerics [--prompts 200 --gradients 20 --greedy 64 --bfloat16 20] [--model FOLDER]

The prompts are chats, sums and word problems (tests/real/prompts.py). The embedded engine samples the answers at
temperature 1. All computations are in float32, except the bfloat16 rows. The row `transformers bfloat16` is the
difference between transformers in bfloat16 and transformers in float32, on the same tokens. A gradient's difference is
relative to the largest entry of its tensor. The reference for gradients is transformers in float64; transformers in
float32 is also shown.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.engines import engine_kinds
from benchmarks.families import POLICY_GRADIENT, accumulated, logprobs_of
from benchmarks.one_rank import one_rank_setup
from relax_core.contracts.algorithm import AlgorithmConfig
from relax_core.contracts.tree import TokenTree
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.build_client import build_client
from relax_core.engines.embedded.decoder import Decoder, Prefix, ScoreItem, score
from relax_core.engines.embedded.decoder_model import LanguageModel
from relax_core.engines.embedded.fused_weights import FusedWeights
from relax_core.engines.embedded.model_config import read_model_config
from relax_core.engines.embedded.token_sampler import SamplingSettings, sample_keys
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import TokensToScore
from relax_core.families.pretrained import pretrained_folder
from relax_core.weights.folder_stream import read_safetensors
from tests.real.prompts import conversations
from tests.trees import answers_tree, of_tokens

CONTEXT, NEW_TOKENS = 256, 16
AT_ONCE = 32  # number of samples that the engine decodes together


@dataclass(frozen=True)
class Answer:
    """Holds a prompt and its answer with the log-probs of the engine that sampled it."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.ids]


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def embedded_model(folder: Path, dtype: torch.dtype = torch.float32) -> LanguageModel:
    config = read_model_config(folder)
    weights = FusedWeights(config, dtype)
    weights.apply(weights.checked(read_safetensors(folder)))
    return LanguageModel(config, weights, context_length=CONTEXT)


@torch.inference_mode()
def answers(
    engine: LanguageModel,
    prompts: Sequence[list[int]],
    *,
    temperature: float,
    stop: Sequence[int],
    new_tokens: int = NEW_TOKENS,
) -> list[Answer]:
    """Returns one answer to each prompt, decoded in one batch."""
    decoder = Decoder(
        engine, dtype=torch.float32, max_samples=len(prompts), max_tokens=len(prompts) * CONTEXT, context_length=CONTEXT
    )
    settings = SamplingSettings(
        max_new_tokens=new_tokens,
        temperature=temperature,
        top_p=1.0,
        top_k=-1,
        stop_token_ids=tuple(stop),
        banned_token_ids=(),
    )
    done = decoder.admit(
        [
            Prefix(token_ids=prompt, settings=settings, keys=sample_keys([index], 1)[0])
            for index, prompt in enumerate(prompts)
        ]
    )
    ended: dict[int, Answer] = {}
    running = list(range(len(prompts)))  # the prompt of each slot
    while running:
        for slot in map(int, done):
            ended[running[slot]] = Answer(prompts[running[slot]], *decoder.slots.output(slot))
        left = len(running) - len(done)
        for source, target in decoder.remove([int(slot) for slot in done]):
            running[target] = running[source]
        del running[left:]
        done = decoder.step() if running else done
    return [ended[index] for index in range(len(prompts))]


@torch.inference_mode()
def reference_logprobs(model: Any, given: Sequence[Answer]) -> Tensor:
    """Returns the log-probs of all answer tokens by transformers, float32 ``[tokens]``."""
    return torch.cat([logprobs_of(model, answer.tokens)[-len(answer.ids) :].float() for answer in given])


@torch.inference_mode()
def scored(model: LanguageModel, given: Sequence[Answer], dtype: torch.dtype) -> Tensor:
    """Returns the log-probs of all answer tokens by the embedded engine, ``[tokens]``."""
    items = [
        ScoreItem(token_ids=answer.tokens, start=len(answer.prompt) - 1, top_k=1, temperature=1.0) for answer in given
    ]
    return torch.cat([torch.tensor(scores.logprobs) for scores in score(model, items, dtype=dtype)])


def groups_of(given: Sequence[Answer]) -> list[TokenTree]:
    """Returns for each answer a group of one sample, with random advantages."""
    random = np.random.default_rng(0)
    return [
        answers_tree(
            f"g{index}",
            np.array(answer.prompt, dtype=np.int32),
            [len(answer.ids)],
            np.array(answer.ids, dtype=np.int32),
            advantages=random.standard_normal(len(answer.ids)).astype(np.float32),
        )
        for index, answer in enumerate(given)
    ]


class Trainer:
    """Runs the Relax trainer on one rank."""

    def __init__(self, folder: Path, *, dtype: str = "float32") -> None:
        from relax_core.train.policy_backend import MegatronBackend

        setup = one_rank_setup(
            folder,
            family=None,
            dtype=dtype,
            algorithm=POLICY_GRADIENT,
            config=AlgorithmConfig("policy_gradient", 2),
        )
        self._backend = MegatronBackend(setup, temperature=1.0)

    def logprobs(self, given: Sequence[Answer]) -> Tensor:
        groups = groups_of(given)
        found = self._backend.logprobs(groups)
        return torch.from_numpy(np.concatenate([of_tokens(g, own) for g, own in zip(groups, found, strict=True)]))

    def gradients(self, given: Sequence[Answer]) -> dict[str, Tensor]:
        """Returns the gradients of the negative sum of log-probs times advantages, by Hugging Face names."""
        from relax_core.train.hf.hf_weights import HfWeights

        self._backend.begin_step(0)
        self._backend.accumulate(groups_of(given))
        weights = HfWeights(self._backend.models, self._backend.architecture, tensor_of=accumulated)
        return {name: tensor.clone() for name, tensor in weights.export()}


def reference_gradients(folder: Path, given: Sequence[Answer], dtype: torch.dtype) -> dict[str, Tensor]:
    model = transformers_model(folder, dtype)
    # SmolLM2's pad token is <|im_end|>, and every prompt contains it. transformers computes no gradient for the
    # embedding of a pad token. Relax has no pad tokens.
    model.get_input_embeddings().padding_idx = None
    for answer, group in zip(given, groups_of(given), strict=True):
        weights = torch.from_numpy(group.extras["advantages"]).to(dtype)
        (-(logprobs_of(model, answer.tokens)[-len(answer.ids) :] * weights).sum()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def gradient_gaps(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> tuple[float, str]:
    """Returns the largest difference relative to a tensor's largest entry, and the tensor's name."""
    return max(
        (float((found[name].double() - tensor).abs().max() / tensor.abs().max()), name)
        for name, tensor in exact.items()
    )


def served_logprobs(kind: str, folder: Path, given: Sequence[Answer]) -> Tensor | None:
    """Returns the log-probs of all answer tokens by an engine process, or None if the engine is not installed."""
    kinds = engine_kinds()
    if kind not in kinds:
        return None
    settings = replace(kinds[kind], context_length=CONTEXT, deterministic=True if kind == "sglang" else None)
    with tempfile.TemporaryDirectory() as name:
        token_file = Path(name) / "token"
        token_file.write_text("token-of-the-benchmark")
        launch = EngineLaunch(
            model_folder=folder,
            engine=settings,
            dtype="float32",
            token_file=token_file,
            log_file=Path(name) / "log",
            load_weights=True,
        )
        process = EngineProcess.start(launch)
        try:
            client = build_client(settings, process.url, model_folder=folder, token_file=token_file)
            rows = [TokensToScore(input_ids=answer.tokens, first=len(answer.prompt)) for answer in given]
            return torch.cat([torch.tensor(scores.logprobs) for scores in client.score(rows, top_k=0, temperature=1.0)])
        finally:
            process.stop(timeout_s=10.0)


def gap(name: str, found: Tensor, exact: Tensor) -> str:
    difference = (found - exact).abs()
    return f"| {name} | {len(exact):,} | {difference.max():.1e} | {difference.mean():.1e} |"


def main() -> None:
    arguments = _parse()
    folder = arguments.model or pretrained_folder("smollm2")
    tokenizer = PromptTokenizer(folder)
    prompts = [
        tokenizer.encode(conversation) for conversation in conversations(max(arguments.prompts, arguments.greedy))
    ]
    stop = list(tokenizer.stop_token_ids)
    engine = embedded_model(folder)
    reference = transformers_model(folder)
    given = [
        answer
        for first in range(0, arguments.prompts, AT_ONCE)
        for answer in answers(
            engine, prompts[first : min(first + AT_ONCE, arguments.prompts)], temperature=1.0, stop=stop
        )
    ]
    exact = reference_logprobs(reference, given)
    lines = ["| Log-probs against transformers in float32 | tokens | max | mean |", "| --- | --- | --- | --- |"]
    sampled = torch.tensor([value for answer in given for value in answer.logprobs])
    lines.append(gap("embedded engine, sampled tokens", sampled, exact))
    lines.append(gap("embedded engine, scored tokens", scored(engine, given, torch.float32), exact))
    trainer = Trainer(folder)
    lines.append(gap("trainer", trainer.logprobs(given), exact))
    served = served_logprobs("sglang", folder, given)
    lines.append("| SGLang | not installed | | |" if served is None else gap("SGLang", served, exact))
    if few := given[: arguments.bfloat16]:
        exact = exact[: sum(len(answer.ids) for answer in few)]
        rounded = transformers_model(folder, torch.bfloat16)
        lines.append(gap("transformers bfloat16", reference_logprobs(rounded, few), exact))
        half = scored(embedded_model(folder, torch.bfloat16), few, torch.bfloat16)
        lines.append(gap("embedded engine bfloat16", half, exact))
        lines.append(gap("trainer bfloat16", Trainer(folder, dtype="bfloat16").logprobs(few), exact))
    print("\n".join(lines))
    if few := given[: arguments.gradients]:
        truth = reference_gradients(folder, few, torch.float64)
        for name, found in (
            ("trainer", trainer.gradients(few)),
            ("transformers", reference_gradients(folder, few, torch.float32)),
        ):
            worst, tensor = gradient_gaps(found, truth)
            print(f"gradients of {len(few)} rows, {name} float32 against float64: {worst:.1e} at most ({tensor})")
    if few_prompts := prompts[: arguments.greedy]:
        equal = 0
        for first in range(0, len(few_prompts), AT_ONCE):
            for answer in answers(engine, few_prompts[first : first + AT_ONCE], temperature=0.0, stop=stop):
                whole = reference.generate(torch.tensor([answer.prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
                equal += list(answer.ids) == whole[0, len(answer.prompt) :].tolist()
        print(
            f"greedy answers (up to {NEW_TOKENS} tokens) equal to transformers' generate: {equal} of {len(few_prompts)}"
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; without it SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--gradients", type=int, default=20, help="number of rows for the comparison of gradients")
    parser.add_argument("--greedy", type=int, default=64, help="number of prompts with greedy answers")
    parser.add_argument("--bfloat16", type=int, default=20, help="answers that are computed in bfloat16")
    return parser.parse_args()


if __name__ == "__main__":
    main()
