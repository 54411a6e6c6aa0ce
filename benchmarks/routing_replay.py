"""Measures the log-prob gap between a bfloat16 engine and a float32 trainer with and without routing replay (R3).

    python -m benchmarks.routing_replay [--seeds 5] [--prompts 32] [--json FILE]

A bfloat16 engine samples. A float32 trainer computes the log-probs of the same tokens twice: with its own routing and
with the engine's experts. So both columns have the same samples and weights. There are two models: the built-in model
after its warm start, and a random model of four layers with 16 experts, 4 per token, and longer responses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import numpy as np
import torch

from benchmarks.harness import started_engine
from benchmarks.one_rank import one_rank_parallel, one_rank_setup
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.tree import TokenTree
from relax_core.data.generated import example
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.families.tiny_configs import EXPERTS
from relax_core.tools.make_tiny import tiny_model_folder
from tests.trees import answers_tree, of_tokens

REACH = 5.0  # the largest gap must be reduced by this factor
SAMPLES = 16  # per prompt
VOCABULARY = 50


@dataclass(frozen=True, kw_only=True)
class Row:
    """Holds the result of one model and seed: gaps in nats over all response tokens. ``rerouted`` is the share of
    tokens for which the trainer's routing chooses another expert in some layer.
    """

    model: str
    seed: int
    tokens: int
    rerouted: float
    max_own: float
    max_replayed: float
    mean_own: float
    mean_replayed: float

    @property
    def fall(self) -> float:
        return self.max_own / self.max_replayed


def random_model(folder: Path, *, seed: int) -> None:
    """Writes a model of four layers with 16 experts, 4 per token. Its distributions are far from flat."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": None,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    model.save_pretrained(folder)


def task_prompts(folder: Path, *, count: int, seed: int) -> list[list[int]]:
    tokenizer = PromptTokenizer(folder)
    rows = [example("reverse_digits", split="train", seed=seed, index=index) for index in range(count)]
    return [tokenizer.encode([{"role": "user", "content": row.prompt}]) for row in rows]


def sample(folder: Path, prompts: Sequence[list[int]], *, new_tokens: int, seed: int, scratch: Path) -> list[TokenTree]:
    """Returns groups that a bfloat16 engine samples, with the engine's log-probs and experts."""
    requests = [
        PromptRequest(rid=str(place), input_ids=ids, sampling_seed=10_000 * seed + place)
        for place, ids in enumerate(prompts)
    ]
    params = SamplingParams(n=SAMPLES, max_new_tokens=new_tokens, return_routed_experts=True)
    found: dict[int, list[Generated]] = {}

    async def responses() -> None:
        async for response in client.generate(requests, params):
            found.setdefault(response.prompt, []).append(response)
        await client.aclose()

    with started_engine(scratch, folder, dtype="bfloat16") as (_, client):
        asyncio.run(responses())
    return [group_of(place, prompt, found[place]) for place, prompt in enumerate(prompts)]


def group_of(place: int, prompt: list[int], answers: Sequence[Generated]) -> TokenTree:
    parts = [answer.response_experts for answer in answers if answer.response_experts is not None]
    assert answers[0].prompt_experts is not None and len(parts) == len(answers)
    return answers_tree(
        f"g{place}",
        prompt,
        [len(answer.output_ids) for answer in answers],
        np.concatenate([answer.output_ids for answer in answers]),
        logprobs=np.concatenate([answer.logprobs for answer in answers]),
        routed_experts=np.concatenate([answers[0].prompt_experts, *parts]),
    )


def measure(name: str, seed: int, folder: Path, groups: Sequence[TokenTree]) -> Row:
    """Returns the gaps of one model and seed."""
    from relax_core.train.model.moe import routers
    from relax_core.train.policy_backend import MegatronBackend

    parallel = one_rank_parallel(micro_batch_tokens=1 << 30)
    setup = one_rank_setup(folder, overrides=[f"model={EXPERTS}"], parallel=parallel)
    backend = MegatronBackend(setup, temperature=1.0, trainable=False)
    replayed = _of_all_tokens(groups, backend.logprobs(groups))
    chosen: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda module, inputs, output: chosen.append(output[1]))
        for router in routers(backend.model_chunks)
    ]
    own = _of_all_tokens(groups, backend.logprobs([replace(group, extras={}) for group in groups]))
    for hook in hooks:
        hook.remove()
    computed = [group.extras["routed_experts"][group.end > np.arange(group.rows) + 1] for group in groups]
    engines = torch.from_numpy(np.concatenate(computed).astype(np.int64))
    same = torch.stack([here.gather(1, engines[:, layer]).all(1) for layer, here in enumerate(chosen)]).all(0)
    rollout = _of_all_tokens(groups, [group.logprobs for group in groups])
    return Row(
        model=name,
        seed=seed,
        tokens=len(rollout),
        rerouted=1.0 - float(same.float().mean()),
        max_own=float(np.abs(own - rollout).max()),
        max_replayed=float(np.abs(replayed - rollout).max()),
        mean_own=float(np.abs(own - rollout).mean()),
        mean_replayed=float(np.abs(replayed - rollout).mean()),
    )


def _of_all_tokens(groups: Sequence[TokenTree], columns: Sequence[np.ndarray]) -> np.ndarray:
    """Converts ``[rows]`` of each group to ``[tokens]`` of all groups."""
    return np.concatenate([of_tokens(group, column) for group, column in zip(groups, columns, strict=True)])


def measure_all(seeds: int, prompts: int) -> list[Row]:
    rows = []
    warm = tiny_model_folder(EXPERTS, task="reverse_digits")
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(seeds):
            asked = task_prompts(warm, count=prompts, seed=seed)
            groups = sample(warm, asked, new_tokens=8, seed=seed, scratch=Path(scratch))
            rows.append(measure(EXPERTS, seed, warm, groups))
            folder = Path(scratch) / f"random-{seed}"
            random_model(folder, seed=seed)
            asked = np.random.default_rng(seed).integers(4, VOCABULARY, (prompts, 16)).tolist()
            groups = sample(folder, asked, new_tokens=48, seed=seed, scratch=Path(scratch))
            rows.append(measure("random, 4 layers", seed, folder, groups))
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| model | seed | tokens | rerouted | max gap, own routing | with replay | fall | mean, own | with replay |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda result: (result.model, result.seed)):
        lines.append(
            f"| {row.model} | {row.seed} | {row.tokens} | {row.rerouted:.1%} | {row.max_own:.3f} | "
            f"{row.max_replayed:.3f} | {row.fall:.1f}x | {row.mean_own:.4f} | {row.mean_replayed:.4f} |"
        )
    for model in sorted({row.model for row in rows}):
        falls = [row.fall for row in rows if row.model == model]
        lines.append(f"{model}: the largest gap falls {statistics.median(falls):.1f}x (median of {len(falls)} seeds, ")
        lines[-1] += f"least {min(falls):.1f}x); required: {REACH:g}x"
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--json", type=Path, default=None, help="also write the rows here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure_all(arguments.seeds, arguments.prompts)
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) | {"fall": row.fall} for row in rows], indent=1))


if __name__ == "__main__":
    main()
