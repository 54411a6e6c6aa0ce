"""Checks engine.weight_transport against the other keys."""

from __future__ import annotations

from collections.abc import Iterator

from relax_core.config.choices import ModeName, WeightTransportName
from relax_core.config.errors import NotYet
from relax_core.config.schema import RelaxConfig
from relax_core.registry import find_engine


def transport_problems(config: RelaxConfig) -> Iterator[str]:
    """Returns one sentence for each problem."""
    wanted, taken = config.engine.weight_transport, find_engine(config.engine.name).transports
    words = f"engine.weight_transport={wanted.value}"
    if wanted is WeightTransportName.cuda_ipc:
        yield NotYet(f"{words} is not built yet. Use engine.weight_transport=auto.")
    elif config.engine.urls and wanted not in (WeightTransportName.auto, WeightTransportName.disk):
        yield f"{words} with engine.urls: servers that the run did not start load from its folder. Use disk, or auto."
    elif wanted is WeightTransportName.nccl and ("nccl" not in taken or config.placement.gpus_per_node == 0):
        yield f"{words}: NCCL needs trainer and engines on GPUs. Use engine.weight_transport=auto."
    elif wanted is WeightTransportName.nccl and config.mode.name is ModeName.colocate:
        yield f"{words} with mode=colocate: they share GPUs, and NCCL wants one rank a GPU. Use disk, or auto."
    elif wanted is not WeightTransportName.auto and wanted.value not in taken:
        yield f"{words}: engine.name={config.engine.name} takes {', '.join(sorted(taken))} only. Use one of these."
    elif wanted is WeightTransportName.auto and config.launcher.ray_address is not None and "disk" not in taken:
        yield (
            f"launcher.ray_address with engine.name={config.engine.name}: engines may be on other nodes, and it takes "
            f"new weights by {', '.join(sorted(taken))} only. Leave launcher.ray_address null."
        )
