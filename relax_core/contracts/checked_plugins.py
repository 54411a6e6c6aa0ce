"""Wraps plug-ins and checks their results. `relax_core.registry` returns only wrapped plug-ins.

A result that contradicts the contract raises `WrongResult`. The error names the plug-in, its file, the result and the
expected result.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from relax_core.contracts.algorithm import (
    AdvantageInputs,
    AlgorithmSpec,
    LossInputs,
    LossOutputs,
    StepTotals,
    ValueInputs,
)
from relax_core.contracts.data import BaseDataSource, DataSourceSpec
from relax_core.contracts.env import Action, BaseInteractionEnv, EnvSpec, EpisodeStart, Message, StepResult
from relax_core.contracts.media import MEDIA_KINDS, MediaSource
from relax_core.contracts.plugin_results import (
    Contained,
    PluginFunction,
    as_number,
    contained,
    copy_containers,
    is_async,
    not_awaited,
    too_large,
)
from relax_core.contracts.reward import (
    MAX_ANSWER,
    MAX_CAUSE,
    MAX_PARTS,
    MAX_REASON,
    MAX_WHY,
    RewardInput,
    RewardOutput,
    RewardSpec,
)
from relax_core.contracts.sink import BaseSink, SinkSpec, SinkStart
from relax_core.contracts.tool_calls import ToolSchema, checked_schemas
from relax_core.contracts.untrusted_values import clean_text, clean_value, shown

if TYPE_CHECKING:
    from torch import Tensor

A_REWARD = "a finite number, or RewardOutput(reward=…), with reward=None if it could not be computed"


def checked_reward(spec: RewardSpec) -> RewardSpec:
    """Returns the reward with a wrapped function, which returns a `RewardOutput` for each answer.

    The wrapped function is async if the reward's function is async. A plain number becomes the reward, and the answer
    is exact if the number is 1 (or True). If the reward or a part is NaN, infinite or too large (`too_large`),
    ``reward`` becomes None and ``reason`` says why. Texts are shortened and cleaned (`clean_text`). The wrapped
    function raises `WrongResult` for any other result, and if ``score_group`` returns a list with another length than
    the group.

    Each call gets a separate copy of the data row and messages (`copy_containers`).
    """
    if (check_row := spec.check_row) is not None:
        spec = replace(spec, check_row=lambda row, config: check_row(copy_containers(row), config))
    if spec.combine is not None:
        return replace(spec, combine=_checked_combine(spec))
    if spec.score_group is None:
        return replace(spec, score=_checked_score(spec))
    return replace(spec, score_group=_checked_score_group(spec))


def _own_input(given: RewardInput) -> RewardInput:
    """Returns the input with copies of its lists and mappings, in the same class."""
    made = copy(given)  # `replace` would omit the judges, because they are not a field
    for name in ("row", "messages", "turns", "turn_rewards"):
        object.__setattr__(made, name, copy_containers(getattr(given, name)))
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
        return [
            _one_reward(output, spec.name, source, what=f"entry {position}") for position, output in enumerate(came)
        ]

    def score_group(given: Sequence[RewardInput], config: Any) -> list[RewardOutput]:
        return outputs(given_score([_own_input(reward_input) for reward_input in given], config), len(given))

    async def score_group_async(given: Sequence[RewardInput], config: Any) -> list[RewardOutput]:
        return outputs(await given_score([_own_input(reward_input) for reward_input in given], config), len(given))

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
    if came.parts is not None and len(came.parts) > MAX_PARTS:
        raise source.wrong(f"{len(came.parts)} numbers", f"at most {MAX_PARTS} numbers", what="parts")
    parts = {}
    for name, value in (came.parts or {}).items():
        number = as_number(value)
        if number is None or not isinstance(name, str):
            raise source.wrong(came.parts, "names with numbers, or None", what="parts")
        parts[clean_text(name, MAX_CAUSE)] = number
    return replace(
        came,
        reward=reward,
        exact=bool(exact),
        parts=parts or None,
        reason=clean_text(came.reason, MAX_REASON),
        answer=None if came.answer is None else clean_text(came.answer, MAX_ANSWER),
        why=clean_text(came.why, MAX_WHY),
        cause=clean_text(came.cause, MAX_CAUSE),
    )


def _finite(output: RewardOutput, name: str, *, came: object) -> RewardOutput:
    """Returns the output, without reward if a number is not finite.

    ``came`` is the reward that the plug-in returned.
    """
    metrics = {"reward": output.reward, **(output.parts or {})}
    for what, value in metrics.items():
        if value is not None and (why := too_large(value)) is not None:
            reason = f"reward {name}: {what} is {shown(came) if what == 'reward' else value}, {why}"
            return RewardOutput(reward=None, reason=reason, cause="not_finite")
    return output


def checked_algorithm(spec: AlgorithmSpec) -> AlgorithmSpec:
    """Returns the algorithm with functions that raise `WrongResult` for a tensor of a wrong shape.

    The functions also raise `WrongResult` for advantages and returns that are not finite. A loss that is not finite is
    reported by the trainer, with the train step.
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

    wanted = f"a finite float tensor of shape [{tokens}], one value for each token"
    if not isinstance(came, torch.Tensor) or list(came.shape) != [tokens] or not came.is_floating_point():
        raise source.wrong_tensor(came, wanted, what=what)
    finite = torch.isfinite(came.float())  # the columns are float32, and a float64 value may overflow
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
            raise source.wrong(came, f"a list of {len(inputs)} tensors, one for each group")
        groups = enumerate(zip(came, inputs, strict=True))
        return [_per_token(values, len(group.loss_mask), source, what=f"group {k}") for k, (values, group) in groups]

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
    """Returns the metrics sink with an ``open`` that raises `WrongResult` for a result that is not a sink."""
    function = PluginFunction("metrics sink", spec.name, spec.open)

    def checked_open(start: SinkStart, config: Any) -> BaseSink:
        came: Any = spec.open(start, config)
        if not isinstance(came, BaseSink):
            raise function.wrong(not_awaited(came), "an object of a class under BaseSink")
        return came

    return replace(spec, open=checked_open)


