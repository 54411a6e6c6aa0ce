"""Tests that an episode cut into segments with equal contexts trains like the complete episode.

`test_layout_ranks.py` trains episodes of several segments on several ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import VOCABULARY, make_model
from tiny_trainer import PPO_CLIP, make_backend, train_step

from relax_core.contracts.algorithm import AlgorithmSpec, LossInputs, LossOutputs, StepTotals
from relax_core.contracts.tree import NOT_SAMPLED, Episode, TokenTree, Turn, check_tree
from relax_core.registry import find_algorithm
from relax_core.rollout.group_advantages import advantage_extras
from relax_core.train.hf.hf_weights import HfWeights
from relax_core.train.micro_batches import MicroBatcher
from tests.trees import with_tokens

REACH = 1e-6
OF_MICRO_BATCHES = ("ratio_low", "ratio_high")  # quantiles of a micro-batch; cut episodes change the micro-batches
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
BUDGET_ROWS = 70  # rows of a micro-batch; this budget splits a group of cut episodes
TOP_K = 3


class Chosen:
    """Switches between the algorithms of `CASES`, so one backend trains with all algorithms."""

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
    """Collects the rows of a group, chain by chain, depth first. Each chain follows the prompt."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.token_ids, self.sampled = list(prompt), [False] * len(prompt)
        self.prompt, self.ends = len(prompt), []
        self.ends: list[int]

    def add(self, parts: Sequence[tuple[list[int], bool]]) -> list[tuple[int, int]]:
        """Adds a chain of sampled and other parts, and returns the rows of the sampled parts."""
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
    """Returns a group of episodes with one segment each, and the same group with most episodes cut into segments.

    A later segment repeats earlier sampled tokens as context and does not train them again.
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
            until = int(random.integers(done + 1, count + 1)) if place else count  # the first episode is not cut
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
    """Returns three groups uncut, and the same groups cut."""
    random = np.random.default_rng(5)
    pairs = [make_group(random, f"g{place}") for place in range(3)]
    return [whole for whole, _ in pairs], [cut for _, cut in pairs]


def with_columns(trees: Sequence[TokenTree], logprobs: np.ndarray, case: str, chosen: Chosen) -> list[TokenTree]:
    """Returns the groups of a train step for a case. ``logprobs`` of the model: ``[tokens of all groups]``."""
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


def test_the_cut_episodes_have_other_rows_and_the_same_tokens() -> None:
    whole, cut = make_groups()
    assert sum(len(episode.leaves) for tree in cut for episode in tree.episodes) > len(cut) * 4 + 3
    assert sum(tree.computed_rows for tree in cut) > 1.2 * sum(tree.computed_rows for tree in whole)
    for whole_tree, cut_tree in zip(whole, cut, strict=True):
        assert all(len(episode.leaves) == 1 for episode in whole_tree.episodes)
        assert np.array_equal(whole_tree.token_ids[whole_tree.tokens[1]], cut_tree.token_ids[cut_tree.tokens[1]])
        assert np.array_equal(whole_tree.lengths, cut_tree.lengths)


@pytest.mark.parametrize("case", CASES)
def test_segments_do_not_change_advantages(case: str) -> None:
    chosen = Chosen()
    chosen.choose(case)
    whole, cut = make_groups()
    logprobs = np.linspace(-3.0, -0.1, sum(len(tree.tokens[1]) for tree in whole), dtype=np.float32)
    made = [with_columns(trees, logprobs, case, chosen) for trees in (whole, cut)]
    for whole_tree, cut_tree in zip(*made, strict=True):
        assert np.array_equal(whole_tree.extras["advantages"], cut_tree.extras["advantages"])


def test_segments_change_neither_loss_nor_gradient(tmp_path: Path) -> None:
    """The learning rate is 0, so all cases have the same weights."""
    make_model(tmp_path)
    whole, cut = make_groups()
    chosen = Chosen()
    backend = make_backend(tmp_path, optimizer={"lr": 0.0, "clip_grad": 0.0}, algorithm=chosen.of_backend)
    found = backend.logprobs(whole)
    logprobs = np.concatenate([of_rows[tree.tokens[1]] for tree, of_rows in zip(whole, found, strict=True)])
    for case in CASES:
        chosen.choose(case)
        results = []
        for trees in (whole, cut):
            batcher = MicroBatcher(BUDGET_ROWS)
            batches = [*batcher.add(with_columns(trees, logprobs, case, chosen)), batcher.flush()]
            metrics = train_step(backend, batches)
            weights = HfWeights(backend.models, backend.architecture, tensor_of=lambda parameter: parameter.main_grad)
            results.append((metrics, {name: tensor.clone() for name, tensor in weights.export()}))
        (expected, wanted), (found, gradients) = results
        assert (found.tokens, found.samples) == (expected.tokens, expected.samples), case
        assert found.loss == pytest.approx(expected.loss, abs=REACH), case
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5) and found.grad_norm > 1e-3, case
        figures = [{n: v for n, v in of.algorithm.items() if n not in OF_MICRO_BATCHES} for of in (found, expected)]
        assert figures[0] == pytest.approx(figures[1], rel=1e-4, abs=1e-6), case
        for name, gradient in wanted.items():
            assert float((gradients[name] - gradient).abs().max()) <= REACH * max(1.0, float(gradient.abs().max()))
