"""Shapes and dtypes of the shared maths, checked at run time while the algorithms run (jaxtyping, beartype)."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import jaxtyping
import pytest
import torch
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Bool, Float32, Float64, Int64, jaxtyped
from torch import Tensor

from algorithms import functional as F
from algorithms.functional import aggregation, losses
from relax_core.registry import find_algorithm
from tests.conformance import cases
from tests.conformance.reference import ALGORITHMS

Tokens, Mask, Ids = Float32[Tensor, " tokens"], Bool[Tensor, " tokens"], Int64[Tensor, " tokens"]
Samples, Lengths, Scalar = Float32[Tensor, " samples"], Int64[Tensor, " samples"], Float32[Tensor, ""]
BY_NAME = {
    **dict.fromkeys(("logprobs", "old_logprobs", "rollout_logprobs", "reference_logprobs"), Tokens),
    **dict.fromkeys(("numerator", "denominator", "per_token", "log_ratio", "advantages"), Tokens),
    **dict.fromkeys(("values", "old_values", "returns", "token_rewards"), Tokens),
    "penalties": Tokens | None,
    "weights": Tokens,
    "loss_mask": Mask,
    "sample_ids": Ids,
    "rewards": Samples,
    "lengths": Lengths,
}
OneMean = Float64[Tensor, " _"]  # what is averaged, of one group
RETURNS: dict[str, Any] = {
    "masked_log_ratio": Tokens,
    "kl_estimate": Tokens,
    "kl_loss": Tokens,
    "kept_by_rejection": Mask,
    "moved_too_far": tuple[Mask, Mask],
    "weights_to_average": OneMean,
    "divide_by_mean_weight": list[Tensor],
    "divide_by_step_deviation": list[Tensor],
    "pass_at_k_advantages": Samples,
    "discounted_rewards": Tokens,
    "length_adaptive_lambda": Float64[Tensor, " samples"],
    "sums_to_the_end": Tokens,
    "correction_weights": tuple[Tokens, Mask],
    "kept_by_opsm": Mask,
    "sum_of_samples": Samples,
    "mean_of_samples": Samples,
    "aggregate_sum": Scalar,
    "overlong_penalty": Samples,
    "group_relative_advantages": Samples,
    "leave_one_out_advantages": Samples,
    "clipped_policy_loss": F.PolicyLoss,
    "gspo_policy_loss": F.PolicyLoss,
    "sapo_policy_loss": F.PolicyLoss,
    "cispo_policy_loss": F.PolicyLoss,
    "normalize_over_step": list[Tensor],
    "generalized_advantages": Tokens,
    "rewards_of_tokens": Tokens,
    "clipped_value_loss": F.ValueLoss,
    "turn_rewards_of_tokens": Tokens,
    "turn_returns": Float64[Tensor, " turns"],
    "anchor_advantages": Float32[Tensor, " turns"],
}
OneGroup, OneMask = Float32[Tensor, " _"], Bool[Tensor, " _"]  # groups differ in length
OF_TURNS = {"turn_rewards": Float64[Tensor, " turns"], "turn_samples": Int64[Tensor, " turns"], "turn_ids": Ids}
BY_FUNCTION: dict[str, dict[str, Any]] = {
    "turn_rewards_of_tokens": OF_TURNS,
    "turn_returns": OF_TURNS,
    "anchor_advantages": {"returns": Float64[Tensor, " turns"]},
    "normalize_over_step": {"advantages": Sequence[OneGroup], "loss_masks": Sequence[OneMask]},
    "divide_by_mean_weight": {"advantages": Sequence[OneGroup], "weights": Sequence[OneMean]},
    "divide_by_step_deviation": {"advantages": Sequence[OneGroup], "rewards": Sequence[OneGroup]},
}


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a copy of the function that checks its tensors on every call."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    shapes = BY_NAME | BY_FUNCTION.get(function.__name__, {})
    copy.__annotations__ = {name: shapes[name] for name in function.__annotations__ if name in shapes}
    copy.__annotations__["return"] = RETURNS[function.__name__]
    typed: Callable[..., Any] = jaxtyped(typechecker=beartype)(copy)
    return typed


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Replaces the shared maths by checked copies; returns the names that were called."""
    names: set[str] = set()

    def spied(name: str) -> Callable[..., Any]:
        typed = checked(getattr(F, name))

        def call(*args: Any, **kwargs: Any) -> Any:
            names.add(name)
            return typed(*args, **kwargs)

        return call

    for name in RETURNS:
        replacement = spied(name)
        for module in (F, losses, aggregation):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, replacement)
    return names


@jaxtyped(typechecker=beartype)
def check_outputs(
    logprobs: Tokens, loss_sum: Scalar, per_token: Tokens, gradient: Tokens, metrics: list[Scalar]
) -> None:
    """Raises if a shape or a dtype is wrong, or if two tensors disagree on the number of tokens."""


def test_every_algorithm_keeps_to_the_shapes(called: set[str]) -> None:
    for algorithm in ALGORITHMS:
        spec, vectors = find_algorithm(algorithm), cases.read(algorithm)
        for case in vectors["loss"]:
            config = cases.config_of(algorithm, case)
            inputs = cases.loss_inputs(case["samples"], config=config, dtype=torch.float32)
            outputs = spec.loss(inputs, config)
            outputs.loss_sum.backward()
            metrics = [part for pair in outputs.metric_sums.values() for part in pair]
            check_outputs(inputs.logprobs, outputs.loss_sum, outputs.per_token, inputs.logprobs.grad, metrics)
        for case in vectors["advantages"]:
            config = cases.config_of(algorithm, case)
            groups = [cases.advantage_inputs(group, config=config) for group in case["groups"]]
            values = [spec.advantages(group, config) for group in groups]
            for one, group in zip(values, groups, strict=True):
                assert one.dtype == torch.float32 and one.shape == group.sample_ids.shape
            if spec.normalize is not None:
                spec.normalize(values, groups, config)
            for one, group in zip(values, groups, strict=True):
                if spec.returns is not None:
                    assert spec.returns(group, one, config).shape == one.shape
        for case in vectors.get("value", []):
            assert spec.value_loss is not None
            values = cases.value_inputs(case["samples"], dtype=torch.float32)
            of_critic = spec.value_loss(values, cases.config_of(algorithm, case))
            of_critic.loss_sum.backward()
            metrics = [part.float() for pair in of_critic.metric_sums.values() for part in pair]
            check_outputs(values.values, of_critic.loss_sum, of_critic.per_token, values.values.grad, metrics)
    assert called == set(RETURNS)


def test_a_wrong_shape_is_seen() -> None:
    """The check refuses lengths that disagree, and float64."""
    kl_estimate = checked(F.kl_estimate)
    right = {"logprobs": torch.zeros(3), "reference_logprobs": torch.zeros(3), "loss_mask": torch.ones(3).bool()}
    assert kl_estimate(**right, estimator="k3").shape == (3,)
    for wrong in ({"loss_mask": torch.ones(2).bool()}, {"logprobs": torch.zeros(3).double()}):
        with pytest.raises((jaxtyping.TypeCheckError, BeartypeCallHintViolation)):
            kl_estimate(**(right | wrong), estimator="k3")