A_ROW = "a mapping with text keys, such as {'prompt': …, 'answer': …}"


def checked_data_source(spec: DataSourceSpec) -> DataSourceSpec:
    """Returns the data source with methods that raise `WrongResult` for a wrong source, row or number of rows."""
    source = PluginFunction("data source", spec.name, spec.open)

    def checked_open(config: Any) -> BaseDataSource:
        came: Any = spec.open(config)
        if not isinstance(came, BaseDataSource):
            raise source.wrong(came, "an object of a class under BaseDataSource")
        return _CheckedDataSource(came, spec.name)

    return replace(spec, open=checked_open)


class _CheckedDataSource(BaseDataSource):
    """Wraps an open data source and checks its results."""

    def __init__(self, rows: BaseDataSource, name: str) -> None:
        self._rows = rows
        self._of_len = PluginFunction("data source", name, rows.__len__)
        self._of_row = PluginFunction("data source", name, rows.__getitem__)
        self._of_where = PluginFunction("data source", name, rows.where)
        self._of_held_out = PluginFunction("data source", name, rows.held_out)

    def __len__(self) -> int:
        with Contained():
            came: Any = type(self._rows).__len__(self._rows)
        if isinstance(came, bool) or not isinstance(came, int) or came < 1:
            raise self._of_len.wrong(came, "the number of rows, 1 or more")
        return came

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        with Contained():
            came = self._rows[number]
        return _row(came, self._of_row)

    def where(self, number: int) -> str:
        with Contained():
            came: Any = self._rows.where(number)
        if not isinstance(came, str):
            raise self._of_where.wrong(came, "text")
        return came

    def held_out(self) -> Sequence[Mapping[str, Any]] | None:
        with Contained():
            came: Any = self._rows.held_out()
        if came is not None and (isinstance(came, str | Mapping) or not isinstance(came, Sequence)):
            raise self._of_held_out.wrong(came, "a sequence of rows, or None")
        return came if came is None else [_row(row, self._of_held_out) for row in came]


def _row(came: Any, source: PluginFunction) -> Mapping[str, Any]:
    if not isinstance(came, Mapping) or not all(isinstance(key, str) for key in came):
        raise source.wrong(came, A_ROW)
    row: Mapping[str, Any] = clean_value(came)
    return row


A_STEP = "StepResult(observation=…), with reward and done if there are any"
A_TOOL_LIST = "a list of tools, each a typed Python function or a JSON schema"
MESSAGES = 'a list that is not empty, of {"role": text, "content": text or parts}'
PARTS = (
    'text, or a list of parts: {"type": "text", "text": text}, {"type": "image", "image": MediaSource(…)}, and '
    'the same with "video" or "audio"'
)


def checked_env(spec: EnvSpec) -> EnvSpec:
    """Returns the env with functions that raise `WrongResult` for a wrong conversation or `StepResult`.

    The functions raise ValueError for a reward that is not finite or too large, and for messages that are nested too
    deeply; the error ends only the episode. Halves of surrogate pairs in texts are replaced.

    Each call gets a separate copy of the data row (`copy_containers`). The checked ``tools`` returns JSON schemas. It
    raises `WrongResult` for a tool that is neither a schema nor a typed function, and for two tools with the same name.
    """
    if spec.messages is not None:
        given_messages = spec.messages
        source = PluginFunction("env", spec.name, given_messages)
        return replace(
            spec, messages=lambda row, config: _conversation(given_messages(copy_containers(row), config), source)
        )
    if spec.open is None:
        return spec  # an agent program plays the episodes, so the env returns no results to check
    given_open = spec.open
    source = PluginFunction("env", spec.name, given_open)

    def checked_open(start: EpisodeStart, config: Any) -> BaseInteractionEnv:
        came: Any = given_open(replace(start, row=copy_containers(start.row)), config)
        if not isinstance(came, BaseInteractionEnv):
            raise source.wrong(not_awaited(came), "an object of a class under BaseInteractionEnv")
        return _CheckedInteraction(came, spec)

    return replace(spec, open=checked_open, tools=None if spec.tools is None else _checked_tools(spec))


