"""Tests the trainer's stream by hand, and random trees against their single paths in transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCABULARY, make_model
from tiny_trainer import CONFIG, PPO_CLIP, clip_loss, make_backend, make_groups, train_step

from relax_core.contracts.algorithm import LossInputs, StepTotals
from relax_core.contracts.tree import TokenTree
from relax_core.train.hf.hf_weights import HfWeights
from relax_core.train.model.tree_attention import TreeBatch
from relax_core.train.tree_packing import pack_tree, tree_starts
from tests.trees import answers_tree, path_of, random_tree


def by_hand(**mask: Any) -> list[TokenTree]:
    return [
        answers_tree("g0", [10, 11], [3, 1], [20, 21, 22, 30], **mask),
        answers_tree("g1", [12], [2], [40, 41]),
    ]


def test_layout_by_hand() -> None:
    layout = pack_tree(by_hand())
    assert layout.token_ids.tolist() == [10, 11, 20, 21, 12, 40]
    assert layout.end.tolist() == [4, 4, 4, 4, 6, 6]
    assert tree_starts(layout.end).tolist() == [0, 4]
    assert layout.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert [rows.tolist() for rows in layout.chosen] == [[2, 3, 4, 5], [1, 2]]
    assert layout.targets.tolist() == [20, 21, 22, 30, 40, 41]
    assert layout.predicting_rows.tolist() == [1, 2, 3, 1, 4, 5]
    assert layout.token_positions is None
    assert layout.sample_ids.tolist() == [0, 0, 0, 1, 2, 2]
    assert layout.num_samples == 3


def test_only_trained_rows_are_chosen_where_that_is_enough() -> None:
    layout = pack_tree(by_hand(loss_mask=[False, True, False, True]), trained_only=True)
    assert [rows.tolist() for rows in layout.chosen] == [[3, 5], [1, 2]]
    assert layout.targets.tolist() == [21, 30, 40, 41]
    assert layout.predicting_rows.tolist() == [2, 1, 4, 5]
    assert layout.token_positions is not None and layout.token_positions.tolist() == [-1, 0, -1, 1, 2, 3]
    batch = TreeBatch.of(layout, device=torch.device("cpu"), dtype=torch.float32)
    column = batch.of_tokens(torch.tensor([1.0, 2.0, 3.0, 4.0]), otherwise=torch.full((6,), -9.0))
    assert column.tolist() == [-9, 1, -9, 2, 3, 4]
    nothing = pack_tree([dataclasses.replace(one, loss_mask=one.loss_mask & False) for one in by_hand()])
    assert len(nothing.targets) == 6


def test_a_sampled_row_of_two_episodes_is_predicted_once_and_is_a_token_of_each() -> None:
    """Rows 1 and 2 are sampled, and two episodes continue after them."""
    (tree,) = by_hand()[1:]
    episode = tree.episodes[0]
    shared = dataclasses.replace(
        tree,
        token_ids=np.array([12, 40, 41, 50, 60], dtype=np.int32),
        end=np.array([5, 5, 5, 4, 5], dtype=np.int32),
        loss_mask=np.array([False, True, True, True, True]),
        logprobs=np.zeros(5, dtype=np.float32),
        versions=np.array([-1, 0, 0, 0, 0], dtype=np.int32),
        episodes=[episode.__class__(f"g1.{place}", [3 + place], 1.0, {}, [], "stop") for place in range(2)],
    )
    layout = pack_tree([shared])
    assert layout.token_ids.tolist() == [12, 40, 41]
    assert layout.targets.tolist() == [40, 41, 50, 60] and layout.predicting_rows.tolist() == [0, 1, 2, 2]
    assert layout.token_positions is not None and layout.token_positions.tolist() == [0, 1, 2, 0, 1, 3]
    assert layout.sample_ids.tolist() == [0, 0, 0, 1, 1, 1]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 3), roots=st.integers(1, 3))
def test_rows_are_what_the_contract_says(seed: int, count: int, roots: int) -> None:
    """Visibility follows from ``end`` in each tree and in the stream alike."""
    random = np.random.default_rng(seed)
    trees = [random_tree(random, roots=roots) for _ in range(count)]
    layout = pack_tree(trees)
    assert len(layout.token_ids) == len(layout.end) == sum(tree.computed_rows for tree in trees)
    stream: list[tuple[int, int]] = []  # Holds the tree and the row of each row of the stream.
    for place, tree in enumerate(trees):
        paths = [path_of(tree, row) for row in range(tree.rows)]
        parents = {int(path[-2]) for path in paths if len(path) > 1}
        stream += [(place, row) for row in sorted(parents)]
    for row, (place, own) in enumerate(stream):
        seen = np.flatnonzero(layout.end[: row + 1] > row)
        assert [stream[one] for one in seen] == [(place, int(one)) for one in path_of(trees[place], own)]
        assert layout.positions[row] == len(seen) - 1
        assert layout.token_ids[row] == trees[place].token_ids[own]
    chosen = [(place, int(row)) for place, rows in enumerate(layout.chosen) for row in rows]
    for (place, row), predicting in zip(chosen, layout.predicting_rows, strict=True):
        assert stream[predicting] == (place, int(path_of(trees[place], row)[-2]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder: Path = tmp_path_factory.mktemp("model")
    return folder, make_model(folder).eval()


@pytest.fixture(scope="module")
def backend(model: tuple[Path, Any]) -> Any:
    return make_backend(model[0], trainable=False)


def logprobs_of_paths(model: Any, tree: TokenTree) -> dict[int, torch.Tensor]:
    """Returns each sampled row's log-prob by a forward pass of its path alone, with gradient."""
    found: dict[int, torch.Tensor] = {}
    for leaf in (leaf for one in tree.episodes for leaf in one.leaves):
        rows = path_of(tree, leaf)
        ids = torch.from_numpy(tree.token_ids[rows]).long()
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        for place, row in enumerate(rows[1:].tolist()):
            if tree.versions[row] >= 0:
                found[row] = logprobs[place]
    return found


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 3), roots=st.integers(1, 2))
def test_a_tree_is_its_paths(model: tuple[Path, Any], backend: Any, seed: int, count: int, roots: int) -> None:
    random = np.random.default_rng(seed)
    trees = [random_tree(random, roots=roots, vocabulary=VOCABULARY) for _ in range(count)]
    for tree, found in zip(trees, backend.logprobs(trees), strict=True):
        with torch.no_grad():
            expected = logprobs_of_paths(model[1], tree)
        assert sorted(expected) == tree.sampled.tolist()
        wanted = np.zeros(tree.rows, dtype=np.float32)
        wanted[list(expected)] = [float(one) for one in expected.values()]
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)


