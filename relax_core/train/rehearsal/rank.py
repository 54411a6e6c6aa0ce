"""Builds one rank of a run's policy without weights, and runs one train step of it on the ``meta`` device."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from megatron.core import parallel_state
from torch import Tensor

from relax_core.contracts.media import MediaReader
from relax_core.contracts.tree import TokenTree
from relax_core.families.folder import folder_architecture
from relax_core.train import process_group
from relax_core.train.device import training_device
from relax_core.train.megatron_rank import RankSetup, StepSums, counted_sums, gradient_buffers
from relax_core.train.model.tree_attention import TreeBatch
from relax_core.train.optimizer import create_optimizer_state, optimizer_tensors
from relax_core.train.policy_backend import MegatronBackend
from relax_core.train.rehearsal.allocator import FREED, CachingAllocator
from relax_core.train.rehearsal.counting import Counting, Routing
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
    PUBLISH,
    REDUCE,
    STATE,
    SUMS,
    WEIGHTS,
    Counts,
    Message,
    Section,
)
from relax_core.train.rehearsal.stand_ins import FusedKernels, StageShapes, replace_gpu_parts, use_group_without_ranks
from relax_core.train.rehearsal.timeline import Block, lengthened

log = logging.getLogger(__name__)
_TIMED = {"pack": PACK, "pipeline": PIPELINE, "sums": SUMS, "reduce": REDUCE, "optimizer": OPTIMIZER}


@dataclass(frozen=True, kw_only=True)
class Units:
    """Describes the layers of a chunk: the kinds of layers repeat after ``layers`` layers, which form a unit.

    The whole model has ``whole`` units in a chunk. The trace of a shorter model is lengthened by repeating the unit
    ``template``; None if the model has too few units, or all units.
    """

    layers: int
    whole: int
    template: int | None


def rehearse(
    setup: RankSetup,
    batches: Sequence[Sequence[TokenTree]],
    *,
    units: Units,
    temperature: float,
    media: MediaReader | None = None,
) -> Counts:
    """Returns the counts of one update over ``batches``, the rank's micro-batches.

    The process may rehearse several ranks one after the other. Raises ValueError for a model or a layout that the
    trainer refuses.
    """
    assert training_device().meta, "the process sets RELAX_TRAIN_DEVICE=meta"
    began_s = time.perf_counter()
    use_group_without_ranks()
    counting = Counting()
    replace_gpu_parts(counting, folder_architecture(setup.model_folder, family=setup.family))
    try:
        with counting, FusedKernels(counting):
            rank = RehearsedRank(setup, counting=counting, unit=units.layers, temperature=temperature, media=media)
            rank.create_state()
            state = counting.categories()
            before = counting.now
            counting.clear_counts()
            with counting.during(BETWEEN):
                rank.begin_step(0)
                for groups in batches:
                    rank.accumulate(groups)
                rank.finish_step()
        chunk = len(rank.models[0].decoder.layers)
        counts = Counts(
            layers=chunk * len(rank.models),
            rows=[sum(group.computed_rows for group in groups) for groups in batches],
            state={category: state.get(category, 0) for category in STATE},
            sections=[
                Section(phase=phase, bytes=peak.bytes, by_category=peak.by_category)
                for (_, phase), peak in counting.sections.items()
            ],
            before=before,
            reserved_by_step=_reserved(counting, units, chunk=chunk),
            flops=dict(counting.flops),
            messages=[
                Message(phase=phase, collective=kind, group=group, ranks=ranks, calls=found.calls, bytes=found.bytes)
                for (phase, kind, group, ranks), found in counting.messages.items()
            ],
            host_reads=dict(counting.host_reads),
            operators=counting.operators,
            seconds=0.0,
        )
        published = _published(rank, counting)
        return msgspec.structs.replace(counts, published=published, seconds=time.perf_counter() - began_s)
    finally:
        process_group.leave()


def _published(rank: RehearsedRank, counting: Counting) -> int:
    """Returns the bytes that an export of the weights needs in addition to the state."""
    counting.clear_counts()
    with counting, counting.during(PUBLISH):
        before = counting.now
        for _, tensor in rank.export():
            del tensor  # frees the tensor before the next tensor is created
    return max(peak.bytes for (_, phase), peak in counting.sections.items() if phase == PUBLISH) - before


def _reserved(counting: Counting, units: Units, *, chunk: int) -> int | None:
    """Returns the bytes that a step of the whole model reserves in addition to the state; None for a short model."""
    events, have = counting.events, chunk // units.layers
    if have != units.whole:
        if units.template is None:
            return None
        try:
            events = lengthened(events, counting.marks, units=have, template=units.template, wanted=units.whole)
        except ValueError as error:
            log.warning("the trace of %d units cannot be lengthened: %s", have, error)
            return None
    allocator = CachingAllocator()
    known: set[int] = set()
    for number, size in events:
        if size != FREED:
            known.add(number)
            allocator.allocate(number, size)
        elif number in known:  # State that the step frees stays reserved.
            allocator.free(number)
    return allocator.peak_reserved


class RehearsedRank(MegatronBackend):
    """Runs the policy's rank and reports its phases; it loads no weights."""

    def __init__(
        self, setup: RankSetup, *, counting: Counting, unit: int, temperature: float, media: MediaReader | None = None
    ) -> None:
        self._counting = counting
        self._trained: list[TokenTree] = []
        super().__init__(setup, temperature=temperature, media=media)
        experts = self.architecture.experts
        if experts is not None:
            counting.routing = Routing(experts=experts.count, per_row=experts.per_token)
        self._shapes = StageShapes(self.architecture.hidden_size)
        self._passes = 0
        for model in self.models:
            decoder, last = model.decoder, len(model.decoder.layers) - 1
            decoder.register_forward_pre_hook(self._begin_layers, with_kwargs=True)
            for index, layer in enumerate(decoder.layers):
                if index % unit == 0:
                    layer.register_forward_pre_hook(partial(self._begin_unit, index // unit))
                if index % unit == unit - 1:
                    layer.register_forward_hook(partial(self._end_unit, index // unit, index == last))

    def load_weights(self, tensors: Iterable[Any]) -> None:
        """Loads nothing: weights on ``meta`` have no numbers."""

    def _load_main_weights(self, *args: Any, **kwargs: Any) -> None: ...

    def create_state(self) -> None:
        """Creates the optimizer's state, and gives the memory of the state its categories."""
        create_optimizer_state(self.optimizer, keep=None if self._host_states is None else self._host_states.keep)
        buffers = gradient_buffers(self.model_chunks)
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
        """Stores the groups, because only the last stage counts their tokens, and runs them."""
        self._trained += groups
        super().accumulate(groups)

    def pack(self, groups: Sequence[TokenTree], *, rows: int = 0, trained_only: bool = False) -> TreeBatch:
        """Packs groups and passes their shape to the neighbouring stages."""
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
        self._passes += 1
        hidden = kwargs.get("hidden_states")
        hidden = module.input_tensor if hidden is None else hidden
        self._switch_at_gradient(hidden, EMBEDDING_BACKWARD)
        self._mark_at_gradient(hidden, None)

    def _begin_unit(self, unit: int, layer: Any, args: Any) -> None:
        self._counting.mark(Block(self._passes, False, unit))

    def _end_unit(self, unit: int, last: bool, layer: Any, args: Any, output: Any) -> None:
        if last:
            self._counting.mark(None)
        self._mark_at_gradient(output[0], Block(self._passes, True, unit))

    def _mark_at_gradient(self, tensor: Tensor, block: Block | None) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._counting.mark(block))

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
