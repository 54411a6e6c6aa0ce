"""Executes plan=rehearse: runs the trainer's fullest ranks on torch's ``meta`` device, and reports memory and work.

Child processes run short models (`rehearsal_child.py`), and their counts are extrapolated to the model's layers
(`relax_core.train.rehearsal.counts`). This module imports no torch.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from relax_core.config.choices import LauncherKind
from relax_core.config.saved_config import to_yaml_with_secrets
from relax_core.config.schema import ParallelConfig, RelaxConfig
from relax_core.contracts.child_process import import_path, module_command
from relax_core.plan.build_plan import Plan
from relax_core.plan.context_length import planned_context
from relax_core.plan.gpu_models import gpu_memory_gib
from relax_core.plan.gpu_terms import fullest_stages, trainer_phases
from relax_core.plan.memory_plan import ENGINE_BYTES, PROCESS_BYTES
from relax_core.plan.memory_terms import GIB, stage_layers
from relax_core.plan.model_dimensions import ModelDimensions
from relax_core.plan.rehearsal_child import Job, Reply, Request
from relax_core.plan.workload import Workload
from relax_core.roles.process_placement import roles_of, shares_gpus
from relax_core.train.device import VARIABLE
from relax_core.train.rehearsal.counts import ONCE, REDUCE, Counts, Section, extrapolated

FORWARD_ROLES = ("critic", "reference", "actor_fwd", "teacher")  # roles with a model of torch that are not rehearsed
_DATA_PARALLEL = "DATA_PARALLEL"  # in the names of Megatron's groups
CHILD_S = 1800.0  # longest time of a child process; Qwen3.5-35B takes about 250 s on two busy cores
_WIDTH = 34


@dataclass(frozen=True, kw_only=True)
class RankRehearsal:
    """Holds the counts of one rank of the actor in an update.

    ``stage`` is its pipeline stage. ``rehearsed`` are the numbers of layers that were run on this rank, and ``counts``
    those of all of its layers. ``planned`` is the peak by the formulas of `plan=true` in bytes. Both are without the
    process itself.
    """

    rank: int
    stage: int
    rehearsed: tuple[int, ...]
    counts: Counts
    planned: int


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Holds the rehearsed ranks of a run.

    ``micro_batches`` is the number of micro-batches of one pass over a train step, and ``beside`` the assumed bytes of
    the processes on the trainer's GPU. ``limit`` is the bytes of a GPU. ``left_out`` names roles that are not
    rehearsed. ``seconds`` is the duration of the command.
    """

    name: str
    ranks: Sequence[RankRehearsal]
    micro_batches: int
    beside: int
    limit: int
    left_out: Sequence[str]
    seconds: float

    @property
    def need(self) -> int:
        """Returns the bytes of a GPU that the fullest rank and the processes need, with fragments if they are known."""
        ranks = [rank.counts for rank in self.ranks]
        return self.beside + max(max(counts.reserved or 0, counts.peak.bytes) for counts in ranks)

    @property
    def fullest(self) -> RankRehearsal:
        """Returns the rank with the largest peak."""
        return max(self.ranks, key=lambda rank: rank.counts.peak.bytes)

    @property
    def fits(self) -> bool:
        """Returns whether every rank fits on its GPU."""
        return self.need <= self.limit


@dataclass(frozen=True, kw_only=True)
class Depths:
    """Holds the layers of a chunk in the short models, ascending, and ``unit``, the layers after which kinds repeat.

    ``template`` is the unit of the longer model that is repeated in its trace.
    """

    short: tuple[int, ...]
    unit: int
    template: int | None = None


