"""Chooses the plug-ins that are tried before a start, and the rows for `relax_core.rollout.trial.plugin_trial`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from relax_core.config.choices import LauncherKind
from relax_core.config.redaction import packed_text
from relax_core.config.reward_choice import RewardChoice
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.algorithm import AlgorithmSpec
from relax_core.contracts.reward import RewardSpec
from relax_core.data.generated import example, task_names
from relax_core.data.plugin_source import names_plugin, source_config
from relax_core.data.sources import file_rows
from relax_core.registry import Kind, find, is_builtin
from relax_core.rollout.trial.plugin_trial import Request, try_plugins

CALL_S = 10.0  # a first call may import something
OPEN_S = 120.0  # a data source may load what it has
TRIED_ROWS = 3  # the first, the last and one between them


def plugin_problems(config: RelaxConfig) -> list[str]:
    """Returns what is wrong with the environment, the reward and the algorithm on rows of the data, in sentences.

    Relax's own plug-ins are tried if the data belongs to the user, its algorithms never. Problems that other checks
    report are left to them, and a job on another cluster is checked there, where its files are.
    """
    if config.launcher.name is LauncherKind.ray_job:
        return []
    if problems := source_problems(config):
        return problems
    own_data = config.data.task is None
    on_rows: list[Kind] = [k for k in ("env", "reward") if own_data or not is_builtin(k, getattr(config, k).name)]
    rows = list(_rows(config)) if on_rows else []
    tried: list[Kind] = on_rows if rows else []
    if not is_builtin("algo", config.algo.name):
        tried.append("algo")
    parts = {kind: packed for kind in tried if (packed := _packed(config, kind)) is not None}
    return (
        list(_tried(msgspec.msgpack.encode(Request(rows=rows, call_s=CALL_S, open_s=OPEN_S, **parts)))) if parts else []
    )


def source_problems(config: RelaxConfig) -> list[str]:
    """Returns what is wrong with a data source that is a plug-in.

    Its rows are read in this process afterwards, so it is tried first in a process that can be killed.
    """
    if config.launcher.name is LauncherKind.ray_job or not names_plugin(config.data):
        return []
    try:
        packed = msgspec.msgpack.encode(source_config(config.data), enc_hook=packed_text)
    except ValueError:
        return []
    request = Request(rows=[], data=(config.data.name, packed), call_s=CALL_S, open_s=OPEN_S)
    return list(_tried(msgspec.msgpack.encode(request)))


@cache
def _tried(request: bytes) -> tuple[str, ...]:
    """Keeps results, because the runs of a sweep usually have the same plug-ins and data."""
    return tuple(try_plugins(msgspec.msgpack.decode(request, type=Request)))


def _packed(config: RelaxConfig, kind: Kind) -> tuple[str, bytes] | None:
    """Returns name and settings, or None if another check refuses the settings."""
    plugin_config = getattr(config, kind)
    spec = find(kind, plugin_config.name)
    try:
        if isinstance(spec, AlgorithmSpec | RewardSpec):
            spec.check(plugin_config)
        if isinstance(spec, RewardSpec):
            RewardChoice(spec, plugin_config)
    except ValueError:
        return None
    return plugin_config.name, msgspec.msgpack.encode(plugin_config, enc_hook=packed_text)


def _rows(config: RelaxConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Returns trained rows, or none if the data cannot be read."""
    data = config.data
    if data.task is not None:
        for index in range(TRIED_ROWS if data.task in task_names() else 0):
            made = example(data.task, split="train", seed=config.seed, index=index)
            row = {"prompt": made.prompt, "answer": made.answer}
            yield f"row {index} of data={data.name}", row if made.seed is None else row | {"seed": made.seed}
        return
    try:
        rows, count = file_rows(data)
    except (ValueError, OSError):
        return
    for number in sorted({0, count // 2, count - 1} - {-1}):
        try:
            row = dict(rows[number])
            msgspec.msgpack.encode(row)
        except (ValueError, TypeError, OverflowError):  # it cannot be read, or sent to another process
            continue
        yield rows.where(number), row
