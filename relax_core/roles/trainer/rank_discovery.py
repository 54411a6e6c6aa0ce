"""Finds a role's other ranks for its lead, and builds the model together with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from relax_core.roles.process.discovery import discover_worker
from relax_core.roles.process.failure import RankLost
from relax_core.roles.process.process_placement import node_address
from relax_core.roles.process.role_context import RunContext, worker_name
from relax_core.roles.trainer.build_backend import build_role_backend, role_parallel, store_address
from relax_core.roles.trainer.worker_group import Ranks, Sent, WaitingOn, raise_cause, take_answers
from relax_core.train.parallel_layout import replica_ranks, world_size

RETRY_S = 0.1


def assemble_ranks(
    context: RunContext, role: str, *, waiting: WaitingOn, on_loss: Callable[[RankLost], None] | None = None
) -> Ranks:
    """Returns the ranks of a role once each has built its part of the model.

    Raises TimeoutError for a rank that is not found within ``run.start_timeout_s``; RankLost for a rank that is lost
    while it builds, or that takes longer than that; ActorDiedError for a rank that Ray does not restart; and what a
    rank raised. ``on_loss`` is called at once with the RankLost, in another thread, because the lead may wait in a
    collective.
    """
    layout = role_parallel(context.config, role)
    ranks = world_size(layout)
    timeout_s = context.config.run.start_timeout_s
    if ranks > 1:
        import relax_core.train.policy_backend  # noqa: F401  # takes seconds, while the other ranks import it too
    names = [worker_name(role, rank) for rank in range(ranks)]
    other_ranks = []
    for name in names[1:]:
        with waiting("its start", on=name):
            other_ranks.append((name, _restarted_rank(context, name)))
    address = store_address(context, host=node_address(context.config.launcher))
    built = [(name, other_rank.build.remote(address)) for name, other_rank in other_ranks]
    if built and on_loss is not None:
        threading.Thread(target=watch_build, args=(built, timeout_s, on_loss), name="build-watch", daemon=True).start()
    try:
        lead = build_role_backend(context, role, rank=0, store_address=address)
    except RuntimeError as error:
        if built:
            raise_cause("build", built, error)
        raise
    take_answers("build", built, timeout_s=timeout_s, waiting=waiting)
    return Ranks(name=names[0], lead=lead, other_ranks=other_ranks, replicas=replica_ranks(layout))


def watch_build(sent: Sent, timeout_s: float, on_loss: Callable[[RankLost], None]) -> None:
    """Calls ``on_loss`` as soon as a rank is lost, or when one has not answered in time.

    An error that a rank raises is left to the lead, which gets it as the rank's answer.
    """
    deadline = time.monotonic() + timeout_s
    names = {reference: name for name, reference in sent}
    while names:
        ready, _ = ray.wait(list(names), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        for reference in ready or list(names)[:1]:
            try:
                ray.get(reference, timeout=0)
            except GetTimeoutError:
                on_loss(RankLost(f"{names[reference]} was lost in build: no answer within {timeout_s:.0f} s"))
                return
            except RayActorError as death:
                on_loss(RankLost(f"{names[reference]} was lost in build: {death}"))
                return
            except RayTaskError:
                pass
            del names[reference]


def _restarted_rank(context: RunContext, name: str) -> Any:
    """Returns the rank's Ray handle; a rank of an earlier lead is killed first, so that Ray restarts it."""
    deadline = time.monotonic() + context.config.run.start_timeout_s
    other_rank = discover_worker(context, name)
    killed: int | None = None
    while True:
        try:
            pid = ray.get(other_rank.taken_pid.remote(), timeout=max(0.0, deadline - time.monotonic()))
        except ActorUnavailableError:
            pid = killed
        except GetTimeoutError as error:
            raise TimeoutError(f"{name} was not there within {context.config.run.start_timeout_s:.0f} s") from error
        else:
            if pid is None:
                return other_rank
            if pid != killed:
                ray.kill(other_rank, no_restart=False)
                killed = pid
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} did not restart within {context.config.run.start_timeout_s:.0f} s")
        time.sleep(RETRY_S)
