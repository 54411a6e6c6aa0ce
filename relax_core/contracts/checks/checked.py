"""Wraps plug-ins so that their results are checked; `relax_core.registry` returns only wrapped plug-ins.

A result that contradicts the contract raises `WrongResult`, which names the plug-in, its file, the result and what is
wanted.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
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
from relax_core.contracts.env import Action, BaseInteractionEnv, EnvSpec, EpisodeStart, Message, StepResult
from relax_core.contracts.media import MEDIA_KINDS, MediaSource
from relax_core.contracts.reward import RewardInput, RewardOutput, RewardSpec
from relax_core.contracts.sink import BaseSink, SinkSpec, SinkStart

if TYPE_CHECKING:
    from torch import Tensor

SHOWN = 80  # characters of a wrong result that an error shows
A_REWARD = "a finite number, or RewardOutput(reward=…), whose reward is None if it could not be computed"
A_STEP = "StepResult(observation=…), with reward and done if there are any"
MESSAGES = 'a list that is not empty, of {"role": text, "content": text or parts}'
PARTS = (
    'text, or a list of parts: {"type": "text", "text": text}, {"type": "image", "image": MediaSource(…)}, and '
    'the same with "video" or "audio"'
)


class WrongResult(TypeError):
    """A plug-in returned what its contract does not allow."""


class PluginFunction:
    """Holds the plug-in's function that returned a result, in the words with which an error begins."""

    def __init__(self, kind: str, name: str, function: Callable[..., Any]) -> None:
        whole = inspect.unwrap(function)  # the function may be an object with __call__
        code = getattr(whole, "__code__", None) or getattr(type(whole).__call__, "__code__", None)
        file = f" ({code.co_filename})" if code is not None else ""
        self._words = f"{kind} {name}{file}: {getattr(function, '__name__', 'it')}"

    def wrong(self, came: object, wanted: str, *, what: str = "") -> WrongResult:
        """Returns the error for a result of the wrong type or value."""
        shown = repr(came)
        shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"
        of = f" {what}=" if what else " "
        return WrongResult(f"{self._words} returned{of}{shown} of type {type(came).__name__}. Wanted: {wanted}.")

    def wrong_tensor(self, came: object, wanted: str, *, what: str = "") -> WrongResult:
        """Returns the error for a result that is not the wanted tensor, with its shape and dtype."""
        if not hasattr(came, "shape"):
            return self.wrong(came, wanted, what=what)
        described = f"a {type(came).__name__} of shape {list(came.shape)} and dtype {getattr(came, 'dtype', None)}"
        return WrongResult(f"{self._words} returned{f' {what},' if what else ''} {described}. Wanted: {wanted}.")


def checked_reward(spec: RewardSpec) -> RewardSpec:
    """Returns the reward with a function that gives a `RewardOutput` for each answer.

    The function is async if the reward's own is. A number alone is the reward, and the answer is exact if it is 1 (or
    True). If the reward is NaN or infinite, there is no reward, and the reason says so. The function raises
    `WrongResult` for anything else, and for a ``score_group`` whose list is not as long as the group.
    """
    if spec.score_group is None:
        return replace(spec, score=_checked_score(spec))
    return replace(spec, score_group=_checked_score_group(spec))


def _checked_score(spec: RewardSpec) -> Callable[[RewardInput, Any], Any]:
    given_score: Callable[..., Any] | None = spec.score
    assert given_score is not None
    source = PluginFunction("reward", spec.name, given_score)

    def score(given: RewardInput, config: Any) -> RewardOutput:
        return _one_reward(given_score(given, config), spec.name, source)

    async def score_async(given: RewardInput, config: Any) -> RewardOutput:
        return _one_reward(await given_score(given, config), spec.name, source)

    return score_async if spec.is_async else score


def _checked_score_group(spec: RewardSpec) -> Callable[[Sequence[RewardInput], Any], Any]:
    given_score: Callable[..., Any] | None = spec.score_group
    assert given_score is not None
    source = PluginFunction("reward", spec.name, given_score)

    def outputs(came: Any, count: int) -> list[RewardOutput]:
        wanted = f"a list of {count} rewards, one an answer, in order"
        if isinstance(came, str | bytes | Mapping) or not hasattr(came, "__len__") or not hasattr(came, "__iter__"):
            raise source.wrong(_not_awaited(came), wanted)
        if len(came) != count:
            raise source.wrong(came, f"{wanted}; {len(came)} came")
        return [_one_reward(one, spec.name, source, what=f"entry {position}") for position, one in enumerate(came)]

    def score_group(given: Sequence[RewardInput], config: Any) -> list[RewardOutput]:
        return outputs(given_score(given, config), len(given))

    async def score_group_async(given: Sequence[RewardInput], config: Any) -> list[RewardOutput]:
        return outputs(await given_score(given, config), len(given))

    return score_group_async if spec.is_async else score_group


def _one_reward(came: Any, name: str, source: PluginFunction, *, what: str = "") -> RewardOutput:
    if (number := _as_number(came)) is not None:
        return _finite(RewardOutput(reward=number, exact=number == 1.0), name)
    if not isinstance(came, RewardOutput):
        raise source.wrong(_not_awaited(came), A_REWARD, what=what)
    return _finite(_checked_output(came, source), name)


def _not_awaited(came: Any) -> Any:
    """Closes a coroutine that a plain function returned, so that Python does not warn about it later."""
    if inspect.iscoroutine(came):
        came.close()
    return came


