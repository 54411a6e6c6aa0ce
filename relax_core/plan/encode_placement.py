"""Says on which nodes a run's media are encoded, and what the encode workers take of the cores and memory there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from relax_core.config.choices import LauncherKind
from relax_core.config.host_memory import available_bytes
from relax_core.config.schema import RelaxConfig
from relax_core.config.sections.launcher_schema import RayJobLauncherConfig, SlurmLauncherConfig
from relax_core.plan.batch import plural
from relax_core.plan.memory.media_terms import encode_worker_bytes, shared_item_bytes
from relax_core.plan.memory.memory_terms import GIB
from relax_core.plan.workload import Workload


@dataclass(frozen=True, kw_only=True)
class EncodeNode:
    """Is one node on which media are encoded: its workers, their memory, and the items that they share, in bytes.

    ``cores`` and ``memory`` are those of the node, None where only a Ray that runs already knows them.
    """

    number: int
    rollouts: int
    workers: int
    worker_bytes: int
    item_bytes: int
    cores: int | None
    memory: int | None

    @property
    def words(self) -> str:
        """Returns what is placed there, for the plan."""
        of_cores = "" if self.cores is None else f" on {plural(self.cores, 'core')}"
        of_memory = "" if self.memory is None else f" of {self.memory / GIB:.1f} GiB"
        return (
            f"Node {self.number} has {plural(self.rollouts, 'rollout worker')} with "
            f"{plural(self.workers, 'encode worker')}{of_cores}. They take {self.worker_bytes / GIB:.2f} GiB"
            f"{of_memory}, and their items {self.item_bytes / GIB:.2f} GiB of /dev/shm."
        )

    def faults(self) -> Iterator[str]:
        """Yields what the node lacks: a core for each encode worker, or memory."""
        fits = "Use a smaller modality.workers or fewer rollout.workers."
        here = f"modality.workers={self.workers // self.rollouts}: node {self.number} has "
        here += f"{plural(self.rollouts, 'rollout worker')}, so {plural(self.workers, 'encode worker')}"
        if self.cores is not None and self.workers > self.cores:
            yield f"{here} on {plural(self.cores, 'core')}. {fits}"
        needed = self.worker_bytes + self.item_bytes
        if self.memory is not None and needed > self.memory:
            yield (
                f"{here} that need {needed / GIB:.1f} GiB with their items; it has {self.memory / GIB:.1f} GiB. {fits} "
                "A smaller modality.cache_mb keeps fewer items."
            )


def encode_nodes(
    config: RelaxConfig, roles: Mapping[str, int], work: Workload, *, data_rows: int | None
) -> list[EncodeNode]:
    """Returns the nodes on which rollout workers, and therefore their encode workers, run; none for a run on text.

    Rollout workers are spread over all nodes, node 0 first (`relax_core.roles.process.process_placement.node_options`).
    """
    if work.media is None:
        return []
    nodes = max(config.placement.nodes, config.launcher.nodes)
    cores, memory = _cores(config), _memory(config)
    found = []
    for number, rollouts in sorted(Counter(rank % nodes for rank in range(roles["rollout"])).items()):
        workers = rollouts * config.modality.workers
        found.append(
            EncodeNode(
                number=number,
                rollouts=rollouts,
                workers=workers,
                worker_bytes=workers * encode_worker_bytes(work),
                item_bytes=shared_item_bytes(config, work, rollout_workers=rollouts, data_rows=data_rows),
                cores=cores,
                memory=memory,
            )
        )
    return found


def _runs_here(config: RelaxConfig) -> bool:
    one_node = config.placement.nodes == 1
    return config.launcher.name is LauncherKind.local and config.launcher.ray_address is None and one_node


def _cores(config: RelaxConfig) -> int | None:
    if isinstance(config.launcher, SlurmLauncherConfig | RayJobLauncherConfig):
        return config.launcher.cpus_per_node
    return len(os.sched_getaffinity(0)) if _runs_here(config) else None


def _memory(config: RelaxConfig) -> int | None:
    if isinstance(config.launcher, SlurmLauncherConfig | RayJobLauncherConfig):
        gigabytes = config.launcher.memory_gb
        return None if gigabytes is None else round(gigabytes * 1e9)
    return available_bytes() if _runs_here(config) else None
