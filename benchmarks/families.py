"""Compares every model family with transformers: log-probs and gradients of the trainer, log-probs of the engines.

    python -m benchmarks.families [--only NAME …]

The models are tiny and random, in float32 (benchmarks/family_models.py). The table has the largest absolute difference
of log-probs, and the largest difference of gradients relative to the largest entry of each tensor. `prefill`: log-probs
of every token of given sequences. `decode`: log-probs of sampled tokens; every token after the first uses the cache.
Engines run as processes. SGLang takes part if its environment exists (make sglang-cpu). Recorded results are in
benchmarks/results/families.json.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.engines import engine_kinds
from benchmarks.family_models import VARIANTS, VOCABULARY, make_family_model
from benchmarks.one_rank import one_rank_setup
from relax_core.contracts.algorithm import AlgorithmConfig, AlgorithmSpec, LossInputs, LossOutputs, Requirements
from relax_core.contracts.engine import PromptRequest, SamplingParams
from relax_core.contracts.tree import TokenTree
from relax_core.engines.build_client import build_client
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import EngineClient, TokensToScore
from tests.trees import answers_of, answers_tree, of_tokens, prompt_of

REACH = 2e-5
CONTEXT = 400  # tokens of an engine's context
COLUMNS = {
    "trainer": "trainer, log-probs",
    "gradients": "trainer, gradients",
    "embedded prefill": "embedded, prefill",
    "embedded decode": "embedded, decode",
    "sglang prefill": "SGLang, prefill",
    "sglang decode": "SGLang, decode",
}
PROMPTS = (1, 5, 33, 200)  # lengths
SCORED = ((2, 1), (40, 1), (390, 1), (300, 250))  # sequence length and index of the first scored token


def random_ids(length: int) -> list[int]:
    """Returns random token ids without special tokens."""
    return torch.randint(4, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def logprobs_of(model: Any, ids: Sequence[int]) -> Tensor:
    """Returns transformers' log-probs of all tokens after the first, ``[tokens - 1]``."""
    table = model(torch.tensor([list(ids)])).logits[0, :-1].log_softmax(-1)
    return table.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


# -- the trainer ------------------------------------------------------------------------------------------------------
def _loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutputs:
    return LossOutputs(loss_sum=-(inputs.logprobs * inputs.advantages).sum())


POLICY_GRADIENT = AlgorithmSpec(
    name="policy_gradient",
    summary="weighted log-probs, nothing else",
    config=AlgorithmConfig,
    requirements=lambda config: Requirements(old_logprobs="rollout"),
    check=lambda config: None,
    advantages=lambda inputs, config: inputs.rewards,
    loss=_loss,
    denominator=lambda totals, config: float(totals.tokens),
)


def _groups() -> list[TokenTree]:
    random = np.random.default_rng(0)
    groups = []
    for index, (prompt, lengths) in enumerate(((9, [5, 1, 8]), (150, [40, 7]), (1, [1, 60]))):
        tokens = sum(lengths)
        groups.append(
            answers_tree(
                f"g{index}",
                random.integers(0, VOCABULARY, prompt, dtype=np.int32),
                lengths,
                random.integers(0, VOCABULARY, tokens, dtype=np.int32),
                advantages=random.standard_normal(tokens).astype(np.float32),
            )
        )
    return groups


def trainer_gaps(
    folder: Path, model: Any, *, family: str | None = None, groups: Sequence[TokenTree] | None = None
) -> dict[str, float]:
    """Returns the largest difference of a log-prob, and the largest difference of a gradient relative to its tensor's
    largest entry. ``family`` is the plug-in file of a model without a built-in family. ``groups`` replaces the random
    groups.
    """
    from relax_core.train.hf.hf_weights import HfWeights
    from relax_core.train.policy_backend import MegatronBackend

    setup = one_rank_setup(
        folder,
        family=family or model.config.model_type,
        algorithm=POLICY_GRADIENT,
        config=AlgorithmConfig("policy_gradient", 2),
    )
    backend, groups = MegatronBackend(setup, temperature=1.0), list(groups or _groups())
    samples = [
        (np.concatenate([prompt_of(group), response]).tolist(), len(response))
        for group in groups
        for response in answers_of(group)
    ]
    expected = torch.cat([logprobs_of(model, ids)[-responded:] for ids, responded in samples])
    found = [of_tokens(group, own) for group, own in zip(groups, backend.logprobs(groups), strict=True)]
    gap = np.abs(np.concatenate(found) - expected.detach().numpy()).max()
    weights = torch.from_numpy(np.concatenate([group.extras["advantages"] for group in groups]))
    (-(expected * weights).sum()).backward()
    backend.begin_step(0)
    backend.accumulate(groups)
    ours = HfWeights(backend.models, backend.architecture, tensor_of=accumulated)
    theirs = _gradients(model)
    relative = [
        float((gradient - theirs[name]).abs().max() / theirs[name].abs().max()) for name, gradient in ours.export()
    ]
    return {"trainer": float(gap), "gradients": max(relative)}


