"""Computes log-probs with the newest and the initial weights: the workers of actor_fwd and reference.

With ``placement.forward=actor`` these roles have no workers. The actor's ranks then compute the same columns, and the
advantages, before each train step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NoReturn

from relax_core.config.schema import RelaxConfig
from relax_core.contracts import columns as c
from relax_core.contracts.bus import Group
from relax_core.contracts.media import MediaGone
from relax_core.registry import find_algorithm
from relax_core.roles.failure import RankLost
from relax_core.roles.process_placement import actor_columns
from relax_core.roles.role_context import RunContext
from relax_core.roles.trainer.column_worker import ColumnWorker
from relax_core.roles.trainer.worker_group import WorkerGroup, assemble_ranks
from relax_core.rollout.group_advantages import advantage_extras
from relax_core.weights.version_folder import read_latest

log = logging.getLogger(__name__)


def actor_computed_columns(leased: Sequence[Group], config: RelaxConfig, worker_group: WorkerGroup) -> c.GroupColumns:
    """Returns the columns of `actor_columns` for each group, computed by the actor's ranks between two updates.

    The trained weights are those that the engines of the newest version have, and so are actor_fwd's.
    """
    wanted = actor_columns(config)
    trees = [c.decode_tree(row) for row in leased]
    for column, method in ((c.OLD_LOGPROBS, "logprobs"), (c.REFERENCE_LOGPROBS, "reference_logprobs")):
        if column in wanted:
            logprobs = worker_group.logprobs(trees, method=method)
            trees = [tree.with_extras(**{column: values}) for tree, values in zip(trees, logprobs, strict=True)]
    if c.ADVANTAGES in wanted:
        made = advantage_extras(trees, find_algorithm(config.algo.name), config.algo)
        trees = [tree.with_extras(**extras) for tree, extras in zip(trees, made, strict=True)]
    return {
        tree.group_uid: {name: c.encode_column(name, values) for name, values in tree.extras.items() if name in wanted}
        for tree in trees
    }


class ForwardWorker(ColumnWorker):
    """Writes ``column`` for every group.

    With ``follow`` the worker uses the newest published weights. With ``replays`` and algo.routing_replay it routes
    each token to the experts that the engine chose.
    """

    inputs: tuple[str, ...] = c.FORWARD_COLUMNS
    column: str
    follow: bool
    replays: bool
    _worker_group: WorkerGroup

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        assert rank == 0, "rank 0 drives the other ranks"
        if self.replays and context.config.algo.routing_replay:
            self.inputs = (*self.inputs, c.ROUTED_EXPERTS)
        if context.config.rollout.truncates:
            self.inputs = (*self.inputs, c.KEPT_TOKENS)
        super().__init__(name, context)

    def prepare(self) -> None:
        """Builds the model together with the role's other ranks."""
        try:
            ranks = assemble_ranks(self.context, self.task, waiting=self.waiting, on_loss=self._end)
        except RankLost as lost:
            self._end(lost)
        self._worker_group = WorkerGroup(ranks, timeout_s=self.context.config.run.stall_timeout_s, waiting=self.waiting)

    def columns_of(self, leased: Sequence[Group]) -> c.GroupColumns:
        """Returns the log-probs of each group."""
        groups = [c.decode_tree(leased_group) for leased_group in leased]
        try:
            if self.follow:
                self._load_newest()
            logprobs = self._worker_group.logprobs(groups)
        except RankLost as lost:
            self._end(lost)
        except MediaGone as gone:
            if self._worker_group.alone:
                raise
            self._end(gone)  # the other ranks are waiting in a collective
        return {
            group.group_uid: {self.column: c.encode_column(self.column, values)}
            for group, values in zip(groups, logprobs, strict=True)
        }

    def _end(self, lost: RankLost | MediaGone) -> NoReturn:
        log.error("%s ends, so that all its ranks restart: %s", self.name, lost)
        logging.shutdown()
        os._exit(1)  # Ray restarts this process, which revokes the leases and gets new ranks above 0

    def _load_newest(self) -> None:
        """Loads the newest published weights if they are newer than the weights in use."""
        while True:
            latest = read_latest(self.context.weights_folder)
            assert latest is not None, "groups exist only after weights were published"
            if latest.version == self.version:
                return
            if self._worker_group.load_published(latest):
                self.version = latest.version
                return
            if read_latest(self.context.weights_folder) == latest:
                raise FileNotFoundError(f"weights version {latest.version} is the newest, but {latest.path} is missing")


class ActorFwdWorker(ForwardWorker):
    """Computes log-probs with the trained weights. Each role has a class, because Ray titles a process by its class.

    This worker replays the engine's routing, because the trained policy replays it, too.
    """

    task = "actor_fwd"
    column = c.OLD_LOGPROBS
    follow = True
    replays = True


class ReferenceWorker(ForwardWorker):
    """Computes log-probs with the initial weights of the run.

    The reference routes tokens by its own router and does not replay the engine's routing. The engine's experts are the
    choice of another model; a KL with replayed routing would compare with a policy that never existed.
    """

    task = "reference"
    column = c.REFERENCE_LOGPROBS
    follow = False
    replays = False
