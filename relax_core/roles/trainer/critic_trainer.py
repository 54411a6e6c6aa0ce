"""Implements the critic role, which computes the values of each step's groups and trains in the actor's train steps.

The critic's model is part of the trainer's state. Therefore the actor's lead drives the critic's updates: the critic
reads the policy's groups from the bus, and its update ends before the lead publishes the step's weights. Policy and
critic are saved and loaded in one consistent snapshot. The loss of this process is handled as the loss of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.contracts import columns as c
from relax_core.contracts.bus import Group
from relax_core.contracts.train import StepMetrics
from relax_core.roles.discovery import discover_bus
from relax_core.roles.role_context import RunContext
from relax_core.roles.trainer.build_backend import build_critic
from relax_core.roles.trainer.column_worker import ColumnWorker
from relax_core.roles.trainer.rank_worker import TreePart, critic_groups
from relax_core.train.micro_batches import MicroBatcher

if TYPE_CHECKING:
    from relax_core.train.critic_backend import CriticBackend


class CriticTrainer(ColumnWorker):
    """Writes the values of each step's groups with its current weights.

    The lead calls the methods `begin_step` to `load`.

    All work of the model runs in one thread, so the loop and the lead's calls never run at the same time. Torch's
    number of threads is a setting of the calling thread; this thread sets it to the configured number.
    """

    task = "critic"
    inputs = c.FORWARD_COLUMNS
    whole_steps = True

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        assert rank == 0, "the critic runs on one rank"
        self._model_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{name}-model")
        self._backend: Future[CriticBackend] = self._model_thread.submit(build_critic, context)
        super().__init__(name, context)

    def prepare(self) -> None:
        """Waits until the model is built."""
        self._rank_groups = critic_groups(self.context, discover_bus(self.context, self.waiting))
        self._backend.result(timeout=self.context.config.run.start_timeout_s)
        self.version = self.context.start_step

    def columns_of(self, leased: Sequence[Group]) -> c.GroupColumns:
        """Returns the values of each group's rows."""
        groups = [c.decode_tree(leased_group) for leased_group in leased]
        return {
            group.group_uid: {c.VALUES: c.encode_column(c.VALUES, values)}
            for group, values in zip(groups, self._run("values", groups), strict=True)
        }

    # -- called by the lead -----------------------------------------------------------------------------------------
    def begin_step(self, step: int) -> None:
        """Begins train step ``step``."""
        self.version = step
        self._run("begin_step", step)

    def accumulate(self, step: int, parts: Sequence[TreePart]) -> None:
        """Trains on a micro-batch of all actor ranks. Its groups are packed again for the critic's single rank.

        The lead calls this method for groups with values of this critic, so `prepare` has run before.
        """
        rows = self.context.config.parallel.micro_batch_tokens
        batcher = MicroBatcher(rows, tower=self._backend.result().tower_work)
        for batch in (*batcher.add(self._rank_groups.trees(step, parts)), batcher.flush()):
            self._run("accumulate", batch)

    def add_columns(self, step: int, columns: c.GroupColumns) -> None:
        """Adds columns that the actor's ranks have computed to the groups of train step ``step``."""
        self._rank_groups.add(step, columns)

    def finish_step(self) -> StepMetrics:
        """Ends the step and returns its metrics."""
        metrics: StepMetrics = self._run("finish_step")
        return metrics

    def copy_state(self) -> None:
        """Copies the state of a checkpoint to the host."""
        self._run("copy_state")

    def write_copy(self, folder: Path) -> None:
        """Writes the copy to ``folder``, outside the model's thread."""
        self._backend.result().write_copy(folder)

    def drop_copy(self) -> None:
        """Frees the copy after the checkpoint is written."""
        self._backend.result(timeout=0).drop_copy()

    def load(self, folder: Path) -> None:
        """Loads a checkpoint from ``folder``."""
        self._run("load", folder)

    def _run(self, method: str, *arguments: Any) -> Any:
        """Calls the back end in the model's thread. If the model could not be built, raises the error of the build."""
        return self._model_thread.submit(lambda: getattr(self._backend.result(), method)(*arguments)).result()