def test_a_tree_that_is_cut_into_micro_batches_has_the_same_log_probs(model: tuple[Path, Any], backend: Any) -> None:
    """Rows that several micro-batches compute have the same log-probs, too."""
    cut = make_backend(model[0], trainable=False)
    cut._parallel = dataclasses.replace(cut._parallel, micro_batch_tokens=30)
    random = np.random.default_rng(7)
    trees = [random_tree(random, roots=2, turns=4, vocabulary=VOCABULARY) for _ in range(3)]
    assert min(tree.computed_rows for tree in trees) > 60
    for together, apart in zip(backend.logprobs(trees), cut.logprobs(trees), strict=True):
        np.testing.assert_allclose(apart, together, atol=1e-5, rtol=0)


def unpacked_loss(model: Any, tree: TokenTree) -> torch.Tensor:
    """Sums PPO's clip over the (episode, sampled row) pairs, which are found by their definition."""
    logprobs = logprobs_of_paths(model, tree)
    pairs = [
        (place, row)
        for place, one in enumerate(tree.episodes)
        for row in sorted({int(row) for leaf in one.leaves for row in path_of(tree, leaf) if tree.versions[row] >= 0})
    ]
    rows = [row for _, row in pairs]
    rollout = torch.from_numpy(tree.logprobs[rows])
    inputs = LossInputs(
        logprobs=torch.stack([logprobs[row] for row in rows]),
        old_logprobs=rollout,
        rollout_logprobs=rollout,
        advantages=torch.from_numpy(tree.extras["advantages"]),
        loss_mask=torch.from_numpy(tree.loss_mask[rows]),
        sample_ids=torch.tensor([place for place, _ in pairs]),
        num_samples=len(tree.episodes),
    )
    return clip_loss(inputs, CONFIG).loss_sum


@pytest.fixture(scope="module")
def trainer(model: tuple[Path, Any]) -> tuple[Any, list[StepTotals]]:
    """Returns a back end whose updates change nothing, and the totals of its updates."""
    seen: list[StepTotals] = []

    def tokens(totals: StepTotals, config: Any) -> float:
        seen.append(totals)
        return float(totals.tokens)

    algorithm = dataclasses.replace(PPO_CLIP, denominator=tokens)
    return make_backend(model[0], algorithm=algorithm, optimizer={"lr": 0.0, "clip_grad": 0.0}), seen


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31), roots=st.integers(1, 2), pieces=st.integers(1, 8))
def test_loss_and_gradients_of_a_cut_tree_are_those_of_its_paths(
    model: tuple[Path, Any], trainer: tuple[Any, list[StepTotals]], seed: int, roots: int, pieces: int
) -> None:
    """A row that two episodes share counts once for each, in whichever micro-batches they are."""
    backend, totals = trainer
    tree = random_tree(np.random.default_rng(seed), roots=roots, vocabulary=VOCABULARY)
    cuts = [part.tolist() for part in np.array_split(np.arange(len(tree.episodes)), pieces) if len(part)]
    batches = [[tree.take(part)] for part in cuts] if len(cuts) > 1 else [[tree]]
    trained = [int(tree.loss_mask[rows].sum()) for rows in np.split(tree.tokens[1], np.cumsum(tree.lengths)[:-1])]
    if not sum(trained):
        with pytest.raises(ValueError, match="every token is masked"):
            train_step(backend, batches)
        return
    model[1].zero_grad()
    expected = unpacked_loss(model[1], tree) / sum(trained)
    expected.backward()
    backend.begin_step(0)
    for batch in batches:
        backend.accumulate(batch)
    weights = HfWeights([backend.model], backend.architecture, tensor_of=lambda parameter: parameter.main_grad)
    gradients = {name: gradient / sum(trained) for name, gradient in weights.export()}
    metrics = backend.finish_step()
    assert metrics.loss == pytest.approx(expected.item(), abs=1e-5)
    assert (metrics.tokens, metrics.samples) == (sum(trained), sum(map(bool, trained)))
    # `take` counts none of its pieces as a group; see test_micro_batches.py.
    assert totals[-1].groups == (len(cuts) == 1)
    for name, parameter in model[1].named_parameters():
        scale = max(1.0, float(parameter.grad.abs().max()))
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5 * scale, rtol=0, msg=name)


def test_a_long_prompt(backend: Any) -> None:
    """The prompt is longer than the first rotary table and than every other group's line."""
    long, short = make_groups([[4, 2], [3, 3]], prompt_lengths=[700, 5])
    together = backend.logprobs([long, short])
    np.testing.assert_allclose(together[0], backend.logprobs([long])[0], atol=1e-5, rtol=0)
    np.testing.assert_allclose(together[1], backend.logprobs([short])[0], atol=1e-5, rtol=0)
    assert torch.isfinite(torch.from_numpy(together[1])).all()
