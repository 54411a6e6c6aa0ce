"""The child process of `plan=rehearse`: it reads a `Request` on stdin, and writes a `Reply` to stdout.

It rehearses ranks one after the other (`relax_core.train.rehearsal.rank`); its environment has RELAX_TRAIN_DEVICE=meta.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import msgspec

from relax_core.config.compose import planned_config_from_yaml
from relax_core.config.schema import RelaxConfig
from relax_core.plan.rehearsed_step import largest_micro_batch, planned_media, write_short_model
from relax_core.plan.workload import Workload
from relax_core.train.rehearsal.counts import Counts


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Names a rank and the layers of the model that it rehearses, with ``micro_batches`` micro-batches.

    ``unit``, ``whole`` and ``template`` are as in `relax_core.train.rehearsal.rank.Units`.
    """

    rank: int
    layers: int
    micro_batches: int
    unit: int = 1
    whole: int = 0
    template: int | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the configuration as YAML, the sizes of a step, and the jobs."""

    config: str
    work: Workload
    jobs: list[Job]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the counts of each job in order, or the reason why a job cannot be rehearsed."""

    counts: list[Counts]
    refused: str | None = None


def main() -> int:
    """Runs the jobs and returns the exit code."""
    reply_to = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    warnings.filterwarnings("ignore")
    config = planned_config_from_yaml(request.config)
    config = replace(config, parallel=replace(config.parallel, first_stage_layers=None))
    reply = Reply(counts=[])
    try:
        for job in request.jobs:
            reply.counts.append(run_job(config, request.work, job))
    except (ValueError, NotImplementedError) as error:
        reply = Reply(counts=[], refused=str(error))
    with reply_to:
        reply_to.write(msgspec.json.encode(reply))
    return 0


def run_job(config: RelaxConfig, work: Workload, job: Job) -> Counts:
    """Returns the counts of one update of a rank. Raises ValueError if the trainer refuses the model or the layout."""
    from relax_core.families.folder import folder_architecture
    from relax_core.train.megatron_rank import rank_setup
    from relax_core.train.rehearsal.rank import Units, rehearse

    with tempfile.TemporaryDirectory(prefix="relax-rehearsal-") as name:
        folder = Path(name)
        write_short_model(config, folder, layers=job.layers)
        media = planned_media(config, work, folder_architecture(folder, family=config.model.family))
        groups = largest_micro_batch(config, work, media)
        setup = rank_setup(config, model_folder=folder, rank=job.rank, store_address="")
        return rehearse(
            replace(setup, threads=1),
            [groups] * job.micro_batches,
            units=Units(layers=job.unit, whole=job.whole, template=job.template),
            temperature=config.rollout.temperature,
            media=media,
        )


if __name__ == "__main__":
    sys.exit(main())
