"""Returns 1 if the response begins with one thought in think tags, else 0. Any text, or nothing, may follow.

Source: ``think_format_reward`` of TRL (trl/rewards/format_rewards.py) with the pattern
``^<think>(?!.*<think>)(.*?)</think>.*$``. So the response begins with ``<think>``, has no second ``<think>``, and
contains a closing ``</think>``. With ``opened``, the prompt ends with ``<think>``, as in some chat templates, and the
response begins after this tag.
"""

from __future__ import annotations

from dataclasses import dataclass

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec


@dataclass(frozen=True)
class FormatThinkConfig(RewardConfig):
    """Holds the settings of the reward. ``opened`` means that the prompt ends with ``<think>``."""

    name: str = "format_think"
    opened: bool = False


def score(given: RewardInput, config: FormatThinkConfig) -> RewardOutput:
    """Returns 1 if the format is right, else 0."""
    text = f"<think>{given.response}" if config.opened else given.response
    if not text.startswith("<think>"):
        why = "it does not begin with <think>"
    elif text.count("<think>") > 1:
        why = "it has <think> several times"
    else:
        why = "" if "</think>" in text else "it has no </think>"
    return RewardOutput(reward=float(not why), exact=not why, why=why or "the form is right")


SPEC = RewardSpec(
    name="format_think",
    summary="1 if the response begins with one <think>…</think>, else 0",
    config=FormatThinkConfig,
    score=score,
)
