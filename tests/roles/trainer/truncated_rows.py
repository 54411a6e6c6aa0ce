"""Helpers for the tests of truncated sampling and their tensor-parallel ranks: groups in the trainer's format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import AlgorithmSpec, LossInputs, LossOutputs
from relax_core.contracts.bus import Group
from relax_core.contracts.tree import TokenTree
from relax_core.registry import find_algorithm
from relax_core.roles.trainer.teacher_worker import TeacherScores, teacher_columns
from relax_core.rollout.group_advantages import advantage_extras
from relax_core.train.micro_batches import decode_train_tree
from tests.trees import of_tokens

TEMPERATURE = 0.8
BANNED = 17
TOP_K = 12  # some kept sets have fewer tokens
SAMPLES = 4

Rows = Mapping[str, Sequence[Group]]  # truncation → groups


def train_groups(rows: Sequence[Group], spec: AlgorithmSpec, config: Any) -> list[TokenTree]:
    """Returns the groups in the format of the advantages role and the trainer."""
    requirements = spec.requirements(config)
    advantages = advantage_extras([c.decode_tree(row) for row in rows], spec, config)
    skipped = {c.OLD_LOGPROBS: requirements.old_logprobs == "rollout", c.REFERENCE_LOGPROBS: not requirements.reference}
    groups = []
    for row, made in zip(rows, advantages, strict=True):
        columns = {name: payload for name, payload in row.columns.items() if not skipped.get(name)}
        whole = msgspec.structs.replace(
            row, columns=columns | {name: c.encode_column(name, array) for name, array in made.items()}
        )
        groups.append(decode_train_tree(whole, step=0, oldest_version=0)[0])
    return groups


class Recorded:
    """Wraps an algorithm. The wrapped loss records its inputs and outputs."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.seen: list[tuple[LossInputs, LossOutputs]] = []
        self.spec = dataclasses.replace(spec, loss=self._loss)
        self._inner = spec.loss

    def _loss(self, inputs: LossInputs, config: Any) -> LossOutputs:
        outputs = self._inner(inputs, config)
        self.seen.append((inputs, outputs))
        return outputs


def head_outputs_of(rows: Rows, make: Callable[..., Any]) -> dict[str, dict[str, np.ndarray]]:
    """Returns for each truncation a rank's results from the output layer for the sampled tokens.

    ``make`` makes a backend from the algorithm and its configuration. This backend also computes the teacher's columns.
    """
    recorded = Recorded(find_algorithm("distill"))
    inner = recorded.spec.requirements
    spec = dataclasses.replace(
        recorded.spec, requirements=lambda config: dataclasses.replace(inner(config), entropy=True)
    )
    config: Any = spec.config(group_size=SAMPLES, form="topk_forward", top_k=TOP_K)
    backend = make(algorithm=spec, config=config)
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, of_name in rows.items():
        trees = [c.decode_tree(row) for row in of_name]
        alone, top = backend.logprobs(trees), backend.top_logprobs(trees, top_k=TOP_K)
        taught = []
        for row, top_scores in zip(of_name, top, strict=True):
            scores = TeacherScores(top_scores.logprobs, top_scores.top_ids.astype(np.int32), top_scores.top_logprobs)
            taught.append(msgspec.structs.replace(row, columns={**row.columns, **teacher_columns(scores)}))
        recorded.seen.clear()
        backend.begin_step(0)
        backend.accumulate(train_groups(taught, spec, config))
        inputs = recorded.seen[0][0]
        assert inputs.entropy is not None and inputs.top_logprobs is not None

        def of_groups(values: Sequence[np.ndarray], trees: Sequence[TokenTree] = trees) -> np.ndarray:
            return np.concatenate([of_tokens(tree, own) for tree, own in zip(trees, values, strict=True)])

        found[name] = {
            "engine": of_groups([tree.logprobs for tree in trees]),
            "forward": of_groups(alone),
            "trainer": inputs.logprobs.detach().numpy(),
            "entropy": inputs.entropy.detach().numpy(),
            "top_ids": of_groups([top_scores.top_ids for top_scores in top]),
            "top_logprobs": of_groups([top_scores.top_logprobs for top_scores in top]),
            "gathered": inputs.top_logprobs.detach().numpy(),
        }
    return found