def accumulated(parameter: torch.nn.Parameter) -> Tensor:
    gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return gradient


def _gradients(model: Any) -> Mapping[str, Tensor]:
    """Returns gradients by the tensor names on disk, because transformers fuses the experts of a layer in memory."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            found[name] = parameter.grad
            continue
        layer = name.split(".experts.")[0] + ".experts"
        for expert, gradient in enumerate(parameter.grad):
            if name.endswith("gate_up_proj"):
                gate, up = gradient.chunk(2)
                found |= {f"{layer}.{expert}.gate_proj.weight": gate, f"{layer}.{expert}.up_proj.weight": up}
            else:
                found[f"{layer}.{expert}.down_proj.weight"] = gradient
    return found


# -- engines ----------------------------------------------------------------------------------------------------------
@torch.no_grad()
def engine_gaps(client: EngineClient, model: Any) -> tuple[float, float]:
    """Returns the largest log-prob difference of scored tokens and of sampled tokens. Closes the client's streams."""
    rows = [TokensToScore(input_ids=random_ids(length), first=first) for length, first in SCORED]
    scores = client.score(rows, top_k=0, temperature=1.0)
    scored = [
        (logprobs_of(model, row.input_ids)[row.first - 1 :], score.logprobs)
        for row, score in zip(rows, scores, strict=True)
    ]
    prompts = [
        PromptRequest(rid=f"prompt-{place}", input_ids=random_ids(length), sampling_seed=place, min_version=0)
        for place, length in enumerate(PROMPTS)
    ]

    async def generate() -> list[tuple[Tensor, np.ndarray]]:
        found = []
        try:
            async for response in client.generate(prompts, SamplingParams(n=3, max_new_tokens=24)):
                ids = [*prompts[response.prompt].input_ids, *response.output_ids.tolist()]
                found.append((logprobs_of(model, ids)[-len(response.output_ids) :], response.logprobs))
        finally:
            await client.aclose()
        return found

    sampled = asyncio.run(generate())
    assert len(sampled) == 3 * len(prompts)
    return _largest(scored), _largest(sampled)


def _largest(pairs: Sequence[tuple[Tensor, np.ndarray]]) -> float:
    return max(float((wanted - torch.tensor(found)).abs().max()) for wanted, found in pairs)


def process_gaps(folder: Path, model: Any) -> dict[str, float]:
    """Starts every engine that can run on this machine and returns the differences."""
    token_file = folder / "token"
    token_file.write_text("token-of-the-benchmark")
    found = {}
    for name, engine in engine_kinds().items():
        settings = replace(engine, context_length=CONTEXT, deterministic=True if name == "sglang" else None)
        launch = EngineLaunch(
            model_folder=folder,
            engine=settings,
            dtype="float32",
            token_file=token_file,
            log_file=folder / f"{name}.log",
            load_weights=True,
        )
        process = EngineProcess.start(launch)
        try:
            client = build_client(settings, process.url, model_folder=folder, token_file=token_file)
            found[f"{name} prefill"], found[f"{name} decode"] = engine_gaps(client, model)
        finally:
            process.stop(timeout_s=10.0)
    return found


# -- the table --------------------------------------------------------------------------------------------------------
def measure(variants: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for variant in variants:
        with tempfile.TemporaryDirectory() as name:
            model = make_family_model(Path(name), variant)
            rows.append({"name": variant, **trainer_gaps(Path(name), model), **process_gaps(Path(name), model)})
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"| Model | {' | '.join(COLUMNS.values())} |", "| --- |" + " --- |" * len(COLUMNS)]
    for row in rows:
        figures = " | ".join(f"{row[name]:.1e}" if name in row else "–" for name in COLUMNS)
        lines.append(f"| {row['name']} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), metavar="NAME", help="these models")
    arguments = parser.parse_args()
    rows = measure(arguments.only or list(VARIANTS))
    print(table(rows))
    worst = max(row[name] for row in rows for name in COLUMNS if name in row)
    print(f"\nlargest: {worst:.1e}; to reach: {REACH:.0e}")


if __name__ == "__main__":
    main()
