"""Turns a reward function of the user's program into a plug-in file that all processes of the run can load.

The user's process pickles the function by value into a file that only this user may read and write. The file is code,
like every plug-in file. Therefore the file is refused if other users may read or write it.
"""

from __future__ import annotations

import base64
import inspect
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from relax_core.config.errors import ConfigError
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec
from relax_core.registry import MARK

FUNCTION_FILE = "reward_function.py"
RewardFunction = Callable[[RewardInput], RewardOutput | float]

_TEXT = '''"""Holds the reward function that relax_core.run was given. Only its user may read or write this file."""

from dataclasses import dataclass

from relax_core.api.function_reward import function_spec
from relax_core.contracts.reward import RewardConfig


@dataclass(frozen=True)
class FunctionConfig(RewardConfig):
    name: str = "{name}"


SPEC = function_spec(__file__, FunctionConfig, "{pickled}")
'''


def function_text(function: RewardFunction) -> str:
    """Returns the text of a plug-in file for a function, lambda or callable object.

    The function may be defined in ``__main__`` or in a notebook cell. Raises `ConfigError` if the function is async,
    cannot be called with one argument, or cannot be pickled.
    """
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            [
                f"reward={function!r}: it cannot be called with one argument, a RewardInput: {error}. Give a function "
                "of one argument."
            ]
        ) from error
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigError(
            [
                f"reward={function!r}: it is async, but a worker process makes one call at a time. Give a plain "
                "function, or a plug-in file with an async score in its SPEC."
            ]
        )
    import cloudpickle

    try:
        with _by_value(function):
            pickled = cloudpickle.dumps(function)
    except Exception as error:  # objects of the function may raise any error when they are pickled
        raise ConfigError(
            [
                f"reward={function!r}: it cannot be sent to the run's processes: {type(error).__name__}: {error}. Make "
                "the objects that it holds (an open file, a lock, a connection) inside of it."
            ]
        ) from error
    return _TEXT.format(name=FUNCTION_FILE, pickled=base64.b64encode(pickled).decode())


@contextmanager
def _by_value(function: Any) -> Iterator[None]:
    """Makes cloudpickle pickle the user's module by value, so that the run's processes need not import this module."""
    import cloudpickle

    name = getattr(function, "__module__", None) or type(function).__module__
    module: ModuleType | None = sys.modules.get(name)
    file = getattr(module, "__file__", None) or ""
    installed = "site-packages" in file or "dist-packages" in file or not file
    if module is None or name == "__main__" or installed:
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def write_private(path: Path, text: str) -> None:
    """Writes a file atomically; only this user may read the file."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(partial, path)


def function_spec(file: str, config: type[RewardConfig], pickled: str) -> RewardSpec:
    """Returns the SPEC of a file that `function_text` wrote.

    The file calls this function with its own path.

    Raises PermissionError, before the function is unpickled, if another user owns the file or may read or write it.
    """
    state = os.stat(file)
    if state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
        raise PermissionError(
            f"{file} holds a pickled function, so it is loaded only if this user alone may read and write it: its "
            f"owner is {state.st_uid}, its mode {stat.S_IMODE(state.st_mode):o}. Use chmod 600, or a plug-in file with "
            "a SPEC."
        )
    import cloudpickle

    function = cloudpickle.loads(base64.b64decode(pickled))
    if hasattr(function, "__globals__"):
        function.__globals__[MARK] = True  # with this mark, errors name the line in the function
    return RewardSpec(
        name=getattr(function, "__name__", type(function).__name__),
        summary="a function of the program that started the run",
        config=config,
        score=_Score(function),
        isolated=True,
    )


class _Score:
    """Calls the user's function, which has no settings, as a reward's ``score``.

    ``__wrapped__`` provides the function's name and file for error messages.
    """

    def __init__(self, function: RewardFunction) -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, given: RewardInput, config: Any) -> RewardOutput | float:
        return self.__wrapped__(given)
