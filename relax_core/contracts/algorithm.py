"""The contract of an RL algorithm: one declarative SPEC and pure functions on flat token tensors.

All per-token tensors are flat over the response tokens of a micro-batch, ``[tokens]``, float32. ``sample_ids``
``[tokens]`` int64 maps each token to its sample in the micro-batch (0..num_samples-1), so an algorithm does not depend
on packing, padding or layout. Losses are SUMS: the trainer adds them over all micro-batches and ranks and divides by
one global denominator of the whole train step.
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
    """Holds the teachers that a distillation needs.

    ``models`` maps a name to a Hugging Face folder or to the name of a built-in model. ``key`` is the data column that
    names a prompt's teacher; it is empty if there is one teacher. ``top_k`` is the number of the teacher's most likely
    tokens whose log-probs the loss needs in addition to the sampled token's; 0 means none. ``served_by`` says whether a
    forward pass of the training back end or an engine computes them.
    """

    models: Mapping[str, str]
    key: str = ""
    top_k: int = 0
    served_by: ServedBy = "forward"


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Holds the roles and columns that an algorithm needs with its current settings.

    ``entropy``: the loss needs the entropy of the distribution that each token was sampled from. ``whole_step``: for an
    algorithm with ``normalize``, whether that function needs all groups of a train step with these settings.
    ``rollout_logprobs``: the advantages need the engine's log-probs in addition to the old log-probs. ``turns``: the
    advantages need the turns of the group's episodes. ``state_keys``: they also compare turns that begin in equal
    states, so the run needs an env whose SPEC has ``state_keys``. ``every_token``: False promises that a token with
    advantage 0 has no gradient and does not affect the gradients of other tokens, so the trainer may skip it.
    """

    old_logprobs: OldLogprobs
    reference: bool = False
    critic: bool = False
    teacher: TeacherRequirements | None = None
    entropy: bool = False
    whole_step: bool = True
    rollout_logprobs: bool = False
    turns: bool = False
    state_keys: bool = False
    every_token: bool = True

    @property
    def needs_turns(self) -> bool:
        """Returns whether the advantages need the turns of the group's episodes, with or without their states."""
        return self.turns or self.state_keys


@dataclass(frozen=True, kw_only=True)
class GroupTurns:
    """Holds the turns of a group's samples, sample by sample, in order of time.

    ``rewards`` are the env's rewards of the turns, 0 for turns without a reward. The difference between a sample's
    reward and the sum of its turn rewards is added to its last turn, so that a sample's turns add up to its reward.
    ``state_keys`` identifies the state in which each turn began; an entry is None if the env returned no key, for
    example if the response was cut at a token limit and so never reached the env.
    """

    of_tokens: Tensor  # [tokens] int64, the turn of each token, ascending
    samples: Tensor  # [turns] int64, the sample of each turn
    rewards: Tensor  # [turns] float64, so that sums of equal rewards are equal
    state_keys: Sequence[str | None]  # [turns]


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """Holds the inputs of one whole group. Log-prob tensors are None unless `Requirements` requests them.

    A sample is an episode with all its turns and segments; its tokens are in sampling order. ``old_logprobs`` are those
    of `LossInputs`; if a reference is required, they may be the engine's own. A sample whose tokens are all masked has
    a reward too, because it counts in the group's baseline.
    """

    rewards: Tensor  # [samples] float32, or float64 if float32 cannot hold their differences
    lengths: Tensor  # [samples] int64, response tokens
    loss_mask: Tensor  # [tokens] bool
    sample_ids: Tensor  # [tokens] int64
    old_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None  # [tokens], of the engine's sampling distribution
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None  # [tokens], of the sampled tokens
    values: Tensor | None = None  # [tokens], the critic's value before each token
    turns: GroupTurns | None = None  # if `Requirements` requests ``turns`` or ``state_keys``


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Holds the inputs of one micro-batch.

    ``logprobs``, ``entropy`` and ``top_logprobs`` carry the gradient; all other tensors are detached. The last five are
    None unless `Requirements` requests them. ``top`` in a name refers to the teacher's top-k tokens at each position.

    All log-probs of a token, and its entropy, are of distributions over the same tokens: those that top_k, top_p and
    min_p kept when the token was sampled, without the banned ones. If fewer than ``top_k`` were kept, the rest of both
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
    """Holds the critic's inputs of one micro-batch.

    ``values`` carries the gradient. ``returns`` are the targets. ``old_values`` are the critic's values that the
    advantages were computed from.
    """

    values: Tensor  # [tokens]
    old_values: Tensor  # [tokens]
    returns: Tensor  # [tokens]
    loss_mask: Tensor  # [tokens] bool
    sample_ids: Tensor  # [tokens] int64
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class LossOutputs:
    """Holds the result of a loss on one micro-batch.

    ``loss_sum`` is the numerator, a scalar. ``metric_sums`` maps a name to (sum, count) scalars; the trainer adds them
    over micro-batches and ranks and reports sum / count. ``per_token`` ``[tokens]`` holds the aggregated values,
    detached, for comparisons of implementations.
    """

    loss_sum: Tensor
    metric_sums: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    per_token: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Counts over the whole train step and all ranks. ``tokens`` counts only the trained (unmasked) tokens."""

    tokens: int
    samples: int
    groups: int


@dataclass(frozen=True)
class AlgorithmConfig:
    """Holds the settings that all algorithms share.

    ``group_size`` is the number of samples for each prompt. ``mini_batches`` is the number of mini-batches, with one
    optimizer update each, into which a train step's groups are split. ``epochs`` is the number of passes over these
    mini-batches. ``routing_replay``: the trainer's mixture of experts routes each token to the same experts as the
    engine did (R3, arXiv 2510.11370).
    """

    name: str
    group_size: int
    mini_batches: int = 1
    epochs: int = 1
    routing_replay: bool = False


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """Describes one algorithm. Every function gets the settings, an instance of ``config``, as its last argument.

    - ``config`` is a dataclass under `AlgorithmConfig`.
    - ``check`` raises ValueError (key, value, fix) for invalid combinations of settings.
    - ``advantages`` returns ``[tokens]`` float32.
    - ``denominator`` computes the loss's denominator from the step's global counts.
    - ``normalize`` is for advantages that need statistics over several groups. It gets the advantages of as many groups
      as a train step has, ``[tokens]`` each, and their inputs, and returns the advantages to train with. It is not
      called if `Requirements.whole_step` is False.
    - ``drop_group`` may refuse a complete group before it enters the bus; the next prompt replaces it. It gets the
      rewards of the group's samples (for a combined reward, those of its first part) and the number of groups that were
      refused since the last accepted group. It returns the reason for the ledger, or None to keep the group.
    - ``value_loss`` is the critic's loss, for an algorithm that needs a critic; its denominator is the policy's. The
      critic learns the returns ``[tokens]``.
    - ``returns`` computes them from a group and its advantages before ``normalize``. Without it, the returns are these
      advantages plus the values.
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
