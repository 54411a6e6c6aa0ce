"""The training back end's contract. No Ray here: roles move data, a back end computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from relax_core.contracts.tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What one train step reports, over all ranks. ``moe``: of a mixture of experts, how evenly tokens went to them
    (`relax_core.train.model.moe.balance_metrics`). ``timings_ms``: parts of the step on this rank.
    ``rows``: token rows that were computed, those that several micro-batches or ranks repeat once for each."""

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    samples: int
    logprob_gap_max: float  # over fresh tokens; 0 if there were none
    logprob_gap_mean: float
    logprob_gap_tokens: int
    algorithm: dict[str, float] = field(default_factory=dict)
    moe: dict[str, float] = field(default_factory=dict)
    timings_ms: dict[str, float] = field(default_factory=dict)
    rows: int = 0


class TrainBackend(Protocol):
    """One rank's part of the trainer. All ranks call the same methods in the same order; those of one data-parallel
    replica (its tensor, pipeline and context parallel ranks) with the same groups."""

    def begin_step(self, step: int) -> None:
        """Clears gradients and sums; ``step`` sets the learning rate."""

    def accumulate(self, groups: Sequence[TokenTree]) -> None:
        """Forward and backward over this rank's groups of one micro-batch (may be empty on a rank)."""

    def finish_step(self) -> StepMetrics:
        """Divides by the global denominator, clips, steps the optimizer."""

    def logprobs(self, groups: Sequence[TokenTree]) -> list[np.ndarray]:
        """Log-probs of the current weights, one float32 ``[rows]`` a group, 0 where nothing was sampled."""

    @property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of what `export` gives, in its order."""

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, Hugging Face names and shapes, in the order of the family's map."""

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Sets all weights from Hugging Face names; raises ValueError for a missing, unknown or misshapen one."""

    def copy_state(self) -> None:
        """Copies to the host what a checkpoint holds."""

    def write_copy(self, folder: Path) -> None:
        """Writes the newest copy, in any thread, while training goes on."""

    def save(self, folder: Path) -> None:
        """Both of the above."""

    def load(self, folder: Path) -> None:
        """Reads what any layout wrote."""

    def offload(self) -> None:
        """Gives up the device's memory (colocate); a no-op where device and host share it."""

    def onload(self) -> None: ...
