"""Compares chunked log-probs with the plain log_softmax in float64."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from branches import cpu_branch_only
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from relax_core.train.model import logprobs
from relax_core.train.model.logprobs import head_outputs, top_k_tokens

torch.set_num_threads(1)


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, inverse_temperature: float) -> Tensor:
    logits = hidden @ weight.t() * inverse_temperature
    return torch.log_softmax(logits, dim=1).gather(1, targets[:, None])[:, 0]


def problem(rows: int, vocab: int, width: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Draws hidden states, weight, targets and the incoming gradient."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    return [hidden, weight, targets, torch.randn(rows, generator=generator, dtype=torch.float64)]


def chunked_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, **words: Any) -> Tensor:
    return head_outputs(hidden, weight, targets, **words).logprobs


def values_and_grads(values: Tensor, hidden: Tensor, weight: Tensor, incoming: Tensor) -> list[Tensor]:
    grads = torch.autograd.grad(values, [hidden, weight], incoming.to(values.dtype))
    return [values.detach(), *grads]


@pytest.fixture(params=["plain", "own"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test twice: with the plain operations for tiny problems, and with the autograd function."""
    monkeypatch.setattr(logprobs, "_PLAIN_LOGITS", 10**9 if request.param == "plain" else -1)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    vocab=st.integers(1, 3000),
    width=st.integers(1, 17),
    chunk_rows=st.integers(1, 45),
    inverse_temperature=st.floats(0.1, 10.0),
    seed=st.integers(0, 2**31),
)
def test_any_shape_in_float32(
    rows: int, vocab: int, width: int, chunk_rows: int, inverse_temperature: float, seed: int
) -> None:
    hidden, weight, targets, incoming = problem(rows, vocab, width, seed=seed, dtype=torch.float32)
    ours = chunked_logprobs(hidden, weight, targets, inverse_temperature=inverse_temperature, chunk_rows=chunk_rows)
    assert ours.dtype == torch.float32 and ours.shape == (rows,)
    double_hidden, double_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    theirs = naive(double_hidden, double_weight, targets, inverse_temperature)
    expected = values_and_grads(theirs, double_hidden, double_weight, incoming)
    for mine, exact in zip(values_and_grads(ours, hidden, weight, incoming), expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)


@cpu_branch_only("a GPU rounds the logits' gradient to bfloat16; see test_bfloat16_factors_with_float32_sums")
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("chunk_rows", [8, 64])
def test_bfloat16_inputs_get_float32_maths(chunk_rows: int) -> None:
    hidden, weight, targets, incoming = problem(30, 400, 64, dtype=torch.bfloat16)
    ours = chunked_logprobs(hidden, weight, targets, inverse_temperature=1.0, chunk_rows=chunk_rows)
    assert ours.dtype == torch.float32
    double_hidden, double_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    theirs = naive(double_hidden, double_weight, targets, 1.0)
    mine = values_and_grads(ours, hidden, weight, incoming)
    exact = values_and_grads(theirs, double_hidden, double_weight, incoming)
    # Logits reach 20 here, so bfloat16 would round them by up to 0.06.
    torch.testing.assert_close(mine[0].double(), exact[0], rtol=0, atol=1e-4)
    for grad, expected in zip(mine[1:], exact[1:], strict=True):
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad.double(), expected, rtol=2**-8, atol=1e-4)


