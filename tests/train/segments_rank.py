"""Trains episodes of several turns, whole and cut into segments of equal contexts, with every algorithm.

`python segments_rank.py <folder>` makes a model there, and writes what a single process finds with the whole episodes,
and each of two ranks with the cut ones in every layout, as <name>.safetensors. test_segments.py compares them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forked_ranks import run_alone_and_on_two_ranks
from safetensors.torch import save_file
from tiny_models import VOCABULARY, make_model
from tiny_trainer import PPO_CLIP, make_backend, train_step
from torch import Tensor
from worker_group_layouts import parallel_config

from relax_core.contracts.algorithm import AlgorithmSpec, LossInputs, LossOutputs, StepTotals
from relax_core.contracts.tree import NOT_SAMPLED, Episode, TokenTree, Turn, check_tree
from relax_core.registry import find_algorithm
from relax_core.rollout.group_advantages import advantage_extras
from relax_core.train import process_group
from relax_core.train.hf.hf_weights import HfWeights
from relax_core.train.micro_batches import MicroBatcher, split_over_ranks
from tests.trees import with_tokens

LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "cp2": {"cp": 2}, "pp2": {"pp": 2}}
ACTOR_FWD = {"old_logprobs": "actor_fwd", "correction_low": 0.5}
LENGTH = {"norm_length": 12.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "dr_grpo": ("dr_grpo", LENGTH),
    "dapo": ("dapo", {"overlong_length": 8, "overlong_buffer": 6}),
    "gspo": ("gspo", {"clip_low": 0.1, "clip_high": 0.1}),
    "sapo": ("sapo", {}),
    "cispo": ("cispo", {}),
    "rloo": ("rloo", {**LENGTH, "kl_coef": 0.1}),
    "reinforce_pp": ("reinforce_pp", {"gamma": 0.9}),
    "ppo": ("ppo", {}),
    "distill": ("distill", {}),
    "distill, advantage": ("distill", {"form": "advantage"}),
    "distill, topk_reverse": ("distill", {"form": "topk_reverse"}),
    "gigpo": ("grpo", {"credit": "gigpo"}),
    "gigpo, rloo": ("rloo", {**LENGTH, "credit": "gigpo", "gigpo_weight": 0.5}),
    "weights and rules of sequences": (
        "grpo",
        {
            **ACTOR_FWD,
            "aggregation": "seq_mean_token_mean",
            "correction": "tis_normalized",
            "correction_level": "sequence",
            "rejection": {"seq_mean_k3": [0, 0.01]},
            "opsm_threshold": 1e-2,
        },
    ),
}
BUDGET_ROWS = 70  # the rows of a micro-batch, which splits a group of cut episodes
TOP_K = 3


class Chosen:
    """Is an algorithm that is one of `CASES` at a time, so that one back end trains with all of them."""

    def __init__(self) -> None:
        self.spec: AlgorithmSpec = find_algorithm("grpo")
        self.config: Any = None

    def choose(self, case: str) -> None:
        name, settings = CASES[case]
        self.spec = find_algorithm(name)
        self.config = self.spec.config(**settings)
        self.spec.check(self.config)

    def _loss(self, inputs: LossInputs, config: Any) -> LossOutputs:
        return self.spec.loss(inputs, self.config)

    def _denominator(self, totals: StepTotals, config: Any) -> float:
        return self.spec.denominator(totals, self.config)

    @property
    def of_backend(self) -> AlgorithmSpec:
        return dataclasses.replace(PPO_CLIP, loss=self._loss, denominator=self._denominator)


class _Rows:
    """Collects the rows of a group, chain by chain, depth first; each chain follows the prompt."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.token_ids, self.sampled = list(prompt), [False] * len(prompt)
        self.prompt, self.ends = len(prompt), []
        self.ends: list[int]

    def add(self, parts: Sequence[tuple[list[int], bool]]) -> list[tuple[int, int]]:
        """Adds a chain of these parts, sampled or not, and returns the rows of the sampled ones."""
        turns = []
        for ids, sampled in parts:
            first = len(self.token_ids)
            self.token_ids += ids
            self.sampled += [sampled] * len(ids)
            if sampled:
                turns.append((first, len(self.token_ids)))
        self.ends += [len(self.token_ids)] * (len(self.token_ids) - self.prompt - len(self.ends))
        return turns

    def tree(self, uid: str, episodes: Sequence[Episode]) -> TokenTree:
        rows = len(self.token_ids)
        sampled = np.array(self.sampled)
        return TokenTree(
            group_uid=uid,
            token_ids=np.array(self.token_ids, dtype=np.int32),
            end=np.array([rows] * self.prompt + self.ends, dtype=np.int32),
            loss_mask=sampled,
            logprobs=np.zeros(rows, dtype=np.float32),
            versions=np.where(sampled, 0, NOT_SAMPLED).astype(np.int32),
            episodes=episodes,
        )


