"""Distillation against its golden vectors, and what must hold of the divergences for any two distributions."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algorithms import functional as F
from algorithms.distill import FORMS, SPEC, DistillConfig
from relax_core.contracts.algorithm import AdvantageInputs, LossInputs
from tests.conformance import cases
from tests.conformance import distill_reference as reference
from tests.conformance.test_vectors import assert_alike, joined

VECTORS = json.loads(reference.FILE.read_text(encoding="utf-8"))
LOSS = [pytest.param(case, id=f"{case['config']['form']}-{place}") for place, case in enumerate(VECTORS["loss"])]
VOCABULARY = 12
LOGITS = st.lists(st.floats(-8.0, 8.0, width=32), min_size=VOCABULARY, max_size=VOCABULARY)
MIX = st.floats(0.05, 0.95)
patient = settings(deadline=None)


def inputs_of(samples: list[dict[str, Any]], *, dtype: torch.dtype) -> LossInputs:
    rollout = cases.flat(samples, "rollout_logprobs", dtype)
    return LossInputs(
        logprobs=cases.flat(samples, "logprobs", dtype).requires_grad_(),
        old_logprobs=rollout,
        rollout_logprobs=rollout,
        advantages=cases.flat(samples, "advantages", dtype),
        loss_mask=cases.flat(samples, "mask", torch.bool),
        sample_ids=cases.sample_ids(samples),
        num_samples=len(samples),
        reference_logprobs=cases.flat(samples, "reference_logprobs", dtype),
        teacher_logprobs=cases.flat(samples, "teacher_logprobs", dtype),
        teacher_top_logprobs=cases.flat(samples, "teacher_top_logprobs", dtype),
        top_logprobs=cases.flat(samples, "top_logprobs", dtype).requires_grad_(),
    )


def gradient(tensor: Tensor | None, denominator: float) -> list[float]:
    assert tensor is not None
    grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
    return (grad / denominator).flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", LOSS)
def test_loss_and_gradients(case: dict[str, Any], dtype: torch.dtype) -> None:
    config, samples, expected = DistillConfig(**case["config"]), case["samples"], case["expected"]
    inputs = inputs_of(samples, dtype=dtype)
    outputs = SPEC.loss(inputs, config)
    outputs.loss_sum.backward()
    denominator = SPEC.denominator(cases.totals(samples), config)
    close = {"rel": 2e-5, "abs": 4e-6} if dtype is torch.float32 else {"rel": 1e-7, "abs": 1e-9}
    assert outputs.per_token is not None
    per_token = outputs.per_token.masked_fill(~inputs.loss_mask, 0.0)
    assert float(outputs.loss_sum.detach()) / denominator == pytest.approx(expected["loss"], **close)
    assert per_token.tolist() == pytest.approx(joined(expected["per_token"]), **close)
    assert gradient(inputs.logprobs, denominator) == pytest.approx(joined(expected["gradient"]), **close)
    wanted = [one for sample in expected["top_gradient"] for row in sample for one in row]
    assert gradient(inputs.top_logprobs, denominator) == pytest.approx(wanted, **close)


@pytest.mark.parametrize("case", VECTORS["advantages"])
def test_advantages(case: dict[str, Any]) -> None:
    samples = case["samples"]
    inputs = AdvantageInputs(
        rewards=torch.tensor(case["rewards"]),
        lengths=torch.tensor([len(sample["mask"]) for sample in samples]),
        loss_mask=cases.flat(samples, "mask", torch.bool),
        sample_ids=cases.sample_ids(samples),
        old_logprobs=cases.flat(samples, "rollout_logprobs", torch.float32),
        reference_logprobs=cases.flat(samples, "reference_logprobs", torch.float32),
        teacher_logprobs=cases.flat(samples, "teacher_logprobs", torch.float32),
        turns=cases.group_turns(case),
    )
    got = SPEC.advantages(inputs, DistillConfig(**case["config"]))
    assert got.dtype == torch.float32
    trained = inputs.loss_mask
    wanted = torch.tensor(joined(case["expected"]))[trained]
    assert got[trained].tolist() == pytest.approx(wanted.tolist(), rel=1e-5, abs=1e-6)


def test_the_file_is_what_the_generator_writes() -> None:
    assert_alike(VECTORS, json.loads(reference.render()))
    assert {case["config"]["form"] for case in VECTORS["loss"]} == set(FORMS)


@pytest.mark.parametrize("noise", [float("nan"), float("inf"), -7.0])
@pytest.mark.parametrize("case", LOSS)
def test_masked_tokens_have_no_influence(case: dict[str, Any], noise: float) -> None:
    config, clean = DistillConfig(**case["config"]), inputs_of(case["samples"], dtype=torch.float32)
    masked = ~clean.loss_mask
    names = ("logprobs", "rollout_logprobs", "old_logprobs", "advantages", "teacher_logprobs", "reference_logprobs")
    spoilt = {name: getattr(clean, name).detach().masked_fill(masked, noise) for name in names}
    tops = ("top_logprobs", "teacher_top_logprobs")
    spoilt |= {name: getattr(clean, name).detach().masked_fill(masked[:, None], noise) for name in tops}
    results = []
    for inputs in (clean, dataclasses.replace(clean, **spoilt)):
        assert inputs.top_logprobs is not None
        inputs.logprobs.requires_grad_(), inputs.top_logprobs.requires_grad_()
        outputs = SPEC.loss(inputs, config)
        outputs.loss_sum.backward()
        metrics = {name: (float(total), float(count)) for name, (total, count) in outputs.metric_sums.items()}
        grads = gradient(inputs.logprobs, 1.0), gradient(inputs.top_logprobs, 1.0)
        results.append((float(outputs.loss_sum.detach()), grads, metrics))
    assert results[0] == results[1]


@pytest.mark.parametrize("case", LOSS)
def test_micro_batches_in_any_order_add_up(case: dict[str, Any]) -> None:
    config, samples = DistillConfig(**case["config"]), case["samples"]

    def run(parts: list[list[int]]) -> float:
        return sum(
            float(SPEC.loss(inputs_of([samples[i] for i in part], dtype=torch.float32), config).loss_sum.detach())
            for part in parts
        )

    assert run([[3, 1], [2], [0]]) == pytest.approx(run([[0, 1, 2, 3]]), rel=1e-5, abs=1e-6)


# -- the divergences --------------------------------------------------------------------------------------------------
def top_of(student: list[float], teacher: list[float], *, k: int) -> tuple[Tensor, Tensor]:
    q, p = torch.tensor(student).log_softmax(-1), torch.tensor(teacher).log_softmax(-1)
    top = p.topk(k)
    return q[top.indices][None], top.values[None]


def divergence(top: tuple[Tensor, Tensor], name: str, mix: float = 0.5) -> float:
    return float(
        F.top_k_divergence(
            top_logprobs=top[0],
            teacher_top_logprobs=top[1],
            loss_mask=torch.tensor([True]),
            divergence=name,
            mix=mix,
        )
    )


@pytest.mark.parametrize("name", F.TOP_K_DIVERGENCES)
@given(student=LOGITS, teacher=LOGITS, k=st.integers(1, VOCABULARY), mix=MIX)
@patient
def test_never_negative_and_0_for_equals(
    name: str, student: list[float], teacher: list[float], k: int, mix: float
) -> None:
    assert divergence(top_of(student, teacher, k=k), name, mix) >= -2e-6
    assert divergence(top_of(teacher, teacher, k=k), name, mix) == pytest.approx(0.0, abs=1e-6)


@given(student=LOGITS, teacher=LOGITS, k=st.integers(1, VOCABULARY - 1))
@patient
def test_with_the_whole_vocabulary_it_is_the_full_kl_and_else_less(
    student: list[float], teacher: list[float], k: int
) -> None:
    q, p = (torch.tensor(logits, dtype=torch.float64).log_softmax(-1) for logits in (student, teacher))
    whole, part = top_of(student, teacher, k=VOCABULARY), top_of(student, teacher, k=k)
    for name, left, right in (("forward", p, q), ("reverse", q, p)):
        full = float((left.exp() * (left - right)).sum())
        assert divergence(whole, name) == pytest.approx(full, rel=1e-4, abs=5e-5)
        # float32 log-probs know a tail of 1e-6 to a tenth: its log-ratio is off by that times the tail's weight
        slack = 0.2 if float(1 - part[1].exp().sum()) < 1e-4 else 1e-3
        assert divergence(part, name) <= full * (1 + 1e-3) + slack


@given(student=LOGITS, teacher=LOGITS, mix=MIX)
@patient
def test_mixed_and_jsd_are_what_their_names_say(student: list[float], teacher: list[float], mix: float) -> None:
    top = top_of(student, teacher, k=5)
    forward, reverse = divergence(top, "forward"), divergence(top, "reverse")
    assert divergence(top, "mixed", mix) == pytest.approx(mix * forward + (1 - mix) * reverse, rel=1e-4, abs=1e-5)
    swapped = divergence((top[1], top[0]), "jsd", 1 - mix)  # JSD(β) of (p, q) is JSD(1 - β) of (q, p)
    assert divergence(top, "jsd", mix) == pytest.approx(swapped, rel=1e-4, abs=1e-5)
    assert divergence(top, "jsd", 0.5) <= 0.6932  # log 2


@pytest.mark.parametrize("name", F.TOP_K_DIVERGENCES)
def test_an_empty_tail_gives_finite_values_and_gradients(name: str) -> None:
    """All the mass, or a little more by rounding, is on the top tokens of one side, of the other, or of both."""
    full, over = torch.tensor([0.0, -100.0]), torch.tensor([6e-8, -100.0])
    rest = torch.tensor([-0.7, -3.0])
    for student, teacher in ((full, rest), (rest, full), (over, over), (full, torch.tensor([-100.0, 0.0]))):
        live = student.clone()[None].requires_grad_()
        value = F.top_k_divergence(
            top_logprobs=live,
            teacher_top_logprobs=teacher[None],
            loss_mask=torch.tensor([True]),
            divergence=name,
            mix=0.4,
        )
        value.sum().backward()
        assert live.grad is not None and bool(value.isfinite().all()) and bool(live.grad.isfinite().all())


def test_the_gradient_by_the_students_logits_is_that_of_the_full_kl() -> None:
    """For the forward KL over the whole vocabulary the gradient is q - p."""
    torch.manual_seed(0)
    student, teacher = torch.randn(6, VOCABULARY, requires_grad=True), torch.randn(6, VOCABULARY)
    top = teacher.log_softmax(-1).topk(VOCABULARY)
    F.top_k_divergence(
        top_logprobs=student.log_softmax(-1).gather(-1, top.indices),
        teacher_top_logprobs=top.values,
        loss_mask=torch.ones(6, dtype=torch.bool),
        divergence="forward",
        mix=0.5,
    ).sum().backward()
    torch.testing.assert_close(student.grad, student.detach().softmax(-1) - teacher.softmax(-1), rtol=1e-4, atol=1e-5)


def test_the_log_ratio_as_a_loss_has_no_mean_gradient_as_an_advantage_it_has_that_of_the_kl() -> None:
    """The mean is over all tokens, weighted by their probability under the student."""
    torch.manual_seed(1)
    student, teacher = torch.randn(VOCABULARY, requires_grad=True), torch.randn(VOCABULARY)
    logprobs, wanted = student.log_softmax(-1), teacher.log_softmax(-1)
    weights = logprobs.detach().exp()
    (as_loss,) = torch.autograd.grad((weights * (logprobs - wanted)).sum(), student, retain_graph=True)
    assert float(as_loss.abs().max()) < 1e-6
    d = F.teacher_log_ratio(
        logprobs=logprobs, teacher_logprobs=wanted, loss_mask=torch.ones(VOCABULARY, dtype=torch.bool)
    )
    (as_advantage,) = torch.autograd.grad((weights * d * logprobs).sum(), student, retain_graph=True)
    (of_kl,) = torch.autograd.grad((logprobs.exp() * (logprobs - wanted)).sum(), student)
    torch.testing.assert_close(as_advantage, of_kl)
