"""Tests properties of distillation's divergences for any distributions. test_vectors.py tests the golden vectors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algorithms import functional as F

VOCABULARY = 12
LOGITS = st.lists(st.floats(-8.0, 8.0, width=32), min_size=VOCABULARY, max_size=VOCABULARY)
MIX = st.floats(0.05, 0.95)
patient = settings(deadline=None)


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
        # in float32 a tail of 1e-6 has an error of a tenth; this error times the tail's weight is the divergence's
        # error
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
    """On one side or on both sides, all mass (or a little more by rounding) is on the top tokens."""
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
    """The gradient of the forward KL over the complete vocabulary is q - p."""
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
    """The mean is over all tokens, weighted by the student's probabilities."""
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
