"""Finds settings that make a trainer fit into its GPUs; each named setting was evaluated on the plan's own sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from relax_core.config.choices import Recompute
from relax_core.config.schema import RelaxConfig
from relax_core.plan.workload import Workload

Peak = Callable[[RelaxConfig, Workload], int]  # returns the bytes of a GPU in the trainer's largest phase
_MORE_GPUS = "raise parallel.tp, parallel.cp or parallel.pp with more GPUs"


def trainer_room(config: RelaxConfig, work: Workload, peak: Peak, *, limit: int) -> str:
    """Returns the fix, without its full stop, for a trainer whose peak exceeds ``limit`` bytes.

    The fix is the first change of settings that fits, or how many rows would fit.
    """
    parallel = config.parallel
    changes: list[dict[str, Any]] = [{}]
    if parallel.dp * parallel.cp > 1 and not parallel.distributed_optimizer:
        changes.append({"distributed_optimizer": True})
    if parallel.recompute is not Recompute.full:
        changes += [change | {"recompute": Recompute.full} for change in tuple(changes)]
    for change in changes:
        changed = replace(config, parallel=replace(parallel, **change))
        rows = work.micro_batch_rows if peak(changed, work) <= limit else _rows_that_fit(changed, work, peak, limit)
        if rows >= work.episode_rows:
            words = [f"parallel.{key}={_typed(value)}" for key, value in change.items()]
            if rows < work.micro_batch_rows:
                words.append(f"parallel.micro_batch_tokens={rows}")
            return f"Set {' '.join(words)}"
    tried = f" with parallel.recompute=full{' parallel.distributed_optimizer=true' if len(changes[-1]) > 1 else ''}"
    if rows == 0:
        return f"Even{tried} its weights, gradients and Adam states leave no room for a row: {_MORE_GPUS}"
    return (
        f"One episode, {work.prompt_tokens} prompt and "
        f"{work.episode_rows - work.prompt_tokens} response rows, is never cut, and of its "
        f"{work.episode_rows} rows only {rows} fit even{tried}: {_MORE_GPUS}, or lower rollout.max_new_tokens"
    )


def _rows_that_fit(config: RelaxConfig, work: Workload, peak: Peak, limit: int) -> int:
    """Returns how many rows of a micro-batch fit on one rank, fewer than now, or 0 if not even one fits."""
    fitting, too_many = 0, work.micro_batch_rows
    while too_many - fitting > 1:
        rows = (fitting + too_many) // 2
        if peak(config, replace(work, micro_batch_rows=rows)) <= limit:
            fitting = rows
        else:
            too_many = rows
    return fitting


def _typed(value: Recompute | bool) -> str:
    return value.value if isinstance(value, Recompute) else str(value).lower()
