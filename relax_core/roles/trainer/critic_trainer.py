"""The critic: values for every row as it comes, and training in lockstep with the actor.

Its model is state of the trainer. So the actor's lead drives its updates with the very groups that the policy trains
on, whose rows the critic reads from the bus, and ends them before it publishes the step's weights; both are saved and
loaded in one cut, and the loss of this process is the loss of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.contracts import columns as c
from relax_core.contracts.bus import LeasedRow
from relax_core.contracts.train import StepMetrics
from relax_core.roles.annotators.column_worker import ColumnWorker, RowColumns
from relax_core.roles.process.discovery import discover_bus
from relax_core.roles.process.role_context import RunContext
from relax_core.roles.trainer.build_backend import build_critic
from relax_core.roles.trainer.rank_batches import TreePart, critic_rows
from relax_core.train.packing.micro_batches import MicroBatcher

if TYPE_CHECKING:
    from relax_core.train.critic_backend import CriticBackend


class CriticWorker(ColumnWorker):
    """Writes the values of each step's rows with the weights that it has. `begin_step` to `load` are the lead's calls.

    All of the model's work runs in one thread: so loop and lead never meet in the middle of a call, and torch's number
    of threads, which belongs to a thread, is the configured one.
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
        self._rows = critic_rows(self.context, discover_bus(self.context, self.waiting))
        self._backend.result(timeout=self.context.config.run.start_timeout_s)
        self.version = self.context.start_step

    def columns_of(self, rows: Sequence[LeasedRow]) -> RowColumns:
        groups = [c.decode_tree(row) for row in rows]
        return {
            group.group_uid: {c.VALUES: c.encode_column(c.VALUES, values)}
            for group, values in zip(groups, self._run("values", groups), strict=True)
        }

    # -- the lead's -------------------------------------------------------------------------------------------------
    def begin_step(self, step: int) -> None:
        self.version = step
        self._run("begin_step", step)

    def accumulate(self, step: int, parts: Sequence[TreePart]) -> None:
        """``parts``: a micro-batch of all the actor's ranks; here it is cut for the one rank that there is. The lead
        calls it when rows have this critic's values, so `prepare` is behind it."""
        batcher = MicroBatcher(self.context.config.parallel.micro_batch_tokens)
        for batch in (*batcher.add(self._rows.trees(step, parts)), batcher.flush()):
            self._run("accumulate", batch)

    def finish_step(self) -> StepMetrics:
        metrics: StepMetrics = self._run("finish_step")
        return metrics

    def copy_state(self) -> None:
        self._run("copy_state")

    def write_copy(self, folder: Path) -> None:
        """Beside the model's thread."""
        self._backend.result().write_copy(folder)

    def load(self, folder: Path) -> None:
        self._run("load", folder)

    def _run(self, method: str, *arguments: Any) -> Any:
        """Calls the back end in the model's thread; raises what building it raised, where that failed."""
        return self._model_thread.submit(lambda: getattr(self._backend.result(), method)(*arguments)).result()
