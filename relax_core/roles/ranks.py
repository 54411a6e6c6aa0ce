"""How a role's lead finds its peers, and makes the model together with them."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError

from relax_core.roles.backend import build_role_backend, role_parallel, store_address
from relax_core.roles.context import RunContext, worker_name
from relax_core.roles.gang import Ranks, WaitingOn
from relax_core.roles.meet import meet_worker
from relax_core.roles.placement import node_address
from relax_core.train.layout_arithmetic import replica_ranks, world_size

RETRY_S = 0.1


def assemble_ranks(context: RunContext, role: str, *, waiting: WaitingOn) -> Ranks:
    """Returns once every rank has its part of the model. Raises TimeoutError, naming a rank that is not there within
    ``run.start_timeout_s``, and ActorDiedError for one that Ray does not start again."""
    layout = role_parallel(context.config, role)
    ranks = world_size(layout)
    timeout_s = context.config.run.start_timeout_s
    if ranks > 1:
        import relax_core.train.backend  # noqa: F401  # seconds, in which the peers do the same
    names = [worker_name(role, rank) for rank in range(ranks)]
    peers = []
    for name in names[1:]:
        with waiting("its start", on=name):
            peers.append((name, _fresh_peer(context, name)))
    address = store_address(ranks, host=node_address(context.config.launcher))
    built = [peer.build.remote(address) for _, peer in peers]
    lead = build_role_backend(context, role, rank=0, store_address=address)
    ray.get(built, timeout=timeout_s)
    return Ranks(name=names[0], lead=lead, peers=peers, replicas=replica_ranks(layout))


def _fresh_peer(context: RunContext, name: str) -> Any:
    """The rank's Ray handle. Where a lead that is gone had taken it, its process is ended first: Ray starts another."""
    deadline = time.monotonic() + context.config.run.start_timeout_s
    peer = meet_worker(context, name)
    killed: int | None = None
    while True:
        try:
            pid = ray.get(peer.taken_pid.remote(), timeout=deadline - time.monotonic())
        except ActorUnavailableError:
            pid = killed
        else:
            if pid is None:
                return peer
            if pid != killed:
                ray.kill(peer, no_restart=False)
                killed = pid
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} did not start anew within {context.config.run.start_timeout_s:.0f} s")
        time.sleep(RETRY_S)