def _checked_output(came: RewardOutput, source: PluginFunction) -> RewardOutput:
    reward = None if came.reward is None else _as_number(came.reward)
    if reward is None and came.reward is not None:
        raise source.wrong(came.reward, A_REWARD, what="reward")
    exact = _as_number(came.exact)
    if exact is None:
        raise source.wrong(came.exact, "True or False", what="exact")
    if not isinstance(came.reason, str):
        raise source.wrong(came.reason, "text", what="reason")
    if came.answer is not None and not isinstance(came.answer, str):
        raise source.wrong(came.answer, "text, or None", what="answer")
    if came.parts is not None and not isinstance(came.parts, Mapping):
        raise source.wrong(came.parts, "names with numbers, or None", what="parts")
    parts = {}
    for name, value in (came.parts or {}).items():
        number = _as_number(value)
        if number is None or not isinstance(name, str):
            raise source.wrong(came.parts, "names with numbers, or None", what="parts")
        parts[name] = number
    return replace(came, reward=reward, exact=bool(exact), parts=parts or None)


def _finite(output: RewardOutput, name: str) -> RewardOutput:
    figures = {"reward": output.reward, **(output.parts or {})}
    for what, value in figures.items():
        if value is not None and not math.isfinite(value):
            return RewardOutput(reward=None, reason=f"reward {name}: {what} is {value}, which is no number to train on")
    return output


def _as_number(value: object) -> float | None:
    """Returns a number of Python, or an array or tensor of one element, as a float; None for any other object."""
    if isinstance(value, numbers.Real):
        return float(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) is not None:  # an array of numpy or a tensor of torch
        shape = getattr(value, "shape", None)
        if shape is not None and math.prod(shape) == 1 and isinstance(inner := value.item(), numbers.Real):
            return float(inner)
    return None


def checked_env(spec: EnvSpec) -> EnvSpec:
    """Returns the env with functions that raise `WrongResult` if they return no conversation, or no `StepResult`."""
    if spec.messages is not None:
        given_messages = spec.messages
        source = PluginFunction("env", spec.name, given_messages)
        return replace(spec, messages=lambda row, config: _conversation(given_messages(row, config), source))
    given_open = spec.open
    assert given_open is not None
    source = PluginFunction("env", spec.name, given_open)

    def checked_open(start: EpisodeStart, config: Any) -> BaseInteractionEnv:
        came: Any = given_open(start, config)
        if not isinstance(came, BaseInteractionEnv):
            raise source.wrong(_not_awaited(came), "an object of a class under BaseInteractionEnv")
        return _CheckedInteraction(came, spec.name)

    return replace(spec, open=checked_open)


class _CheckedInteraction(BaseInteractionEnv):
    """An episode's env whose results are checked. Its methods are async if the env's own are."""

    def __init__(self, env: BaseInteractionEnv, name: str) -> None:
        def source(method: Callable[..., Any]) -> PluginFunction:
            return PluginFunction("env", name, method)

        of_reset, of_step, of_messages = source(env.reset), source(env.step), source(env.format_observation)
        self.reset = _then(env.reset, lambda came: _value(came, of_reset))  # type: ignore[method-assign]
        self.step = _then(env.step, lambda came: _checked_step(came, of_step))  # type: ignore[method-assign]
        self.format_observation = _then(  # type: ignore[method-assign]
            env.format_observation, lambda came: _conversation(came, of_messages)
        )
        self.close = env.close  # type: ignore[method-assign]

    def reset(self) -> Any: ...

    def step(self, action: Action) -> StepResult: ...  # type: ignore[empty-body]


def _then(function: Callable[..., Any], check: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns ``function`` with a check of its result; it is async if ``function`` is."""
    if not inspect.iscoroutinefunction(function):
        return lambda *given: check(function(*given))

    async def awaited(*given: Any) -> Any:
        return check(await function(*given))

    return awaited


def _value(came: Any, source: PluginFunction) -> Any:
    if inspect.isawaitable(came):
        raise source.wrong(_not_awaited(came), "an observation; make the method async def if it has to wait")
    return came


def _checked_step(came: Any, source: PluginFunction) -> StepResult:
    if not isinstance(came, StepResult):
        raise source.wrong(_not_awaited(came), A_STEP)
    reward = None if came.reward is None else _as_number(came.reward)
    if came.reward is not None and (reward is None or not math.isfinite(reward)):
        raise source.wrong(came.reward, "a finite number, or None if the turn has no reward of its own", what="reward")
    done = _as_number(came.done)
    if done is None:
        raise source.wrong(came.done, "True or False", what="done")
    if not isinstance(came.info, Mapping):
        raise source.wrong(came.info, "names with values", what="info")
    return replace(came, reward=reward, done=bool(done))


def _conversation(came: Any, source: PluginFunction) -> list[Message]:
    if isinstance(came, str | Mapping) or not isinstance(came, Sequence) or not came:
        raise source.wrong(_not_awaited(came), MESSAGES)
    for message in came:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise source.wrong(message, MESSAGES, what="a message")
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            if not content or not all(map(_is_part, content)):
                raise source.wrong(content, PARTS, what="content")
        elif not isinstance(content, str):
            raise source.wrong(message, MESSAGES, what="a message")
    return list(came)


def _is_part(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    if kind == "text":
        return isinstance(part.get("text"), str)
    source = part.get(kind) if kind in MEDIA_KINDS else None
    return isinstance(source, MediaSource) and source.kind == kind


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
    if not bool(torch.isfinite(came).all()):
        position = int((~torch.isfinite(came)).nonzero()[0])
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
        came = drop_group(rewards, dropped_in_a_row, config)
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
        number = _as_number(came)
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
            raise function.wrong(_not_awaited(came), "an object of a class under BaseSink")
        return came

    return replace(spec, open=checked_open)