def make_group(random: np.random.Generator, uid: str) -> tuple[TokenTree, TokenTree]:
    """Returns a group whose episodes are one segment each, and the same group with most of them cut into several.

    A later segment repeats what was sampled before it as context, which is not trained there.
    """

    def some(most: int) -> list[int]:
        ids: list[int] = random.integers(0, VOCABULARY, int(random.integers(1, most + 1))).tolist()
        return ids

    prompt = some(6)
    whole, cut = _Rows(prompt), _Rows(prompt)
    whole_episodes, cut_episodes = [], []
    for place in range(4):
        count = 1 + (place + int(random.integers(0, 2))) % 4
        answers, observed = [some(5) for _ in range(count)], [some(3) for _ in range(count - 1)]
        parts = [
            part
            for turn in range(count)
            for part in ([(observed[turn - 1], False)] if turn else []) + [(answers[turn], True)]
        ]
        rewards = [float(random.integers(0, 4)) / 4 for _ in range(count)]
        states = [str(random.choice(["a", "b"])) for _ in range(count)]

        def episode(spans: Sequence[tuple[int, int]], leaves: list[int]) -> Episode:
            turns = [
                Turn(first, last, "engine-0", [(0, last - first)], "stop", reward, 0.0, 0.0, state)
                for (first, last), reward, state in zip(spans, rewards, states, strict=True)  # noqa: B023
            ]
            return Episode(f"{uid}.{place}", leaves, sum(rewards), {}, turns, "env_done")  # noqa: B023

        spans = whole.add(parts)
        whole_episodes.append(episode(spans, [spans[-1][1] - 1]))
        spans, leaves, done = [], [], 0
        while done < count:
            until = int(random.integers(done + 1, count + 1)) if place else count  # the first one stays whole
            context = [(ids, False) for ids, _ in parts[: max(0, 2 * done)]]
            spans += cut.add([*context, *parts[2 * done : 2 * until - 1]])
            leaves.append(spans[-1][1] - 1)
            done = until
        cut_episodes.append(episode(spans, leaves))
    made = whole.tree(uid, whole_episodes), cut.tree(uid, cut_episodes)
    for tree in made:
        check_tree(tree)
    return made


def make_groups() -> tuple[list[TokenTree], list[TokenTree]]:
    """Returns three groups, whole and cut."""
    random = np.random.default_rng(5)
    pairs = [make_group(random, f"g{place}") for place in range(3)]
    return [whole for whole, _ in pairs], [cut for _, cut in pairs]


