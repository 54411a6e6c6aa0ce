"""Tests the trainer's packed stream by hand. Compares random trees with their single paths in transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
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
from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.tree import TokenTree
from relax_core.families.folder import folder_architecture
from relax_core.families.towers import Towers
from relax_core.families.vision_tower import image_rows
from relax_core.tools.make_tiny import tiny_model_folder
from relax_core.train.hf.hf_weights import HfWeights
from relax_core.train.micro_batches import (
    NO_TOWER,
    MicroBatcher,
    TowerWork,
    TreeLayout,
    pack_tree,
    split_over_ranks,
    tree_starts,
)
from relax_core.train.model.tree_attention import TreeBatch
from tests import media_items
from tests.trees import answers_tree, path_of, random_tree

IMAGE = media_items.IMAGE
TOWER = replace(media_items.TOWER, deepstack_layers=0, hidden_size=8, num_heads=1, intermediate_size=8)


def image(name: str, height: int, width: int) -> MediaItem:
    """Makes an image of ``height`` times ``width`` rows."""
    grid = [1, 2 * height, 2 * width]
    rows = image_rows(TOWER, grid=grid)
    return MediaItem(
        kind="image",
        digest=name,
        token_ids=rows.token_ids.tobytes(),
        offsets=rows.offsets.tobytes(),
        advance=rows.advance,
        placeholder=rows.placeholder,
        grid=grid,
        width=8 * width,
        height=8 * height,
    )


def tree(uid: str, *answers: int, items: list[MediaItem], last: list[MediaItem] | None = None) -> TokenTree:
    """Makes a prompt with a token before each item and a token at the end. ``last`` items end the last answer."""
    prompt, media = list[int](), list[Media]()
    for item in items:
        prompt.append(1)
        media.append(Media(item, len(prompt), len(prompt) + item.rows))
        prompt += item.ids.tolist()
    prompt.append(1)
    lengths, ids = list(answers), [2] * sum(answers)
    for item in last or []:
        start = len(prompt) + len(ids)
        media.append(Media(item, start, start + item.rows))
        ids += item.ids.tolist()
        lengths[-1] += item.rows
    return replace(answers_tree(uid, prompt, lengths, ids), media=media)


def always(rows: float) -> Callable[[MediaItem], float]:
    """Returns tower work that counts ``rows`` for every item."""
    return lambda item: rows


def entries(layout: TreeLayout) -> list[tuple[int, str, int]]:
    """Returns for each entry the row, the item and the index of the feature in the item."""
    assert layout.media is not None
    owners = [(item.digest, number) for item in layout.media.items for number in range(item.rows)]
    features, rows = layout.media.features.tolist(), layout.media.rows.tolist()
    return [(row, *owners[feature]) for row, feature in zip(rows, features, strict=True)]


def test_every_computed_row_of_an_item_gets_its_feature_and_an_item_is_there_once() -> None:
    small, large = image("small", 1, 2), image("large", 2, 2)
    # Rows: 1 small small 1 large×4 1 | 2 2 small small (this row ends its branch) | 1 small small 1 | 2.
    layout = pack_tree(
        [tree("a", 1, 1, items=[small, large], last=[small]), tree("b", 2, items=[small])], towers=Towers(vision=TOWER)
    )
    assert layout.media is not None
    assert [item.digest for item in layout.media.items] == ["small", "large"]
    expected = [(1, "small", 0), (2, "small", 1), *((4 + number, "large", number) for number in range(4))]
    # The first answer has one token, so it has no computed row. The second answer has its token and all image rows but
    # one.
    expected += [(10, "small", 0), (12, "small", 0), (13, "small", 1)]
    assert entries(layout) == expected
    assert (layout.token_ids[layout.media.rows] == IMAGE).all()


def test_a_part_has_the_items_that_it_needs() -> None:
    first, second, three = image("one", 1, 2), image("two", 2, 2), image("three", 1, 1)
    layout = pack_tree([tree("a", 2, items=[first, second, three])], towers=Towers(vision=TOWER))
    assert layout.media is not None
    part = layout.media.taken(np.flatnonzero(layout.media.rows >= 5), Towers(vision=TOWER))
    assert [item.digest for item in part.items] == ["two", "three"]
    whole = entries(layout)
    assert entries(replace(layout, media=part)) == [entry for entry in whole if entry[0] >= 5]


def test_rotary_positions_are_those_of_the_items_along_each_path() -> None:
    layout = pack_tree([tree("a", 2, 3, items=[image("one", 2, 3)])], towers=Towers(vision=TOWER))
    assert layout.rotary is not None
    time = [0, *[1] * 6, 4, 5, 5, 6]
    height = [0, 1, 1, 1, 2, 2, 2, 4, 5, 5, 6]
    width = [0, 1, 2, 3, 1, 2, 3, 4, 5, 5, 6]
    assert layout.rotary.tolist() == [time, height, width]
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9]


def test_text_alone_has_no_rotary_positions_of_its_own() -> None:
    layout = pack_tree([tree("a", 2, 3, items=[])], towers=Towers(vision=TOWER))
    assert layout.rotary is None and layout.media is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_micro_batch_keeps_the_budget_of_patches(ranks: int) -> None:
    found = [tree(f"g{place}", 2, 2, items=[image(f"image {place}", 2, 2)]) for place in range(5)]
    batcher = MicroBatcher(1000, ranks=ranks, tower=TowerWork(most_patches=32))  # an image has 16 patches
    batches = [*batcher.add(found), batcher.flush()]
    per_rank = [
        sum(packed_tree.media[0].item.patches for packed_tree in share)
        for batch in batches
        for share in split_over_ranks(batch, ranks, tower=TowerWork(most_patches=32))
    ]
    assert sum(len(batch) for batch in batches) >= 5
    assert max(per_rank) <= 32
    assert len(batches) == (3 if ranks == 1 else 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_equal_images_of_a_micro_batch_count_once_on_one_rank(ranks: int) -> None:
    """Each tree has 7 computed rows, and the tower's work for the image is 50 rows."""
    found = [tree(f"g{place}", 2, items=[image("same", 2, 2)]) for place in range(4 * ranks)]
    tower = TowerWork(rows=always(50.0), most_patches=16)
    for budget, expected in ((50 + 4 * 7, [4 * ranks]), (50 + 4 * 7 - 1, [3 * ranks, ranks])):
        batcher = MicroBatcher(budget, ranks=ranks, tower=tower)
        assert [len(batch) for batch in (*batcher.add(found), batcher.flush())] == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_micro_batch_ends_where_rows_and_the_towers_work_reach_the_budget(ranks: int) -> None:
    """Three trees of 7 rows fit into 24 rows. With the tower's work of 5.6 rows per tree, only one tree fits."""
    found = [tree(f"g{place}", 2, items=[image(f"image {place}", 2, 2)]) for place in range(6)]
    for rows, expected in ((0.0, 3 * ranks), (5.6, ranks)):
        batcher = MicroBatcher(24, ranks=ranks, tower=TowerWork(rows=always(rows)))
        batches = [len(batch) for batch in (*batcher.add(found), batcher.flush())]
        assert batches == [expected] * (6 // expected)


def test_ranks_are_balanced_by_the_work_of_the_towers() -> None:
    groups = [tree("image", 2, items=[image("one", 2, 2)]), *(tree(f"g{place}", 9, items=[]) for place in range(3))]
    by_rows = split_over_ranks(groups, 2)
    by_work = split_over_ranks(groups, 2, tower=TowerWork(rows=always(24.0)))
    assert [len(share) for share in by_rows] == [2, 2]
    assert [len(share) for share in by_work] == [1, 3]


def test_a_model_without_towers_has_no_work_for_items() -> None:
    folder = tiny_model_folder("tiny_qwen3", task="reverse_digits")
    assert TowerWork.of(folder_architecture(folder), most_patches=7) is NO_TOWER


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
    nothing = pack_tree(
        [dataclasses.replace(token_tree, loss_mask=token_tree.loss_mask & False) for token_tree in by_hand()]
    )
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
    """Visibility follows from ``end``, in each tree and in the stream."""
    random = np.random.default_rng(seed)
    trees = [random_tree(random, roots=roots) for _ in range(count)]
    layout = pack_tree(trees)
    assert len(layout.token_ids) == len(layout.end) == sum(tree.computed_rows for tree in trees)
    stream: list[tuple[int, int]] = []  # for each row of the stream: its tree and its row in the tree
    for place, tree in enumerate(trees):
        paths = [path_of(tree, row) for row in range(tree.rows)]
        parents = {int(path[-2]) for path in paths if len(path) > 1}
        stream += [(place, row) for row in sorted(parents)]
    for row, (place, own) in enumerate(stream):
        seen = np.flatnonzero(layout.end[: row + 1] > row)
        assert [stream[seen_row] for seen_row in seen] == [
            (place, int(path_row)) for path_row in path_of(trees[place], own)
        ]
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
    """Returns the log-prob of each sampled row, with gradient. Computes each path in a separate forward pass."""
    found: dict[int, torch.Tensor] = {}
    for leaf in (leaf for episode in tree.episodes for leaf in episode.leaves):
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
        wanted[list(expected)] = [float(logprob) for logprob in expected.values()]
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)


