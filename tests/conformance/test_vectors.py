"""Compares our algorithms with the golden vectors, and the golden vectors with the reference that wrote them."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.distill import FORMS
from relax_core.contracts.algorithm import LossInputs
from relax_core.registry import find_algorithm
from tests.conformance import cases, distill_reference, generate, reference

ALL = (*reference.ALGORITHMS, "distill")
LOSS_CASES = [
    pytest.param(name, case, id=f"{name}-{place}")
    for name in ALL
    for place, case in enumerate(cases.read(name)["loss"])
]
LOSS_CASES_OF_REFERENCE = [case for case in LOSS_CASES if case.values[0] != "distill"]
ADVANTAGE_CASES = [
    pytest.param(name, case, id=f"{name}-{place}")
    for name in ALL
    for place, case in enumerate(cases.read(name)["advantages"])
]

VALUE_CASES = [
    pytest.param(name, case, id=f"{name}-{place}")
    for name in reference.ALGORITHMS
    for place, case in enumerate(cases.read(name).get("value", []))
]


# The finite differences of distillation's top log-probs have fewer digits.
CLOSE = {torch.float32: {"rel": 1e-5, "abs": 2e-6}, torch.float64: {"rel": 1e-8, "abs": 1e-9}}
CLOSE_OF_DISTILL = {torch.float32: {"rel": 2e-5, "abs": 4e-6}, torch.float64: {"rel": 1e-7, "abs": 1e-9}}
NOISY = ("logprobs", "old_logprobs", "rollout_logprobs", "reference_logprobs", "advantages", "entropy")
NOISY_OF_DISTILL = ("teacher_logprobs", *cases.TOPS)


def joined(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def gradient_of(tensor: Tensor | None, denominator: float = 1.0) -> list[float]:
    assert tensor is not None
    grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
    return (grad / denominator).flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("algorithm", "case"), LOSS_CASES)
def test_loss_and_gradient(algorithm: str, case: dict[str, Any], dtype: torch.dtype) -> None:
    spec, config, samples = find_algorithm(algorithm), cases.config_of(algorithm, case), case["samples"]
    inputs = cases.loss_inputs(samples, config=config, dtype=dtype)
    outputs = spec.loss(inputs, config)
    outputs.loss_sum.backward()
    denominator = spec.denominator(cases.totals(samples), config)
    assert outputs.per_token is not None and outputs.loss_sum.dtype == outputs.per_token.dtype == dtype
    per_token = outputs.per_token.masked_fill(~inputs.loss_mask, 0.0)
    expected = case["expected"]
    close = (CLOSE_OF_DISTILL if algorithm == "distill" else CLOSE)[dtype]
    assert float(outputs.loss_sum.detach()) / denominator == pytest.approx(expected["loss"], **close)
    assert per_token.tolist() == pytest.approx(joined(expected["per_token"]), **close)
    assert gradient_of(inputs.logprobs, denominator) == pytest.approx(joined(expected["gradient"]), **close)
    if algorithm == "distill":
        wanted = joined(joined(expected["top_gradient"]))
        assert gradient_of(inputs.top_logprobs, denominator) == pytest.approx(wanted, **close)
    assert (inputs.entropy is not None) == ("entropy_gradient" in expected) == spec.requirements(config).entropy
    if inputs.entropy is not None:
        assert inputs.entropy.grad is not None
        of_entropy = (inputs.entropy.grad / denominator).tolist()
        assert of_entropy == pytest.approx(joined(expected["entropy_gradient"]), **close)


@pytest.mark.parametrize(("algorithm", "case"), LOSS_CASES_OF_REFERENCE)
def test_samples_without_advantage_matter_only_where_the_algorithm_says_so(
    algorithm: str, case: dict[str, Any]
) -> None:
    spec, config, samples = find_algorithm(algorithm), cases.config_of(algorithm, case), case["samples"]
    zeroed = [sample | {"advantages": [0.0] * len(sample["mask"])} for sample in samples[1:]]
    found = []
    for given in ([samples[0], *zeroed], samples[:1]):
        inputs = cases.loss_inputs(given, config=config, dtype=torch.float64)
        loss_sum = spec.loss(inputs, config).loss_sum
        loss_sum.backward()
        assert inputs.logprobs.grad is not None
        of_entropy = None if inputs.entropy is None else inputs.entropy.grad
        found.append((loss_sum.detach(), inputs.logprobs.grad, of_entropy))
    (loss, gradient, _), (alone, expected, _) = found
    count = len(expected)
    if spec.requirements(config).every_token:
        assert any(column is not None and bool(column[count:].any()) for column in found[0][1:])
    else:
        assert float(loss) == pytest.approx(float(alone), rel=1e-12)
        assert torch.equal(gradient[:count], expected) and not gradient[count:].any()
        assert found[0][2] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("algorithm", "case"), VALUE_CASES)
def test_value_loss_and_gradient(algorithm: str, case: dict[str, Any], dtype: torch.dtype) -> None:
    spec, config, samples = find_algorithm(algorithm), cases.config_of(algorithm, case), case["samples"]
    assert spec.value_loss is not None
    inputs = cases.value_inputs(samples, dtype=dtype)
    outputs = spec.value_loss(inputs, config)
    outputs.loss_sum.backward()
    denominator = spec.denominator(cases.totals(samples), config)
    assert outputs.per_token is not None and inputs.values.grad is not None
    expected = case["expected"]
    close = CLOSE[dtype]
    assert float(outputs.loss_sum.detach()) / denominator == pytest.approx(expected["loss"], **close)
    assert outputs.per_token.tolist() == pytest.approx(joined(expected["per_token"]), **close)
    assert (inputs.values.grad / denominator).tolist() == pytest.approx(joined(expected["gradient"]), **close)
    pairs = zip(joined(expected["gradient"]), inputs.loss_mask.tolist(), strict=True)
    held = sum(trained and value == 0.0 for value, trained in pairs)
    assert float(outputs.metric_sums["clip"][0]) == held  # the clip share counts tokens without a gradient


@pytest.mark.parametrize(("algorithm", "case"), VALUE_CASES)
def test_masked_tokens_and_the_order_of_samples_have_no_say_in_the_value_loss(
    algorithm: str, case: dict[str, Any]
) -> None:
    spec, config, samples = find_algorithm(algorithm), cases.config_of(algorithm, case), case["samples"]
    assert spec.value_loss is not None

    def run(parts: list[list[int]], noise: float) -> tuple[float, dict[int, list[float]]]:
        total, gradients = 0.0, {}
        for part in parts:
            inputs = cases.value_inputs([samples[i] for i in part], dtype=torch.float32)
            spoilt = {
                name: getattr(inputs, name).detach().masked_fill(~inputs.loss_mask, noise)
                for name in ("values", "old_values", "returns")
            }
            inputs = dataclasses.replace(inputs, **spoilt | {"values": spoilt["values"].requires_grad_()})
            outputs = spec.value_loss(inputs, config)
            outputs.loss_sum.backward()
            assert inputs.values.grad is not None
            assert not inputs.values.grad[~inputs.loss_mask].any()
            total += float(outputs.loss_sum.detach())
            rows = inputs.values.grad.split([len(samples[i]["mask"]) for i in part])
            gradients.update({i: row.tolist() for i, row in zip(part, rows, strict=True)})
        return total, gradients

    whole, whole_gradients = run([[0, 1, 2, 3, 4]], 0.0)
    for parts, noise in (([[0, 1, 2, 3, 4]], float("nan")), ([[4, 2], [0], [3], [1]], float("inf"))):
        split, gradients = run(parts, noise)
        assert split == pytest.approx(whole, rel=1e-5, abs=1e-6)
        for i, row in whole_gradients.items():
            assert gradients[i] == pytest.approx(row, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("algorithm", "case"), LOSS_CASES_OF_REFERENCE)
def test_the_vectors_gradient_is_that_of_their_loss(algorithm: str, case: dict[str, Any]) -> None:
    """These finite differences have another step size and another order than the generator's differences."""
    config, samples, step = case["config"], case["samples"], 2e-6
    for i, sample in enumerate(samples):
        for t, expected in enumerate(case["expected"]["gradient"][i]):
            ends = []
            for by in (step, -step):
                live = [list(sample["logprobs"]) for sample in samples]
                live[i][t] += by
                per_token = reference.losses(algorithm, config, samples, live)
                ends.append(reference.step_loss(config, samples, per_token))
            assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(expected, rel=1e-6, abs=1e-8)
            assert sample["mask"][t] or expected == 0.0


