"""The contract of an RL algorithm: one declarative SPEC and pure functions on flat token tensors.

All per-token tensors are flat over the response tokens of a micro-batch, ``[tokens]``, float32. ``sample_ids``
``[tokens]`` int64 maps each token to its sample in the micro-batch (0..num_samples-1). So an algorithm does not depend
on packing, padding or parallel layout. Losses are SUMS: the trainer adds the losses of all micro-batches and ranks and
divides the total by one global denominator of the whole train step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

OldLogprobs = Literal["rollout", "actor_fwd"]
ServedBy = Literal["forward", "engine"]
Offline = Literal["demonstrations", "pairs", "labels"]  # the kind of data rows that an objective trains on


@dataclass(frozen=True, kw_only=True)
class TeacherRequirements:
    """Describes the teachers that a distillation needs.

    ``models`` maps a name to a Hugging Face folder or to the name of a built-in model. ``key`` is the data column with
    the name of a prompt's teacher; ``key`` is empty if there is one teacher. ``top_k``: the loss needs the log-probs of
    the teacher's ``top_k`` most likely tokens in addition to the sampled token's log-prob; with 0 the loss needs only
    the sampled token's log-prob. ``served_by`` says where the teacher's log-probs are computed: in a forward pass of
    the training back end, or in an engine.
    """

    models: Mapping[str, str]
    key: str = ""
    top_k: int = 0
    served_by: ServedBy = "forward"


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Lists the roles and columns that an algorithm needs with its current settings.

    ``entropy``: the loss needs the entropy of the distribution that each token was sampled from. ``whole_step``: the
    algorithm's function ``normalize``, if it exists, needs all groups of a train step with these settings.
    ``rollout_logprobs``: the advantages need the engine's log-probs in addition to the old log-probs. ``turns``: the
    advantages need the turns of the group's episodes. ``state_keys``: the advantages also compare turns that begin in
    equal states, so the run needs an env with ``state_keys`` in its SPEC. ``every_token``: False promises that a token
    with advantage 0 has no gradient and does not affect the gradients of other tokens, so the trainer may skip this
    token. ``offline``: the responses are in the data, and no engine runs. A row of "demonstrations" is a group of one
    sample. A row of "pairs" is a group of two samples, and sample 0 is preferred to sample 1. A row of "labels" is a
    group of two samples. The reward of sample 0 is its label. Sample 1 is not trained; it has the same prompt and the
    response of a row with another prompt, and its reward is 0. A micro-batch of a rank has all samples of such a group
    or none.
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
    offline: Offline | None = None

    @property
    def needs_turns(self) -> bool:
        """Returns whether the advantages need the turns of the group's episodes, with or without the turns' states."""
        return self.turns or self.state_keys


@dataclass(frozen=True, kw_only=True)
class GroupTurns:
    """Holds the turns of a group's samples: sample by sample, and in temporal order within a sample.

    ``rewards``: the env's reward of each turn, 0 for a turn without a reward. The difference between a sample's reward
    and the sum of its turn rewards is added to the sample's last turn, so the turn rewards of a sample add up to the
    sample's reward. ``state_keys``: a key of the state at the start of each turn. An entry is None if the env returned
    no key, for example because the response was cut at a token limit and the env did not get it.
    """

    of_tokens: Tensor  # [tokens] int64, the turn index of each token, ascending
    samples: Tensor  # [turns] int64, the sample index of each turn
    rewards: Tensor  # [turns] float64: sums of equal rewards must be equal
    state_keys: Sequence[str | None]  # [turns]


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """Holds the inputs of one whole group. Log-prob tensors are None unless `Requirements` requests them.

    A sample is an episode with all its turns and segments; its tokens are in sampling order. ``old_logprobs`` are the
    same as in `LossInputs`; if a reference is required, they may be the log-probs that the engine reported. A sample
    with only masked tokens has a reward too, because its reward is part of the group's baseline.
    """

    rewards: Tensor  # [samples] float32, or float64 if float32 would lose the differences between rewards
    lengths: Tensor  # [samples] int64, number of response tokens
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

    ``logprobs``, ``entropy`` and ``top_logprobs`` carry the gradient; all other tensors are detached. Five tensors are
    None unless `Requirements` requests them. ``top`` in a name refers to the teacher's top-k tokens at each position.
    The trainer gives the indexes ``trained``, because `of_trained` must not read the mask on the device.

    All log-probs and the entropy of a token are computed over the same candidate tokens: the tokens that top_k, top_p
    and min_p kept when the token was sampled, without the banned tokens. If fewer than ``top_k`` candidates were kept,
    the remaining entries of the two ``top`` tensors are `relax_core.contracts.kept_tokens.OUTSIDE`, a probability of 0.

    ``group_ids`` maps each sample to its group in the micro-batch. The samples of a group are adjacent and in order. An
    ``offline`` algorithm has no rollout log-probs; they are 0. Its old log-probs are 0 unless it requires actor_fwd.
    Its advantages are 1 unless its ``normalize`` is called.
    """

    logprobs: Tensor  # [tokens], of the current weights
    old_logprobs: Tensor  # [tokens], of the proximal policy
    rollout_logprobs: Tensor  # [tokens], of the engine's sampling distribution
    advantages: Tensor  # [tokens]
    loss_mask: Tensor  # [tokens] bool
    sample_ids: Tensor  # [tokens] int64
    num_samples: int
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None  # [tokens], of the sampled tokens
    entropy: Tensor | None = None  # [tokens], nats, of the current weights
    teacher_top_logprobs: Tensor | None = None  # [tokens, top_k]
    top_logprobs: Tensor | None = None  # [tokens, top_k], of the current weights for the teacher's top-k tokens
    trained: Tensor | None = None  # [trained tokens] int64, where loss_mask is True
    group_ids: Tensor | None = None  # [samples] int64

    def of_trained(self, columns: Tensor) -> Tensor:
        """Returns the trained tokens' entries of ``columns`` ``[…, tokens]``."""
        return columns[..., self.loss_mask if self.trained is None else self.trained]


