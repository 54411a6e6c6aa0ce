"""The trainer's lead leases groups, trains a step, publishes the weights and acknowledges the groups.

It also saves checkpoints between steps. This is the step path, on which neither the controller nor Serve has a part.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from relax_core.config.choices import ModeName
from relax_core.contracts import columns as c
from relax_core.contracts.bus import BusTimeout, Lease, LeaseRequest
from relax_core.contracts.tree import TokenTree
from relax_core.families.folder import folder_architecture
from relax_core.observe.service.metrics_actor import MetricsUnavailable
from relax_core.observe.service.records import ACTOR, RANK, metric_record
from relax_core.registry import find_algorithm
from relax_core.roles.engine.engine_directory import EngineDirectory
from relax_core.roles.process.discovery import discover_bus, discover_metrics, discover_worker
from relax_core.roles.process.process_placement import node_address
from relax_core.roles.process.role_context import RunContext, worker_name
from relax_core.roles.process.worker import Worker
from relax_core.roles.trainer.rank_worker import policy_columns, policy_groups
from relax_core.roles.trainer.run_checkpoint import RunCheckpoints
from relax_core.roles.trainer.step_metrics import StepClock, StepGroups, rank_values, step_values
from relax_core.roles.trainer.weight_sync import WeightSync
from relax_core.roles.trainer.worker_group import Ranks, TrainerWorkerGroup, assemble_ranks
from relax_core.train.micro_batches import decode_train_tree
from relax_core.train.updates import StepResult, StepUpdates, UpdatePlan
from relax_core.weights.transports.choice import build_transport, choose_transport

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
STOP_SLICE_S = 5.0  # the delay in seconds after which a waiting trainer notices that it must stop


class Stopped(Exception):
    """The trainer was asked to stop while it waited for groups."""


class PolicyTrainer(Worker):
    """Is rank 0 of the actor role, which drives the other ranks and alone leases and acknowledges groups."""

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        assert rank == 0, "rank 0 drives the other ranks"
        self._version = context.start_step
        super().__init__(name, context)

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

    def work(self) -> None:
        """Builds the model, publishes its weights and trains until the last step or a stop."""
        context, config = self.context, self.context.config
        self._config = config
        self._stall_s = config.run.stall_timeout_s
        self._time_sharing = config.mode.name is ModeName.colocate
        self._requirements = find_algorithm(config.algo.name).requirements(config.algo)
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
            skips=self._skips_without_advantage(),
        )
        self._bus = discover_bus(context, self.waiting)
        self._worker_group = self._build_worker_group(ranks)
        self._metrics = discover_metrics(context)
        self._sync = self._build_sync()
        self._checkpoints = RunCheckpoints(
            context, bus=self._bus, worker_group=self._worker_group, report_progress=self.report_progress
        )
        try:
            if self.context.resume_from is not None:
                self._worker_group.load(self.context.resume_from)
            self._publish(self._version)
            self._train()
        finally:
            self._sync.close()

    def _skips_without_advantage(self) -> bool:
        """Returns whether groups without an advantage are counted and not computed."""
        needed = self._requirements
        balances = self._config.model.moe_aux_loss_coef > 0
        return self._config.algo.skip_without_advantage and not (needed.every_token or needed.critic or balances)

    def _build_sync(self) -> WeightSync:
        config = self._config
        choice = choose_transport(config)
        self.set_state("starting", f"weights go to the engines by {choice.name.value}: {choice.reason}")
        transport = build_transport(
            choice.name, host=node_address(config.launcher), timeout_s=config.engine.sync_timeout_s
        )
        frozen = self._worker_group.lead.frozen_weights
        return WeightSync(self.context, EngineDirectory(self.context), transport, waiting=self.waiting, frozen=frozen)

    def _build_worker_group(self, ranks: Ranks) -> TrainerWorkerGroup:
        critic = discover_worker(self.context, worker_name("critic", 0)) if self._requirements.critic else None
        rank_groups = None if self._payloads is None else policy_groups(self.context, self._bus)
        return TrainerWorkerGroup(
            ranks, timeout_s=self._stall_s, waiting=self.waiting, critic=critic, rank_groups=rank_groups
        )

    # -- the loop ---------------------------------------------------------------------------------------------------
    def _train(self) -> None:
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

    def _step(self, lease: Lease | None) -> Lease | None:
        """Trains one step; returns the next step's first lease if it came with the acknowledgement."""
        step, clock = self._version, self._clock
        updates = StepUpdates(self._worker_group, self._plan, step=step)
        consumed = self._consume(updates, lease, clock, step=step)
        result = clock.timed("train_ms", updates.finish)
        clock.timed("sync_ms", partial(self._publish, step + 1))
        if self._time_sharing:
            clock.timed("sync_ms", self._end_push)
            clock.timed("sync_ms", self._sync.resume_memory)
        self._version = step + 1
        self._report(consumed, result, clock, step=step)
        return self._acknowledge(consumed, step=step)

    def _consume(self, updates: StepUpdates, lease: Lease | None, clock: StepClock, *, step: int) -> StepGroups:
        """Leases the step's groups and trains on them by micro-batches, while later groups are generated."""
        consumed = StepGroups()
        remaining = self._plan.groups
        while remaining:
            if lease is None:
                request = self._request(step, remaining)
                lease = self._lease(request, clock, may_stop=not updates.made)
            if self._time_sharing:
                clock.timed("sync_ms", self._sync.release_memory)
            remaining -= len(lease.rows)
            groups = clock.timed("decode_ms", partial(self._decode, lease, step, consumed))
            self._worker_group.add_lease(lease)
            lease = None
            clock.timed("train_ms", partial(updates.add, groups))
        return consumed

    def _decode(self, lease: Lease, step: int, consumed: StepGroups) -> list[TokenTree]:
        oldest = step - self._config.mode.max_staleness
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

    def _request(self, step: int, remaining: int) -> LeaseRequest:
        """Returns the request for the rest of the step.

        The groups may come in several leases, but in no more than there are micro-batches.
        """
        fitting = self._plan.budget_tokens // self._group_tokens * self._plan.ranks if self._group_tokens else 1
        return LeaseRequest(
            task="actor",
            columns=self._columns,
            payloads=self._payloads,
            min_groups=remaining if self._time_sharing else max(1, min(remaining, fitting)),
            max_groups=remaining,
            step=step,
            lease_s=self._config.bus.lease_s,
        )

    def _lease(self, request: LeaseRequest, clock: StepClock, *, may_stop: bool) -> Lease:
        """Leases groups in slices of time, so that a stop is noticed.

        After ``run.stall_timeout_s`` it raises the bus's error, which names the worker that owes the groups. A step
        that has made an update does not stop, because its weights belong to no checkpoint before it is done.
        """
        deadline = time.monotonic() + self._stall_s
        while True:
            try:
                return clock.timed_lease(
                    lambda: self._bus.lease(request, timeout_s=STOP_SLICE_S), timeout_s=STOP_SLICE_S
                )
            except BusTimeout:
                if self.stopping and may_stop:
                    raise Stopped from None
                if time.monotonic() > deadline:
                    raise

    def _acknowledge(self, consumed: StepGroups, *, step: int) -> Lease | None:
        every = self._config.run.save_every
        due = (every > 0 and (step + 1) % every == 0) or self._checkpoints.due(step + 1)
        last = step + 1 == self._config.run.steps or self.stopping
        then = None if due or last else self._request(step + 1, self._config.rollout.prompts_per_step)
        lease = self._ack(consumed, then, step=step)
        self._checkpoints.raise_failure()
        if due:
            self._clock.timed("checkpoint_ms", partial(self._save, step + 1))
        return lease

    def _save(self, version: int) -> None:
        """Saves a checkpoint after the metrics of its steps, because a resumed run continues the metrics after it."""
        try:
            self._metrics.flush()
        except MetricsUnavailable as error:
            log.warning("the metrics before checkpoint %d may be missing: %s", version, error)
        self._checkpoints.save(version)
        self._show_step()

    def _ack(self, consumed: StepGroups, then: LeaseRequest | None, *, step: int) -> Lease | None:
        def call() -> Lease | None:
            return self._bus.ack(
                consumed.lease_ids, step=step, dropped=consumed.dropped, then=then, timeout_s=STOP_SLICE_S
            )

        try:
            return self._clock.timed_lease(call, timeout_s=STOP_SLICE_S)
        except BusTimeout:
            if then is None:
                raise
            return None  # the bus has recorded the step; the next step leases its groups with a call of its own

    def _report(self, consumed: StepGroups, result: StepResult, clock: StepClock, *, step: int) -> None:
        now = time.perf_counter()
        step_ms = 1e3 * (now - self._step_ended)
        values = step_values(consumed, result, clock, step=step, step_ms=step_ms)
        ranks = rank_values(result.metrics.ranks, now_s=time.time())
        records = (metric_record(ACTOR, step, values), metric_record(RANK, step, ranks))
        self._metrics.put(*records, *consumed.histograms(step=step))
        self._step_ended, self._clock = now, StepClock()
        self._show_step()

    def _show_step(self) -> None:
        self.set_state("running", f"step {self._version} of {self._config.run.steps}")

    # -- engines ----------------------------------------------------------------------------------------------------
    def _publish(self, version: int) -> None:
        """Publishes the weights; their push runs beside the trainer, and the next version waits for its end."""
        self._end_push()
        self._sync.publish(version, self._worker_group.export())

    def _end_push(self) -> None:
        report = self._sync.end_push()
        if report is not None:
            self._clock.push_ms, self._clock.stall_ms = report.push_ms, report.stall_ms
