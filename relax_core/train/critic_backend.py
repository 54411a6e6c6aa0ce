"""The critic's training back end: the policy's trunk with a value head, its forward pass and its updates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from relax_core.contracts.algorithm import ValueInputs
from relax_core.contracts.train import TrainGroup
from relax_core.train.rank import MegatronRank, RankSetup, micro_batch_sums
from relax_core.train.tree import pack_tree
from relax_core.train.tree_attention import TreeBatch
from relax_core.train.value_moments import moment_sums


class CriticBackend(MegatronRank):
    """It starts from the policy's weights and a head of zeros, so that every value is 0 until the first update."""

    def __init__(self, setup: RankSetup) -> None:
        assert setup.algorithm.value_loss is not None, "a critic needs a loss"
        super().__init__(setup, value_head=True)

    def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        """Forward and backward over this rank's groups of one micro-batch (may be empty on a rank)."""
        if not groups:
            return
        with self._timed("pack"):
            layout = pack_tree(groups)
            tree = self._to_device(layout)
        with self._timed("forward"):
            inputs = ValueInputs(
                values=self._values(tree),
                old_values=self._column([group.values for group in groups]),
                returns=self._column([group.returns for group in groups]),
                loss_mask=self._column([group.loss_mask for group in groups]),
                sample_ids=torch.from_numpy(layout.sample_ids).to(self._device),
                num_samples=layout.num_samples,
            )
            assert self._algorithm.value_loss is not None
            outputs = self._algorithm.value_loss(inputs, self._knobs)
        with self._timed("backward"):
            outputs.loss_sum.backward()
        with self._timed("sums"):
            sums = micro_batch_sums(groups, outputs)
            sums.algorithm |= moment_sums(
                returns=inputs.returns.cpu().numpy(),
                values=inputs.values.detach().cpu().numpy(),
                loss_mask=inputs.loss_mask.cpu().numpy(),
            )
            self._sums.add(sums)

    def values(self, groups: Sequence[TrainGroup]) -> list[np.ndarray]:
        """The value in front of each response token, one float32 ``[tokens]`` a group. No gradient."""
        return [values for (values,) in self._forward_only(groups, lambda tree: [self._values(tree)])]

    def _values(self, tree: TreeBatch) -> Tensor:
        """Of the state that each response token was chosen in, float32 ``[tokens]``."""
        hidden = self.model_chunks[0](tree)
        return self.model.values(hidden[tree.predicting_rows])
