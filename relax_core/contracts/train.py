"""Reports of the training back end (`relax_core/train/`) on a step: metrics over all ranks, and a rank's timings."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Holds the metrics of one train step over all ranks.

    ``algorithm`` maps a metric to its mean, and ``algorithm_counts`` to the number of values, such as tokens, in that
    mean; groups that are not computed have no values.
    ``moe`` has metrics of the experts' load balance (`relax_core.train.model.moe.balance_metrics`).
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


OWN_PARTS = ("pack", "forward", "sums", "backward")  # parts of a rank's update that do not wait for other replicas


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Holds one rank's timings of a train step: its start and end, and the durations of its parts.

    ``began_s`` and ``ended_s`` are Unix times in seconds. ``wall_ms`` and ``cpu_ms`` map a part to milliseconds of wall
    time and of CPU time of the rank's main thread. ``core_wait_ms`` is the time in `OWN_PARTS` in which that thread was
    ready to run but had no core. ``rows`` counts the token rows of its passes.
    """

    began_s: float
    ended_s: float
    wall_ms: dict[str, float]
    cpu_ms: dict[str, float]
    rows: int
    core_wait_ms: float = 0.0