def rehearse(config: RelaxConfig, plan: Plan) -> Rehearsal:
    """Rehearses the actor's fullest ranks. Raises ValueError (key, value, fix) if the run cannot be rehearsed."""
    began_s = time.perf_counter()
    refuse_what_cannot_be(config, plan)
    if config.engine.context_length is None:
        config = planned_context(config)
    parallel, model, work = config.parallel, plan.model, plan.work
    depths = find_depths(config, model)
    micro_batches = _micro_batches(parallel, work)
    stages = fullest_stages(parallel)
    chunks = parallel.pp * parallel.vpp
    jobs = [
        (
            stage,
            Job(
                rank=_first_rank(parallel, stage),
                layers=depth * chunks,
                micro_batches=micro_batches,
                unit=depths.unit,
                whole=stage_layers(parallel, model, later=stage > 0) // parallel.vpp // depths.unit,
                template=depths.template if depth == depths.short[-1] else None,
            ),
        )
        for stage in stages
        for depth in reversed(depths.short)
    ]
    found = run_jobs(config, work, [job for _, job in jobs])
    ranks = []
    for stage in stages:
        of_stage = sorted(
            (counts for (its, _), counts in zip(jobs, found, strict=True) if its == stage),
            key=lambda counts: counts.layers,
        )
        layers = stage_layers(parallel, model, later=stage > 0)
        whole = of_stage[-1]
        if whole.layers != layers:
            whole = extrapolated(of_stage[0], of_stage[-1], layers=layers)
        phases = trainer_phases(config, model, work, stage=stage)
        ranks.append(
            RankRehearsal(
                rank=_first_rank(parallel, stage),
                stage=stage,
                rehearsed=tuple(counts.layers for counts in of_stage),
                counts=whole,
                planned=max(sum(terms.values()) for terms in phases.values()),
            )
        )
    colocated = shares_gpus(config)
    return Rehearsal(
        name=plan.name,
        ranks=ranks,
        micro_batches=work.micro_batches,
        beside=PROCESS_BYTES + (ENGINE_BYTES if colocated else 0),
        limit=round(gpu_memory_gib(config.placement) * GIB),
        left_out=[role for role in roles_of(config) if role in FORWARD_ROLES],
        seconds=time.perf_counter() - began_s,
    )


def refuse_what_cannot_be(config: RelaxConfig, plan: Plan) -> None:
    """Raises ValueError (key, value, fix) for a run that cannot be rehearsed."""
    if plan.refused and not plan.memory:
        raise ValueError(" ".join(plan.refused))
    if config.launcher.name is LauncherKind.ray_job:
        raise ValueError(
            "plan=rehearse with launcher=ray_job: the model and the data are on the cluster, and a rehearsal runs on "
            "this machine. Drop launcher=ray_job."
        )
    if not config.placement.gpus_per_node:
        raise ValueError(
            "plan=rehearse with placement.gpus_per_node=0: a rehearsal runs the trainer's GPU branch. Add "
            "placement=gpu, or use plan=true, which is measured on CPUs."
        )
    if config.rollout.truncates:
        raise ValueError(
            f"plan=rehearse with rollout.top_k={config.rollout.top_k}, rollout.top_p={config.rollout.top_p}, "
            f"rollout.min_p={config.rollout.min_p}: the sizes of the kept sets are not known before the run. Set "
            "rollout.top_k=-1 rollout.top_p=1.0 rollout.min_p=0.0 for the rehearsal."
        )


