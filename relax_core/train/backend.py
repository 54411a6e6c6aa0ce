"""The policy's training back end: one data-parallel rank's part of the trainer (contracts/train.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from relax_core.contracts.algorithm import LossInputs
from relax_core.contracts.train import TrainGroup
from relax_core.train.device import has_cuda
from relax_core.train.logprobs import HeadOutputs, chunked_logprobs, head_outputs, likeliest_tokens
from relax_core.train.rank import MegatronRank, RankSetup, micro_batch_sums
from relax_core.train.tree import TreeLayout, pack_tree
from relax_core.train.tree_attention import TreeBatch


class TopLogprobs(NamedTuple):
    """Of a group's response tokens: their own log-probs float32 ``[tokens]``; the likeliest tokens at their places,
    int64 ``[tokens, top_k]``, likeliest first, and the log-probs of those, float32 ``[tokens, top_k]``."""

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class MegatronBackend(MegatronRank):
    """Implements `relax_core.contracts.train.TrainBackend` on megatron-core.

    ``temperature``: what log-probs are computed at. ``trainable`` False: what actor_fwd, reference and teachers use.
    """

    def __init__(self, setup: RankSetup, *, temperature: float, trainable: bool = True) -> None:
        if temperature <= 0:
            raise ValueError(f"rollout.temperature={temperature}: training needs more than 0; 1.0 is usual.")
        super().__init__(setup, trainable=trainable)
        self._inverse_temperature = 1.0 / temperature
        self._wants_entropy = self.trainable and self._algorithm.needs(self._knobs).entropy

    def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        """Forward and backward over this rank's groups of one micro-batch (may be empty on a rank)."""
        if not groups:
            return
        with self._timed("pack"):
            layout = pack_tree(groups)
            tree = self._to_device(layout)
        with self._timed("forward"):
            inputs = self._loss_inputs(groups, layout, tree)
            outputs = self._algorithm.loss(inputs, self._knobs)
        with self._timed("backward"):
            outputs.loss_sum.backward()
        with self._timed("sums"):
            sums = micro_batch_sums(groups, outputs)
            gap = fresh_gap(groups, inputs.logprobs.detach().cpu().numpy())
            sums.gap_sum, sums.gap_tokens = float(gap.sum(dtype=np.float64)), gap.size
            sums.gap_max = float(gap.max(initial=0.0))
            self._sums.add(sums)

    def logprobs(self, groups: Sequence[TrainGroup]) -> list[np.ndarray]:
        """Log-probs of the current weights, one float32 ``[tokens]`` a group. No gradient."""

        def forward(tree: TreeBatch) -> list[Tensor]:
            hidden, weight = self._head(tree)
            return [chunked_logprobs(hidden, weight, tree.targets, **self._head_settings)]

        return [logprobs for (logprobs,) in self._forward_only(groups, forward)]

    def top_logprobs(self, groups: Sequence[TrainGroup], *, top_k: int) -> list[TopLogprobs]:
        """`logprobs` with the ``top_k`` likeliest tokens beside each, 1..vocab of them. No gradient."""

        def forward(tree: TreeBatch) -> Sequence[Tensor]:
            hidden, weight = self._head(tree)
            return likeliest_tokens(hidden, weight, tree.targets, top_k=top_k, **self._head_settings)

        return [TopLogprobs(*columns) for columns in self._forward_only(groups, forward)]

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under Hugging Face names, in map order; the tensors are valid until the next step."""
        return self._weights.export()

    def offload(self) -> None:
        """Does nothing on a CPU, where device and host share memory."""
        self._refuse_on_cuda("offload")

    def onload(self) -> None:
        self._refuse_on_cuda("onload")

    # -- parts --------------------------------------------------------------------------------------------------
    @property
    def _head_settings(self) -> dict[str, Any]:
        return {
            "inverse_temperature": self._inverse_temperature,
            "chunk_rows": self._parallel.logprob_chunk_tokens,
        }

    def _head(self, tree: TreeBatch) -> tuple[Tensor, Tensor]:
        """Hidden states in front of each response token ``[tokens, hidden]``, and the output weight."""
        hidden = self.model_chunks[0](tree)
        return hidden[tree.predicting_rows], self.model.output_weight()

    def _loss_inputs(self, groups: Sequence[TrainGroup], layout: TreeLayout, tree: TreeBatch) -> LossInputs:
        def column(name: str) -> Tensor | None:
            """Every column is there for all groups of a step or for none."""
            if getattr(groups[0], name) is None:
                return None
            return self._column([getattr(group, name) for group in groups])

        def present(name: str) -> Tensor:
            return self._column([getattr(group, name) for group in groups])

        rollout, old, top_ids = present("rollout_logprobs"), column("old_logprobs"), column("teacher_top_ids")
        hidden, weight = self._head(tree)
        head: HeadOutputs = head_outputs(
            hidden,
            weight,
            tree.targets,
            gather=None if top_ids is None else top_ids.to(torch.int64),
            entropy=self._wants_entropy,
            **self._head_settings,
        )
        return LossInputs(
            logprobs=head.logprobs,
            old_logprobs=rollout if old is None else old,
            rollout_logprobs=rollout,
            advantages=present("advantages"),
            loss_mask=present("loss_mask"),
            sample_ids=torch.from_numpy(layout.sample_ids).to(self._device),
            num_samples=layout.num_samples,
            reference_logprobs=column("reference_logprobs"),
            teacher_logprobs=column("teacher_logprobs"),
            entropy=head.entropy,
            teacher_top_logprobs=column("teacher_top_logprobs"),
            top_logprobs=head.gathered,
        )

    def _refuse_on_cuda(self, what: str) -> None:
        if has_cuda():
            raise ValueError(f"mode.name=colocate: {what} is not built for GPUs yet. Use mode=async.")


def fresh_gap(groups: Sequence[TrainGroup], logprobs: np.ndarray) -> np.ndarray:
    """|log-prob here - log-prob in the engine| of the trained tokens that the step's own weights sampled.

    ``logprobs``: float32 ``[tokens]``, of the step's own forward.
    """
    mask = np.concatenate([group.loss_mask for group in groups])
    fresh = [np.zeros(len(g.loss_mask), dtype=bool) if g.fresh is None else g.fresh for g in groups]
    counted = mask & np.concatenate(fresh)
    rollout = np.concatenate([group.rollout_logprobs for group in groups])
    return np.abs(logprobs[counted] - rollout[counted])
