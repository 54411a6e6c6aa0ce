"""Implements the critic's training back end: the policy's layers with a value head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from relax_core.contracts.algorithm import ValueInputs
from relax_core.contracts.media import MediaReader
from relax_core.contracts.tree import TokenTree
from relax_core.train.megatron_rank import ComputedTrees, MegatronRank, RankSetup, StepSums, joined
from relax_core.train.micro_batches import moment_sums
from relax_core.train.model.tree_attention import TreeBatch


class CriticBackend(MegatronRank):
    """Trains a critic that starts from the policy's weights and a value head of zeros.

    All values are therefore 0 until the first update.
    """

    def __init__(self, setup: RankSetup, *, media: MediaReader | None = None) -> None:
        assert setup.algorithm.value_loss is not None, "a critic needs a value loss"
        super().__init__(setup, value_head=True, media=media)

    def loss(self, batch: TreeBatch, hidden: Tensor) -> Tensor:
        """Returns the algorithm's summed value loss of a micro-batch; see `MegatronRank.loss`."""
        with self.timed("forward"):
            of_chosen = self.model.values(hidden[batch.predicting_rows])
            if not batch.groups:
                return of_chosen.sum() * 0.0
            old_values = self._column([group.of_tokens("values") for group in batch.groups])
            values = batch.of_tokens(of_chosen, otherwise=old_values)
            inputs = ValueInputs(
                values=values,
                old_values=old_values,
                returns=self._column([group.of_tokens("returns") for group in batch.groups]),
                loss_mask=self._column([group.loss_mask[group.tokens[1]] for group in batch.groups]),
                sample_ids=torch.from_numpy(batch.layout.sample_ids).to(self._device),
                num_samples=batch.layout.num_samples,
            )
            assert self._algorithm.value_loss is not None
            outputs = self._algorithm.value_loss(inputs, self._config)
            self._computed.append(ComputedTrees.of(batch.groups, outputs, values))
        return outputs.loss_sum

    def add_column(self, sums: StepSums, trees: Sequence[TokenTree], column: np.ndarray) -> None:
        """Adds the moments of returns and errors; see `MegatronRank.add_column`."""
        sums.algorithm |= moment_sums(
            returns=joined([tree.of_tokens("returns") for tree in trees]),
            values=column,
            loss_mask=joined([tree.loss_mask[tree.tokens[1]] for tree in trees]),
        )

    def values(self, groups: Sequence[TokenTree]) -> list[np.ndarray]:
        """Returns the values before sampled rows, without gradient: float32 ``[rows]`` per group, 0 at other rows."""

        def columns(batch: TreeBatch, hidden: Tensor) -> list[Tensor]:
            return [self.model.values(hidden[batch.predicting_rows])]

        return [values for (values,) in self._forward_only(groups, columns, like=[(torch.float32, ())])]
