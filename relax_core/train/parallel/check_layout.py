"""Whether a rank may join with the layout that it was given. Imports nothing heavy."""

from __future__ import annotations

from relax_core.config.schema import ParallelConfig
from relax_core.train.parallel.layout_arithmetic import combination_faults, switch_faults, world_size


def check_layout(parallel: ParallelConfig, ranks: int) -> None:
    """Raises ValueError (key, value, fix) for a layout that contradicts itself or does not fill ``ranks`` ranks."""
    faults = [*combination_faults(parallel), *switch_faults(parallel)]
    if world_size(parallel) != ranks:
        faults.append(
            f"parallel.dp={parallel.dp} x tp={parallel.tp} x pp={parallel.pp} x cp={parallel.cp} = "
            f"{world_size(parallel)} ranks, but there are {ranks}."
        )
    if faults:
        raise ValueError(" ".join(faults))