def find_depths(config: RelaxConfig, model: ModelDimensions) -> Depths:
    """Returns the layers of a chunk in two short models.

    The first chunk holds the layers with outputs of the vision tower, and every chunk whole periods of kinds of layers.
    If the complete model is not longer than the second short model, only the complete model runs. Raises ValueError
    (key, value, fix) if a chunk does not hold whole periods, or if the stages differ and a stage is too short.
    """
    parallel, unit = config.parallel, _period(model)
    least = -(-max(1, model.deepstack_layers) // unit) * unit
    own = {stage_layers(parallel, model, later=stage > 0) // parallel.vpp for stage in range(parallel.pp)}
    with_outputs = -(-model.deepstack_layers // unit)  # units that differ from others
    short = (least, (with_outputs + 3) * unit)
    if any(chunk % unit for chunk in own):
        raise ValueError(
            f"plan=rehearse with parallel.pp={parallel.pp} parallel.vpp={parallel.vpp}: a chunk has {min(own)} layers, "
            f"and the kinds of layers repeat every {unit}. Use a number of chunks that gives each a multiple of {unit}."
        )
    if min(own) < short[1]:
        if len(own) > 1:
            raise ValueError(
                f"plan=rehearse with parallel.first_stage_layers={parallel.first_stage_layers}: the smallest chunk has "
                f"{min(own)} layers, and at least {short[1]} are needed. Set parallel.first_stage_layers=null."
            )
        return Depths(short=(min(own),), unit=unit)
    return Depths(short=short, unit=unit, template=with_outputs + 1)


def _period(model: ModelDimensions) -> int:
    """Returns the number of layers after which the kinds of layers repeat."""
    if model.delta_net is None:
        return 1
    kinds = [layer in model.delta_layer_numbers for layer in range(model.layers)]
    return next(
        period
        for period in range(1, model.layers + 1)
        if all(kind == kinds[layer % period] for layer, kind in enumerate(kinds))
    )


def _first_rank(parallel: ParallelConfig, stage: int) -> int:
    return stage * parallel.tp * parallel.cp * parallel.dp


def _micro_batches(parallel: ParallelConfig, work: Workload) -> int:
    """Returns how many micro-batches show every state of the schedule: all in flight, and one after the other."""
    if parallel.vpp > 1:
        return 2 * parallel.pp  # the interleaved schedule requires a multiple of the stages
    return max(1, min(parallel.pp + 1, work.micro_batches))


def run_jobs(config: RelaxConfig, work: Workload, jobs: Sequence[Job]) -> list[Counts]:
    """Returns the counts of each job; as many child processes run at a time as there are cores."""
    children = min(len(jobs), len(os.sched_getaffinity(0)))
    shares = [list(range(first, len(jobs), children)) for first in range(children)]
    text = to_yaml_with_secrets(config)
    with ThreadPoolExecutor(children) as pool:
        replies = list(pool.map(lambda share: _reply(text, work, [jobs[index] for index in share]), shares))
    found: dict[int, Counts] = {}
    for share, reply in zip(shares, replies, strict=True):
        found |= dict(zip(share, reply, strict=True))
    return [found[index] for index in range(len(jobs))]


def _reply(text: str, work: Workload, jobs: list[Job]) -> list[Counts]:
    environment = {**os.environ, VARIABLE: "meta", "PYTHONPATH": import_path()}
    request = msgspec.json.encode(Request(config=text, work=work, jobs=jobs))
    command = module_command("relax_core.plan.rehearsal_child")
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, env=environment, timeout=CHILD_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"plan=rehearse: the rehearsal of layers {[job.layers for job in jobs]} has not ended after {CHILD_S:.0f} "
            "s. Run it on a machine with idle cores, or use plan=true."
        ) from error
    if done.returncode or not done.stdout:
        raise RuntimeError(
            f"the rehearsal of layers {[job.layers for job in jobs]} ended with exit code {done.returncode}:\n"
            f"{done.stderr.decode(errors='replace')[-4000:]}"
        )
    reply = msgspec.json.decode(done.stdout, type=Reply)
    if reply.refused is not None:
        raise ValueError(f"plan=rehearse: {reply.refused}")
    return reply.counts


# -- The report -----------------------------------------------------------------------------------------------------
def as_json_values(rehearsal: Rehearsal) -> dict[str, Any]:
    """Returns the rehearsal as plain dicts and lists."""
    values: dict[str, Any] = msgspec.to_builtins(rehearsal)
    values["fits"] = rehearsal.fits
    for rank, of_rank in zip(rehearsal.ranks, values["ranks"], strict=True):
        of_rank["peak"] = msgspec.to_builtins(rank.counts.peak)
    return values


def as_text(rehearsal: Rehearsal) -> str:
    """Returns the rehearsal as text, with the verdict first."""
    return "\n".join(_lines(rehearsal)) + "\n"


def _lines(rehearsal: Rehearsal) -> Iterator[str]:
    counts, room = rehearsal.fullest.counts, rehearsal.limit / GIB
    verdict = "fits" if rehearsal.fits else "does not fit"
    yield (
        f"{rehearsal.name}: the actor {verdict}. Its fullest rank needs {rehearsal.need / GIB:.1f} GiB of "
        f"{room:.1f} GiB, {rehearsal.beside / GIB:.0f} of them assumed for the processes."
    )
    for rank in rehearsal.ranks:
        yield ""
        yield from _rank_lines(rank, rehearsal.micro_batches)
    yield ""
    if rehearsal.left_out:
        yield f"Not rehearsed: {', '.join(rehearsal.left_out)}. plan=true has formulas for them."
    yield f"Rehearsed on meta in {rehearsal.seconds:.0f} s; {counts.seconds:.0f} s in {counts.operators:,} operators."


def _rank_lines(rank: RankRehearsal, micro_batches: int) -> Iterator[str]:
    counts = rank.counts
    run = ", ".join(map(str, rank.rehearsed))
    how = f"extrapolated from {run}" if counts.layers not in rank.rehearsed else "all run"
    rows = f"micro-batches of {counts.rows[0]:,} rows"
    yield f"Rank {rank.rank} (stage {rank.stage}): {counts.layers} layers, {how}; {rows}"
    reserved = "is not known" if counts.reserved is None else _gib(counts.reserved)
    peak, error = counts.peak, rank.planned / counts.peak.bytes - 1
    yield f"  peak {_gib(peak.bytes)} in {peak.phase}; reserved {reserved}"
    yield f"  plan=true says {_gib(rank.planned)} ({error:+.1%})"
    for name, size in sorted(peak.by_category.items(), key=lambda pair: -pair[1]):
        if size >= GIB // 100:
            yield f"    {name:{_WIDTH}} {_gib(size)}"
    yield f"  an export of the weights needs {_gib(counts.published)} beside the state"
    yield "  peak by phase"
    for section in peaks_by_phase(counts).values():
        yield f"    {section.phase:{_WIDTH}} {_gib(section.bytes)}"
    yield f"  in a pass over a train step of {micro_batches} such micro-batches"
    scale = micro_batches / len(counts.rows)
    for phase, flops in counts.flops.items():
        yield f"    {phase:{_WIDTH}} {_of_step(flops, phase, scale) / 1e12:10,.1f} TFLOP"
    for (collective, group), (calls, sent) in _by_group(counts, scale).items():
        yield f"    {collective + ' in ' + group:{_WIDTH}} {calls:10,.0f} calls, {sent / GIB:,.2f} GiB sent"
    reads = sum(_of_step(count, phase, scale) for phase, count in counts.host_reads.items())
    yield f"    {'host reads':{_WIDTH}} {reads:10,.0f}"


def peaks_by_phase(counts: Counts) -> dict[str, Section]:
    """Returns the largest section of each phase."""
    found: dict[str, Section] = {}
    for section in counts.sections:
        if section.phase not in found or section.bytes > found[section.phase].bytes:
            found[section.phase] = section
    return found


def _of_step(count: int, phase: str, scale: float) -> float:
    return count if phase in ONCE else count * scale


def _by_group(counts: Counts, scale: float) -> Mapping[tuple[str, str], tuple[float, float]]:
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for message in counts.messages:
        sums = found[message.collective, message.group.replace("_PARALLEL_GROUP", "").replace("_", " ").lower()]
        # Gradients and parameters travel once in an update, with parallel.overlap during the passes.
        phase = REDUCE if _DATA_PARALLEL in message.group else message.phase
        sums[0] += _of_step(message.calls, phase, scale)
        sums[1] += _of_step(message.bytes, phase, scale)
    return {key: (calls, sent) for key, (calls, sent) in sorted(found.items(), key=lambda pair: -pair[1][1])}


def _gib(size: int) -> str:
    return f"{size / GIB:7.2f} GiB"
