"""Wraps plug-ins so that their results are checked; `relax_core.registry` returns only wrapped plug-ins.

A result that contradicts the contract raises `WrongResult`, which names the plug-in, its file, the result and what is
wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from relax_core.contracts.algorithm import (
    AdvantageInputs,
    AlgorithmSpec,
    LossInputs,
    LossOutputs,
    StepTotals,
    ValueInputs,
)
from relax_core.contracts.checks.foreign_values import clean_text, shown
from relax_core.contracts.checks.plugin_results import PluginFunction, as_number, not_awaited, own_copy, too_large
from relax_core.contracts.reward import (
    MOST_ANSWER,
    MOST_CAUSE,
    MOST_PARTS,
    MOST_REASON,
    MOST_WHY,
    RewardInput,
    RewardOutput,
    RewardSpec,
)
from relax_core.contracts.sink import BaseSink, SinkSpec, SinkStart

if TYPE_CHECKING:
    from torch import Tensor

A_REWARD = "a finite number, or RewardOutput(reward=…), whose reward is None if it could not be computed"


def checked_reward(spec: RewardSpec) -> RewardSpec:
    """Returns the reward with a function that gives a `RewardOutput` for each answer.

    The function is async if the reward's own is. A number alone is the reward, and the answer is exact if it is 1 (or
    True). If the reward or a part is NaN, infinite or too large (`too_large`), there is no reward, and the reason says
    so. Texts are shortened, and have no halves of surrogate pairs (`clean_text`). The function raises `WrongResult` for
    anything else, and for a ``score_group`` whose list is not as long as the group.

    Each call gets a data row and messages of its own (`own_copy`).
    """
    if (check_row := spec.check_row) is not None:
        spec = replace(spec, check_row=lambda row, config: check_row(own_copy(row), config))
    if spec.combine is not None:
        return replace(spec, combine=_checked_combine(spec))
    if spec.score_group is None:
        return replace(spec, score=_checked_score(spec))
    return replace(spec, score_group=_checked_score_group(spec))


def _own_input(given: RewardInput) -> RewardInput:
    """Returns an input of the same class whose lists and mappings are its own."""
    made = copy(given)  # `replace` would leave out the judges, which are no field
    for name in ("row", "messages", "turns", "turn_rewards"):
        object.__setattr__(made, name, own_copy(getattr(given, name)))
    return made


def _checked_score(spec: RewardSpec) -> Callable[[RewardInput, Any], Any]:
    given_score: Callable[..., Any] | None = spec.score
    assert given_score is not None
    source = PluginFunction("reward", spec.name, given_score)

    def score(given: RewardInput, config: Any) -> RewardOutput:
        return _one_reward(given_score(_own_input(given), config), spec.name, source)

    async def score_async(given: RewardInput, config: Any) -> RewardOutput:
        return _one_reward(await given_score(_own_input(given), config), spec.name, source)

    return score_async if spec.is_async else score


def _checked_combine(spec: RewardSpec) -> Callable[[RewardInput, Mapping[str, RewardOutput], Any], RewardOutput]:
    combine = spec.combine
    assert combine is not None
    source = PluginFunction("reward", spec.name, combine)
    return lambda given, outputs, config: _one_reward(combine(_own_input(given), outputs, config), spec.name, source)


def _checked_score_group(spec: RewardSpec) -> Callable[[Sequence[RewardInput], Any], Any]:
    given_score: Callable[..., Any] | None = spec.score_group
    assert given_score is not None
    source = PluginFunction("reward", spec.name, given_score)

    def outputs(came: Any, count: int) -> list[RewardOutput]:
        wanted = f"a list of {count} rewards, one an answer, in order"
        if isinstance(came, str | bytes | Mapping) or not hasattr(came, "__len__") or not hasattr(came, "__iter__"):
            raise source.wrong(not_awaited(came), wanted)
        if len(came) != count:
            raise source.wrong(came, f"{wanted}; {len(came)} came")
        return [_one_reward(one, spec.name, source, what=f"entry {position}") for position, one in enumerate(came)]

    def score_group(given: Sequence[RewardInput], config: Any) -> list[RewardOutput]:
        return outputs(given_score([_own_input(one) for one in given], config), len(given))

    async def score_group_async(given: Sequence[RewardInput], config: Any) -> list[RewardOutput]:
        return outputs(await given_score([_own_input(one) for one in given], config), len(given))

    return score_group_async if spec.is_async else score_group


def _one_reward(came: Any, name: str, source: PluginFunction, *, what: str = "") -> RewardOutput:
    if (number := as_number(came)) is not None:
        return _finite(RewardOutput(reward=number, exact=number == 1.0), name, came=came)
    if not isinstance(came, RewardOutput):
        raise source.wrong(not_awaited(came), A_REWARD, what=what)
    return _finite(_checked_output(came, source), name, came=came.reward)


def _checked_output(came: RewardOutput, source: PluginFunction) -> RewardOutput:
    reward = None if came.reward is None else as_number(came.reward)
    if reward is None and came.reward is not None:
        raise source.wrong(came.reward, A_REWARD, what="reward")
    exact = as_number(came.exact)
    if exact is None:
        raise source.wrong(came.exact, "True or False", what="exact")
    for what in ("reason", "why", "cause"):
        if not isinstance(getattr(came, what), str):
            raise source.wrong(getattr(came, what), "text", what=what)
    if came.answer is not None and not isinstance(came.answer, str):
        raise source.wrong(came.answer, "text, or None", what="answer")
    if came.parts is not None and not isinstance(came.parts, Mapping):
        raise source.wrong(came.parts, "names with numbers, or None", what="parts")
    if came.parts is not None and len(came.parts) > MOST_PARTS:
        raise source.wrong(f"{len(came.parts)} numbers", f"at most {MOST_PARTS} numbers", what="parts")
    parts = {}
    for name, value in (came.parts or {}).items():
        number = as_number(value)
        if number is None or not isinstance(name, str):
            raise source.wrong(came.parts, "names with numbers, or None", what="parts")
        parts[clean_text(name, MOST_CAUSE)] = number
    return replace(
        came,
        reward=reward,
        exact=bool(exact),
        parts=parts or None,
        reason=clean_text(came.reason, MOST_REASON),
        answer=None if came.answer is None else clean_text(came.answer, MOST_ANSWER),
        why=clean_text(came.why, MOST_WHY),
        cause=clean_text(came.cause, MOST_CAUSE),
    )


def _finite(output: RewardOutput, name: str, *, came: object) -> RewardOutput:
    """Returns the output, or why there is no reward; ``came`` is the reward as the function returned it."""
    figures = {"reward": output.reward, **(output.parts or {})}
    for what, value in figures.items():
        if value is not None and (why := too_large(value)) is not None:
            reason = f"reward {name}: {what} is {shown(came) if what == 'reward' else value}, {why}"
            return RewardOutput(reward=None, reason=reason, cause="not_finite")
    return output


def checked_algorithm(spec: AlgorithmSpec) -> AlgorithmSpec:
    """Returns the algorithm with functions that raise `WrongResult` for a tensor of a wrong shape.

    They raise it for advantages and returns that are not finite, too. The trainer itself reports a loss that is not
    finite, with its step.
    """
    changes: dict[str, Any] = {
        "advantages": _checked_advantages(spec),
        "loss": _checked_loss(spec.name, spec.loss),
        "denominator": _checked_denominator(spec),
    }
    if spec.normalize is not None:
        changes["normalize"] = _checked_normalize(spec.name, spec.normalize)
    if spec.drop_group is not None:
        changes["drop_group"] = _checked_drop_group(spec.name, spec.drop_group)
    if spec.value_loss is not None:
        changes["value_loss"] = _checked_loss(spec.name, spec.value_loss)
    if spec.returns is not None:
        changes["returns"] = _checked_returns(spec.name, spec.returns)
    return replace(spec, **changes)


def _per_token(came: Any, tokens: int, source: PluginFunction, *, what: str = "") -> Any:
    import torch

    wanted = f"a finite float tensor of shape [{tokens}], one value a token"
    if not isinstance(came, torch.Tensor) or list(came.shape) != [tokens] or not came.is_floating_point():
        raise source.wrong_tensor(came, wanted, what=what)
    finite = torch.isfinite(came.float())  # the columns are float32, in which a float64 may overflow
    if not bool(finite.all()):
        position = int((~finite).nonzero()[0])
        raise source.wrong(float(came[position]), wanted, what=f"{what or 'the tensor'}[{position}]")
    return came


def _checked_advantages(spec: AlgorithmSpec) -> Callable[[AdvantageInputs, Any], Tensor]:
    source = PluginFunction("algorithm", spec.name, spec.advantages)
    return lambda inputs, config: _per_token(spec.advantages(inputs, config), len(inputs.loss_mask), source)


def _checked_returns(name: str, returns: Callable[..., Any]) -> Callable[[AdvantageInputs, Tensor, Any], Tensor]:
    source = PluginFunction("algorithm", name, returns)
    return lambda inputs, advantages, config: _per_token(
        returns(inputs, advantages, config), len(inputs.loss_mask), source
    )


def _checked_normalize(name: str, normalize: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    source = PluginFunction("algorithm", name, normalize)

    def checked(advantages: Sequence[Tensor], inputs: Sequence[AdvantageInputs], config: Any) -> list[Tensor]:
        came = normalize(advantages, inputs, config)
        if not isinstance(came, list | tuple) or len(came) != len(inputs):
            raise source.wrong(came, f"a list of {len(inputs)} tensors, one a group")
        groups = enumerate(zip(came, inputs, strict=True))
        return [_per_token(one, len(group.loss_mask), source, what=f"group {k}") for k, (one, group) in groups]

    return checked


def _checked_drop_group(name: str, drop_group: Callable[..., Any]) -> Callable[..., str | None]:
    source = PluginFunction("algorithm", name, drop_group)

    def checked(rewards: Sequence[float], dropped_in_a_row: int, config: Any) -> str | None:
        came = drop_group(list(rewards), dropped_in_a_row, config)
        if came is not None and not (isinstance(came, str) and came):
            raise source.wrong(came, "the reason as text, or None to keep the group")
        return came

    return checked


def _checked_loss(name: str, loss: Callable[..., Any]) -> Callable[[Any, Any], LossOutputs]:
    source = PluginFunction("algorithm", name, loss)

    def checked(inputs: LossInputs | ValueInputs, config: Any) -> LossOutputs:
        import torch

        came = loss(inputs, config)
        if not isinstance(came, LossOutputs):
            raise source.wrong_tensor(came, "LossOutputs(loss_sum=…)")
        total = came.loss_sum
        if not isinstance(total, torch.Tensor) or total.ndim != 0 or not total.is_floating_point():
            raise source.wrong_tensor(total, "a float tensor of shape [], the sum over the tokens", what="loss_sum")
        for key, pair in came.metric_sums.items():
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise source.wrong(pair, "a pair of scalars, sum and count", what=f"metric_sums[{key!r}]")
        return came

    return checked


def _checked_denominator(spec: AlgorithmSpec) -> Callable[[StepTotals, Any], float]:
    source = PluginFunction("algorithm", spec.name, spec.denominator)

    def checked(totals: StepTotals, config: Any) -> float:
        came = spec.denominator(totals, config)
        number = as_number(came)
        if number is None or not math.isfinite(number) or number <= 0:
            raise source.wrong(came, "a finite number above 0")
        return number

    return checked


def checked_sink(spec: SinkSpec) -> SinkSpec:
    """Returns the same metrics sink, whose ``open`` raises `WrongResult` where it returns no sink."""
    function = PluginFunction("metrics sink", spec.name, spec.open)

    def checked_open(start: SinkStart, config: Any) -> BaseSink:
        came: Any = spec.open(start, config)
        if not isinstance(came, BaseSink):
            raise function.wrong(not_awaited(came), "an object of a class under BaseSink")
        return came

    return replace(spec, open=checked_open)
