"""Converts the cases of a vector file to the inputs of our algorithms."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax_core.contracts.algorithm import (
    AdvantageInputs,
    AlgorithmConfig,
    GroupTurns,
    LossInputs,
    StepTotals,
    ValueInputs,
)
from relax_core.registry import find_algorithm

VECTORS = Path(__file__).parent / "vectors"
TOPS = ("top_logprobs", "teacher_top_logprobs")  # keys of distillation: one list per token


def read(algorithm: str) -> dict[str, Any]:
    """Returns the cases of an algorithm. Advantage cases have several groups; for distillation they have one group."""
    loaded: dict[str, Any] = json.loads((VECTORS / f"{algorithm}.json").read_text(encoding="utf-8"))
    for case in loaded["advantages"] if algorithm == "distill" else []:
        group = {name: case.pop(name) for name in ("rewards", "samples", "turns") if name in case}
        case |= {"groups": [group], "expected": [case["expected"]]}
    return loaded


def config_of(algorithm: str, case: Mapping[str, Any]) -> AlgorithmConfig:
    """Returns the settings of a case. The file also has values of settings that are constants now."""
    config = find_algorithm(algorithm).config
    known = {field.name for field in dataclasses.fields(config)}
    assert case["config"].get("std_epsilon") == getattr(config, "std_epsilon", None)
    return config(**{name: value for name, value in case["config"].items() if name in known})


def flat(samples: Sequence[Mapping[str, Any]], name: str, dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for sample in samples for value in sample[name]], dtype=dtype)


def sample_ids(samples: Sequence[Mapping[str, Any]]) -> Tensor:
    return torch.tensor([place for place, sample in enumerate(samples) for _ in sample["mask"]])


def loss_inputs(samples: Sequence[Mapping[str, Any]], *, config: Any, dtype: torch.dtype) -> LossInputs:
    """Returns the inputs of a loss. As in the trainer, a setting selects the engine's log-probs as ``old_logprobs``."""
    rollout = flat(samples, "rollout_logprobs", dtype)
    return LossInputs(
        logprobs=flat(samples, "logprobs", dtype).requires_grad_(),
        old_logprobs=flat(samples, "old_logprobs", dtype) if config.old_logprobs == "actor_fwd" else rollout,
        rollout_logprobs=rollout,
        advantages=flat(samples, "advantages", dtype),
        loss_mask=flat(samples, "mask", torch.bool),
        sample_ids=sample_ids(samples),
        num_samples=len(samples),
        reference_logprobs=flat(samples, "reference_logprobs", dtype),
        entropy=flat(samples, "entropy", dtype).requires_grad_() if "entropy" in samples[0] else None,
        teacher_logprobs=flat(samples, "teacher_logprobs", dtype) if "teacher_logprobs" in samples[0] else None,
        **{name: flat(samples, name, dtype).requires_grad_() for name in TOPS if name in samples[0]},
    )


def value_inputs(samples: Sequence[Mapping[str, Any]], *, dtype: torch.dtype) -> ValueInputs:
    return ValueInputs(
        values=flat(samples, "values", dtype).requires_grad_(),
        old_values=flat(samples, "old_values", dtype),
        returns=flat(samples, "returns", dtype),
        loss_mask=flat(samples, "mask", torch.bool),
        sample_ids=sample_ids(samples),
        num_samples=len(samples),
    )


def advantage_inputs(group: Mapping[str, Any], *, config: Any) -> AdvantageInputs:
    samples = group["samples"]
    old = "old_logprobs" if config.old_logprobs == "actor_fwd" else "rollout_logprobs"
    return AdvantageInputs(
        rewards=torch.tensor(group["rewards"], dtype=torch.float32),
        lengths=torch.tensor([len(sample["mask"]) for sample in samples]),
        loss_mask=flat(samples, "mask", torch.bool),
        sample_ids=sample_ids(samples),
        old_logprobs=flat(samples, old, torch.float32),
        rollout_logprobs=flat(samples, "rollout_logprobs", torch.float32),
        reference_logprobs=flat(samples, "reference_logprobs", torch.float32),
        values=flat(samples, "values", torch.float32) if "values" in samples[0] else None,
        teacher_logprobs=flat(samples, "teacher_logprobs", torch.float32) if "teacher_logprobs" in samples[0] else None,
        turns=group_turns(group),
    )


def group_turns(group: Mapping[str, Any]) -> GroupTurns:
    """Returns the turns of a group. In a group without turns, each sample is one turn."""
    samples, rewards = group["samples"], group["rewards"]
    one_each = [
        [{"tokens": len(sample["mask"]), "reward": reward, "state": None}]
        for sample, reward in zip(samples, rewards, strict=True)
    ]
    of_samples = [(place, turn) for place, turns in enumerate(group.get("turns", one_each)) for turn in turns]
    lengths = torch.tensor([turn["tokens"] for _, turn in of_samples])
    return GroupTurns(
        of_tokens=torch.arange(len(lengths)).repeat_interleave(lengths),
        samples=torch.tensor([place for place, _ in of_samples]),
        rewards=torch.tensor([turn["reward"] for _, turn in of_samples], dtype=torch.float64),
        state_keys=[turn["state"] for _, turn in of_samples],
    )


def totals(samples: Sequence[Mapping[str, Any]]) -> StepTotals:
    """Returns the step's counts. Leaves out samples without a trained token."""
    return StepTotals(
        tokens=sum(sum(sample["mask"]) for sample in samples),
        samples=sum(any(sample["mask"]) for sample in samples),
        groups=1,
    )
