"""Says which numbers of engines a run can have, and how many of them its samples in flight can fill."""

from __future__ import annotations

import math

from relax_core.config.choices import ModeName
from relax_core.config.engine_checks import unseen_media
from relax_core.config.schema import RelaxConfig
from relax_core.registry import find_engine
from relax_core.server.orders import Limits


def limits_of(config: RelaxConfig) -> Limits:
    """Returns which orders for engines a run takes."""
    engine, refusal, no_more, no_urls = config.engine, "", "", ""
    if config.mode.name is ModeName.colocate:
        refusal = "mode=colocate: engines and trainer take turns in the same memory, so no engine comes or goes."
    if engine.urls:
        no_more = "engine.urls: somebody else started this run's engines. Start another server and send engine_urls."
    elif config.placement.gpus_per_node:
        no_more = "placement.gpus_per_node: engines on GPUs are placed at the start. Send engine_urls of a server."
    if find_engine(engine.name).attach is None:
        no_urls = f"engine.name={engine.name}: this kind of engine attaches to no server. Send num_replicas."
    elif unseen := unseen_media(config):
        no_urls = (
            f"a server that the run did not start gets no {' and no '.join(unseen)} of prompts. Send num_replicas."
        )
    return Limits(
        start=engine.count,
        most=max(engine.count, engine.elastic.max_count),
        refusal=refusal,
        no_more=no_more,
        no_urls=no_urls,
        hosts=engine.elastic.allowed_hosts,
    )


def usable_engines(config: RelaxConfig) -> int:
    """Returns how many engines the samples in flight can fill; more of them would have nothing to do."""
    rollout = config.rollout
    groups = config.mode.versions_in_flight * rollout.prompts_per_step + rollout.spare_prompts
    return math.ceil(groups * config.algo.group_size / config.engine.max_running_samples)


def autoscaler_bounds(config: RelaxConfig) -> tuple[int, int]:
    """Returns the smallest and the largest number of engines that the autoscaler orders."""
    least = max(config.engine.count, config.engine.autoscaler.min_count)
    return least, max(least, min(config.engine.elastic.max_count, usable_engines(config)))