def _checked_tools(spec: EnvSpec) -> Callable[[Mapping[str, Any], Any], list[ToolSchema]]:
    given_tools = spec.tools
    assert given_tools is not None
    source = PluginFunction("env", spec.name, given_tools)

    def tools(row: Mapping[str, Any], config: Any) -> list[ToolSchema]:
        came: Any = given_tools(copy_containers(row), config)
        if isinstance(came, str | Mapping) or not isinstance(came, Sequence):
            raise source.wrong(not_awaited(came), A_TOOL_LIST)
        try:
            return checked_schemas(came)
        except ValueError as error:
            raise source.wrong(came, f"{A_TOOL_LIST}. {error}") from error

    return tools


class _CheckedInteraction(BaseInteractionEnv):
    """Wraps an episode's env and checks its results. A method is async if the env's method is async."""

    def __init__(self, env: BaseInteractionEnv, spec: EnvSpec) -> None:
        def source(method: Callable[..., Any]) -> PluginFunction:
            return PluginFunction("env", spec.name, method)

        of_reset, of_step, of_messages = source(env.reset), source(env.step), source(env.format_observation)
        self.reset = _then(env.reset, lambda came: _value(came, of_reset))  # type: ignore[method-assign]
        self.step = _then(env.step, lambda came: _checked_step(came, of_step, keyed=spec.state_keys))  # type: ignore[method-assign]
        self.format_observation = _then(  # type: ignore[method-assign]
            env.format_observation, lambda came: _conversation(came, of_messages)
        )
        self.close = contained(env.close)  # type: ignore[method-assign]

    def reset(self) -> Any: ...

    def step(self, action: Action) -> StepResult: ...  # type: ignore[empty-body]


def _then(function: Callable[..., Any], check: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a function that calls ``function`` and checks the result. It is async if ``function`` is async."""
    function = contained(function)
    if not is_async(function):
        return lambda *given: check(function(*given))

    async def awaited(*given: Any) -> Any:
        return check(await function(*given))

    return awaited


def _value(came: Any, source: PluginFunction) -> Any:
    if inspect.isawaitable(came):
        raise source.wrong(not_awaited(came), "an observation; make the method async def if it has to wait")
    return came


def _checked_step(came: Any, source: PluginFunction, *, keyed: bool) -> StepResult:
    if not isinstance(came, StepResult):
        raise source.wrong(not_awaited(came), A_STEP)
    reward = None if came.reward is None else as_number(came.reward)
    if came.reward is not None and reward is None:
        raise source.wrong(came.reward, "a finite number, or None if the turn has no reward", what="reward")
    if reward is not None and (why := too_large(reward)) is not None:
        raise ValueError(f"reward is {shown(came.reward)}, {why}")
    done = as_number(came.done)
    if done is None:
        raise source.wrong(came.done, "True or False", what="done")
    if not isinstance(came.info, Mapping):
        raise source.wrong(came.info, "names with values", what="info")
    info = clean_value(came.info)
    try:
        msgspec.json.encode(info)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"info has a number that JSON cannot hold: {shown(info)}") from error
    except TypeError as error:
        raise source.wrong(came.info, f"names with values that JSON can hold; {error}", what="info") from error
    if came.state_key is None and keyed:
        raise source.wrong(
            None, "text, because its SPEC has state_keys=True; drop that if it has none", what="state_key"
        )
    if came.state_key is not None and not isinstance(came.state_key, str):
        raise source.wrong(came.state_key, "text, or None", what="state_key")
    edit = None if came.context_edit is None else _conversation(came.context_edit, source)
    key = None if came.state_key is None else clean_text(came.state_key)
    return replace(came, reward=reward, done=bool(done), info=info, state_key=key, context_edit=edit)


def _conversation(came: Any, source: PluginFunction) -> list[Message]:
    if isinstance(came, str | Mapping) or not isinstance(came, Sequence) or not came:
        raise source.wrong(not_awaited(came), MESSAGES)
    for message in came:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise source.wrong(message, MESSAGES, what="a message")
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            if not content or not all(map(_is_part, content)):
                raise source.wrong(content, PARTS, what="content")
        elif not isinstance(content, str):
            raise source.wrong(message, MESSAGES, what="a message")
        if not all(isinstance(message.get(key, ""), str) for key in ("name", "tool_call_id")):
            raise source.wrong(message, f"{MESSAGES}; name and tool_call_id are text", what="a message")
    return [clean_value(message) for message in came]


def _is_part(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    if kind == "text":
        return isinstance(part.get("text"), str)
    source = part.get(kind) if kind in MEDIA_KINDS else None
    return isinstance(source, MediaSource) and source.kind == kind
