"""Sums up the episodes of a run with an environment of several turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_core.contracts.env import REWARDED_ENDS

Values = Mapping[str, float]
ENDED = "ended/"
AGENT = "agent/"
_MEANS = ("turns", "restarts", "cut_observations", "engine_s", "queue_s", "env_s", "tool_calls", "failed_calls")
_QUANTILES = ("turns/p50", "turns/p90", "turns/p99")


def episode_results(prompt_batches: Sequence[Values]) -> dict[str, Any]:
    """Returns the figures of all episodes; none for a run of one turn.

    Means and shares are over all episodes, but the cached share over all tokens of prompts. ``given_up`` is the share
    of episodes whose end has no reward. A quantile is the mean of those of the prompt batches, weighted by their
    episodes. ``agent`` has the means of the figures of agents' requests, if agents play.
    """
    played = [values for values in prompt_batches if "turns" in values]
    episodes = sum(values["samples"] for values in played)
    if not episodes:
        return {}

    def mean(name: str) -> float:
        return sum(values.get(name, 0.0) * values["samples"] for values in played) / episodes

    prompts = sum(values.get("prompt_tokens", 0.0) for values in played)
    cached = sum(values.get("cached_share", 0.0) * values.get("prompt_tokens", 0.0) for values in played)
    reasons = sorted({name for values in played for name in values if name.startswith(ENDED)})
    agents = sorted({name for values in played for name in values if name.startswith(AGENT)})
    return {
        **{name: mean(name) for name in _MEANS},
        **{name.replace("/", "_"): mean(name) for name in _QUANTILES},
        "cached_share": cached / max(1.0, prompts),
        "given_up": sum((mean(name) for name in reasons if name.removeprefix(ENDED) not in REWARDED_ENDS), 0.0),
        "ended": {name.removeprefix(ENDED): mean(name) for name in reasons},
        **({"agent": {name.removeprefix(AGENT): mean(name) for name in agents}} if agents else {}),
    }
