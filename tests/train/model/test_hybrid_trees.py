"""Tests models with gated delta nets: token trees give the log-probs, gradients and branch bits of single rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.parity_case import Outcome
from benchmarks.parity_data import one_sample_each, with_rollout
from benchmarks.parity_media import HYBRID, HYBRID_EXPERTS, WORDS, Items, make_case, make_model
from benchmarks.parity_media_ranks import recurrent_rule, settings_of, steps
from benchmarks.parity_ranks import make_backend
from relax_core.contracts.media_file import FolderReader
from relax_core.contracts.tree import TokenTree
from relax_core.train.policy_backend import MegatronBackend

LOGPROBS, GRADIENTS = 2e-5, 1e-5  # maximum gaps: in nats; relative


@dataclasses.dataclass(frozen=True)
class Hybrid:
    """Holds a random model, and trees of depth 4 with media items in branches."""

    folder: Path
    family: str
    trees: Sequence[TokenTree]

    def backend(self) -> MegatronBackend:
        return make_backend(
            self.folder,
            family=self.family,
            layout={},
            rank=0,
            ranks=1,
            port=0,
            media=FolderReader(self.folder / "media"),
            optimizer=settings_of(self.family),
        )

    def step(self, groups: Sequence[TokenTree]) -> Outcome:
        return steps(self.backend(), groups, replica=0, layout={}, count=1)


@pytest.fixture(scope="module", params=[HYBRID, HYBRID_EXPERTS])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    folder = tmp_path_factory.mktemp("hybrid")
    make_model(folder / request.param, request.param)
    items = Items(folder / request.param, folder / "media")
    trees = [*make_case("depth", items), *make_case("branches", items)]
    model = Hybrid(folder, request.param, [])
    trees = [dataclasses.replace(tree, group_uid=f"g{place}") for place, tree in enumerate(trees)]
    return dataclasses.replace(model, trees=with_rollout(trees, model.backend().logprobs(trees)))


def test_trees_and_rows_have_the_same_logprobs_and_gradient(hybrid: Hybrid) -> None:
    trees, rows = hybrid.step(hybrid.trees), hybrid.step(one_sample_each(hybrid.trees))
    for ours, theirs in zip(trees.logprobs, rows.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=LOGPROBS, rtol=0)
    squares = [
        (float((gradient - rows.gradients[name]).norm()) ** 2, float(rows.gradients[name].norm()) ** 2)
        for name, gradient in trees.gradients.items()
    ]
    difference, size = np.sqrt(np.sum(squares, axis=0))
    assert size > 0.9, "the gradient is clipped to 1"
    assert difference / size <= GRADIENTS


def test_each_tensors_gradient_is_the_same_by_the_recurrent_rule(hybrid: Hybrid) -> None:
    """Includes the decay's parameters: with the chunked rule their gradients have the largest rounding errors."""
    with recurrent_rule():
        trees, rows = hybrid.step(hybrid.trees), hybrid.step(one_sample_each(hybrid.trees))
    assert sum(name.endswith("A_log") for name in trees.gradients) == 6
    assert trees.each_gradient(rows) <= GRADIENTS


def test_another_token_in_one_branch_leaves_the_bits_of_every_other(hybrid: Hybrid) -> None:
    backend, tree = hybrid.backend(), hybrid.trees[0]
    [before] = backend.logprobs([tree])
    for row in (8, 16, 90):  # in an inner segment, in a leaf, and in a branch of the trunk
        ids = tree.token_ids.copy()
        ids[row] = (ids[row] + 1) % WORDS
        [after] = backend.logprobs([dataclasses.replace(tree, token_ids=ids)])
        below = np.arange(tree.rows)
        seen = (below >= row) & (below < tree.end[row])  # rows that attend to the token, and the token's own prediction
        assert np.array_equal(before[~seen], after[~seen]), row
        assert (before[seen & tree.loss_mask] != after[seen & tree.loss_mask]).any(), row
