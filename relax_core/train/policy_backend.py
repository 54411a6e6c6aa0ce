"""Implements the policy's training back end: one rank of the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from relax_core.contracts.algorithm import LossInputs
from relax_core.contracts.columns import ROUTED_EXPERTS
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import MediaReader
from relax_core.contracts.tree import TokenTree
from relax_core.train import parallel_layout
from relax_core.train.megatron_rank import ComputedTrees, MegatronRank, RankSetup, StepSums, joined
from relax_core.train.model.logprobs import HeadOutputs, Truncation, head_outputs, top_k_tokens
from relax_core.train.model.tree_attention import TreeBatch
from relax_core.train.optimizer import frozen_weights
from relax_core.weights.lora_merge import LoraFactors

CLOSE_SAMPLES_S = 10.0


class TrainedLog(Protocol):
    """Defines the interface of the log of a rank's trained samples."""

    def trained(self, step: int, groups: Sequence[TokenTree], logprobs: np.ndarray | None) -> None:
        """Logs groups of a train step and their tokens' log-probs, float32 ``[tokens]``, or None if not computed."""

    def close(self, *, timeout_s: float) -> None:
        """Writes the waiting samples."""


class TopLogprobs(NamedTuple):
    """Holds the log-probs of a group's rows, with 0 at rows that were not sampled.

    ``logprobs`` are the log-probs of the rows' tokens, float32 ``[rows]``. ``top_ids`` are the most likely tokens at
    each row, int64 ``[rows, top_k]``, most likely first. ``top_logprobs`` are the log-probs of ``top_ids``, float32
    ``[rows, top_k]``. If a kept set has fewer than top_k tokens, the remaining ids are -1 and the remaining log-probs
    are `OUTSIDE`.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class MegatronBackend(MegatronRank):
    """Adds the policy's log-probs and loss to a rank, and exports its weights.

    ``temperature`` is the sampling temperature at which log-probs are computed. If ``trainable`` is False the back end
    serves actor_fwd, reference and teacher roles. Log-probs and entropies refer to the distribution that was sampled:
    without the banned tokens, and over the kept sets if the groups have kept sets. ``samples`` logs each micro-batch on
    the one rank of a replica that counts the micro-batch.
    """

    def __init__(
        self,
        setup: RankSetup,
        *,
        temperature: float,
        trainable: bool = True,
        media: MediaReader | None = None,
        samples: TrainedLog | None = None,
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"rollout.temperature={temperature}: training needs a value above 0; 1.0 is usual.")
        super().__init__(setup, trainable=trainable, media=media)
        self._samples = samples
        self._inverse_temperature = 1.0 / temperature
        self._vocab_size = self.architecture.vocab_size
        self._wants_entropy = self.trainable and self._algorithm.requirements(self._config).entropy

    def loss(self, batch: TreeBatch, hidden: Tensor) -> Tensor:
        """Returns the algorithm's summed loss of a micro-batch; see `MegatronRank.loss`."""
        with self.timed("forward"):
            head = self._head(batch, hidden)
            if not batch.groups:
                return head.logprobs.sum() * 0.0
            inputs = self._loss_inputs(batch, head)
            outputs = self._algorithm.loss(inputs, self._config)
            if reports():
                self._computed.append(ComputedTrees.of(batch.groups, outputs, inputs.logprobs))
        return outputs.loss_sum

    def add_column(self, sums: StepSums, trees: Sequence[TokenTree], column: np.ndarray) -> None:
        """Adds the log-prob gap to the engine, and logs the trained samples; see `MegatronRank.add_column`."""
        gap = on_policy_gap(trees, column)
        sums.gap_sum, sums.gap_tokens = float(gap.sum(dtype=np.float64)), gap.size
        sums.gap_max = float(gap.max(initial=0.0))
        if self._samples is not None:
            self._samples.trained(self._step, trees, column)

    def count(self, groups: Sequence[TokenTree]) -> None:
        """Counts and logs groups without a gradient; see `MegatronRank.count`."""
        super().count(groups)
        if self._samples is not None:
            self._samples.trained(self._step, groups, None)

    def close_samples(self) -> None:
        """Writes the waiting samples; no train step may follow."""
        if self._samples is not None:
            self._samples.close(timeout_s=CLOSE_SAMPLES_S)

    def logprobs(self, groups: Sequence[TokenTree]) -> list[np.ndarray]:
        """Returns log-probs with the current weights: float32 ``[rows]`` per group, 0 at rows that were not sampled."""

        def columns(batch: TreeBatch, hidden: Tensor) -> Sequence[Tensor]:
            inputs = self._head_inputs(batch, hidden)
            return self._of_all_tokens(batch, head_outputs(*inputs, **self._head_settings(batch)).logprobs)

        return [logprobs for (logprobs,) in self._forward_only(groups, columns, like=[(torch.float32, ())])]

    def reference_logprobs(self, groups: Sequence[TokenTree]) -> list[np.ndarray]:
        """Returns the log-probs with the weights of `keep_reference`, as `logprobs` does; the weights stay as they are.

        Call it between updates. The reference routes tokens by its own router, so the engine's choice of experts is
        ignored.
        """
        routed_here = [group.without_extra(ROUTED_EXPERTS) for group in groups]
        with self.reference_weights():
            return self.logprobs(routed_here)

    def top_logprobs(self, groups: Sequence[TokenTree], *, top_k: int) -> list[TopLogprobs]:
        """Returns log-probs and the ``top_k`` most likely tokens of each row, without gradient.

        ``top_k`` is between 1 and the vocabulary size.
        """

        def columns(batch: TreeBatch, hidden: Tensor) -> Sequence[Tensor]:
            inputs = self._head_inputs(batch, hidden)
            return self._of_all_tokens(batch, *top_k_tokens(*inputs, top_k=top_k, **self._head_settings(batch)))

        like = [(torch.float32, ()), (torch.int64, (top_k,)), (torch.float32, (top_k,))]
        return [TopLogprobs(*columns) for columns in self._forward_only(groups, columns, like=like)]

    @property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the name and shape of each weight in the order of `export`."""
        return self._weights.shapes

    @property
    def frozen_weights(self) -> frozenset[str]:
        """Returns the names of the frozen weights that `export` yields."""
        return frozen_weights(self.architecture, self._setup.frozen)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all weights under Hugging Face names in the order of `weight_shapes`.

        The tensors are valid until the next step. The call is collective.
        """
        self._gather_parameters()
        return self._weights.export()

    def export_base(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all weights as `export` does, without LoRA factors."""
        self._gather_parameters()
        return self._weights.export_base()

    def export_factors(self) -> Iterator[LoraFactors]:
        """Yields the LoRA factors of all adapted weights. The call is collective."""
        self._gather_parameters()
        return self._weights.export_factors()

    # -- Helpers ------------------------------------------------------------------------------------------------
    def _head_settings(self, batch: TreeBatch) -> dict[str, Any]:
        return {
            "inverse_temperature": self._inverse_temperature,
            "chunk_rows": parallel_layout.LOGPROB_CHUNK_ROWS,
            "group": parallel_state.get_tensor_model_parallel_group() if self._parallel.tp > 1 else None,
            "vocab_size": self._vocab_size,
            "truncation": Truncation.of(self._kept(batch), self._setup.banned_token_ids, self._device),
        }

    @staticmethod
    def _kept(batch: TreeBatch) -> KeptTokens | None:
        """Returns the kept sets of this rank's chosen rows, or None if the groups have no kept sets."""
        present = [
            group.kept.take(rows)
            for group, rows in zip(batch.groups, batch.layout.chosen, strict=False)
            if group.kept is not None
        ]
        assert len(present) in (0, len(batch.groups)), "all groups of a run or no group must have kept sets"
        if not present:
            return None
        kept, tokens = KeptTokens.joined(present), batch.tokens
        return kept if tokens is None else kept.take(tokens.mine.cpu().numpy())

    def _head_inputs(self, batch: TreeBatch, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the hidden states that predict this rank's chosen rows, the output weight, and the rows' tokens.

        The hidden states are ``[local rows, hidden]``.
        """
        weight = self.model.output_weight()
        if self._overlap and weight.requires_grad:
            # Megatron waits for a parameter when its module runs, but no module runs with this parameter.
            self.model_chunks[-1].param_to_bucket_group[weight].finish_param_sync()
        return hidden[batch.predicting_rows], weight, batch.targets

    def _head(self, batch: TreeBatch, hidden: Tensor) -> HeadOutputs:
        """Returns the log-probs of all chosen rows and the other outputs that the algorithm requires."""
        top_ids = None
        if batch.groups and "teacher_top_ids" in batch.groups[0].extras:
            chosen = zip(batch.groups, batch.layout.chosen, strict=True)
            top_ids = self._column([group.extras["teacher_top_ids"][rows] for group, rows in chosen]).to(torch.int64)
            top_ids = top_ids if batch.tokens is None else top_ids[batch.tokens.mine]
        head = head_outputs(
            *self._head_inputs(batch, hidden),
            gather=top_ids,
            entropy=self._wants_entropy,
            **self._head_settings(batch),
        )
        if batch.tokens is None:
            return head
        entropy, gathered = (
            None if column is None else batch.tokens.of_all_ranks(column) for column in (head.entropy, head.gathered)
        )
        return HeadOutputs(batch.tokens.of_all_ranks(head.logprobs), entropy, gathered)

    @staticmethod
    def _of_all_tokens(batch: TreeBatch, *columns: Tensor) -> tuple[Tensor, ...]:
        """Gathers columns ``[local rows, …]`` of all context-parallel ranks into ``[chosen rows, …]``."""
        tokens = batch.tokens
        return columns if tokens is None else tuple(tokens.of_all_ranks(column) for column in columns)

    def _loss_inputs(self, batch: TreeBatch, head: HeadOutputs) -> LossInputs:
        groups, layout = batch.groups, batch.layout

        def column(name: str) -> Tensor | None:
            """Returns the column ``name``, or None if the step's groups do not have this column."""
            return self._column([group.of_tokens(name) for group in groups]) if name in groups[0].extras else None

        rollout, old = self._column([group.logprobs[group.tokens[1]] for group in groups]), column("old_logprobs")
        old = rollout if old is None else old
        advantages, top = column("advantages"), column("teacher_top_logprobs")
        assert advantages is not None, "the trainer leases groups with advantages"
        gathered = None
        if head.gathered is not None:
            assert top is not None, "the teacher writes ids and log-probs together"
            gathered = batch.of_tokens(head.gathered, otherwise=top)
        entropy = None if head.entropy is None else batch.of_tokens(head.entropy, otherwise=torch.zeros_like(old))
        loss_mask = [group.loss_mask[group.tokens[1]] for group in groups]
        return LossInputs(
            logprobs=batch.of_tokens(head.logprobs, otherwise=old),
            old_logprobs=old,
            rollout_logprobs=rollout,
            advantages=advantages,
            loss_mask=self._column(loss_mask),
            sample_ids=torch.from_numpy(layout.sample_ids).to(self._device),
            num_samples=layout.num_samples,
            reference_logprobs=column("reference_logprobs"),
            teacher_logprobs=column("teacher_logprobs"),
            entropy=entropy,
            teacher_top_logprobs=top,
            top_logprobs=gathered,
            trained=self._column([np.flatnonzero(joined(loss_mask))]),
            group_ids=self._column([np.repeat(np.arange(len(groups)), [len(group.episodes) for group in groups])]),
        )


def on_policy_gap(groups: Sequence[TokenTree], logprobs: np.ndarray) -> np.ndarray:
    """Returns |trainer's log-prob - engine's log-prob| of the trained tokens that the step's initial weights sampled.

    ``logprobs`` is float32 ``[tokens]`` and comes from the step's own forward pass.
    """
    rows = [group.tokens[1] for group in groups]
    on_policy = [
        group.extras.get("on_policy", np.zeros(len(own), dtype=bool)) for group, own in zip(groups, rows, strict=True)
    ]
    counted = np.concatenate(on_policy)
    counted &= np.concatenate([group.loss_mask[own] for group, own in zip(groups, rows, strict=True)])
    rollout = np.concatenate([group.logprobs[own] for group, own in zip(groups, rows, strict=True)])
    return np.abs(logprobs[counted] - rollout[counted])


def reports() -> bool:
    """Returns True on the rank of each replica that reports the last stage's results."""
    return (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