@dataclass(frozen=True, kw_only=True)
class ValueInputs:
    """Holds the critic's inputs of one micro-batch.

    ``values`` carries the gradient. ``returns`` are the critic's targets. ``old_values`` are the critic's values that
    entered the advantages.
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

    ``loss_sum`` is the numerator of the loss, a scalar. ``metric_sums`` maps a metric's name to the scalars (sum,
    count); the trainer adds sums and counts over micro-batches and ranks and reports sum / count. ``per_token``
    ``[tokens]`` is each token's loss before the aggregation, detached, to compare implementations.
    """

    loss_sum: Tensor
    metric_sums: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    per_token: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Holds counts over the whole train step and all ranks. ``tokens`` counts only the trained (unmasked) tokens."""

    tokens: int
    samples: int
    groups: int


@dataclass(frozen=True)
class AlgorithmConfig:
    """Holds the settings that all algorithms share.

    ``group_size`` is the number of samples for each prompt. ``mini_batches`` is the number of mini-batches of a train
    step; the trainer splits the step's groups into mini-batches and makes one optimizer update for each. ``epochs`` is
    the number of passes over these mini-batches. ``routing_replay``: the trainer's mixture of experts routes each token
    to the experts that the engine chose (R3, arXiv 2510.11370).
    """

    name: str
    group_size: int
    mini_batches: int = 1
    epochs: int = 1
    routing_replay: bool = False


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """Describes one algorithm. Every function gets the settings, an instance of ``config``, as its last argument.

    - ``config`` is a subclass of `AlgorithmConfig`, a dataclass.
    - ``check`` raises ValueError (key, value, fix) for invalid combinations of settings.
    - ``advantages`` returns ``[tokens]`` float32.
    - ``denominator`` computes the loss's denominator from the step's global counts.
    - ``normalize`` is for advantages that need statistics over several groups. Its arguments are the advantages
      (``[tokens]``) and the inputs of each group of one train step. It returns the advantages to train with. It is not
      called if `Requirements.whole_step` is False.
    - ``drop_group`` may refuse a complete group before the group enters the bus; the rollout then plays the next
      prompt. The arguments of ``drop_group`` are the rewards of the group's samples (for a combined reward, the rewards
      of its first part) and the number of groups that were refused since the last accepted group. It returns the reason
      for the ledger, or None to keep the group.
    - ``value_loss`` is the critic's loss, for an algorithm that needs a critic. The trainer divides the critic's loss
      by the denominator of the policy's loss. The critic learns the returns ``[tokens]``.
    - ``returns`` computes the returns of a group from its inputs and its advantages before ``normalize``. Without this
      function the returns are these advantages plus the values.
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
