"""DAPO (arXiv 2503.14476): GRPO with a higher upper clip, token mean, dynamic sampling and soft overlong punishment.

The presets switch the punishment off, because its lengths depend on the run. The paper uses 20480 and 4096 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from algorithms import functional as F
from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DapoConfig(P.GroupConfig, P.TokenClipConfig):
    """Holds the settings of DAPO. conf/algo documents the values."""

    name: str = "dapo"
    clip_high: float = 0.28
    max_dropped_in_a_row: int = 20
    overlong_length: int = 0
    overlong_buffer: int = 0


def check(config: DapoConfig) -> None:
    """Raises ValueError with all invalid settings and their fixes."""
    problems = P.group_problems(config) + P.token_clip_problems(config, usual="DAPO uses 0.2 and 0.28.")
    if config.max_dropped_in_a_row < 0:
        problems.append(
            f"algo.max_dropped_in_a_row={config.max_dropped_in_a_row}: must not be negative. "
            "0 switches dynamic sampling off."
        )
    off = config.overlong_length == config.overlong_buffer == 0
    if not off and not 0 < config.overlong_buffer < config.overlong_length:
        problems.append(
            f"algo.overlong_length={config.overlong_length} with algo.overlong_buffer={config.overlong_buffer}: need "
            "0 < overlong_buffer < overlong_length (the paper: 4096 and 20480), or both 0 for no punishment."
        )
    P.refuse(problems)


def punishments(inputs: AdvantageInputs, config: DapoConfig) -> Tensor | None:
    """Returns the length punishments, ``[samples]`` in [-1, 0], or None if the punishment is off."""
    if not config.overlong_length:
        return None
    return F.overlong_penalty(lengths=inputs.lengths, max_length=config.overlong_length, buffer=config.overlong_buffer)


def rewards_with_overlong_penalty(inputs: AdvantageInputs, config: DapoConfig) -> Tensor:
    """Returns the ``[samples]`` rewards with length punishment and, for ``kl_placement`` "reward", KL penalty."""
    rewards, punished = P.penalized_rewards(inputs, config), punishments(inputs, config)
    return rewards if punished is None else rewards + punished


def advantages(inputs: AdvantageInputs, config: DapoConfig) -> Tensor:
    """Returns GRPO's advantages, computed from the punished rewards, ``[tokens]`` float32."""
    return P.group_advantages(inputs, config, punishments=punishments(inputs, config))


def normalize(advantages: Sequence[Tensor], inputs: Sequence[AdvantageInputs], config: DapoConfig) -> list[Tensor]:
    """Normalises a step's advantages like GRPO, but with the std of the punished rewards."""
    return P.normalize_group(
        advantages,
        inputs,
        config,
        rewards=[rewards_with_overlong_penalty(group_input, config) for group_input in inputs],
    )


def drop_group(rewards: Sequence[float], dropped_in_a_row: int, config: DapoConfig) -> str | None:
    """Returns a reason to drop the group, or None to keep it. Dynamic sampling uses the rewards without punishment."""
    return F.drop_all_equal(rewards=rewards, dropped_in_a_row=dropped_in_a_row, max_dropped=config.max_dropped_in_a_row)


SPEC = AlgorithmSpec(
    name="dapo",
    summary="GRPO with a higher upper clip, dynamic sampling and overlong punishment",
    config=DapoConfig,
    requirements=P.group_requirements,
    check=check,
    advantages=advantages,
    loss=P.clipped_loss,
    denominator=P.denominator,
    normalize=normalize,
    drop_group=drop_group,
)
