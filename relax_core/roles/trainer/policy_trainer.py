"""Rank 0 of the actor role: it drives the trainer's other ranks and alone leases and acknowledges groups.

**Start** (`work`): the other ranks are found, and all build the model together; the bus, the critic and the metrics are
connected; the way of the weights to the engines is chosen; a checkpoint is loaded on all ranks; the weights are
published, which lets the engines begin.

**A train step** (`_step`): lease groups as they arrive; compute micro-batches of them, forward and backward, on all
ranks, while later groups are generated; step the optimizer, once a mini-batch and epoch; publish the weights t + 1;
record the metrics; acknowledge the groups, which ends their samples in the ledger; save a checkpoint if one is due.
Values, old, reference and teacher log-probs come as columns of the groups (`column_worker.py`). Neither the controller
nor Serve has a part in a step.

**Shutdown** (`_train`, `work`): the loop ends after the last step, or on a stop between steps or before a step has made
an update. Then the last checkpoint is saved, the samples' files are closed, hf/ is written and the publisher ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from relax_core.bus.staleness import oldest_version
from relax_core.config.choices import ModeName
from relax_core.config.schema import RelaxConfig
from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import Requirements
from relax_core.contracts.bus import BusTimeout, Lease, LeaseRequest
from relax_core.contracts.engine import SYNC_TIMEOUT_S
from relax_core.contracts.tree import TokenTree
from relax_core.families.folder import folder_architecture
from relax_core.observe.event_log import ACTOR, RANK, metric_record
from relax_core.registry import find_algorithm
from relax_core.roles.discovery import discover_bus, discover_worker
from relax_core.roles.engine_directory import EngineDirectory
from relax_core.roles.process_placement import node_address
from relax_core.roles.role_context import RunContext, worker_name
from relax_core.roles.trainer.rank_worker import policy_columns, policy_groups
from relax_core.roles.trainer.run_checkpoint import RunCheckpoints
from relax_core.roles.trainer.step_metrics import StepClock, StepGroups, rank_values, step_values
from relax_core.roles.trainer.weight_sync import WeightSync
from relax_core.roles.trainer.worker_group import TrainerWorkerGroup, assemble_ranks
from relax_core.roles.worker import Worker
from relax_core.train.micro_batches import decode_train_tree
from relax_core.train.updates import StepResult, StepUpdates, UpdatePlan
from relax_core.weights.transport_choice import build_transport, choose_transport

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
STOP_SLICE_S = 5.0  # the delay in seconds after which a waiting trainer notices that it must stop


class Stopped(Exception):
    """The trainer was asked to stop while it waited for groups."""


class PolicyTrainer(Worker):
    """Trains the policy from the first step to the last, together with the critic if there is one."""

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        assert rank == 0, "rank 0 drives the other ranks"
        self._version = context.start_step
        super().__init__(name, context)

    # -- called by other processes ----------------------------------------------------------------------------------
    def version(self) -> int:
        """Returns the number of train steps done."""
        return self._version

    def record_evaluation(self, version: int, values: Mapping[str, float]) -> bool:
        """Records an evaluation's figures; returns True if the run ends because none was better for run.patience."""
        enough = self._checkpoints.record_evaluation(version, values)
        if enough:
            run = self.context.config.run
            log.info("the run ends: %d evaluations in a row brought no better %s", run.patience, run.keep_best)
            self.request_stop()
        return enough

    # -- start and shutdown -----------------------------------------------------------------------------------------
    def work(self) -> None:
        """Builds the model, publishes its weights and trains until the last step or a stop."""
        context, config = self.context, self.context.config
        self._config = config
        self._time_sharing = config.mode.name is ModeName.colocate
        needed = find_algorithm(config.algo.name).requirements(config.algo)
        self._columns = policy_columns(config)
        # With several data-parallel ranks, the lead trains only a part of the groups and reads it as other ranks do.
        self._payloads = (*c.STRUCTURE_COLUMNS, c.ADVANTAGES) if config.parallel.dp > 1 else None
        self._group_tokens = 0
        self._clock = StepClock()
        ranks = assemble_ranks(context, "actor", waiting=self.waiting)
        self._plan = UpdatePlan(
            groups=config.rollout.prompts_per_step,
            mini_batches=config.algo.mini_batches,
            epochs=config.algo.epochs,
            budget_tokens=config.parallel.micro_batch_tokens,
            tower=ranks.lead.tower_work,
            ranks=config.parallel.dp,
            seed=config.seed,
            skips=_skips_without_advantage(config, needed),
        )
        self._bus = discover_bus(context, self.waiting)
        self._worker_group = TrainerWorkerGroup(
            ranks,
            timeout_s=config.run.stall_timeout_s,
            waiting=self.waiting,
            critic=discover_worker(context, worker_name("critic", 0)) if needed.critic else None,
            rank_groups=None if self._payloads is None else policy_groups(context, self._bus),
        )
        self._metrics = context.event_writer(self.name)
        self._sync = self._build_sync()
        self._checkpoints = RunCheckpoints(
            context, bus=self._bus, worker_group=self._worker_group, report_progress=self.report_progress
        )
        try:
            if context.resume_from is not None:
                self._worker_group.load(context.resume_from)
            self._publish(self._version)
            self._train()
        finally:
            self._sync.close()

    def _build_sync(self) -> WeightSync:
        config = self._config
        choice = choose_transport(config)
        self.set_state("starting", f"weights go to the engines by {choice.name.value}: {choice.reason}")
        transport = build_transport(choice.name, host=node_address(config.launcher), timeout_s=SYNC_TIMEOUT_S)
        frozen = self._worker_group.lead.frozen_weights
        return WeightSync(self.context, EngineDirectory(self.context), transport, waiting=self.waiting, frozen=frozen)

    def _train(self) -> None:
        """Makes steps until the last one or a stop, and leaves their results on disk."""
        self.set_state("running")
        lease: Lease | None = None
        self._step_ended = time.perf_counter()
        try:
            while self._version < self._config.run.steps and not self.stopping:
                lease = self._step(lease)
        except Stopped:
            log.info("stopped after step %d", self._version)
        self._save(self._version)
        self._checkpoints.finish()
        self._worker_group.close_samples()
        if self._config.run.export_hf:
            self._export_hf()

    # -- one train step ---------------------------------------------------------------------------------------------
    def _step(self, lease: Lease | None) -> Lease | None:
        """Trains one step on groups of which the first may be leased; returns the next step's first lease, if any."""
        step, clock, consumed = self._version, self._clock, StepGroups()
        updates = StepUpdates(self._worker_group, self._plan, step=step)
        while (missing := self._plan.groups - len(consumed.leased)) > 0:
            if lease is None:
                lease = self._lease(self._request(step, missing), may_stop=not updates.made)
            if self._time_sharing:
                with clock.timed("sync_ms"):
                    self._sync.release_memory()
            with clock.timed("decode_ms"):
                groups = self._decode(lease, step, consumed)
            self._worker_group.add_lease(lease)
            with clock.timed("train_ms"):
                updates.add(groups)
            lease = None
        with clock.timed("train_ms"):
            result = updates.finish()
        with clock.timed("sync_ms"):
            self._publish(step + 1)
            if self._time_sharing:
                self._end_push()
                self._sync.resume_memory()
        self._version = step + 1
        self._report(consumed, result, step=step)
        return self._acknowledge(consumed, step=step)

    def _request(self, step: int, missing: int) -> LeaseRequest:
        """Returns the request for the step's missing groups.

        The groups may come in several leases, but in no more than there are micro-batches.
        """
        fitting = self._plan.budget_tokens // self._group_tokens * self._plan.ranks if self._group_tokens else 1
        return LeaseRequest(
            task="actor",
            columns=self._columns,
            payloads=self._payloads,
            min_groups=missing if self._time_sharing else max(1, min(missing, fitting)),
            max_groups=missing,
            step=step,
        )

    def _lease(self, request: LeaseRequest, *, may_stop: bool) -> Lease:
        """Leases groups in slices of time, so that a stop is noticed.

        After ``run.stall_timeout_s`` it raises the bus's error, which names the worker that owes the groups. A step
        that has made an update does not stop, because its weights belong to no checkpoint before it is done.
        """
        deadline = time.monotonic() + self._config.run.stall_timeout_s
        while True:
            try:
                return self._clock.timed_lease(
                    lambda: asyncio.run(self._bus.lease(request, timeout_s=STOP_SLICE_S)), timeout_s=STOP_SLICE_S
                )
            except BusTimeout:
                if self.stopping and may_stop:
                    raise Stopped from None
                if time.monotonic() > deadline:
                    raise

    def _decode(self, lease: Lease, step: int, consumed: StepGroups) -> list[TokenTree]:
        oldest = oldest_version(step, self._config.mode)
        groups = []
        for row in lease.rows:
            group, masked = decode_train_tree(row, step=step, oldest_version=oldest)
            groups.append(group)
            consumed.dropped.update(masked)
            self._group_tokens = max(self._group_tokens, group.computed_rows)
        consumed.lease_ids.append(lease.lease_id)
        consumed.leased.extend(lease.rows)
        consumed.groups.extend(groups)
        return groups

    def _publish(self, version: int) -> None:
        """Publishes the weights; their push runs beside the trainer, and the next version waits for its end."""
        self._end_push()
        self._sync.publish(version, self._worker_group.export())

    def _end_push(self) -> None:
        report = self._sync.end_push()
        if report is not None:
            self._clock.push_ms, self._clock.stall_ms = report.push_ms, report.stall_ms

    def _report(self, consumed: StepGroups, result: StepResult, *, step: int) -> None:
        now = time.perf_counter()
        values = step_values(consumed, result, self._clock, step=step, step_ms=1e3 * (now - self._step_ended))
        ranks = rank_values(result.metrics.ranks, now_s=time.time())
        records = (metric_record(ACTOR, step, values), metric_record(RANK, step, ranks))
        self._metrics.put(*records, *consumed.histograms(step=step))
        self._step_ended, self._clock = now, StepClock()
        self._show_step()

    def _acknowledge(self, consumed: StepGroups, *, step: int) -> Lease | None:
        """Ends the step's samples in the ledger and saves a checkpoint if one is due.

        Otherwise the same call leases the next step's first groups. Returns that lease, if any.
        """
        every, version = self._config.run.save_every, step + 1
        due = (every > 0 and version % every == 0) or self._checkpoints.due(version)
        last = version == self._config.run.steps or self.stopping
        then = None if due or last else self._request(version, self._plan.groups)
        try:
            lease = self._clock.timed_lease(
                lambda: asyncio.run(
                    self._bus.ack(
                        consumed.lease_ids, step=step, dropped=consumed.dropped, then=then, timeout_s=STOP_SLICE_S
                    )
                ),
                timeout_s=STOP_SLICE_S,
            )
        except BusTimeout:
            if then is None:
                raise
            lease = None  # the bus has recorded the step; the next step leases its groups with a call of its own
        self._checkpoints.raise_failure()
        if due:
            with self._clock.timed("checkpoint_ms"):
                self._save(version)
        return lease

    # -- files ------------------------------------------------------------------------------------------------------
    def _save(self, version: int) -> None:
        """Saves a checkpoint after the metrics of its steps, because a resumed run continues the metrics after it."""
        try:
            self._metrics.flush()
        except TimeoutError as error:
            log.warning("the metrics before checkpoint %d may be missing: %s", version, error)
        self._checkpoints.save(version)
        self._show_step()

    def _show_step(self) -> None:
        self.set_state("running", f"step {self._version} of {self._config.run.steps}")

    def _export_hf(self) -> None:
        from relax_core.train.hf.hf_export import export_hf_folder

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self._worker_group.export():
                self.report_progress(f"writes hf/: {name}")
                yield name, tensor
                del tensor  # frees it before the next one is made

        export_hf_folder(
            tensors(),
            shapes=self._worker_group.lead.weight_shapes,
            own_dtype=self._config.model.dtype,
            source_folder=self.context.model_folder,
            target=self.context.run_dir / "hf",
            passed=folder_architecture(self.context.model_folder, also=self._config.model.family).passed,
        )


def _skips_without_advantage(config: RelaxConfig, needed: Requirements) -> bool:
    """Returns whether groups whose trained tokens all have an advantage of 0 are counted and not computed."""
    balances = config.model.moe_aux_loss_coef > 0
    return not (needed.every_token or needed.critic or balances)
