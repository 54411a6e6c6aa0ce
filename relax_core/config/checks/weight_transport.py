"""Checks engine.weight_transport against the other keys."""

from __future__ import annotations

from collections.abc import Iterator

from relax_core.config.errors import NotYet
from relax_core.config.schema import ModeName, RelaxConfig, WeightTransportName

EMBEDDED = "embedded"


def transport_problems(config: RelaxConfig) -> Iterator[str]:
    """Returns one sentence for each problem."""
    wanted, engine = config.engine.weight_transport, config.engine.name
    words = f"engine.weight_transport={wanted.value}"
    if wanted is WeightTransportName.cuda_ipc:
        yield NotYet(f"{words} is not built yet. Use engine.weight_transport=auto.")
    elif config.engine.urls and wanted not in (WeightTransportName.auto, WeightTransportName.disk):
        yield f"{words} with engine.urls: those servers have no loader of Relax's. Use disk, or auto."
    elif wanted is WeightTransportName.nccl and (engine == EMBEDDED or config.placement.gpus_per_node == 0):
        yield f"{words}: NCCL needs trainer and engines on GPUs. Use engine.weight_transport=auto."
    elif wanted is WeightTransportName.nccl and config.mode.name is ModeName.colocate:
        yield f"{words} with mode=colocate: they share GPUs, and NCCL wants one rank a GPU. Use disk, or auto."
