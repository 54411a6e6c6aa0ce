"""One call of a reward: what it raises is no reward, and the reason says what it was."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec
from relax_core.registry import plugin_words

Outcome = tuple[RewardOutput, Exception | None]  # with what the reward raised


def score_here(spec: RewardSpec, inputs: Sequence[RewardInput], config: Any) -> list[Outcome]:
    """The outcomes of a reward that is a plain function, one an input, in order."""
    if spec.score_group is not None:
        return _group_here(spec, inputs, config)
    assert spec.score is not None
    outcomes: list[Outcome] = []
    for given in inputs:
        try:
            output = spec.score(given, config)
        except Exception as error:  # foreign code: the sample is dropped with its words, up to reward.max_failed
            outcomes.append(_no_reward(error))
        else:
            assert isinstance(output, RewardOutput), "the registry checks what a score returns"
            outcomes.append((output, None))
    return outcomes


def _group_here(spec: RewardSpec, inputs: Sequence[RewardInput], config: Any) -> list[Outcome]:
    assert spec.score_group is not None
    try:
        outputs: Any = spec.score_group(inputs, config)
    except Exception as error:  # foreign code, as above
        return [_no_reward(error)] * len(inputs)
    return [(output, None) for output in outputs]


async def score_async(spec: RewardSpec, inputs: Sequence[RewardInput], config: RewardConfig) -> list[Outcome]:
    """The outcomes of one call of an async reward, which is cancelled after ``config.timeout_s`` seconds an input.
    ``inputs`` is a single one where the reward takes one answer."""
    limit_s = config.timeout_s * len(inputs)
    call: Any = spec.score_group(inputs, config) if spec.score_group else spec.score(inputs[0], config)  # type: ignore[misc]
    try:
        async with asyncio.timeout(limit_s) as limit:
            came = await call
    except Exception as error:  # foreign code, as above
        late = RewardOutput(reward=None, reason=f"reward {config.name}: no answer within {limit_s:g} s"), None
        return [late if limit.expired() else _no_reward(error)] * len(inputs)
    return [(output, None) for output in (came if spec.score_group else [came])]


def _no_reward(error: Exception) -> Outcome:
    return RewardOutput(reward=None, reason=plugin_words(error)), error