def test_a_tree_that_is_cut_into_micro_batches_has_the_same_log_probs(model: tuple[Path, Any], backend: Any) -> None:
    """Includes rows that several micro-batches compute."""
    cut = make_backend(model[0], trainable=False)
    cut._parallel = dataclasses.replace(cut._parallel, micro_batch_tokens=30)
    random = np.random.default_rng(7)
    trees = [random_tree(random, roots=2, turns=4, vocabulary=VOCABULARY) for _ in range(3)]
    assert min(tree.computed_rows for tree in trees) > 60
    for together, apart in zip(backend.logprobs(trees), cut.logprobs(trees), strict=True):
        np.testing.assert_allclose(apart, together, atol=1e-5, rtol=0)


def unpacked_loss(model: Any, tree: TokenTree) -> torch.Tensor:
    """Sums PPO's clipped loss over the (episode, sampled row) pairs, by its definition."""
    logprobs = logprobs_of_paths(model, tree)
    pairs = [
        (place, row)
        for place, episode in enumerate(tree.episodes)
        for row in sorted(
            {int(row) for leaf in episode.leaves for row in path_of(tree, leaf) if tree.versions[row] >= 0}
        )
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
    """Returns a backend with updates that change nothing, and the totals of its updates."""
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
    """A row that two episodes share counts twice, even if the episodes are in different micro-batches."""
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
    # `take` counts no piece of this group as a group; see test_micro_batches.py.
    assert totals[-1].groups == (len(cuts) == 1)
    for name, parameter in model[1].named_parameters():
        scale = max(1.0, float(parameter.grad.abs().max()))
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5 * scale, rtol=0, msg=name)


def test_a_long_prompt(backend: Any) -> None:
    """The prompt is longer than the first rotary table and longer than every path of the other groups."""
    long, short = make_groups([[4, 2], [3, 3]], prompt_lengths=[700, 5])
    together = backend.logprobs([long, short])
    np.testing.assert_allclose(together[0], backend.logprobs([long])[0], atol=1e-5, rtol=0)
    np.testing.assert_allclose(together[1], backend.logprobs([short])[0], atol=1e-5, rtol=0)
    assert torch.isfinite(torch.from_numpy(together[1])).all()
