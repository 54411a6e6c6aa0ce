"""The worker of actor_fwd and of reference: log-probs by a forward pass, with the newest or with the first weights."""

from __future__ import annotations

import numpy as np

from relax_core.contracts import columns as c
from relax_core.contracts.bus import Lease, LeaseRequest
from relax_core.contracts.train import TrainBackend
from relax_core.roles.backend import build_backend, store_address
from relax_core.roles.context import RunContext
from relax_core.roles.meet import meet_bus, meet_metrics
from relax_core.roles.worker import Worker
from relax_core.train.rows import decode_prompt_and_responses
from relax_core.weights.publisher import read_latest


class ForwardWorker(Worker):
    """Writes ``column`` for every row. ``follow``: keep to the newest published weights (actor_fwd); a reference keeps
    the weights that the run started from."""

    def __init__(self, name: str, context: RunContext, rank: int, *, task: str, column: str, follow: bool) -> None:
        assert rank == 0, f"{task} runs on one rank"
        self._task, self._column, self._follow = task, column, follow
        super().__init__(name, context)

    def work(self) -> None:
        config = self.context.config
        backend = build_backend(self.context, rank=0, world_size=1, store_address=store_address(1), trainable=False)
        bus = meet_bus(self.context)
        metrics = meet_metrics(self.context)
        request = LeaseRequest(
            task=self._task,
            columns=(c.PROMPT_IDS, c.RESPONSE_IDS),
            max_groups=config.rollout.prompts_per_step,
            lease_s=config.bus.lease_s,
        )
        self.set_state("running")
        timeout_s = config.run.stall_timeout_s
        bus.revoke(request.task, timeout_s=timeout_s)  # what a predecessor that was killed had in hand
        version = -1
        lease: Lease | None = bus.lease(request, timeout_s=timeout_s)
        while lease is not None:
            if self._follow:
                version = self._catch_up(backend, version)
            groups = [decode_prompt_and_responses(row) for row in lease.rows]
            logprobs = backend.logprobs(groups)
            columns = {
                group.group_uid: {self._column: c.encode_flat(values.astype(np.float32), group.lengths.tolist())}
                for group, values in zip(groups, logprobs, strict=True)
            }
            metrics.record(self._task, version, {"groups": len(groups), "version": version})
            lease = bus.write(lease.lease_id, columns, then=request, timeout_s=timeout_s)

    def _catch_up(self, backend: TrainBackend, version: int) -> int:
        """Loads the newest published weights where they are newer than ``version``; returns their version."""
        from relax_core.weights.files import read_weights

        while True:
            latest = read_latest(self.context.weights_folder)
            assert latest is not None, "rows exist, so weights were published"
            if latest.version == version:
                return version
            try:
                backend.load_weights(read_weights(latest))
                return latest.version
            except FileNotFoundError:
                if read_latest(self.context.weights_folder) == latest:
                    raise
                # else newer versions have replaced it meanwhile
