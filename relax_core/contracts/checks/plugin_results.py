"""Defines the error for a wrong result of a plug-in, and what all checks of results share."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any

from relax_core.contracts.checks.foreign_values import shown

# The largest size of a number of a reward. Its square, and a sum of some thousand squares, are finite in float32.
MOST_REWARD = 1e15


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
