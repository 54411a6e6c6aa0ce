"""Builds one rank of a run's policy without weights, and runs one train step of it on the ``meta`` device."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from relax_core.contracts.media import MediaReader
from relax_core.contracts.tree import TokenTree
from relax_core.train import process_group
from relax_core.train.device import training_device
from relax_core.train.megatron_rank import RankSetup, StepSums, counted_sums
from relax_core.train.model.tree_attention import TreeBatch
from relax_core.train.optimizer import create_optimizer_state, optimizer_tensors
from relax_core.train.policy_backend import MegatronBackend
from relax_core.train.rehearsal.allocator import CachingAllocator
from relax_core.train.rehearsal.counts import (
    ADAM,
    BETWEEN,
    BUFFERS,
    EMBEDDING,
    EMBEDDING_BACKWARD,
    GRADIENTS,
    HEAD,
    HEAD_BACKWARD,
    LAYERS,
    LAYERS_BACKWARD,
    OPTIMIZER,
    PACK,
    PIPELINE,
    REDUCE,
    STATE,
    WEIGHTS,
    Counts,
    Message,
    Section,
)
from relax_core.train.rehearsal.counting import Counting, Routing
from relax_core.train.rehearsal.stand_ins import FusedKernels, StageShapes, replace_gpu_parts, use_group_without_ranks

_TIMED = {"pack": PACK, "pipeline": PIPELINE, "reduce": REDUCE, "optimizer": OPTIMIZER}


def rehearse(
    setup: RankSetup, batches: Sequence[Sequence[TokenTree]], *, temperature: float, media: MediaReader | None = None
) -> Counts:
    """Returns the counts of one update over ``batches``, the rank's micro-batches.

    The process may rehearse several ranks one after the other. Raises ValueError for a model or a layout that the
    trainer refuses.
    """
    assert training_device().meta, "the process sets RELAX_TRAIN_DEVICE=meta"
    began_s = time.perf_counter()
    use_group_without_ranks()
    counting = Counting()
    replace_gpu_parts(counting)
    try:
        with counting, FusedKernels(counting):
            rank = RehearsedRank(setup, counting=counting, temperature=temperature, media=media)
            create_optimizer_state(rank.optimizer)
            rank.name_state()
            state = counting.categories()
            counting.clear_counts()
            with counting.during(BETWEEN):
                rank.begin_step(0)
                for groups in batches:
                    rank.accumulate(groups)
                rank.finish_step()
        allocator = CachingAllocator().replay(counting.events)
        return Counts(
            layers=sum(len(model.decoder.layers) for model in rank.models),
            rows=[sum(group.computed_rows for group in groups) for groups in batches],
            state={category: state.get(category, 0) for category in STATE},
            sections=[
                Section(phase=phase, bytes=peak.bytes, by_category=peak.by_category)
                for (_, phase), peak in counting.sections.items()
            ],
            allocated=allocator.peak_allocated,
            reserved=allocator.peak_reserved,
            flops=dict(counting.flops),
            messages=[
                Message(phase=phase, collective=kind, group=group, ranks=ranks, calls=found.calls, bytes=found.bytes)
                for (phase, kind, group, ranks), found in counting.messages.items()
            ],
            host_reads=dict(counting.host_reads),
            operators=counting.operators,
            seconds=time.perf_counter() - began_s,
        )
    finally:
        process_group.leave()


class RehearsedRank(MegatronBackend):
    """Runs the policy's rank and reports its phases; it loads no weights."""

    def __init__(
        self, setup: RankSetup, *, counting: Counting, temperature: float, media: MediaReader | None = None
    ) -> None:
        self._counting = counting
        self._trained: list[TokenTree] = []
        super().__init__(setup, temperature=temperature, media=media)
        experts = self.architecture.experts
        if experts is not None:
            counting.routing = Routing(experts=experts.count, per_row=experts.per_token)
        self._shapes = StageShapes(self.architecture.hidden_size)
        for model in self.models:
            model.decoder.register_forward_pre_hook(self._begin_layers, with_kwargs=True)

    def load_weights(self, tensors: Iterable[Any]) -> None:
        """Leaves the weights without numbers."""

    def _load_main_weights(self, *args: Any, **kwargs: Any) -> None: ...

    def name_state(self) -> None:
        """Gives the memory of the state its categories; the optimizer's state must exist."""
        buffers = [buffer for chunk in self.model_chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        name = self._counting.name
        name(optimizer_tensors(self.optimizer), ADAM)  # In float32 these include the weights, which come last.
        name((buffer for model in self.models for buffer in model.buffers()), BUFFERS)
        name((buffer.grad_data for buffer in buffers), GRADIENTS)
        name((buffer.param_data for buffer in buffers if buffer.param_data is not None), WEIGHTS)
        name((parameter.data for model in self.models for parameter in model.parameters()), WEIGHTS)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Reports the phase of a block."""
        with ExitStack() as stack:
            stack.enter_context(super().timed(part))
            if part in _TIMED:
                stack.enter_context(self._counting.during(_TIMED[part]))
            yield

    def accumulate(self, groups: Sequence[TokenTree]) -> None:
        """Remembers the groups, whose tokens only the last stage counts, and runs them."""
        self._trained += groups
        super().accumulate(groups)

    def pack(self, groups: Sequence[TokenTree], *, rows: int = 0, trained_only: bool = False) -> TreeBatch:
        """Packs groups and tells the neighbouring stages their shape."""
        batch = super().pack(groups, rows=rows, trained_only=trained_only)
        ranks = parallel_state.get_context_parallel_world_size()
        if self._parallel.sequence_parallel:
            ranks *= parallel_state.get_tensor_model_parallel_world_size()
        self._shapes.packed(batch.padded_rows // ranks)
        return batch

    def forward(self, chunk: Any, batch: TreeBatch) -> Tensor:
        """Runs a chunk of layers and reports where its backward pass begins."""
        with self._counting.during(EMBEDDING):
            hidden = super().forward(chunk, batch)
            self._switch_at_gradient(hidden, LAYERS_BACKWARD)
            return hidden

    def _begin_layers(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._counting.switch(LAYERS)
        if kwargs.get("hidden_states") is not None:
            self._switch_at_gradient(kwargs["hidden_states"], EMBEDDING_BACKWARD)

    def loss(self, batch: TreeBatch, hidden: Tensor) -> Tensor:
        """Computes the loss and reports where its backward pass begins."""
        with self._counting.during(HEAD):
            loss = super().loss(batch, hidden)
            self._switch_at_gradient(loss, HEAD_BACKWARD)
            return loss

    def _switch_at_gradient(self, tensor: Tensor, phase: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._counting.switch(phase))

    def _sums_over_ranks(self) -> StepSums:
        if not self._sums.tokens:  # this rank does not report
            self._sums.add(counted_sums(self._trained))
        return super()._sums_over_ranks()
