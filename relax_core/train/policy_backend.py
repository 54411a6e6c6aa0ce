"""The policy's training back end: one rank's part of the trainer (contracts/train.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from relax_core.contracts.algorithm import LossInputs
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.tree import TokenTree
from relax_core.train.megatron_on_cpu.device_loader import has_cuda
from relax_core.train.model.logprobs import HeadOutputs, chunked_logprobs, head_outputs, top_k_tokens
from relax_core.train.model.truncation import Truncation
from relax_core.train.rank import MegatronRank
from relax_core.train.rank_setup import RankSetup
from relax_core.train.step.pipeline_schedule import MicroBatch
from relax_core.train.step.step_sums import micro_batch_sums


class TopLogprobs(NamedTuple):
    """Of a group's rows: their own log-probs float32 ``[rows]``; the top-k tokens at their places, int64
    ``[rows, top_k]``, most likely first, and the log-probs of those, float32 ``[rows, top_k]``; all 0 where nothing was
    sampled. Where a kept set has fewer tokens the ids end in -1 and the log-probs in `OUTSIDE`."""

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class MegatronBackend(MegatronRank):
    """Implements `relax_core.contracts.train.TrainBackend` on megatron-core.

    ``temperature``: what log-probs are computed at. ``trainable`` False: what actor_fwd, reference and teachers use.
    Log-probs and entropies are those of the distribution that was sampled from: over the groups' kept sets, where they
    have them, and without the banned tokens.
    """

    def __init__(self, setup: RankSetup, *, temperature: float, trainable: bool = True) -> None:
        if temperature <= 0:
            raise ValueError(f"rollout.temperature={temperature}: training needs more than 0; 1.0 is usual.")
        super().__init__(setup, trainable=trainable)
        self._inverse_temperature = 1.0 / temperature
        self._vocab_size = self.architecture.vocab_size
        self._wants_entropy = self.trainable and self._algorithm.requirements(self._config).entropy

    def loss(self, batch: MicroBatch, hidden: Tensor) -> Tensor:
        with self.timed("forward"):
            head = self._head(batch, hidden)
            if not batch.groups:
                return head.logprobs.sum() * 0.0
            inputs = self._loss_inputs(batch, head)
            outputs = self._algorithm.loss(inputs, self._config)
        with self.timed("sums"):
            sums = micro_batch_sums(batch.groups, outputs)
            gap = fresh_gap(batch.groups, inputs.logprobs.detach().cpu().numpy())
            sums.gap_sum, sums.gap_tokens = float(gap.sum(dtype=np.float64)), gap.size
            sums.gap_max = float(gap.max(initial=0.0))
            self._sums.add(sums)
        return outputs.loss_sum

    def logprobs(self, groups: Sequence[TokenTree]) -> list[np.ndarray]:
        """Log-probs of the current weights, one float32 ``[rows]`` a group, 0 where nothing was sampled."""

        def columns(batch: MicroBatch, hidden: Tensor) -> Sequence[Tensor]:
            inputs = self._head_inputs(batch, hidden)
            return self._of_all_tokens(batch, chunked_logprobs(*inputs, **self._head_settings(batch)))

        return [logprobs for (logprobs,) in self._forward_only(groups, columns, like=[(torch.float32, ())])]

    def top_logprobs(self, groups: Sequence[TokenTree], *, top_k: int) -> list[TopLogprobs]:
        """`logprobs` with the ``top_k`` top-k tokens beside each, 1..vocab of them. No gradient."""

        def columns(batch: MicroBatch, hidden: Tensor) -> Sequence[Tensor]:
            inputs = self._head_inputs(batch, hidden)
            return self._of_all_tokens(batch, *top_k_tokens(*inputs, top_k=top_k, **self._head_settings(batch)))

        like = [(torch.float32, ()), (torch.int64, (top_k,)), (torch.float32, (top_k,))]
        return [TopLogprobs(*columns) for columns in self._forward_only(groups, columns, like=like)]

    @property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of what `export` gives, in its order."""
        return self._weights.shapes

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under Hugging Face names, in map order; the tensors are valid until the next step."""
        self._gather_parameters()
        return self._weights.export()

    def offload(self) -> None:
        """Does nothing on a CPU, where device and host share memory."""
        self._refuse_on_cuda("offload")

    def onload(self) -> None:
        self._refuse_on_cuda("onload")

    # -- parts --------------------------------------------------------------------------------------------------
    def _head_settings(self, batch: MicroBatch) -> dict[str, Any]:
        return {
            "inverse_temperature": self._inverse_temperature,
            "chunk_rows": self._parallel.logprob_chunk_tokens,
            "group": parallel_state.get_tensor_model_parallel_group() if self._parallel.tp > 1 else None,
            "vocab_size": self._vocab_size,
            "truncation": Truncation.of(self._kept(batch), self._setup.banned_token_ids, self._device),
        }

    @staticmethod
    def _kept(batch: MicroBatch) -> KeptTokens | None:
        """The kept sets of this rank's chosen rows, where the groups have them."""
        present = [
            group.kept.take(rows)
            for group, rows in zip(batch.groups, batch.layout.chosen, strict=False)
            if group.kept is not None
        ]
        assert len(present) in (0, len(batch.groups)), "kept sets are there for all groups of a run or for none"
        if not present:
            return None
        kept, tokens = KeptTokens.joined(present), batch.tree.tokens
        return kept if tokens is None else kept.take(tokens.mine.cpu().numpy())

    def _head_inputs(self, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states in front of this rank's chosen rows ``[local rows, hidden]``, the output weight, and the rows'
        tokens."""
        weight = self.model.output_weight()
        if self._overlap:  # Megatron waits for the parameters of a module, and no module uses this one
            self.model_chunks[-1].param_to_bucket_group[weight].finish_param_sync()
        return hidden[batch.tree.predicting_rows], weight, batch.tree.targets

    def _head(self, batch: MicroBatch, hidden: Tensor) -> HeadOutputs:
        """Of all chosen rows: log-probs, and what else the algorithm asks for."""
        tree = batch.tree
        top_ids = None
        if batch.groups and "teacher_top_ids" in batch.groups[0].extras:
            chosen = zip(batch.groups, batch.layout.chosen, strict=True)
            top_ids = self._column([group.extras["teacher_top_ids"][rows] for group, rows in chosen]).to(torch.int64)
            top_ids = top_ids if tree.tokens is None else top_ids[tree.tokens.mine]
        head = head_outputs(
            *self._head_inputs(batch, hidden),
            gather=top_ids,
            entropy=self._wants_entropy,
            **self._head_settings(batch),
        )
        if tree.tokens is None:
            return head
        entropy, gathered = (
            None if column is None else tree.tokens.of_all_ranks(column) for column in (head.entropy, head.gathered)
        )
        return HeadOutputs(tree.tokens.of_all_ranks(head.logprobs), entropy, gathered)

    @staticmethod
    def _of_all_tokens(batch: MicroBatch, *columns: Tensor) -> tuple[Tensor, ...]:
        """Columns ``[local rows, …]`` → ``[chosen rows, …]``: those of the other context-parallel ranks, too."""
        tokens = batch.tree.tokens
        return columns if tokens is None else tuple(tokens.of_all_ranks(column) for column in columns)

    def _loss_inputs(self, batch: MicroBatch, head: HeadOutputs) -> LossInputs:
        groups, layout = batch.groups, batch.layout

        def column(name: str) -> Tensor | None:
            """Every column is there for all groups of a step or for none."""
            return self._column([group.of_tokens(name) for group in groups]) if name in groups[0].extras else None

        rollout, old = self._column([group.logprobs[group.tokens[1]] for group in groups]), column("old_logprobs")
        old = rollout if old is None else old
        advantages, top = column("advantages"), column("teacher_top_logprobs")
        assert advantages is not None, "the trainer leases them"
        gathered = None
        if head.gathered is not None:
            assert top is not None, "the teacher writes both"
            gathered = batch.of_tokens(head.gathered, otherwise=top)
        entropy = None if head.entropy is None else batch.of_tokens(head.entropy, otherwise=torch.zeros_like(old))
        return LossInputs(
            logprobs=batch.of_tokens(head.logprobs, otherwise=old),
            old_logprobs=old,
            rollout_logprobs=rollout,
            advantages=advantages,
            loss_mask=self._column([group.loss_mask[group.tokens[1]] for group in groups]),
            sample_ids=torch.from_numpy(layout.sample_ids).to(self._device),
            num_samples=layout.num_samples,
            reference_logprobs=column("reference_logprobs"),
            teacher_logprobs=column("teacher_logprobs"),
            entropy=entropy,
            teacher_top_logprobs=top,
            top_logprobs=gathered,
        )

    def _refuse_on_cuda(self, what: str) -> None:
        if has_cuda():
            raise ValueError(f"mode.name=colocate: {what} is not built for GPUs yet. Use mode=async.")


def fresh_gap(groups: Sequence[TokenTree], logprobs: np.ndarray) -> np.ndarray:
    """|log-prob here - log-prob in the engine| of the trained tokens that the step's own weights sampled.

    ``logprobs``: float32 ``[tokens]``, of the step's own forward.
    """
    rows = [group.tokens[1] for group in groups]
    on_policy = [
        group.extras.get("on_policy", np.zeros(len(own), dtype=bool)) for group, own in zip(groups, rows, strict=True)
    ]
    counted = np.concatenate(on_policy)
    counted &= np.concatenate([group.loss_mask[own] for group, own in zip(groups, rows, strict=True)])
    rollout = np.concatenate([group.logprobs[own] for group, own in zip(groups, rows, strict=True)])
    return np.abs(logprobs[counted] - rollout[counted])
