"""Wraps environments so that their results are checked where they enter (`relax_core.contracts.checks.checked`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from relax_core.contracts.checks.foreign_values import clean_text, clean_value, shown
from relax_core.contracts.checks.plugin_results import (
    PluginFunction,
    as_number,
    contained,
    is_async,
    not_awaited,
    own_copy,
    too_large,
)
from relax_core.contracts.env import Action, BaseInteractionEnv, EnvSpec, EpisodeStart, Message, StepResult
from relax_core.contracts.media import MEDIA_KINDS, MediaSource
from relax_core.contracts.tool_use.tool_schemas import ToolSchema, checked_schemas

A_STEP = "StepResult(observation=…), with reward and done if there are any"
A_TOOL_LIST = "a list of tools, each a typed Python function or a JSON schema"
MESSAGES = 'a list that is not empty, of {"role": text, "content": text or parts}'
PARTS = (
    'text, or a list of parts: {"type": "text", "text": text}, {"type": "image", "image": MediaSource(…)}, and '
    'the same with "video" or "audio"'
)


def checked_env(spec: EnvSpec) -> EnvSpec:
    """Returns the env with functions that raise `WrongResult` if they return no conversation, or no `StepResult`.

    They raise ValueError for a number that cannot be trained on and for messages that are nested too deeply, which ends
    the episode alone. Texts have no halves of surrogate pairs.

    Each call gets a data row of its own (`own_copy`). Its ``tools`` returns JSON schemas alone, and raises
    `WrongResult` for anything that is neither a schema nor a typed function, and for two tools of one name.
    """
    if spec.messages is not None:
        given_messages = spec.messages
        source = PluginFunction("env", spec.name, given_messages)
        return replace(spec, messages=lambda row, config: _conversation(given_messages(own_copy(row), config), source))
    if spec.open is None:
        return spec  # a program plays its episodes, and returns nothing to Relax's own functions
    given_open = spec.open
    source = PluginFunction("env", spec.name, given_open)

    def checked_open(start: EpisodeStart, config: Any) -> BaseInteractionEnv:
        came: Any = given_open(replace(start, row=own_copy(start.row)), config)
        if not isinstance(came, BaseInteractionEnv):
            raise source.wrong(not_awaited(came), "an object of a class under BaseInteractionEnv")
        return _CheckedInteraction(came, spec)

    return replace(spec, open=checked_open, tools=None if spec.tools is None else _checked_tools(spec))


def _checked_tools(spec: EnvSpec) -> Callable[[Mapping[str, Any], Any], list[ToolSchema]]:
    given_tools = spec.tools
    assert given_tools is not None
    source = PluginFunction("env", spec.name, given_tools)

    def tools(row: Mapping[str, Any], config: Any) -> list[ToolSchema]:
        came: Any = given_tools(own_copy(row), config)
        if isinstance(came, str | Mapping) or not isinstance(came, Sequence):
            raise source.wrong(not_awaited(came), A_TOOL_LIST)
        try:
            return checked_schemas(came)
        except ValueError as error:
            raise source.wrong(came, f"{A_TOOL_LIST}. {error}") from error

    return tools


class _CheckedInteraction(BaseInteractionEnv):
    """An episode's env whose results are checked. Its methods are async if the env's own are."""

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
    """Returns ``function`` with a check of its result; it is async if ``function`` is."""
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
        raise source.wrong(came.reward, "a finite number, or None if the turn has no reward of its own", what="reward")
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
