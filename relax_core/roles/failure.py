"""A worker's failure in one line: what went wrong first, and where, if that was in a plug-in's own file."""

from __future__ import annotations

import traceback

from relax_core.registry import is_plugin_module


def first_cause(error: BaseException) -> BaseException:
    """The first leaf of a task group's failures, not the tasks that were cancelled after it; of an error that came
    through Ray, the one that was raised there."""
    from ray.exceptions import RayTaskError  # late: Ray reads its token's place when it is imported

    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(error, RayTaskError) and error.cause is not None:
            error = error.cause
        else:
            return error


def failure_line(error: BaseException) -> str:
    """For the user's first screen; the traceback is for the logs."""
    error = first_cause(error)
    words = f"{type(error).__name__}: {error}".splitlines()[0]
    places = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_plugin_module(frame.f_globals.get("__name__", ""))
    ]
    return f"{words} ({places[-1][0]}, line {places[-1][1]})" if places else words
