"""Implements the lead, rank 0 of the actor role. It drives all other trainer ranks, and leases and acknowledges groups.

**Start** (`work`): the lead finds the other ranks, and all ranks build the model together. The lead connects to the
bus, the critic and the metrics, and chooses the weight transport to the engines. All ranks load the checkpoint, if the
run resumes. Then the lead publishes the weights, so the engines can begin.

**A train step** (`_step`): lease groups as they arrive; run forward and backward of their micro-batches on all ranks
while later groups are generated; step the optimizer, once per mini-batch and epoch; publish the weights t + 1; record
the metrics; acknowledge the groups, which ends their samples in the ledger; save a checkpoint if one is due. Values and
the old, reference and teacher log-probs are columns of the groups (`column_worker.py`). The controller and Ray Serve
are not involved in a step.

**Shutdown** (`_train`, `work`): the loop ends after the last step or on a stop. A stop takes effect between steps, or
in a step before its first update. Then the lead saves the last checkpoint, closes the sample log, writes hf/ and ends
the weight publisher.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from relax_core.bus.ray_bus import blocking
from relax_core.bus.staleness import oldest_version
from relax_core.config.choices import ModeName
from relax_core.config.engine_checks import engine_count
from relax_core.config.model_checks import frozen_parts
from relax_core.config.schema import RelaxConfig
from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import Requirements
from relax_core.contracts.bus import BusTimeout, Group, Lease, LeaseRequest
from relax_core.contracts.engine import SYNC_TIMEOUT_S
from relax_core.contracts.outage import OUTAGE_SHARE, Outage, is_outage, retry_through_outage
from relax_core.contracts.reward import HALT
from relax_core.contracts.train import RankTimes, StepMetrics
from relax_core.contracts.tree import TokenTree
from relax_core.families.architecture import Architecture
from relax_core.families.folder import folder_architecture
from relax_core.observe.event_log import ACTOR, RANK, HistogramRecord, metric_record
from relax_core.registry import find_algorithm
from relax_core.roles.discovery import discover_bus, discover_worker
from relax_core.roles.engine_directory import EngineDirectory
from relax_core.roles.gpu_turns import LOCK_FILE, GpuTurn
from relax_core.roles.process_placement import actor_columns, node_address, sends_factors, shares_gpus
from relax_core.roles.role_context import RunContext, worker_name
from relax_core.roles.trainer.held_out import open_held_out
from relax_core.roles.trainer.rank_worker import policy_columns, policy_groups
from relax_core.roles.trainer.reference_logprobs import actor_computed_columns
from relax_core.roles.trainer.run_checkpoint import RunCheckpoints
from relax_core.roles.trainer.shadow_watch import HACK_ONSET, shadow_counts, watch_values
from relax_core.roles.trainer.trainer_turns import TrainerTurns
from relax_core.roles.trainer.weight_sync import WeightSync
from relax_core.roles.trainer.worker_group import TrainerWorkerGroup, assemble_ranks
from relax_core.roles.worker import Worker
from relax_core.train.device import training_device
from relax_core.train.micro_batches import (
    MOMENTS,
    StepResult,
    StepUpdates,
    UpdatePlan,
    decode_train_tree,
    explained_variance,
)
from relax_core.weights.transport_choice import build_transport, choose_transport

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.weights.lora_merge import LoraFactors


log = logging.getLogger(__name__)
STOP_SLICE_S = 5.0  # longest time in seconds until a waiting trainer notices a stop


class Stopped(Exception):
    """The trainer was asked to stop while it waited for groups."""


class PolicyTrainer(Worker):
    """Trains the policy from the first step to the last, and drives the critic if the algorithm has a critic."""

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        assert rank == 0, "rank 0 drives the other ranks"
        self._version = context.start_step
        super().__init__(name, context)

    # -- called by other processes ----------------------------------------------------------------------------------
    def version(self) -> int:
        """Returns the number of finished train steps."""
        return self._version

    def record_evaluation(self, version: int, values: Mapping[str, float]) -> bool:
        """Records an evaluation's metrics; returns True if the run ends because of ``run.patience``."""
        enough = self._checkpoints.record_evaluation(version, values)
        if enough:
            run = self.context.config.run
            log.info("the run ends: %d evaluations in a row did not improve %s", run.patience, run.keep_best)
            self.request_stop()
        return enough

    # -- start and shutdown -----------------------------------------------------------------------------------------
    def work(self) -> None:
        """Builds the model, publishes its weights and trains until the last step or a stop."""
        context, config = self.context, self.context.config
        self._config = config
        needed = find_algorithm(config.algo.name).requirements(config.algo)
        self._columns = policy_columns(config)
        # With several data-parallel ranks, the lead trains only its share of the groups and reads this share from the
        # bus, unless all ranks compute columns for all groups first.
        self._computed = actor_columns(config)
        reads_share = config.parallel.dp > 1 and not self._computed
        self._payloads = (*c.STRUCTURE_COLUMNS, c.ADVANTAGES) if reads_share else None
        self._group_tokens = 0
        self._clock = StepClock()
        self._sync = self._build_sync() if engine_count(config) else None
        self._turns = self._build_turns()
        if self._turns is not None and self._turns.offloads:
            self._turns.begin()  # an engine may have started first
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
            rank_groups=policy_groups(context, self._bus) if config.parallel.dp > 1 else None,
        )
        if self._turns is not None:
            self._turns.worker_group = self._worker_group
        self._metrics = context.event_writer(self.name)
        self._checkpoints = RunCheckpoints(
            context,
            bus=self._bus,
            worker_group=self._worker_group,
            report_progress=self.report_progress,
            report_wait=self._report_wait,
        )
        self._held_out = open_held_out(context, self._worker_group, self._metrics)
        try:
            if context.resume_from is not None:
                self._worker_group.load(context.resume_from)
            if self._held_out is not None:
                self._held_out.evaluate(self._version)
            self._publish(self._version, first=True)
            if self._turns is not None and self._turns.offloads:
                self._turns.end()
            self._train()
        finally:
            if self._sync is not None:
                self._sync.close()

    def _build_sync(self) -> WeightSync:
        from relax_core.train.hf.stored_weights import stored_weights
        from relax_core.train.optimizer import frozen_weights  # it imports Megatron, which the controller does not

        config = self._config
        choice = choose_transport(config)
        self.set_state("starting", f"weights go to the engines by {choice.name.value}: {choice.reason}")
        transport = build_transport(choice.name, host=node_address(config.launcher), timeout_s=SYNC_TIMEOUT_S)
        # Engines that release the memory of their weights need all tensors again.
        frozen: Collection[str] = ()
        if not shares_gpus(config):
            frozen = frozen_weights(self._architecture(), frozen_parts(config))
            if sends_factors(config):
                frozen = [weight.name for weight in stored_weights(self._architecture())]
        return WeightSync(self.context, EngineDirectory(self.context), transport, waiting=self.waiting, frozen=frozen)

    def _build_turns(self) -> TrainerTurns | None:
        """Returns the turns of time sharing, None if trainer and engines work at the same time."""
        config = self._config
        if config.mode.name is not ModeName.colocate or self._sync is None:
            return None
        gpus = None
        if shares_gpus(config):
            file = self.context.token_file.with_name(LOCK_FILE)
            gpus = GpuTurn(file, timeout_s=config.run.stall_timeout_s, waiting=self.waiting)
        return TrainerTurns(self._sync, offloads=training_device().gpu, gpus=gpus, end_push=self._end_push)

    def _architecture(self) -> Architecture:
        return folder_architecture(self.context.model_folder, also=self._config.model.family)

    def _train(self) -> None:
        """Trains until the last step or a stop, and writes the results to disk."""
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
        """Trains one step. ``lease`` may have the step's first groups. Returns the next step's first lease, if any."""
        step, clock, consumed = self._version, self._clock, StepGroups()
        updates: StepUpdates | None = None
        while (missing := self._plan.groups - len(consumed.leased)) > 0:
            if lease is None:
                lease = self._lease(self._request(step, missing), may_stop=updates is None or not updates.made)
            if self._turns is not None:
                with clock.timed("sync_ms"):
                    self._turns.begin()
            if self._computed:
                with clock.timed("logprobs_ms"):
                    lease = self._with_computed_columns(lease, step)
            updates = updates or StepUpdates(self._worker_group, self._plan, step=step)
            with clock.timed("decode_ms"):
                groups = self._decode(lease, step, consumed)
            self._worker_group.add_lease(lease)
            with clock.timed("train_ms"):
                updates.add(groups)
            lease = None
        assert updates is not None, "a step has groups"
        with clock.timed("train_ms"):
            result = updates.finish()
        if self._turns is not None and self._turns.offloads and self._saves(step + 1):
            with clock.timed("checkpoint_ms"):
                self._checkpoints.copy_models(step + 1)  # before the state leaves the device
        with clock.timed("sync_ms"):
            self._publish(step + 1)
            if self._turns is not None:
                self._turns.end()
        self._version = step + 1
        self._report(consumed, result, step=step)
        if self._held_out is not None:
            self._held_out.evaluate(step + 1)
            self._step_ended = time.perf_counter()
        return self._acknowledge(consumed, step=step)

    def _request(self, step: int, missing: int) -> LeaseRequest:
        """Returns the request for the step's missing groups.

        The groups may come in several leases; the number of leases is at most the number of micro-batches.
        """
        fitting = self._plan.budget_tokens // self._group_tokens * self._plan.ranks if self._group_tokens else 1
        return LeaseRequest(
            task="actor",
            columns=self._columns,
            payloads=self._payloads,
            min_groups=missing if self._turns is not None or self._computed else max(1, min(missing, fitting)),
            max_groups=missing,
            step=step,
        )

    def _with_computed_columns(self, lease: Lease, step: int) -> Lease:
        """Returns the lease with the columns that the actor's ranks compute; the other ranks get them, too."""
        columns = actor_computed_columns(lease.rows, self._config, self._worker_group)
        self._worker_group.add_columns(step, columns)
        return msgspec.structs.replace(lease, rows=c.with_columns(lease.rows, columns))

    def _lease(self, request: LeaseRequest, *, may_stop: bool) -> Lease:
        """Leases groups with short timeouts, so the trainer notices a stop.

        After ``run.stall_timeout_s`` it raises the bus's error, which names the worker that has to deliver the groups.
        A stop is ignored after the first update of a step, because a checkpoint cannot describe weights between two
        steps.
        """
        deadline = time.monotonic() + self._config.run.stall_timeout_s
        while True:
            try:
                return self._clock.timed_lease(
                    lambda: blocking(self._bus.lease(request, timeout_s=STOP_SLICE_S)), timeout_s=STOP_SLICE_S
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

    def _publish(self, version: int, *, first: bool = False) -> None:
        """Publishes the weights, unless the run has no engines.

        The push runs in the background; the next version waits until the push has ended.

        During an outage of the disk or of shared memory this method waits and retries. If shared memory has no space
        for the ``first`` version of this process, it is probably too small for the model, so the error is raised at
        once.
        """
        if self._sync is None:
            return
        self._end_push()
        if self._turns is not None:
            self._turns.before_publication()
        on_disk = self.context.weights_folder.is_relative_to(self.context.run_dir)
        outage, waits = Outage(f"writes weights {version}", report=self._report_wait), on_disk or not first
        sync = self._sync
        if not sends_factors(self._config):
            self._write_weights(partial(sync.publish, version), outage, waits=waits)
            return
        self._write_exports(
            lambda: self._factor_exports(sync),
            lambda base, factors: sync.publish(version, base, factors=factors),
            outage,
            waits=waits,
        )

    def _factor_exports(self, sync: WeightSync) -> tuple[Iterator[tuple[str, Tensor]], Iterator[LoraFactors]]:
        """Returns the weights of the base model, empty if this process has written them, and the LoRA factors."""
        base = iter(()) if sync.has_frozen else self._worker_group.export_base()
        return base, self._worker_group.export_factors()

    def _write_weights(
        self,
        write: Callable[[Iterator[tuple[str, Tensor]]], None],
        outage: Outage,
        *,
        waits: bool = True,
        progress: str = "",
    ) -> None:
        """Passes all weights to ``write``. If ``waits`` is True, repeats this after an outage of the disk.

        ``progress`` is the name of a long operation; each weight is reported as progress of this operation.
        """

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self._worker_group.export():
                if progress:
                    self.report_progress(f"{progress}: {name}")
                yield name, tensor
                del tensor  # frees the tensor before the next tensor is created

        self._write_exports(lambda: (tensors(),), write, outage, waits=waits)

    def _write_exports(
        self,
        exports: Callable[[], tuple[Iterator[Any], ...]],
        write: Callable[..., None],
        outage: Outage,
        *,
        waits: bool,
    ) -> None:
        """Passes the results of ``exports`` to ``write``. If ``waits`` is True, repeats both after an outage."""

        def attempt() -> None:
            exported = exports()
            try:
                write(*exported)
            except OSError as error:
                if waits and is_outage(error):  # all ranks end their part of this export before the next export begins
                    for _ in itertools.chain(*exported):
                        pass
                raise

        retry_through_outage(attempt, outage, limit_s=OUTAGE_SHARE * self._config.run.stall_timeout_s if waits else 0.0)

    def _report_wait(self, text: str) -> None:
        self.set_state("running", text)

    def _end_push(self) -> None:
        assert self._sync is not None, "only engines get weights"
        report = self._sync.end_push()
        if report is not None:
            self._clock.push_ms, self._clock.stall_ms = report.push_ms, report.stall_ms

    def _report(self, consumed: StepGroups, result: StepResult, *, step: int) -> None:
        now = time.perf_counter()
        values = step_values(consumed, result, self._clock, step=step, step_ms=1e3 * (now - self._step_ended))
        values |= self._look_at_shadow(consumed, step=step)
        ranks = rank_values(result.metrics.ranks, now_s=time.time())
        records = (metric_record(ACTOR, step, values), metric_record(RANK, step, ranks))
        self._metrics.put(*records, *consumed.histograms(step=step))
        self._step_ended, self._clock = now, StepClock()
        self._show_step()
        if HACK_ONSET in values and self._config.reward.on_hack == HALT:
            self._halt(int(values[HACK_ONSET]))

    def _look_at_shadow(self, consumed: StepGroups, *, step: int) -> dict[str, float]:
        """Updates the detection of reward hacking (shadow_watch.py) with this step, and returns its metrics."""
        groups = ([episode.parts for episode in group.episodes] for group in consumed.groups)
        self._checkpoints.shadow_watch = self._checkpoints.shadow_watch.after(shadow_counts(step, groups))
        return watch_values(self._checkpoints.shadow_watch)

    def _halt(self, onset: int) -> None:
        """Ends the run. The error names the checkpoint that a run with another reward can continue from.

        Raises RuntimeError. The weights of this step are not saved, so no run can continue from them.
        """
        self._flush_metrics()
        self._checkpoints.finish()
        reward, folder = self._config.reward, self._checkpoints.newest_before(onset)
        where = "no older checkpoint exists" if folder is None else f"{folder} is older: resume={folder}"
        raise RuntimeError(
            f"reward.on_hack=halt: since train step {onset} the model learns answers that reward={reward.name} "
            f"accepts and its shadow reward rejects; {where}. Use a stricter reward; the dashboard shows the answers"
        )

    def _acknowledge(self, consumed: StepGroups, *, step: int) -> Lease | None:
        """Ends the step's samples in the ledger and saves a checkpoint if one is due.

        If no checkpoint is due, the same bus call also leases the next step's first groups. Returns this lease, if any.
        """
        version = step + 1
        due = self._due(version)
        last = version == self._config.run.steps or self.stopping
        then = None if due or last else self._request(version, self._plan.groups)
        try:
            lease = self._clock.timed_lease(
                lambda: blocking(
                    self._bus.ack(
                        consumed.lease_ids, step=step, dropped=consumed.dropped, then=then, timeout_s=STOP_SLICE_S
                    )
                ),
                timeout_s=STOP_SLICE_S,
            )
        except BusTimeout:
            if then is None:
                raise
            lease = None  # the bus has recorded the step; a separate call leases the groups of the next step
        self._checkpoints.raise_failure()
        if due:
            with self._clock.timed("checkpoint_ms"):
                self._save(version)
        return lease

    # -- files ------------------------------------------------------------------------------------------------------
    def _save(self, version: int) -> None:
        """Writes all metrics to disk, then saves a checkpoint.

        A resumed run continues the metrics from the checkpoint's step.
        """
        self._flush_metrics()
        with nullcontext() if self._checkpoints.has_copy(version) else self._state_on_device():
            self._checkpoints.save(version)
        self._show_step()

    def _due(self, version: int) -> bool:
        """Returns whether a checkpoint is due after ``version`` steps."""
        every = self._config.run.save_every
        return (every > 0 and version % every == 0) or self._checkpoints.due(version)

    def _saves(self, version: int) -> bool:
        return self._due(version) or version == self._config.run.steps

    def _state_on_device(self) -> AbstractContextManager[None]:
        return nullcontext() if self._turns is None else self._turns.with_state()

    def _flush_metrics(self) -> None:
        try:
            self._metrics.flush()
        except TimeoutError as error:
            log.warning("metrics up to step %d may be missing: %s", self._version, error)

    def _show_step(self) -> None:
        self.set_state("running", f"step {self._version} of {self._config.run.steps}")

    def _export_hf(self) -> None:
        from relax_core.train.hf.hf_export import export_hf_folder

        def write(tensors: Iterator[tuple[str, Tensor]]) -> None:
            export_hf_folder(
                tensors,
                shapes=self._worker_group.lead.weight_shapes,
                own_dtype=self._config.model.dtype,
                source_folder=self.context.model_folder,
                target=self.context.run_dir / "hf",
                copied_prefixes=self._architecture().copied_prefixes,
            )

        with self._state_on_device():
            self._write_weights(write, Outage("writes hf/", report=self._report_wait), progress="writes hf/")


def _skips_without_advantage(config: RelaxConfig, needed: Requirements) -> bool:
    """Returns whether the trainer only counts groups with advantage 0 at all trained tokens, without computing them."""
    balances = config.model.moe_aux_loss_coef > 0
    return not (needed.every_token or needed.critic or balances)


LeaseT = TypeVar("LeaseT", Lease, Lease | None)


@dataclass(kw_only=True)
class StepClock:
    """Holds the milliseconds of one step's parts on the lead rank.

    ``wait_ms`` is the wait for groups. ``bus_ms`` is the further time of the bus calls that lease and acknowledge.
    ``logprobs_ms`` is the time of `actor_computed_columns`. ``push_ms`` is the time of the last push, which runs in the
    background; only the wait for its end is in ``sync_ms``. ``stall_ms`` is the time that an engine did not decode
    because of the push.
    """

    wait_ms: float = 0.0
    bus_ms: float = 0.0
    logprobs_ms: float = 0.0
    decode_ms: float = 0.0
    train_ms: float = 0.0
    sync_ms: float = 0.0
    push_ms: float = 0.0
    stall_ms: float = 0.0
    checkpoint_ms: float = 0.0

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the block's time to ``part``."""
        began = time.perf_counter()
        yield
        self._add(part, time.perf_counter() - began)

    def timed_lease(self, call: Callable[[], LeaseT], *, timeout_s: float) -> LeaseT:
        """Calls the bus for a lease and measures the call.

        A call that raises `BusTimeout` has waited ``timeout_s`` for groups.
        """
        began = time.perf_counter()
        try:
            lease = call()
        except BusTimeout:
            self._add_bus_call(time.perf_counter() - began, waited_s=timeout_s)
            raise
        self._add_bus_call(time.perf_counter() - began, waited_s=0.0 if lease is None else lease.waited_s)
        return lease

    def _add_bus_call(self, seconds: float, *, waited_s: float) -> None:
        self._add("wait_ms", waited_s)
        self._add("bus_ms", seconds - waited_s)

    def _add(self, part: str, seconds: float) -> None:
        setattr(self, part, getattr(self, part) + 1e3 * seconds)


def rank_values(ranks: Sequence[RankTimes], *, now_s: float) -> dict[str, float]:
    """Returns a step's metrics of all policy ranks; ``now_s`` is the Unix time of their record.

    ``step_ms`` is the time from the start of a rank's first call in the step to the end of its last call. ``lag_ms`` is
    the time from the end of the rank's last call to the record. The clocks of all hosts are assumed to be equal.
    """
    values: dict[str, float] = {}
    for rank, times in enumerate(ranks):
        name = worker_name("actor", rank)
        values[f"{name}/step_ms"] = 1e3 * (times.ended_s - times.began_s)
        values[f"{name}/lag_ms"] = 1e3 * (now_s - times.ended_s)
        values[f"{name}/core_wait_ms"] = times.core_wait_ms
        values[f"{name}/rows"] = float(times.rows)
        values |= {f"{name}/{part}_ms": ms for part, ms in times.wall_ms.items()}
        values |= {f"{name}/cpu/{part}_ms": ms for part, ms in times.cpu_ms.items()}
    return {name: round(value, 3) for name, value in values.items()}


QUANTILES = (10, 50, 90)
HISTOGRAM_BINS = 20


@dataclass(kw_only=True)
class StepGroups:
    """Holds the groups that a step consumed.

    ``leased`` has the groups as the bus returned them, ``lease_ids`` their leases, and ``groups`` their token trees in
    the same order. ``dropped`` maps the uids of completely masked episodes to the reasons.
    """

    leased: list[Group] = field(default_factory=list)
    groups: list[TokenTree] = field(default_factory=list)
    lease_ids: list[int] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)

    def values(self, *, step: int) -> dict[str, float]:
        """Returns the metrics over the step's samples, without metrics that have no data.

        Samples of data rows have no metrics of rewards and sampling.
        """
        episodes = [episode for group in self.groups for episode in group.episodes]
        staleness = [step - version for row in self.leased for version in row.versions]
        parts: dict[str, list[float]] = {}
        for episode in episodes:
            for name, value in episode.parts.items():
                parts.setdefault(name, []).append(value)
        count = len(episodes)
        sampled = {}
        if not all(group.is_of_data for group in self.groups):
            sampled = {
                **reward_values([group.rewards for group in self.groups]),
                "exact": sum(parts.pop("exact", [0.0])) / count,
                **{f"reward_{name}": sum(values) / len(values) for name, values in parts.items()},
                "truncated": sum(episode.ended == "length" for episode in episodes) / count,
                **sampled_entropy(self.groups),
            }
        return {
            **sampled,
            **length_values(self._lengths()),
            "staleness_max": float(max(staleness)),
            "staleness_mean": sum(staleness) / count,
            **self._modality_values(step=step),
        }

    def _modality_values(self, *, step: int) -> dict[str, float]:
        """Returns number of samples, mean reward and mean staleness by modality; empty in a text-only run."""
        values: dict[str, float] = {}
        for name in sorted({row.modality for row in self.leased} - {""}):
            mine = [(row, group) for row, group in zip(self.leased, self.groups, strict=True) if row.modality == name]
            rewards = np.concatenate([group.rewards for _, group in mine])
            staleness = [step - version for row, _ in mine for version in row.versions]
            values[f"modality/{name}/samples"] = float(len(rewards))
            values[f"modality/{name}/reward"] = float(rewards.mean())
            values[f"modality/{name}/staleness_mean"] = sum(staleness) / len(staleness)
        return values

    def histograms(self, *, step: int) -> list[HistogramRecord]:
        """Returns the distributions of the samples' lengths, staleness, rewards and, if available, mean advantages."""
        staleness = np.array([step - version for row in self.leased for version in row.versions])
        return [
            integer_histogram("response_tokens", self._lengths(), step=step),
            integer_histogram("staleness", np.sort(staleness), step=step),
            *self._reward_histograms(step=step),
        ]

    def _reward_histograms(self, *, step: int) -> list[HistogramRecord]:
        """Returns the distributions of rewards and advantages; empty for data rows."""
        if all(group.is_of_data for group in self.groups):
            return []
        advantages = [group_advantages(group) for group in self.groups]
        return [
            real_histogram("reward", np.concatenate([group.rewards for group in self.groups]), step=step),
            *(
                [
                    real_histogram(
                        "advantage",
                        np.concatenate([advantage for advantage in advantages if advantage is not None]),
                        step=step,
                    )
                ]
                if all(advantage is not None for advantage in advantages)
                else []
            ),
        ]

    def _lengths(self) -> np.ndarray:
        """Returns the number of tokens of each response, int64 ``[samples]``, in ascending order."""
        return np.sort(np.concatenate([group.lengths for group in self.groups]))


