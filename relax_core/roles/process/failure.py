"""A worker's failure in one line: what went wrong first, and where, if that was in a plug-in's own file."""

from __future__ import annotations

from typing import Literal

from relax_core.contracts.bus import BusLost
from relax_core.contracts.engine import EngineUnreachable
from relax_core.registry import plugin_words
from relax_core.weights.version_folder import PublishedUnreadable

Lost = Literal["bus", "rank", "engine", "process", "time", "weights"]

# Gloo's failures are bare RuntimeErrors. The first is the path of its source files.
GLOO_WORDS = ("gloo/", "Application timeout caused pair closure", "monitoredBarrier")


def what_was_lost(error: BaseException) -> Lost | None:
    """What a worker failed of where that is no fault of its own: another process is gone, or did not do its part in
    time. Starting the services again mends that. None for whatever a role's own code raised: it would raise it again.
    """
    from ray.exceptions import RayActorError

    from relax_core.roles.trainer.worker_group import RankLost

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
        case TimeoutError():  # a BusTimeout among them: it names whom it waited for
            return "time"
    return None


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


def broke_of_others(error: BaseException) -> bool:
    """Whether a collective broke, which tells that another rank is gone or late. An error of a rank's own is the cause
    of such, and not one of them."""
    from torch.distributed import DistError

    while True:
        if isinstance(error, DistError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in GLOO_WORDS):
            return True
        if error.__cause__ is None:
            return False
        error = error.__cause__


def failure_line(error: BaseException) -> str:
    """For the user's first screen; the traceback is for the logs."""
    return plugin_words(first_cause(error))