@pytest.mark.parametrize(("algorithm", "case"), ADVANTAGE_CASES)
def test_advantages(algorithm: str, case: dict[str, Any]) -> None:
    spec, config = find_algorithm(algorithm), cases.config_of(algorithm, case)
    inputs = [cases.advantage_inputs(group, config=config) for group in case["groups"]]
    got = [spec.advantages(group_input, config) for group_input in inputs]
    for raw, group_input, wanted in zip(got, inputs, case.get("returns", []), strict=False):
        assert spec.returns is not None
        assert spec.returns(group_input, raw, config).tolist() == pytest.approx(joined(wanted), rel=1e-5, abs=1e-6)
    if spec.normalize is not None:
        got = spec.normalize(got, inputs, config)
    for values, group_input, expected in zip(got, inputs, case["expected"], strict=True):
        assert values.dtype == torch.float32
        wanted = [a for row in expected for a in row]
        trained = group_input.loss_mask.tolist()
        pairs = [
            pair for pair, counts in zip(zip(values.tolist(), wanted, strict=True), trained, strict=True) if counts
        ]
        assert [a for a, _ in pairs] == pytest.approx([b for _, b in pairs], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("algorithm", reference.ALGORITHMS)
def test_the_files_are_what_the_generator_writes(algorithm: str) -> None:
    """Numbers are compared to nine digits, because another libm may round the last digits differently."""
    assert_alike(cases.read(algorithm), json.loads(generate.render(algorithm)))


def test_the_file_of_distillation_is_what_its_generator_writes() -> None:
    found = json.loads(distill_reference.FILE.read_text(encoding="utf-8"))
    assert_alike(found, json.loads(distill_reference.render()))
    assert {case["config"]["form"] for case in found["loss"]} == set(FORMS)


def assert_alike(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_alike(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for left_part, right_part in zip(left, right, strict=True):
            assert_alike(left_part, right_part)
    elif isinstance(left, float):
        assert math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-9)
    else:
        assert left == right


@pytest.mark.parametrize("algorithm", reference.ALGORITHMS)
def test_the_vectors_reach_every_branch(algorithm: str) -> None:
    """With vectors that never clip, a wrong clip would pass."""
    shares: dict[str, float] = {}
    for case in cases.read(algorithm)["loss"]:
        config = cases.config_of(algorithm, case)
        inputs = cases.loss_inputs(case["samples"], config=config, dtype=torch.float32)
        for name, (total, _) in find_algorithm(algorithm).loss(inputs, config).metric_sums.items():
            shares[name] = shares.get(name, 0.0) + float(total)
    unused = {"clip_low", "clip_high"} if algorithm == "sapo" else set()  # SAPO's weight is soft, not clipped
    assert all(
        shares[name] > 0
        for name in {"clip_low", "clip_high", "tis_cut", "opsm_cut", "rejected", "reference_kl"} - unused
    )


@pytest.mark.parametrize(("algorithm", "case"), LOSS_CASES)
def test_micro_batches_in_any_order_add_up(algorithm: str, case: dict[str, Any]) -> None:
    spec, config, samples = find_algorithm(algorithm), cases.config_of(algorithm, case), case["samples"]

    def run(parts: list[list[int]]) -> tuple[float, dict[int, list[float]]]:
        total, gradients = 0.0, {}
        for part in parts:
            inputs: LossInputs = cases.loss_inputs([samples[i] for i in part], config=config, dtype=torch.float32)
            outputs = spec.loss(inputs, config)
            outputs.loss_sum.backward()
            total += float(outputs.loss_sum.detach())
            rows = torch.tensor(gradient_of(inputs.logprobs)).split([len(samples[i]["mask"]) for i in part])
            gradients.update({i: row.tolist() for i, row in zip(part, rows, strict=True)})
        return total, gradients

    last = len(samples) - 1
    whole, whole_gradients = run([[*range(last + 1)]])
    split, split_gradients = run([[last, 2], [0], [3], [1]] if last > 3 else [[3, 1], [2], [0]])
    assert split == pytest.approx(whole, rel=1e-5, abs=1e-6)
    for i, row in whole_gradients.items():
        assert split_gradients[i] == pytest.approx(row, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("noise", [float("nan"), -7.0])
@pytest.mark.parametrize(("algorithm", "case"), LOSS_CASES)
def test_masked_tokens_have_no_influence(algorithm: str, case: dict[str, Any], noise: float) -> None:
    spec, config = find_algorithm(algorithm), cases.config_of(algorithm, case)
    clean = cases.loss_inputs(case["samples"], config=config, dtype=torch.float32)
    masked = ~clean.loss_mask
    names = (*NOISY, *NOISY_OF_DISTILL) if algorithm == "distill" else NOISY
    columns = {name: column.detach() for name in names if (column := getattr(clean, name)) is not None}
    spoilt = dataclasses.replace(
        clean,
        **{
            name: column.masked_fill(masked[:, None] if column.dim() == 2 else masked, noise)
            for name, column in columns.items()
        },
    )
    results = []
    for inputs in (clean, spoilt):
        inputs.logprobs.requires_grad_()
        tops = [] if inputs.top_logprobs is None else [inputs.top_logprobs.requires_grad_()]
        outputs = spec.loss(inputs, config)
        outputs.loss_sum.backward()
        metrics = {name: (float(total), float(count)) for name, (total, count) in outputs.metric_sums.items()}
        gradients = [gradient_of(tensor) for tensor in (inputs.logprobs, *tops)]
        results.append((float(outputs.loss_sum.detach()), gradients, metrics))
    assert results[0] == results[1]
    assert not torch.tensor(results[1][1][0])[masked].any()


@pytest.mark.parametrize(("algorithm", "case"), LOSS_CASES)
def test_a_batch_without_a_trained_token_is_zero(algorithm: str, case: dict[str, Any]) -> None:
    spec, config = find_algorithm(algorithm), cases.config_of(algorithm, case)
    inputs = cases.loss_inputs(case["samples"], config=config, dtype=torch.float32)
    inputs = dataclasses.replace(inputs, loss_mask=torch.zeros_like(inputs.loss_mask))
    outputs = spec.loss(inputs, config)
    outputs.loss_sum.backward()
    assert float(outputs.loss_sum.detach()) == 0.0 and not any(gradient_of(inputs.logprobs))
    assert all(float(total) == float(count) == 0.0 for total, count in outputs.metric_sums.values())