def integer_histogram(name: str, values: np.ndarray, *, step: int) -> HistogramRecord:
    """Returns the distribution of integers, which must be in ascending order, in bins of equal width."""
    least, largest = int(values[0]), int(values[-1])
    width = math.ceil((largest - least + 1) / HISTOGRAM_BINS)
    limits = np.arange(least + width - 1, largest + width, width)
    counts = np.diff(np.searchsorted(values, limits, side="right"), prepend=0)
    return _histogram(name, values, limits=limits, counts=counts, step=step)


def real_histogram(name: str, values: np.ndarray, *, step: int) -> HistogramRecord:
    """Returns the distribution of real numbers in bins of equal width; one bin if all numbers are equal."""
    values = np.sort(values.astype(np.float64))
    bins = HISTOGRAM_BINS if values[-1] > values[0] else 1
    limits = np.linspace(values[0], values[-1], bins + 1)[1:]
    counts = np.diff(np.searchsorted(values, limits, side="right"), prepend=0)
    return _histogram(name, values, limits=limits, counts=counts, step=step)


def _histogram(name: str, values: np.ndarray, *, limits: np.ndarray, counts: np.ndarray, step: int) -> HistogramRecord:
    return HistogramRecord(
        source=ACTOR,
        step=step,
        time_s=time.time(),
        name=name,
        limits=limits.astype(float).tolist(),
        counts=counts.tolist(),
        least=float(values[0]),
        largest=float(values[-1]),
        total=float(values.sum()),
        total_of_squares=float((values * values).sum()),
    )


