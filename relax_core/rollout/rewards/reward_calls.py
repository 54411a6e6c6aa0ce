"""Calls a reward once. An error gives an outcome without a reward; the reason is the error's text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from relax_core.config.reward_choice import Outcome
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, RewardUnusable
from relax_core.registry import plugin_error_text


def score_sync(
    spec: RewardSpec, inputs: Sequence[RewardInput], config: Any, *, on_answer: Callable[[], None] = lambda: None
) -> list[Outcome]:
    """Returns the outcomes of a reward that is a plain function; one outcome per input, in order.

    ``on_answer`` is called after each answer, except if the reward scores whole groups. Raises `RewardUnusable` if the
    reward raises it.
    """
    if spec.score_group is not None:
        return _score_group_sync(spec, inputs, config)
    assert spec.score is not None
    outcomes: list[Outcome] = []
    for given in inputs:
        try:
            output = spec.score(given, config)
        except RewardUnusable:
            raise
        except Exception as error:  # plug-in code: the sample is dropped with this reason, up to reward.max_failed
            outcomes.append(_no_reward(error))
        else:
            assert isinstance(output, RewardOutput), "the registry checks the result of a score"
            outcomes.append((output, None))
        on_answer()
    return outcomes


def _score_group_sync(spec: RewardSpec, inputs: Sequence[RewardInput], config: Any) -> list[Outcome]:
    assert spec.score_group is not None
    try:
        outputs: Any = spec.score_group(inputs, config)
    except RewardUnusable:
        raise
    except Exception as error:  # plug-in code: every sample of the group is dropped with this reason
        return [_no_reward(error)] * len(inputs)
    return [(output, None) for output in outputs]


async def score_async(spec: RewardSpec, inputs: Sequence[RewardInput], config: RewardConfig) -> list[Outcome]:
    """Returns the outcomes of one call of an async reward; the limit is ``config.timeout_s`` seconds per input.

    ``inputs`` has one entry if the reward scores single answers. Raises `RewardUnusable` if the reward raises it.
    """
    limit_s = config.timeout_s * len(inputs)
    call: Any = spec.score_group(inputs, config) if spec.score_group else spec.score(inputs[0], config)  # type: ignore[misc]
    try:
        async with asyncio.timeout(limit_s) as limit:
            result = await call
    except RewardUnusable:
        raise
    except Exception as error:  # plug-in code: the samples are dropped with this reason
        reason = f"reward {config.name}: no answer within {limit_s:g} s"
        late = RewardOutput(reward=None, reason=reason, cause="timeout"), None
        return [late if limit.expired() else _no_reward(error)] * len(inputs)
    return [(output, None) for output in (result if spec.score_group else [result])]


def _no_reward(error: Exception) -> Outcome:
    return RewardOutput(reward=None, reason=plugin_error_text(error), cause="raised"), error
