"""Classifies a worker's failure: finds its first cause, and whether another process caused it."""

from __future__ import annotations

from typing import Literal

from relax_core.contracts.bus import BusLost, LeaseLost
from relax_core.contracts.engine import EngineUnreachable
from relax_core.contracts.media import MediaGone
from relax_core.contracts.outage import is_exhausted
from relax_core.registry import plugin_error_text
from relax_core.weights.version_folder import PublishedUnreadable

Lost = Literal["bus", "rank", "engine", "process", "time", "weights", "lease", "machine"]

# Texts in errors of Gloo, which are plain RuntimeErrors. The first text is the path of Gloo's source files.
GLOO_ERROR_PARTS = ("gloo/", "Application timeout caused pair closure", "monitoredBarrier")


class RankLost(RuntimeError):
    """A rank of a model, or the critic, died, restarted or answered too late. The text names the rank."""


def what_was_lost(error: BaseException) -> Lost | None:
    """Returns the kind of loss if another process or the machine caused the failure, else None.

    A loss means that another process has died or was too late, or that this process had no free file descriptor or
    memory. A restart of the services repairs a loss. A restart does not repair an error in a role's code, because the
    error would occur again.
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
        case TimeoutError():  # also a BusTimeout, with a text that names the awaited worker
            return "time"
        case LeaseLost() | MediaGone():  # the lease expired before its work was done, and the bus has its groups
            return "lease"
        case OSError() as short if is_exhausted(short):
            return "machine"
    return None


def first_cause(error: BaseException) -> BaseException:
    """Returns the error that occurred first.

    In the error of a task group, this is the first leaf, because the group cancelled all further tasks after it. If Ray
    passed the error on, the result is the error of the other process.
    """
    from ray.exceptions import RayTaskError  # imported late, because Ray reads the path of its token during the import

    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(error, RayTaskError) and error.cause is not None:
            error = error.cause
        else:
            return error


def is_broken_collective(error: BaseException) -> bool:
    """Returns True if the error is a broken collective, which means that another rank has died or is late.

    An error in a rank's code breaks the collectives on all other ranks.
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
    """Returns the first cause in one line for the user, without the traceback, which is in the logs."""
    return plugin_error_text(first_cause(error))