@pytest.fixture
def float32_sums() -> Iterator[None]:
    """Provides on a CPU the products that torch has only on a GPU: bfloat16 factors with float32 sums."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", lambda left, right, dtype: left.to(dtype) @ right.to(dtype), "CPU")
    library.impl("mm.dtype_out", lambda left, right, dtype, *, out: out.copy_(left.to(dtype) @ right.to(dtype)), "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("float32_sums")
@pytest.mark.parametrize("chunk_rows", [8, 64])
def test_bfloat16_factors_with_float32_sums(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the computation on a GPU without a float32 copy of the weight.

    Logits have the same precision as with float32 copies. Gradients are within bfloat16's rounding of one factor.
    """
    monkeypatch.setattr(logprobs._Shard, "matrix", lambda self, weight: weight[: self.size])
    monkeypatch.setattr(logprobs, "_PLAIN_LOGITS", -1)
    hidden, weight, targets, incoming = problem(30, 400, 64, dtype=torch.bfloat16)
    gather = torch.randint(0, 400, (30, 3), generator=torch.Generator().manual_seed(3))
    flows = [incoming, incoming.flip(0), incoming[:, None].expand(30, 3)]
    ours = head_outputs(
        hidden, weight, targets, inverse_temperature=0.7, chunk_rows=chunk_rows, gather=gather, entropy=True
    )
    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    theirs = naive_outputs(exact_hidden, exact_weight, targets, gather, 0.7)
    for mine, exact in zip(ours, theirs, strict=True):
        assert mine is not None and mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), exact, rtol=0, atol=1e-4)
    plain = chunked_logprobs(hidden, weight, targets, inverse_temperature=0.7, chunk_rows=chunk_rows)
    torch.testing.assert_close(plain.double(), theirs[0], rtol=0, atol=1e-4)
    got = torch.autograd.grad(
        sum((mine * flow).sum() for mine, flow in zip(ours, flows, strict=True)), [hidden, weight]
    )  # type: ignore[operator]
    exact_loss = sum((output * flow).sum() for output, flow in zip(theirs, flows, strict=True))
    for grad, exact in zip(got, torch.autograd.grad(exact_loss, [exact_hidden, exact_weight]), strict=True):
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad.double(), exact, rtol=2**-7, atol=2**-7 * float(exact.abs().max()) / 8)
    top = top_k_tokens(hidden, weight, targets, inverse_temperature=0.7, chunk_rows=chunk_rows, top_k=2)
    best = torch.log_softmax(exact_hidden @ exact_weight.t() * 0.7, dim=1).topk(2)
    assert torch.equal(top.top_ids, best.indices)
    torch.testing.assert_close(top.top_logprobs.double(), best.values, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("way")
def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    values = chunked_logprobs(hidden, weight, torch.tensor([0, 0]), inverse_temperature=1.0, chunk_rows=2)
    assert values.tolist() == [0.0, -600.0]
    grads = torch.autograd.grad(values.sum(), [hidden, weight])
    # Row 0 is certain of its target and has no gradient. Row 1: d/dh = W[0] - W[2] = 2, d/dW = -300 · (e_0 - e_2).
    assert grads[0].flatten().tolist() == [0.0, 2.0]
    assert grads[1].flatten().tolist() == [-300.0, 0.0, 300.0]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("chunk_rows", [4, 16])
def test_only_the_wanted_gradient_and_none_without_grad_mode(chunk_rows: int) -> None:
    hidden, weight, targets, _ = problem(10, 20, 4)
    values = chunked_logprobs(hidden.detach(), weight, targets, inverse_temperature=1.0, chunk_rows=chunk_rows)
    values.sum().backward()
    assert hidden.grad is None and weight.grad is not None
    with torch.no_grad():
        quiet = chunked_logprobs(hidden, weight, targets, inverse_temperature=1.0, chunk_rows=chunk_rows)
    assert quiet.grad_fn is None and torch.equal(quiet, values)


def test_backward_twice_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first backward pass (retain_graph) must not change the saved chunk."""
    monkeypatch.setattr(logprobs, "_PLAIN_LOGITS", -1)
    hidden, weight, targets, incoming = problem(10, 20, 4)
    values = chunked_logprobs(hidden, weight, targets, inverse_temperature=0.5, chunk_rows=10)
    first, second = (torch.autograd.grad(values, [hidden, weight], incoming, retain_graph=True) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (128, 4097), (2, 151_936)])
def test_in_place_softmax_equals_out_of_place(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Torch does not document that ``out=`` may be the input, but logprobs.py relies on it."""
    logits = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1)) * 5
    for function in (torch.softmax, torch.log_softmax):
        in_place = logits.clone()
        function(in_place, dim=1, out=in_place)
        assert torch.equal(in_place, function(logits, dim=1))


