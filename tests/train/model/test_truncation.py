"""Compares log-probs over kept sets without banned tokens with a float64 softmax over the kept tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from relax_core.contracts.kept_tokens import OUTSIDE, KeptTokens
from relax_core.train.model.logprobs import HeadOutputs, KeptRows, Truncation, head_outputs, top_k_tokens

torch.set_num_threads(1)
CPU = torch.device("cpu")


def left(rows: int, vocab: int, targets: Tensor, *, banned: list[int], seed: int) -> Tensor:
    """Draws kept sets without banned tokens, bool ``[rows, vocab]``. The smallest sets contain only the target."""
    random = torch.Generator().manual_seed(seed)
    shares = torch.tensor([0.0, 0.02, 0.3, 1.0])[torch.randint(0, 4, (rows, 1), generator=random)]
    mask = torch.rand(rows, vocab, generator=random) < shares
    mask[torch.arange(rows), targets] = True
    mask[:, banned] = False
    return mask


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, gather: Tensor, mask: Tensor, inverse_temperature: float
) -> HeadOutputs:
    """Computes in float64, row by row, over the kept tokens only."""
    logprobs, entropies, gathered = [], [], []
    for row, own in enumerate(mask):
        ids = own.nonzero()[:, 0]
        found = torch.log_softmax(hidden[row].double() @ weight[ids].double().t() * inverse_temperature, dim=0)
        of_id = dict(zip(ids.tolist(), found, strict=True))
        outside = torch.tensor(OUTSIDE, dtype=torch.float64)
        logprobs.append(of_id[int(targets[row])])
        entropies.append(-(found.exp() * found).sum())
        gathered.append(torch.stack([of_id.get(int(token_id), outside) for token_id in gather[row]]))
    return HeadOutputs(torch.stack(logprobs), torch.stack(entropies), torch.stack(gathered))


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 30),
    vocab=st.integers(2, 400),
    width=st.integers(1, 9),
    k=st.integers(1, 5),
    chunk_rows=st.integers(2, 33),
    inverse_temperature=st.floats(0.2, 4.0),
    ban=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
)
def test_values_and_gradients_are_those_over_the_set(
    rows: int,
    vocab: int,
    width: int,
    k: int,
    chunk_rows: int,
    inverse_temperature: float,
    ban: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    banned = [0] if ban else []
    targets = torch.randint(len(banned), vocab, (rows,), generator=random)
    gather = torch.randint(-1, vocab, (rows, k), generator=random)  # -1 means no token
    flows = [torch.randn(*shape, generator=random, dtype=torch.float64) for shape in ((rows,), (rows,), (rows, k))]
    mask = left(rows, vocab, targets, banned=banned, seed=seed)
    truncation = Truncation.of(KeptTokens.of_mask(mask.numpy()), banned, CPU)
    settings_ = {"inverse_temperature": inverse_temperature, "chunk_rows": chunk_rows, "truncation": truncation}
    ours = head_outputs(hidden, weight, targets, gather=gather, entropy=True, **settings_)
    theirs = plain(hidden, weight, targets, gather, mask, inverse_temperature)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 1e-10, "atol": 1e-11}
    grads = []
    for outputs in (ours, theirs):
        total = sum(
            (output * flow.to(output.dtype)).sum()
            for output, flow in zip(outputs, flows, strict=True)
            if output is not None
        )
        # The log-prob of a token outside the set is a huge negative constant; other numbers vanish next to it.
        outside = outputs.gathered == OUTSIDE
        total = total - (outputs.gathered * flows[2].to(outputs.gathered.dtype))[outside].sum().detach()
        grads.append(torch.autograd.grad(total, [hidden, weight]))
    for mine, exact in zip((*ours, *grads[0]), (*theirs, *grads[1]), strict=True):
        torch.testing.assert_close(mine.double(), exact.double(), **close)


def test_nothing_left_out_is_no_truncation_to_the_bit() -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 16, generator=random).requires_grad_()
    weight = torch.randn(400, 16, generator=random).requires_grad_()
    targets, gather = torch.randint(0, 400, (300,), generator=random), torch.randint(0, 400, (300, 3), generator=random)
    everything = Truncation.of(KeptTokens.whole(300, vocab_size=400), [], CPU)
    found = []
    for truncation in (None, everything):
        outputs = head_outputs(
            hidden,
            weight,
            targets,
            inverse_temperature=0.7,
            chunk_rows=64,
            gather=gather,
            entropy=True,
            truncation=truncation,
        )
        assert outputs.entropy is not None and outputs.gathered is not None
        total = outputs.logprobs.sum() + outputs.entropy.sum() + outputs.gathered.sum()
        found.append([*outputs, *torch.autograd.grad(total, [hidden, weight])])
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))
    assert Truncation.of(None, [], CPU) is None


@pytest.mark.parametrize("chunk_rows", [4, 64])
def test_a_set_of_one_token_has_log_prob_0_and_no_gradient(chunk_rows: int) -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 8, generator=random).requires_grad_()
    weight = torch.randn(50, 8, generator=random).requires_grad_()
    targets = torch.randint(0, 50, (10,), generator=random)
    kept = KeptTokens.of_lists([[int(target)] for target in targets], vocab_size=50)
    outputs = head_outputs(
        hidden,
        weight,
        targets,
        inverse_temperature=1.0,
        chunk_rows=chunk_rows,
        entropy=True,
        truncation=Truncation.of(kept, [], CPU),
    )
    assert outputs.entropy is not None
    assert not outputs.logprobs.any() and not outputs.entropy.any()
    for grad in torch.autograd.grad(outputs.logprobs.sum() + outputs.entropy.sum(), [hidden, weight]):
        torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("chunk_rows", [3, 64])
def test_the_top_k_tokens_lie_within_the_set(chunk_rows: int) -> None:
    random = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(40, 8, generator=random), torch.randn(90, 8, generator=random)
    targets = torch.randint(2, 90, (40,), generator=random)
    mask = left(40, 90, targets, banned=[0, 1], seed=5)
    truncation = Truncation.of(KeptTokens.of_mask(mask.numpy()), [0, 1], CPU)
    got = top_k_tokens(
        hidden, weight, targets, inverse_temperature=0.7, chunk_rows=chunk_rows, top_k=6, truncation=truncation
    )
    exact = (hidden.double() @ weight.double().t() * 0.7).masked_fill(~mask, -torch.inf).log_softmax(1)
    values, ids = exact.topk(6, dim=1)
    none = values.isneginf()
    assert none.any() and not none.all(1).any()
    assert torch.equal(got.top_ids, ids.masked_fill(none, -1))
    torch.testing.assert_close(got.top_logprobs.double(), values.masked_fill(none, OUTSIDE), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.logprobs.double(), exact.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(
    vocab=st.integers(1, 300),
    rows=st.integers(1, 20),
    first=st.integers(0, 320),
    words=st.integers(1, 320),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_a_chunk_of_a_shard_is_decoded_alone(
    vocab: int, rows: int, first: int, words: int, seed: int, data: st.DataObject
) -> None:
    """A padded model has tokens beyond the sets' vocabulary. These tokens are excluded."""
    start = data.draw(st.integers(0, rows - 1))
    chunk = slice(start, data.draw(st.integers(start + 1, rows)))
    mask = left(rows, vocab, torch.zeros(rows, dtype=torch.int64), banned=[], seed=seed)
    logits = torch.rand(chunk.stop - start, words, generator=torch.Generator().manual_seed(seed))
    found = logits.clone()
    KeptRows(KeptTokens.of_mask(mask.numpy()), CPU).leave_out(found, chunk, first=first)
    whole = np.ones((rows, 640), dtype=bool)
    whole[:, :vocab] = ~mask.numpy()
    whole[mask.numpy().all(1)] = False  # these rows store only the fact that all tokens were kept
    left_out = torch.from_numpy(whole[chunk, first : first + words])
    assert torch.equal(found, logits.masked_fill(left_out, OUTSIDE))
