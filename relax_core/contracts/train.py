"""The contract of the training back end, which computes and imports no Ray; the roles move the data."""

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
    """Holds the metrics of one train step over all ranks.

    ``algorithm`` maps a metric to its mean, and ``algorithm_counts`` to the number of values, such as tokens, that the
    mean is over; groups that are not computed have no values.
    ``moe`` says how evenly the tokens were routed to the experts (`relax_core.train.model.moe.balance_metrics`).
    ``timings_ms`` has the durations of parts of the step on this rank, in milliseconds. ``rows`` counts the token rows
    that were computed; a row that several micro-batches or ranks compute counts once for each.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    samples: int
    logprob_gap_max: float  # over on-policy tokens; 0 if there are none
    logprob_gap_mean: float
    logprob_gap_tokens: int
    algorithm: dict[str, float] = field(default_factory=dict)
    algorithm_counts: dict[str, float] = field(default_factory=dict)
    moe: dict[str, float] = field(default_factory=dict)
    timings_ms: dict[str, float] = field(default_factory=dict)
    rows: int = 0


OWN_PARTS = ("pack", "forward", "sums", "backward")  # parts of a rank's update without a wait for other replicas


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Holds when one rank worked on a train step, and how long the parts of its work took.

    ``began_s`` and ``ended_s`` are Unix times in seconds. ``wall_ms`` and ``cpu_ms`` map a part to milliseconds of wall
    time and of processor time of the rank's main thread. ``core_wait_ms`` is the time in `OWN_PARTS` in which that
    thread was ready to run and got no core. ``rows`` counts the token rows of its passes.
    """

    began_s: float
    ended_s: float
    wall_ms: dict[str, float]
    cpu_ms: dict[str, float]
    rows: int
    core_wait_ms: float = 0.0


class TrainBackend(Protocol):
    """Is one rank's part of the trainer.

    All ranks call the same methods in the same order. The ranks of one data-parallel replica (tensor, pipeline and
    context parallel) pass the same groups.
    """

    def begin_step(self, step: int) -> None:
        """Clears gradients and sums. ``step`` determines the learning rate."""

    def accumulate(self, groups: Sequence[TokenTree]) -> None:
        """Runs forward and backward over this rank's groups of one micro-batch; a rank may have none."""

    def count(self, groups: Sequence[TokenTree]) -> None:
        """Adds groups without a gradient to the update's counts. One rank of all is given them."""

    def finish_step(self) -> StepMetrics:
        """Divides by the global denominator, clips the gradients and steps the optimizer."""

    @property
    def times(self) -> RankTimes:
        """Returns the times of this rank's part of the update that `finish_step` has just ended."""

    def logprobs(self, groups: Sequence[TokenTree]) -> list[np.ndarray]:
        """Returns the current weights' log-probs, float32 ``[rows]`` for each group; 0 if a row was not sampled."""

    @property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of the tensors of `export`, in its order."""

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all weights with Hugging Face names and shapes, in the order of the family's map."""

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Sets all weights from Hugging Face names. Raises ValueError for a missing, unknown or misshapen one."""

    def copy_state(self) -> None:
        """Copies to the host the state that a checkpoint holds."""

    def write_copy(self, folder: Path) -> None:
        """Writes the newest copy. Any thread may call it while training goes on."""

    def save(self, folder: Path) -> None:
        """Copies the state and writes it."""

    def load(self, folder: Path) -> None:
        """Reads the checkpoint of any layout."""