def with_columns(trees: Sequence[TokenTree], logprobs: np.ndarray, case: str, chosen: Chosen) -> list[TokenTree]:
    """Returns the groups of a train step for a case; ``logprobs`` ``[tokens of all groups]`` are the model's own."""
    random = np.random.default_rng(6)
    found = []
    for tree, own in zip(
        trees, np.split(logprobs, np.cumsum([len(tree.tokens[1]) for tree in trees])[:-1]), strict=True
    ):
        tokens = len(own)

        def near(own: np.ndarray = own) -> np.ndarray:
            return (own + 0.1 * random.standard_normal(len(own))).astype(np.float32)

        columns = {name: near() for name in ("logprobs", "old_logprobs", "reference_logprobs", "teacher_logprobs")}
        columns["values"] = random.standard_normal(tokens).astype(np.float32)
        mask = random.random(tokens) >= 0.15
        if "topk" in case:
            columns["teacher_top_ids"] = random.integers(0, VOCABULARY, (tokens, TOP_K), dtype=np.int32)
            columns["teacher_top_logprobs"] = np.full((tokens, TOP_K), -2.0, dtype=np.float32)
        if chosen.config.old_logprobs != "actor_fwd":
            del columns["old_logprobs"]
        found.append(with_tokens(tree, loss_mask=mask, **columns))
    extras = advantage_extras(found, chosen.spec, chosen.config)
    return [tree.with_extras(**own) for tree, own in zip(found, extras, strict=True)]


def trained(
    backend: Any,
    chosen: Chosen,
    trees: Sequence[TokenTree],
    logprobs: np.ndarray,
    *,
    replica: int = 0,
    replicas: int = 1,
) -> Iterator[tuple[str, dict[str, Any], dict[str, Tensor]]]:
    """Yields each case with the metrics of its train step and the gradient of each tensor, on every rank.

    The learning rate is 0, so that all cases have the same weights.
    """
    for case in CASES:
        chosen.choose(case)
        batcher = MicroBatcher(BUDGET_ROWS, ranks=replicas)
        batches = [*batcher.add(with_columns(trees, logprobs, case, chosen)), batcher.flush()]
        metrics = train_step(backend, [split_over_ranks(batch, replicas)[replica] for batch in batches])
        of_models = HfWeights(backend.models, backend.architecture, tensor_of=lambda parameter: parameter.main_grad)
        figures = {name: getattr(metrics, name) for name in ("loss", "grad_norm", "tokens", "samples", "algorithm")}
        yield case, figures, {name: one.clone() for name, one in of_models.export()}


def build(folder: Path, chosen: Chosen, **overrides: Any) -> Any:
    return make_backend(folder, optimizer={"lr": 0.0, "clip_grad": 0.0}, algorithm=chosen.of_backend, **overrides)


def own_logprobs(backend: Any, trees: Sequence[TokenTree]) -> np.ndarray:
    """Returns the log-probs of all tokens of the groups, float32 ``[tokens of all groups]``."""
    found = backend.logprobs(trees)
    return np.concatenate([of_rows[tree.tokens[1]] for tree, of_rows in zip(trees, found, strict=True)])


def save(folder: Path, name: str, found: Iterator[tuple[str, dict[str, Any], dict[str, Tensor]]]) -> None:
    figures: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for case, of_case, gradients in found:
        figures[case] = of_case
        tensors |= {f"{case}/{key}": one.contiguous() for key, one in gradients.items()}
    save_file(tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(figures))


def single(folder: Path) -> None:
    make_model(folder)
    whole, cut = make_groups()
    chosen = Chosen()
    backend = build(folder, chosen)
    logprobs = own_logprobs(backend, whole)
    np.save(folder / "logprobs.npy", logprobs)
    save(folder, "whole", trained(backend, chosen, whole, logprobs))
    save(folder, "cut", trained(backend, chosen, cut, logprobs))


def rank_main(folder: Path, rank: int, port: int) -> None:
    from megatron.core import parallel_state

    logprobs, (_, cut) = np.load(folder / "logprobs.npy"), make_groups()
    for name, sizes in LAYOUTS.items():
        chosen = Chosen()
        parallel = parallel_config(**sizes, sequence_parallel=False)
        backend = build(folder, chosen, parallel=parallel, rank=rank, world_size=2, store_address=f"127.0.0.1:{port}")
        replica, replicas = parallel_state.get_data_parallel_rank(), sizes.get("dp", 1)
        found = trained(backend, chosen, cut, logprobs, replica=replica, replicas=replicas)
        save(folder, f"{name}.{rank}", found)
        process_group.leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(run_alone_and_on_two_ranks(Path(sys.argv[1]), single, rank_main))