# -- Entropy and other tokens in addition to the target ---------------------------------------------------------------
def naive_outputs(
    hidden: Tensor, weight: Tensor, targets: Tensor, gather: Tensor, inverse_temperature: float
) -> list[Tensor]:
    logprobs = torch.log_softmax(hidden @ weight.t() * inverse_temperature, dim=1)
    entropy = torch.distributions.Categorical(logits=logprobs).entropy()
    return [logprobs.gather(1, targets[:, None])[:, 0], entropy, logprobs.gather(1, gather)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("wanted", ["all", "entropy", "gather", "logprobs"])
@pytest.mark.parametrize(("chunk_rows", "inverse_temperature"), [(1, 1.0), (4, 0.7), (10, 2.5), (64, 1.0)])
def test_values_and_gradients_equal_naive(chunk_rows: int, inverse_temperature: float, wanted: str) -> None:
    hidden, weight, targets, incoming = problem(10, 37, 8)
    generator = torch.Generator().manual_seed(2)
    gather = torch.randint(0, 37, (10, 5), generator=generator)
    gather[0] = targets[0]  # a token may occur several times and may be the target
    flows = [incoming, incoming.flip(0), torch.randn(10, 5, generator=generator, dtype=torch.float64)]
    ours = head_outputs(
        hidden,
        weight,
        targets,
        inverse_temperature=inverse_temperature,
        chunk_rows=chunk_rows,
        gather=gather if wanted in ("all", "gather") else None,
        entropy=wanted in ("all", "entropy"),
    )
    theirs = naive_outputs(hidden, weight, targets, gather, inverse_temperature)
    assert [output is not None for output in ours[1:]] == [wanted in ("all", "entropy"), wanted in ("all", "gather")]
    pairs = [
        (mine, reference, flow) for mine, reference, flow in zip(ours, theirs, flows, strict=True) if mine is not None
    ]
    for mine, reference, _ in pairs:
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)
    got, expected = (
        torch.autograd.grad(sum((pair[side] * pair[2]).sum() for pair in pairs), [hidden, weight]) for side in (0, 1)
    )
    for mine, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("way")
def test_one_output_may_go_unused() -> None:
    hidden, weight, targets, incoming = problem(6, 20, 4)
    outputs = head_outputs(hidden, weight, targets, inverse_temperature=1.0, chunk_rows=4, entropy=True)
    plain = chunked_logprobs(hidden, weight, targets, inverse_temperature=1.0, chunk_rows=4)
    mine = torch.autograd.grad(outputs.logprobs, [hidden, weight], incoming, retain_graph=True)
    for got, expected in zip(mine, torch.autograd.grad(plain, [hidden, weight], incoming), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
    assert outputs.entropy is not None
    (of_entropy,) = torch.autograd.grad(outputs.entropy.sum(), [weight])
    assert of_entropy.abs().sum() > 0


@pytest.mark.usefixtures("way")
def test_the_entropy_of_a_certain_row_is_zero_and_of_a_flat_one_log_vocab() -> None:
    hidden = torch.tensor([[300.0], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    outputs = head_outputs(hidden, weight, torch.tensor([0, 0]), inverse_temperature=1.0, chunk_rows=2, entropy=True)
    assert outputs.entropy is not None
    assert outputs.entropy.tolist() == pytest.approx([0.0, math.log(3)])
    grads = torch.autograd.grad(outputs.entropy.sum(), [hidden, weight])
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    assert grads[0].flatten().tolist() == pytest.approx([0.0, 0.0], abs=1e-7)


@pytest.mark.parametrize("chunk_rows", [3, 64])
def test_top_k_tokens_are_those_of_the_whole_distribution(chunk_rows: int) -> None:
    hidden, weight, targets, _ = problem(10, 37, 8)
    got = top_k_tokens(hidden, weight, targets, inverse_temperature=0.7, chunk_rows=chunk_rows, top_k=4)
    logprobs = torch.log_softmax(hidden @ weight.t() * 0.7, dim=1).detach()
    order = logprobs.argsort(dim=1, descending=True)[:, :4]
    assert torch.equal(got.top_ids, order) and got.logprobs.grad_fn is None
    torch.testing.assert_close(got.top_logprobs, logprobs.gather(1, order))
    torch.testing.assert_close(got.logprobs, logprobs.gather(1, targets[:, None])[:, 0])


@pytest.mark.parametrize(
    ("flags", "most_mb"),
    [(["--way=ours"], 16), (["--way=entropy"], 16), (["--way=top_8"], 16), (["--way=kept", "--kept=5000"], 20)],
)
def test_memory_stays_at_one_chunk(flags: list[str], most_mb: float) -> None:
    """All logits would take 41 MB. A chunk takes 2.6 MB, the weight's gradient 2.6 MB, and the kept sets 1.3 MB."""
    sizes = ["--rows=512", "--vocab=20000", "--hidden=32", "--chunk=32"]
    command = [sys.executable, "-m", "benchmarks.logprobs", *flags, *sizes]
    printed = subprocess.run(
        command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, check=True, timeout=300
    ).stdout
    assert json.loads(printed)["peak_mb"] < most_mb