def group_advantages(group: TokenTree) -> np.ndarray | None:
    """Returns the mean advantage of each episode's tokens, float64 ``[episodes]``; None without advantages."""
    advantages = group.of_tokens(c.ADVANTAGES)
    if advantages is None:
        return None
    sums = np.bincount(group.tokens[0], weights=advantages, minlength=len(group.episodes))
    return sums / np.maximum(group.lengths, 1)


def reward_values(groups: list[np.ndarray]) -> dict[str, float]:
    """Returns reward metrics from one array of rewards per group.

    A group of at least two equal rewards has no signal.
    """
    rewards = np.concatenate(groups)
    several = [group for group in groups if len(group) > 1]
    values = {
        "reward": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
    }
    if several:
        values["groups_without_signal"] = sum(bool((group == group[0]).all()) for group in several) / len(several)
    return values


def length_values(lengths: np.ndarray) -> dict[str, float]:
    """Returns length metrics from lengths in ascending order, int64 ``[samples]``.

    The quantile p is the smallest length L such that p % of the answers have at most length L.
    """
    return {
        "response_tokens": float(lengths.mean()),
        "response_tokens/min": float(lengths[0]),
        **{f"response_tokens/p{q}": float(lengths[-(-q * len(lengths) // 100) - 1]) for q in QUANTILES},
        "response_tokens/max": float(lengths[-1]),
    }


def sampled_entropy(groups: list[TokenTree]) -> dict[str, float]:
    """Returns the negated mean of the engine's log-probs over the trained tokens, in nats per token.

    This value is an estimate of the mean entropy of the sampling distributions.
    """
    trained = np.concatenate([group.logprobs[group.loss_mask] for group in groups])
    tokens = len(trained)
    if not tokens:
        return {}
    return {"entropy": -float(trained.sum(dtype=np.float64)) / tokens}


def step_values(
    consumed: StepGroups, result: StepResult, clock: StepClock, *, step: int, step_ms: float
) -> dict[str, float]:
    """Returns the trainer's record of a step as names and numbers."""
    metrics, critic = result.metrics.policy, result.metrics.critic
    needed_rows = sum(group.computed_rows for group in consumed.groups) - result.skipped_rows
    return {
        **consumed.values(step=step),
        "loss": metrics.loss,
        "grad_norm": metrics.grad_norm,
        "learning_rate": metrics.learning_rate,
        "updates": result.updates,
        "samples": metrics.samples,
        "tokens": metrics.tokens,
        "rows": metrics.rows,
        "skipped_groups": result.skipped_groups,
        "repeated_rows": 1.0 - needed_rows / max(1, metrics.rows),
        "samples_per_s": 1e3 * metrics.samples / step_ms,
        "tokens_per_s": 1e3 * metrics.tokens / step_ms,
        **logprob_gap(metrics),
        "step_ms": step_ms,
        "wait_ms": clock.wait_ms,
        "bus_ms": clock.bus_ms,
        "logprobs_ms": clock.logprobs_ms,
        "decode_ms": clock.decode_ms,
        "train_ms": clock.train_ms,
        "sync_ms": clock.sync_ms,
        "push_ms": clock.push_ms,
        "stall_ms": clock.stall_ms,
        "checkpoint_ms": clock.checkpoint_ms,
        **{f"algorithm/{name}": value for name, value in metrics.algorithm.items()},
        **{f"moe/{name}": value for name, value in metrics.moe.items()},
        **({} if critic is None else critic_values(critic)),
        **{f"train/{name}": value for name, value in metrics.timings_ms.items()},
    }


def logprob_gap(metrics: StepMetrics) -> dict[str, float]:
    """Returns metrics of the gap between trainer and engine log-probs over on-policy tokens, if such tokens exist."""
    if not metrics.logprob_gap_tokens:
        return {"logprob_gap_tokens": 0.0}
    return {
        "logprob_gap_max": metrics.logprob_gap_max,
        "logprob_gap_mean": metrics.logprob_gap_mean,
        "logprob_gap_tokens": float(metrics.logprob_gap_tokens),
    }


def critic_values(metrics: StepMetrics) -> dict[str, float]:
    """Returns the critic's metrics: loss, mean return, metrics of the algorithm and explained variance."""
    found = {name: value for name, value in metrics.algorithm.items() if name not in MOMENTS}
    found |= {"loss": metrics.loss, "grad_norm": metrics.grad_norm, "return": metrics.algorithm["return"]}
    explained = explained_variance(metrics.algorithm)
    if explained is not None:
        found["explained_variance"] = explained
    return {f"value/{name}": value for name, value in found.items()}
