"""The workers of actor_fwd and of reference: log-probs by a forward pass, with the newest or with the first weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from relax_core.contracts import columns as c
from relax_core.contracts.bus import LeasedRow
from relax_core.roles.backend import build_backend, store_address
from relax_core.roles.column_worker import ColumnWorker, RowColumns
from relax_core.roles.context import RunContext
from relax_core.train.rows import decode_prompt_and_responses
from relax_core.weights.publisher import read_latest

if TYPE_CHECKING:
    from relax_core.train.backend import MegatronBackend


class ForwardWorker(ColumnWorker):
    """Writes ``column`` for every row. ``follow``: keep to the newest published weights."""

    inputs = (c.PROMPT_IDS, c.RESPONSE_IDS)
    column: str
    follow: bool
    _backend: MegatronBackend

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        assert rank == 0, f"{self.task} runs on one rank"
        super().__init__(name, context)

    def prepare(self) -> None:
        address = store_address(1)
        self._backend = build_backend(self.context, rank=0, world_size=1, store_address=address, trainable=False)

    def columns_of(self, rows: Sequence[LeasedRow]) -> RowColumns:
        if self.follow:
            self._catch_up()
        groups = [decode_prompt_and_responses(row) for row in rows]
        return {
            group.group_uid: {self.column: c.encode_flat(values.astype(np.float32), group.lengths.tolist())}
            for group, values in zip(groups, self._backend.logprobs(groups), strict=True)
        }

    def _catch_up(self) -> None:
        """Loads the newest published weights where they are newer than those in use."""
        from relax_core.weights.files import read_weights

        while True:
            latest = read_latest(self.context.weights_folder)
            assert latest is not None, "rows exist, so weights were published"
            if latest.version == self.version:
                return
            try:
                self._backend.load_weights(read_weights(latest))
                self.version = latest.version
                return
            except FileNotFoundError:
                if read_latest(self.context.weights_folder) == latest:
                    raise
                # else newer versions have replaced it meanwhile


class ActorFwdWorker(ForwardWorker):
    """With the weights that are trained; a class of its own, since Ray titles a process by its class."""

    task = "actor_fwd"
    column = c.OLD_LOGPROBS
    follow = True


class ReferenceWorker(ForwardWorker):
    """With the weights that the run started from."""

    task = "reference"
    column = c.REFERENCE_LOGPROBS
    follow = False
