"""The tree layout, by hand and against each sequence on its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_model
from tiny_trainer import make_backend, make_groups

from relax_core.contracts.tree import TokenTree
from relax_core.train.tree import pack_tree


def test_layout_by_hand() -> None:
    def group(prompt: list[int], responses: list[list[int]]) -> TokenTree:
        flat = np.array([token for response in responses for token in response], dtype=np.int32)
        return TokenTree(
            group_uid="g",
            prompt_ids=np.array(prompt, dtype=np.int32),
            lengths=np.array([len(response) for response in responses]),
            response_ids=flat,
            loss_mask=np.ones(len(flat), dtype=bool),
            rollout_logprobs=np.zeros(len(flat), dtype=np.float32),
        )

    layout = pack_tree([group([10, 11], [[20, 21, 22], [30]]), group([12], [[40, 41]])])
    assert layout.token_ids.tolist() == [10, 11, 20, 21, 12, 40]
    assert layout.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert layout.targets.tolist() == [20, 21, 22, 30, 40, 41]
    assert layout.predicting_rows.tolist() == [1, 2, 3, 1, 4, 5]
    assert layout.sample_ids.tolist() == [0, 0, 0, 1, 2, 2]
    assert layout.num_samples == 3
    assert layout.end.tolist() == [4, 4, 4, 4, 6, 6]


def test_rows_are_what_the_contract_says() -> None:
    groups = make_groups([[3, 1], [2, 2, 9]], prompt_lengths=[4, 6])
    assert len(pack_tree(groups).token_ids) == sum(group.packed_tokens for group in groups)


def test_an_empty_response_is_refused() -> None:
    with pytest.raises(ValueError, match="groups g1: a prompt or a response without tokens"):
        pack_tree(make_groups([[3], [2, 0]], prompt_lengths=[4, 6]))


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("model")
    make_model(folder)
    return make_backend(folder)


@st.composite
def group_lengths(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    groups = draw(st.integers(1, 4))
    lengths = [draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)) for _ in range(groups)]
    return lengths, [draw(st.integers(1, 40)) for _ in range(groups)]


@settings(max_examples=25, deadline=None)
@given(group_lengths(), st.integers(0, 100))
def test_a_tree_is_its_sequences(backend: Any, shape: tuple[list[list[int]], list[int]], seed: int) -> None:
    """Log-probs of packed groups are those of every sample in a stream of its own."""
    lengths, prompts = shape
    groups = make_groups(lengths, prompt_lengths=prompts, seed=seed)
    packed = backend.logprobs(groups)
    for group, together in zip(groups, packed, strict=True):
        ends = np.cumsum(group.lengths)
        for start, end in zip(ends - group.lengths, ends, strict=True):
            alone = TokenTree(
                group_uid="alone",
                prompt_ids=group.prompt_ids,
                lengths=np.array([end - start]),
                response_ids=group.response_ids[start:end],
                loss_mask=group.loss_mask[start:end],
                rollout_logprobs=group.rollout_logprobs[start:end],
            )
            np.testing.assert_allclose(together[start:end], backend.logprobs([alone])[0], atol=1e-5, rtol=0)


def test_a_long_prompt(backend: Any) -> None:
    """Longer than the first rotary table and than every other group's line."""
    long, short = make_groups([[4, 2], [3, 3]], prompt_lengths=[700, 5])
    together = backend.logprobs([long, short])
    np.testing.assert_allclose(together[0], backend.logprobs([long])[0], atol=1e-5, rtol=0)
    np.testing.assert_allclose(together[1], backend.logprobs([short])[0], atol=1e-5, rtol=0)
    assert torch.isfinite(torch.from_numpy(together[1])).all()
