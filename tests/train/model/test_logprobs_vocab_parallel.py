"""Compares the output layer sharded over two ranks with the same functions on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logprobs_worker_group import RANKS, Answer, Problem, WorkerGroup, solve, worker_group

from relax_core.contracts.kept_tokens import OUTSIDE, KeptTokens
from relax_core.train.device import training_device

torch.set_num_threads(1)
# On a GPU each rank also rounds the gradient of its part of the logits to bfloat16.
HALF = 2**-6 if training_device().gpu else 2**-7


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    with worker_group(tmp_path_factory.mktemp("worker_group")) as started:
        yield started


def check(ranks: WorkerGroup, problem: Problem, *, rtol: float, atol: float) -> list[Answer]:
    """Compares two ranks with one.

    Outputs and hidden gradients are bit-identical on both ranks and agree with one rank. The shards of the weight
    gradient form the complete gradient.
    """
    alone, answers = solve(problem), ranks.solve(problem)
    for answer in answers:
        for mine, first in zip(
            [*answer.outputs, answer.hidden_gradient], [*answers[0].outputs, answers[0].hidden_gradient], strict=True
        ):
            assert torch.equal(mine, first)
        assert torch.equal(answer.top_k[1], answers[0].top_k[1])
        for mine, whole in zip(answer.outputs, alone.outputs, strict=True):
            torch.testing.assert_close(mine, whole, rtol=rtol, atol=atol)
        torch.testing.assert_close(answer.hidden_gradient, alone.hidden_gradient, rtol=rtol, atol=atol)
        for place in (0, 2):
            torch.testing.assert_close(answer.top_k[place], alone.top_k[place], rtol=rtol, atol=atol)
    joined = torch.cat([answer.weight_gradient for answer in answers])
    torch.testing.assert_close(joined, alone.weight_gradient, rtol=rtol, atol=atol)
    return answers


def make(
    *,
    rows: int,
    words: int,
    pads: int,
    width: int,
    k: int,
    entropy: bool,
    chunk_rows: int,
    top_k: int,
    inverse_temperature: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    return Problem(
        hidden=normal(rows, width).to(dtype),
        weight=normal(words + pads, width).to(dtype),
        targets=torch.randint(0, words, (rows,), generator=random),
        gather=torch.randint(0, words, (rows, k), generator=random) if k else None,
        incoming=(normal(rows), normal(rows) if entropy else None, normal(rows, k) if k else None),
        settings={"inverse_temperature": inverse_temperature, "chunk_rows": chunk_rows, "vocab_size": words},
        top_k=top_k,
    )


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_two_ranks_are_one(ranks: WorkerGroup, data: st.DataObject) -> None:
    """The kept sets lie in one rank's shard or anywhere, or keep all tokens. Some entries name no token (-1)."""
    words = data.draw(st.integers(1, 200), label="words")
    pads = data.draw(st.integers(0, 20), label="pads")
    seed = data.draw(st.integers(0, 2**31), label="seed")
    problem = make(
        rows=data.draw(st.integers(0, 30), label="rows"),
        words=words,
        pads=pads + (words + pads) % RANKS,
        width=data.draw(st.integers(1, 9), label="width"),
        k=data.draw(st.integers(0, 4), label="k"),
        entropy=data.draw(st.booleans(), label="entropy"),
        chunk_rows=data.draw(st.integers(2, 33), label="chunk rows"),
        top_k=data.draw(st.integers(1, min(words, 6)), label="top k"),
        inverse_temperature=data.draw(st.floats(0.1, 5.0), label="inverse temperature"),
        seed=seed,
    )
    rows = len(problem.targets)
    random = np.random.default_rng(seed)
    mask = random.random((rows, words)) < random.choice([0.0, 0.05, 0.5, 1.0], (rows, 1))
    mask[np.arange(len(mask)), problem.targets.numpy()] = True
    banned = sorted(set(range(words)) - set(problem.targets.tolist()))[: data.draw(st.integers(0, words // 2))]
    mask[:, banned] = False
    kept = KeptTokens.of_mask(mask) if rows and data.draw(st.booleans(), label="kept") else None
    named = problem.gather
    if named is not None and (kept is not None or banned):  # if all tokens are kept, -1 has no meaning
        named = named.masked_fill(torch.from_numpy(random.random(named.shape) < 0.2), -1)
    truncated = replace(problem, kept=kept, banned=banned, gather=named)
    for answer in check(ranks, truncated, rtol=1e-11, atol=1e-11):
        for tensor in (*answer.outputs, answer.hidden_gradient, answer.weight_gradient):
            assert bool(tensor.isfinite().all())
        assert torch.equal(answer.top_k[1] == -1, answer.top_k[2] == OUTSIDE)


def test_a_rank_of_padding_alone(ranks: WorkerGroup) -> None:
    answers = check(
        ranks, make(rows=7, words=5, pads=9, width=4, k=2, entropy=True, chunk_rows=3, top_k=5), rtol=1e-12, atol=1e-12
    )
    assert not answers[1].weight_gradient.any()
    assert not answers[0].weight_gradient[5:].any()


def test_a_shard_far_below_the_other(ranks: WorkerGroup) -> None:
    """The probability of one shard is 0 in floating point. All results must be finite."""
    problem = make(rows=6, words=8, pads=0, width=1, k=1, entropy=True, chunk_rows=4, top_k=8, dtype=torch.float32)
    problem.hidden.fill_(300.0)
    problem.weight.copy_(torch.arange(8.0, 0.0, -1.0)[:, None])
    for answer in check(ranks, problem, rtol=1e-6, atol=1e-4):
        assert all(bool(torch.isfinite(tensor).all()) for tensor in (*answer.outputs, answer.hidden_gradient))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, HALF)])
def test_lower_precision(ranks: WorkerGroup, dtype: torch.dtype, tolerance: float) -> None:
    problem = make(rows=40, words=500, pads=12, width=32, k=3, entropy=True, chunk_rows=16, top_k=4, dtype=dtype)
    answers = check(ranks, problem, rtol=tolerance, atol=tolerance)
    assert answers[0].outputs[0].dtype == torch.float32 and answers[0].hidden_gradient.dtype == dtype
