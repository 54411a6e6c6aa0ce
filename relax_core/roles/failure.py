"""Classifies a worker's failure: its first cause in one line, and whether another process caused it."""

from __future__ import annotations

from typing import Literal

from relax_core.contracts.bus import BusLost, LeaseLost
from relax_core.contracts.engine import EngineUnreachable
from relax_core.contracts.media import MediaGone
from relax_core.contracts.outage import is_exhausted
from relax_core.registry import plugin_error_text
from relax_core.weights.version_folder import PublishedUnreadable

Lost = Literal["bus", "rank", "engine", "process", "time", "weights", "lease", "machine"]

# Gloo raises bare RuntimeErrors. The first of these texts is the path of its source files.
GLOO_ERROR_PARTS = ("gloo/", "Application timeout caused pair closure", "monitoredBarrier")


class RankLost(RuntimeError):
    """Reports that a rank of a model, or the critic, died, restarted or was late with an answer; the text names it."""


def what_was_lost(error: BaseException) -> Lost | None:
    """Returns the kind of loss if another process or the machine caused the failure, else None.

    A loss means that another process has died or did not do its part in time, or that this process had no free file
    descriptor or memory; restarting the services repairs that. An error in a role's own code would occur again.
    """
    from ray.exceptions import RayActorError

    match first_cause(error):
        case BusLost():
            return "bus"
        case RankLost():
            return "rank"
        case EngineUnreachable():
            return "engine"
        case RayActorError():
            return "process"
        case PublishedUnreadable():
            return "weights"
        case TimeoutError():  # also a BusTimeout, which names the worker that it waited for
            return "time"
        case LeaseLost() | MediaGone():  # the lease expired before its work was done, and its groups were returned
            return "lease"
        case OSError() as short if is_exhausted(short):
            return "machine"
    return None


def first_cause(error: BaseException) -> BaseException:
    """Returns the error that came first.

    In a task group that is the first leaf, because the other tasks were cancelled after it. For an error that came
    through Ray it is the error of the other process.
    """
    from ray.exceptions import RayTaskError  # imported late, because Ray reads its token's path when it is imported

    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(error, RayTaskError) and error.cause is not None:
            error = error.cause
        else:
            return error


def is_broken_collective(error: BaseException) -> bool:
    """Returns True if a collective broke, which means that another rank has died or is late.

    An error of a rank's own code causes broken collectives on other ranks but is not a broken collective itself.
    """
    from torch.distributed import DistError

    while True:
        if isinstance(error, DistError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in GLOO_ERROR_PARTS):
            return True
        if error.__cause__ is None:
            return False
        error = error.__cause__


def failure_line(error: BaseException) -> str:
    """Returns the first cause in one line for the user; the traceback belongs in the logs."""
    return plugin_error_text(first_cause(error))
