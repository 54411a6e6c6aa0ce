"""Helpers to call plug-ins safely: they report wrong results, contain exits, copy inputs and convert numbers."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import fields, replace
from types import TracebackType
from typing import Any, NoReturn

from relax_core.contracts.untrusted_values import shown

# The largest absolute value of a reward. The sum of some thousand squares of such rewards is finite in float32.
MAX_REWARD = 1e15


class WrongResult(TypeError):
    """A plug-in returned a result that its contract does not allow; the text names the plug-in and the result."""


_plugin_process: ContextVar[int] = ContextVar("_plugin_process")  # id of the process that currently runs plug-in code
_exit_process = os._exit


def contain_exits() -> None:
    """Turns ``os._exit`` in plug-in code into an error of the plug-in, for processes that also run other code."""
    os._exit = _exit


def _exit(status: int) -> NoReturn:
    """Replaces ``os._exit``: raises if plug-in code calls it in the process that runs the plug-in, else exits."""
    if _plugin_process.get(0) == os.getpid():
        raise _ProcessExit(f"it called os._exit({status})")
    _exit_process(status)


class PluginStopped(RuntimeError):
    """A plug-in raised a BaseException such as SystemExit, or called ``os._exit``; the text says which of the two."""


class _ProcessExit(BaseException):
    """A plug-in called ``os._exit``."""


class Contained:
    """Wraps a block of plug-in code and raises `PluginStopped` for a BaseException that is not an `Exception`.

    A cancellation of the running task and the KeyboardInterrupt of a signal are raised unchanged. After a call of
    `contain_exits`, ``os._exit`` in the block also raises `PluginStopped`, except in a child process that the block
    forks.
    """

    def __enter__(self) -> None:
        self._token = _plugin_process.set(os.getpid())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, GeneratorExit):  # may be raised in another context, where reset fails
            _plugin_process.reset(self._token)
        if error is None or isinstance(error, Exception) or _comes_from_outside(error):
            return
        how = str(error) if isinstance(error, _ProcessExit) else f"it raised {shown(error)}"
        raise PluginStopped(how).with_traceback(trace) from error


def _comes_from_outside(error: BaseException) -> bool:
    """Returns whether an exception may come from a signal or a cancellation and not from the plug-in."""
    if isinstance(error, KeyboardInterrupt):  # a signal raises KeyboardInterrupt only in the main thread
        return threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT))
    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs in this thread
            return False
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit)


def contained(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a plug-in's function wrapped in `Contained`. It is async if ``function`` is async."""
    if is_async(function):

        @functools.wraps(function, updated=())
        async def awaited(*given: Any, **named: Any) -> Any:
            with Contained():
                return await function(*given, **named)

        return awaited

    @functools.wraps(function, updated=())
    def called(*given: Any, **named: Any) -> Any:
        with Contained():
            return function(*given, **named)

    return called


def is_async(function: Callable[..., Any]) -> bool:
    """Returns whether a function has to be awaited; the function may be an object with an ``async def __call__``."""
    whole = inspect.unwrap(function)
    return inspect.iscoroutinefunction(whole) or inspect.iscoroutinefunction(type(whole).__call__)


def contained_spec(spec: Any) -> Any:
    """Returns a SPEC with all its functions wrapped in `Contained`."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name != "config"}
    return replace(spec, **{name: contained(value) for name, value in values.items() if callable(value)})


def copy_containers(value: Any) -> Any:
    """Copies the lists and mappings in a data row's value; the copy shares texts, bytes and media with the original.

    So a plug-in that changes the copy does not affect other samples, epochs or evaluations.
    """
    if isinstance(value, Mapping):
        return {name: copy_containers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [copy_containers(element) for element in value]
    if type(value) is tuple:
        return tuple(map(copy_containers, value))
    if isinstance(value, set | bytearray) or hasattr(value, "__array__"):
        return deepcopy(value)
    return value


class PluginFunction:
    """Names a plug-in's function and makes the errors for its wrong results."""

    def __init__(self, kind: str, name: str, function: Callable[..., Any]) -> None:
        whole = inspect.unwrap(function)  # the function may be an object with __call__
        code = getattr(whole, "__code__", None) or getattr(type(whole).__call__, "__code__", None)
        file = f" ({code.co_filename})" if code is not None else ""
        self._words = f"{kind} {name}{file}: {getattr(function, '__name__', 'it')}"

    def wrong(self, came: object, wanted: str, *, what: str = "") -> WrongResult:
        """Returns the error for a result of the wrong type or value."""
        of = f" {what}=" if what else " "
        return WrongResult(f"{self._words} returned{of}{shown(came)} of type {type(came).__name__}. Wanted: {wanted}.")

    def wrong_tensor(self, came: object, wanted: str, *, what: str = "") -> WrongResult:
        """Returns the error for a result that is not the expected tensor. It has the result's shape and dtype."""
        if not hasattr(came, "shape"):
            return self.wrong(came, wanted, what=what)
        described = f"a {type(came).__name__} of shape {list(came.shape)} and dtype {getattr(came, 'dtype', None)}"
        return WrongResult(f"{self._words} returned{f' {what},' if what else ''} {described}. Wanted: {wanted}.")


def not_awaited(came: Any) -> Any:
    """Closes a coroutine that a plain function returned. Otherwise Python would warn about the coroutine later."""
    if inspect.iscoroutine(came):
        came.close()
    return came


def as_number(value: object) -> float | None:
    """Converts a Python number, or an array or tensor with one element, to a float. Returns None for other objects.

    Returns infinity for an integer or a fraction beyond the range of floats, and None if the conversion raises.
    """
    if isinstance(value, numbers.Real):
        return _as_float(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) is not None:  # an array of numpy or a tensor of torch
        shape = getattr(value, "shape", None)
        if shape is not None and math.prod(shape) == 1 and isinstance(inner := value.item(), numbers.Real):
            return _as_float(inner)
    return None


def too_large(number: float) -> str | None:
    """Returns why a number cannot be a reward; None if it is finite and its absolute value is at most `MAX_REWARD`."""
    if not math.isfinite(number):
        return "which cannot be trained on"
    if abs(number) > MAX_REWARD:
        return f"which is larger than {MAX_REWARD:g}, so sums of its squares overflow"
    return None


def _as_float(value: Any) -> float | None:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except Exception:  # a number class of a plug-in is untrusted code
        return None
