"""The training back end's (`relax_core/train/`) reports on a train step: metrics over all ranks and rank timings."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Holds the metrics of one train step over all ranks.

    ``algorithm`` maps a metric's name to its mean. ``algorithm_counts`` maps the name to the number of values, such as
    tokens, in the mean; groups that were not computed have no values. ``moe`` has metrics of the experts' load balance
    (`relax_core.train.model.moe.balance_metrics`). ``timings_ms`` has the durations of parts of the step on this rank,
    in milliseconds. ``rows`` is the number of computed token rows. A row that several micro-batches or ranks compute is
    counted several times.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    samples: int
    logprob_gap_max: float  # over on-policy tokens; 0 without on-policy tokens
    logprob_gap_mean: float
    logprob_gap_tokens: int
    algorithm: dict[str, float] = field(default_factory=dict)
    algorithm_counts: dict[str, float] = field(default_factory=dict)
    moe: dict[str, float] = field(default_factory=dict)
    timings_ms: dict[str, float] = field(default_factory=dict)
    rows: int = 0


OWN_PARTS = ("pack", "forward", "sums", "backward")  # parts of a rank's update without waits for other replicas


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Holds one rank's timings of a train step.

    ``began_s`` and ``ended_s`` are the Unix times in seconds of the step's start and end. ``wall_ms`` and ``cpu_ms``
    map a part of the step to the wall time and the CPU time of the rank's main thread, in milliseconds.
    ``core_wait_ms`` is the time during `OWN_PARTS` that the main thread was ready to run but had no core. ``rows`` is
    the number of token rows in the rank's passes.
    """

    began_s: float
    ended_s: float
    wall_ms: dict[str, float]
    cpu_ms: dict[str, float]
    rows: int
    core_wait_ms: float = 0.0
