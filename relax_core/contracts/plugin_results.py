"""Defines the error for a wrong result of a plug-in, and what all checks of results share."""

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

from relax_core.contracts.foreign_values import shown

# The largest size of a number of a reward. Its square, and a sum of some thousand squares, are finite in float32.
MOST_REWARD = 1e15


class WrongResult(TypeError):
    """A plug-in returned what its contract does not allow."""


_plugin_process: ContextVar[int] = ContextVar("_plugin_process")  # whose block runs a plug-in
_exit_process = os._exit


def contain_exits() -> None:
    """Makes ``os._exit`` in code of a plug-in a failure of the plug-in in this process, which others share."""
    os._exit = _exit


def _exit(status: int) -> NoReturn:
    """Ends the process as ``os._exit`` does, unless a plug-in would end the process that called it."""
    if _plugin_process.get(0) == os.getpid():
        raise _ProcessExit(f"it called os._exit({status})")
    _exit_process(status)


class PluginStopped(RuntimeError):
    """A plug-in raised what is no `Exception`, such as SystemExit, or called ``os._exit``; the text says which."""


class _ProcessExit(BaseException):
    """A plug-in called ``os._exit``."""


class Contained:
    """Raises `PluginStopped` for any exception of its block that is no `Exception`; the block is code of a plug-in.

    A cancellation of the running task, and the KeyboardInterrupt of a signal, pass as they are. Behind `contain_exits`
    it raises `PluginStopped` for ``os._exit``, too, but in a child process that the block forks.
    """

    def __enter__(self) -> None:
        self._token = _plugin_process.set(os.getpid())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, GeneratorExit):  # which a coroutine that nobody awaits gets in another context
            _plugin_process.reset(self._token)
        if error is None or isinstance(error, Exception) or _comes_from_outside(error):
            return
        how = str(error) if isinstance(error, _ProcessExit) else f"it raised {shown(error)}"
        raise PluginStopped(how).with_traceback(trace) from error


def _comes_from_outside(error: BaseException) -> bool:
    """Returns whether an exception may be a signal's or a cancellation, and not the plug-in's own."""
    if isinstance(error, KeyboardInterrupt):  # Python raises that of a signal in the main thread alone
        return threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT))
    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs in this thread
            return False
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit)


def contained(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a plug-in's function within `Contained`; it is async if ``function`` is."""
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
    """Returns whether a function has to be awaited; it may be an object with an ``async def __call__``."""
    whole = inspect.unwrap(function)
    return inspect.iscoroutinefunction(whole) or inspect.iscoroutinefunction(type(whole).__call__)


def contained_spec(spec: Any) -> Any:
    """Returns a SPEC with all its functions within `Contained`."""
    values = {one.name: getattr(spec, one.name) for one in fields(spec) if one.name != "config"}
    return replace(spec, **{name: contained(value) for name, value in values.items() if callable(value)})


def own_copy(value: Any) -> Any:
    """Returns a value of a data row whose lists and mappings belong to the receiver; texts, bytes and media are shared.

    What a plug-in changes in it reaches no other sample, epoch or evaluation.
    """
    if isinstance(value, Mapping):
        return {name: own_copy(one) for name, one in value.items()}
    if isinstance(value, list):
        return [own_copy(one) for one in value]
    if type(value) is tuple:
        return tuple(map(own_copy, value))
    if isinstance(value, set | bytearray) or hasattr(value, "__array__"):
        return deepcopy(value)
    return value


class PluginFunction:
    """Holds the plug-in's function that returned a result, in the words with which an error begins."""

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
        """Returns the error for a result that is not the wanted tensor, with its shape and dtype."""
        if not hasattr(came, "shape"):
            return self.wrong(came, wanted, what=what)
        described = f"a {type(came).__name__} of shape {list(came.shape)} and dtype {getattr(came, 'dtype', None)}"
        return WrongResult(f"{self._words} returned{f' {what},' if what else ''} {described}. Wanted: {wanted}.")


def not_awaited(came: Any) -> Any:
    """Closes a coroutine that a plain function returned, so that Python does not warn about it later."""
    if inspect.iscoroutine(came):
        came.close()
    return came


def as_number(value: object) -> float | None:
    """Returns a number of Python, or an array or tensor of one element, as a float; None for any other object.

    It is infinite for an integer or a fraction that no float holds. An object that fails to give its value is none.
    """
    if isinstance(value, numbers.Real):
        return _as_float(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) is not None:  # an array of numpy or a tensor of torch
        shape = getattr(value, "shape", None)
        if shape is not None and math.prod(shape) == 1 and isinstance(inner := value.item(), numbers.Real):
            return _as_float(inner)
    return None


def too_large(number: float) -> str | None:
    """Returns why a number is none to train on; None if it is finite and at most `MOST_REWARD` in size."""
    if not math.isfinite(number):
        return "which is no number to train on"
    if abs(number) > MOST_REWARD:
        return f"which is larger than {MOST_REWARD:g}, so sums of its squares overflow"
    return None


def _as_float(value: Any) -> float | None:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except Exception:  # the number of a plug-in is foreign code
        return None
