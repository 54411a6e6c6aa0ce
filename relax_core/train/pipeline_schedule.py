"""Runs forward and backward passes in order: micro-batch by micro-batch, or through a pipeline of stages.

Without a pipeline a micro-batch is computed as soon as it arrives. With a pipeline micro-batches are collected: a run
of Megatron's 1F1B schedule over n micro-batches leaves each of pp stages idle for (pp - 1) / (n + pp - 1) of the time.
A run therefore starts when `RUNS_OF_STAGES` * pp micro-batches are waiting, and for the rest when the step ends.

If gradients are reduced while other passes compute, only the last backward pass of a step may start the reduction.
Which pass is the last is known only when the step ends, so one more micro-batch waits until then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from relax_core.contracts.tree import TokenTree
from relax_core.train.model.tree_attention import TreeBatch

if TYPE_CHECKING:
    from relax_core.train.rank import MegatronRank

RUNS_OF_STAGES = 4

Columns = TypeVar("Columns")
Groups = Sequence[TokenTree]


class Schedule:
    """Runs the micro-batches of an update through this rank's model chunks.

    If ``overlap`` is True, gradients are reduced while other passes compute.
    """

    def __init__(self, chunks: Sequence[Any], passes: MegatronRank, *, overlap: bool) -> None:
        self._chunks, self._passes, self._overlap = chunks, passes, overlap
        self._stages = parallel_state.get_pipeline_model_parallel_world_size()
        self._window = 1 if self._stages == 1 else RUNS_OF_STAGES * self._stages
        self._waiting: list[Groups] = []

    def begin(self) -> None:
        """Discards the micro-batches of an update that failed."""
        self._waiting = []

    def add(self, groups: Groups) -> None:
        """Adds one micro-batch to the update and runs the waiting micro-batches if there are enough of them."""
        self._waiting.append(groups)
        if len(self._waiting) >= self._window + self._overlap:
            window, self._waiting = self._waiting[: self._window], self._waiting[self._window :]
            self._train(window, last=False)

    def finish(self) -> None:
        """Runs the micro-batches that still wait; with overlap the reduction of their gradients then still runs."""
        if self._waiting:
            window, self._waiting = self._waiting, []
            self._train(window, last=True)

    def evaluate(self, batches: Sequence[Groups], columns: Callable[[TreeBatch, Tensor], Columns]) -> list[Columns]:
        """Returns ``columns`` of each micro-batch and the last chunk's output, without gradient; [] on other stages."""
        with torch.no_grad():
            if self._stages == 1:
                made = map(self._passes.pack, batches)
                return [columns(batch, self._passes.forward(self._chunks[0], batch)) for batch in made]
            results: list[Columns] = []
            for start in range(0, len(batches), self._window):
                window = batches[start : start + self._window]
                results += self._pipeline(
                    window, lambda batch: lambda hidden, non_loss_data: columns(batch, hidden), forward_only=True
                )[: len(window)]
            return results

    def _train(self, window: Sequence[Groups], *, last: bool) -> None:
        reduces = self._overlap and last
        with contextlib.ExitStack() as quiet:
            if self._overlap and not last:
                for chunk in self._chunks:
                    quiet.enter_context(chunk.no_sync())
            if self._stages == 1:
                self._plain(window)
                return
            with self._passes.timed("pipeline"):
                no_tokens = torch.zeros((), dtype=torch.int)  # Given a token count, Megatron does not divide the loss.
                self._pipeline(
                    window,
                    # The schedule frees its outputs and refuses to free a view, so it gets a copy.
                    lambda batch: lambda hidden: (self._passes.loss(batch, hidden).clone(), no_tokens, None),
                    reduces=reduces,
                )

    def _plain(self, window: Sequence[Groups]) -> None:
        for groups in window:
            batch = self._passes.pack(groups, trained_only=True)
            loss = self._passes.loss(batch, self._passes.forward(self._chunks[0], batch))
            with self._passes.timed("backward"):
                loss.backward()

    def _pipeline(
        self,
        window: Sequence[Groups],
        last_stage: Callable[[TreeBatch], Callable[..., Any]],
        *,
        forward_only: bool = False,
        reduces: bool = False,
    ) -> list[Any]:
        """Runs Megatron's schedule once and returns, on the last stage, what ``last_stage`` returns with the loss."""
        interleaved = len(self._chunks) > 1
        if interleaved:  # It requires a multiple of the stages, and equal lengths because its messages carry no shapes.
            window = [*window, *[()] * (-len(window) % self._stages)]
        rows = max(map(self._passes.padded_rows, window)) if interleaved else 0
        batches = [self._passes.pack(groups, rows=rows, trained_only=not forward_only) for groups in window]

        def forward_step(waiting: Iterator[TreeBatch], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(waiting)
            return self._passes.forward(chunk, batch), last_stage(batch)

        # The schedule starts the reduction of gradients only in the last backward pass of the last run.
        no_sync = [chunk.no_sync for chunk in self._chunks] if reduces else None
        self._chunks[0].config.no_sync_func = no_sync if no_sync is None or interleaved else no_sync[0]
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in self._chunks],
            model=list(self._chunks),
            num_microbatches=len(batches),
            seq_length=rows,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        assert isinstance(results, list)
        return results
