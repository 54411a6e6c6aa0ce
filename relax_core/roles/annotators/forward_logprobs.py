"""The workers of actor_fwd and of reference: log-probs by a forward pass, with the newest or with the first weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NoReturn

from relax_core.contracts import columns as c
from relax_core.contracts.bus import LeasedRow
from relax_core.roles.annotators.column_worker import ColumnWorker, RowColumns
from relax_core.roles.process.role_context import RunContext
from relax_core.roles.trainer.rank_discovery import assemble_ranks
from relax_core.roles.trainer.worker_group import RankLost, WorkerGroup
from relax_core.weights.version_folder import read_latest

log = logging.getLogger(__name__)


class ForwardWorker(ColumnWorker):
    """Writes ``column`` for every row. ``follow``: keep to the newest published weights. ``replays``: with
    algo.routing_replay, route each token as the engine did."""

    inputs: tuple[str, ...] = c.FORWARD_COLUMNS
    column: str
    follow: bool
    replays: bool
    _worker_group: WorkerGroup

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        assert rank == 0, "other ranks are driven by rank 0"
        if self.replays and context.config.algo.routing_replay:
            self.inputs = (*self.inputs, c.ROUTED_EXPERTS)
        if context.config.rollout.truncates:
            self.inputs = (*self.inputs, c.KEPT_TOKENS)
        super().__init__(name, context)

    def prepare(self) -> None:
        try:
            ranks = assemble_ranks(self.context, self.task, waiting=self.waiting, on_loss=self._end)
        except RankLost as lost:
            self._end(lost)
        self._worker_group = WorkerGroup(ranks, timeout_s=self.context.config.run.stall_timeout_s, waiting=self.waiting)

    def columns_of(self, rows: Sequence[LeasedRow]) -> RowColumns:
        groups = [c.decode_tree(row) for row in rows]
        try:
            if self.follow:
                self._catch_up()
            logprobs = self._worker_group.logprobs(groups)
        except RankLost as lost:
            self._end(lost)
        return {
            group.group_uid: {self.column: c.encode_column(self.column, values)}
            for group, values in zip(groups, logprobs, strict=True)
        }

    def _end(self, lost: RankLost) -> NoReturn:
        log.error("%s ends, so that all ranks start anew: %s", self.name, lost)
        logging.shutdown()
        os._exit(1)  # Ray starts another, which takes the leases back and has new other ranks

    def _catch_up(self) -> None:
        """Loads the newest published weights where they are newer than those in use."""
        while True:
            latest = read_latest(self.context.weights_folder)
            assert latest is not None, "rows exist, so weights were published"
            if latest.version == self.version:
                return
            if self._worker_group.load_published(latest):
                self.version = latest.version
                return
            if read_latest(self.context.weights_folder) == latest:
                raise FileNotFoundError(f"weights version {latest.version} is the newest, and {latest.path} is gone")


class ActorFwdWorker(ForwardWorker):
    """With the weights that are trained; a class of its own, since Ray titles a process by its class.

    It replays, since its log-probs are those of the policy that is trained, which routes as the engine did.
    """

    task = "actor_fwd"
    column = c.OLD_LOGPROBS
    follow = True
    replays = True


class ReferenceWorker(ForwardWorker):
    """With the weights that the run started from. It routes by itself: the engine's experts are another model's choice,
    and under them the KL would be to a policy that nobody ever had."""

    task = "reference"
    column = c.REFERENCE_LOGPROBS
    follow = False
    replays = False
