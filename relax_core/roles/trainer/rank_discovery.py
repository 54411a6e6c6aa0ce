"""How a role's lead finds its other ranks, and makes the model together with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from relax_core.roles.process.discovery import discover_worker
from relax_core.roles.process.process_placement import node_address
from relax_core.roles.process.role_context import RunContext, worker_name
from relax_core.roles.trainer.build_backend import build_role_backend, role_parallel, store_address
from relax_core.roles.trainer.worker_group import RankLost, Ranks, Sent, WaitingOn, raise_cause, take_answers
from relax_core.train.parallel.layout_arithmetic import replica_ranks, world_size

RETRY_S = 0.1


def assemble_ranks(
    context: RunContext, role: str, *, waiting: WaitingOn, on_loss: Callable[[RankLost], None] | None = None
) -> Ranks:
    """Returns once every rank has its part of the model. Raises TimeoutError, naming a rank that is not there within
    ``run.start_timeout_s``; RankLost for one that is lost while it builds, or takes longer than that; ActorDiedError
    for one that Ray does not start again; and what a rank raised.

    ``on_loss``: called in another thread with that RankLost, at once: the lead itself may wait in a collective.
    """
    layout = role_parallel(context.config, role)
    ranks = world_size(layout)
    timeout_s = context.config.run.start_timeout_s
    if ranks > 1:
        import relax_core.train.policy_backend  # noqa: F401  # seconds, in which the other ranks do the same
    names = [worker_name(role, rank) for rank in range(ranks)]
    other_ranks = []
    for name in names[1:]:
        with waiting("its start", on=name):
            other_ranks.append((name, _restarted_rank(context, name)))
    address = store_address(ranks, host=node_address(context.config.launcher))
    built = [(name, other_rank.build.remote(address)) for name, other_rank in other_ranks]
    if built and on_loss is not None:
        threading.Thread(target=tell_loss, args=(built, timeout_s, on_loss), name="build-watch", daemon=True).start()
    try:
        lead = build_role_backend(context, role, rank=0, store_address=address)
    except RuntimeError as error:
        if built:
            raise_cause("build", built, error)
        raise
    take_answers("build", built, timeout_s=timeout_s, waiting=waiting)
    return Ranks(name=names[0], lead=lead, other_ranks=other_ranks, replicas=replica_ranks(layout))


def tell_loss(sent: Sent, timeout_s: float, on_loss: Callable[[RankLost], None]) -> None:
    """Calls ``on_loss`` as soon as one of those who were asked is lost, or where one has not answered in time. What
    they raise by themselves is told to the lead alone."""
    deadline = time.monotonic() + timeout_s
    names = {reference: who for who, reference in sent}
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
    """The rank's Ray handle. Where a lead that is gone had taken it, its process is ended first: Ray starts another."""
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
            raise TimeoutError(f"{name} did not start anew within {context.config.run.start_timeout_s:.0f} s")
        time.sleep(RETRY_S)
