"""What an algorithm is: one declarative record and pure functions on flat token tensors.

All per-token tensors are flat over the response tokens of a micro-batch, ``[tokens]``, float32; ``sample_ids``
``[tokens]`` int64 says which sample of the micro-batch (0..num_samples-1) a token belongs to. So nothing here can
depend on packing, padding or layout. Losses are SUMS; the trainer divides by one global denominator of the whole
train step, after every micro-batch and every rank has added its part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

OldLogprobs = Literal["rollout", "actor_fwd"]
ServedBy = Literal["forward", "engine"]


@dataclass(frozen=True, kw_only=True)
class TeacherRequirements:
    """Teachers of a distillation. ``models``: name → Hugging Face folder, or a builtin's name. ``key``: the data column
    that names a prompt's teacher; empty where there is one teacher. ``top_k``: top-k tokens whose log-probs are
    wanted beside the sampled one's; 0: none. ``served_by``: a forward pass of the trainer's back end, or an engine."""

    models: Mapping[str, str]
    key: str = ""
    top_k: int = 0
    served_by: ServedBy = "forward"


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Roles and columns that an algorithm needs under given settings. ``entropy``: the loss wants the entropy of the
    distribution that each token was sampled from. ``whole_step``: of a spec with ``normalize``, whether it must see a
    whole train step's groups under these settings. ``rollout_logprobs``: the advantages want the engine's log-probs
    beside the old ones."""

    old_logprobs: OldLogprobs
    reference: bool = False
    critic: bool = False
    teacher: TeacherRequirements | None = None
    entropy: bool = False
    whole_step: bool = True
    rollout_logprobs: bool = False


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """One whole group. ``rewards`` ``[samples]``; log-prob tensors are None unless `Requirements` asked for them.

    ``old_logprobs`` are those of `LossInputs`: recomputed, or the engine's own where a reference is asked for. A sample
    that is masked whole has a reward all the same: it counts in the group's baseline.
    """

    rewards: Tensor
    lengths: Tensor  # [samples] int64, response tokens
    loss_mask: Tensor  # [tokens] bool
    sample_ids: Tensor  # [tokens] int64
    old_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None  # [tokens], of the engine's sampling distribution
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None  # [tokens], of the sampled tokens
    values: Tensor | None = None  # [tokens], of the critic, in front of each token


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """One micro-batch. ``logprobs``, ``entropy`` and ``top_logprobs`` carry the gradient; everything else is detached.

    The last five are None unless `Requirements` asked for them. ``top``: the teacher's top-k tokens at each position.
    All log-probs of a token, and its entropy, are of distributions over the same tokens: those that top_k, top_p and
    min_p left when it was sampled, without the banned ones. Where fewer than ``top_k`` were left, the rest of both
    ``top`` tensors is `relax_core.contracts.kept_tokens.OUTSIDE`, a probability of 0.
    """

    logprobs: Tensor  # [tokens], of the current weights
    old_logprobs: Tensor  # [tokens], the proximal policy's
    rollout_logprobs: Tensor  # [tokens], of the engine's sampling distribution
    advantages: Tensor  # [tokens]
    loss_mask: Tensor  # [tokens] bool
    sample_ids: Tensor  # [tokens] int64
    num_samples: int
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None  # [tokens], of the sampled tokens
    entropy: Tensor | None = None  # [tokens], nats, of the current weights
    teacher_top_logprobs: Tensor | None = None  # [tokens, top_k]
    top_logprobs: Tensor | None = None  # [tokens, top_k], of the current weights at the teacher's tokens


@dataclass(frozen=True, kw_only=True)
class ValueInputs:
    """One micro-batch of the critic. ``values`` carries the gradient. ``returns``: what they should be; ``old_values``:
    the critic's own when the advantages were computed."""

    values: Tensor  # [tokens]
    old_values: Tensor  # [tokens]
    returns: Tensor  # [tokens]
    loss_mask: Tensor  # [tokens] bool
    sample_ids: Tensor  # [tokens] int64
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class LossOutputs:
    """``loss_sum``: scalar, the numerator. ``metric_sums``: name → (sum, count) scalars; the trainer adds them over
    micro-batches and ranks and reports sum / count. ``per_token`` ``[tokens]``: what was aggregated, detached, for
    whoever compares implementations."""

    loss_sum: Tensor
    metric_sums: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    per_token: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Counts over the whole train step, all ranks. ``tokens``: trained (unmasked) ones."""

    tokens: int
    samples: int
    groups: int


@dataclass(frozen=True)
class AlgorithmConfig:
    """What every algorithm has. ``group_size``: samples a prompt. ``mini_batches``: optimizer updates that a train
    step's groups are split into. ``epochs``: times that each of them is trained on. ``routing_replay``: the trainer's
    mixture of experts routes each token as the engine's did (R3, arXiv 2510.11370)."""

    name: str
    group_size: int
    mini_batches: int = 1
    epochs: int = 1
    routing_replay: bool = False


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """One algorithm. Every function gets the settings, an instance of ``config`` (a dataclass under `AlgorithmConfig`).

    ``check`` raises ValueError (key, value, fix) for settings that make no sense together.
    ``advantages`` → ``[tokens]`` float32. ``denominator``: from the step's global counts.
    ``normalize``: of an algorithm whose advantages need statistics beyond one group. It gets the advantages of as many
    groups as a train step has, ``[tokens]`` each, and the inputs that they were made of, and returns the advantages to
    train with; it is not called where `Requirements.whole_step` is false.
    ``drop_group``: may refuse a complete group before it enters the bus; the prompt is replaced by the next. It gets
    the rewards of the group's samples and how many groups were refused since the last that was kept, and returns the
    reason for the ledger, or None to keep the group.
    ``value_loss``: the critic's loss, of an algorithm that needs one; its denominator is the policy's. The critic
    learns the returns ``[tokens]``: what ``returns`` makes of a group and its advantages before ``normalize``, or
    without it those advantages plus the values.
    """

    name: str
    summary: str
    config: type[AlgorithmConfig]
    requirements: Callable[[Any], Requirements]
    check: Callable[[Any], None]
    advantages: Callable[[AdvantageInputs, Any], Tensor]
    loss: Callable[[LossInputs, Any], LossOutputs]
    denominator: Callable[[StepTotals, Any], float]
    normalize: Callable[[Sequence[Tensor], Sequence[AdvantageInputs], Any], list[Tensor]] | None = None
    drop_group: Callable[[Sequence[float], int, Any], str | None] | None = None
    value_loss: Callable[[ValueInputs, Any], LossOutputs] | None = None
    returns: Callable[[AdvantageInputs, Tensor, Any], Tensor] | None = None
