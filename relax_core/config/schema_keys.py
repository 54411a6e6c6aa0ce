"""Lists the schema's keys and types, and builds the messages about unknown and removed keys."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from relax_core.config.errors import nearest
from relax_core.config.other_frameworks import synonym
from relax_core.config.schema import LAUNCHERS, RelaxConfig

_FIXED = "It is fixed now"
_CODE_LIMITS = {"wall_s": "10 s", "cpu_s": "5 s", "memory_mib": "512 MiB", "output_bytes": "16 KiB"}
# Removed key → replacement, or reason.
REMOVED = {
    **dict.fromkeys(("parallel.actor_fwd", "parallel.reference"), "Both have the layout parallel.forward"),
    "rollout.advantages": "The algorithm decides whether a role computes them",
    "agent.tool_parser": "The chat template determines it",
    **dict.fromkeys(("bus.lease_s", "bus.call_timeout_s"), f"{_FIXED}, at 600 s"),
    "bus.inline_bytes": f"{_FIXED}, at 64 KiB",
    "bus.max_row_bytes": f"{_FIXED}, at 256 MiB",
    "engine.request_timeout_s": f"{_FIXED}, at 600 s",
    "engine.sync_timeout_s": f"{_FIXED}, at 120 s",
    "engine.silent_s": f"{_FIXED}, at 2 s",
    "engine.elastic.lost_after_s": f"{_FIXED}, at 30 s",
    "engine.elastic.probe_tolerance": f"{_FIXED}, at 1e-4",
    "engine.autoscaler.window_s": "It is half of engine.autoscaler.cooldown_s",
    "modality.source_pixels": f"{_FIXED}, at 64 million",
    "modality.item_mb": f"{_FIXED}, at 64 MiB",
    "modality.prompt_items": f"{_FIXED}, at 16",
    "modality.max_bad_in_a_row": f"{_FIXED}, at 64",
    "agent.memory_gib": f"{_FIXED}, at 2 GiB",
    "agent.processes": f"{_FIXED}, at 64",
    "agent.grace_s": f"{_FIXED}, at 2 s",
    "endpoint.idle_s": "It is half of agent.timeout_s",
    "endpoint.max_body_mb": f"{_FIXED}, at 16 MB",
    "endpoint.max_sessions": "agent.workers bounds the agents of Relax; other agents may play all episodes in flight",
    "run.watch_after_s": "It is a fifth of run.stall_timeout_s",
    "run.watch_steps": f"{_FIXED}, at 20 steps",
    "notify.repeat_s": f"{_FIXED}, at an hour",
    "notify.restarts_per_hour": f"{_FIXED}, at 3",
    "notify.disk_gib": f"{_FIXED}, at 2 GiB",
    **dict.fromkeys([f"reward.{part}_weight" for part in ("right", "form", "tool")], "DeepEyes has fixed weights"),
    "reward.max_answer_chars": f"{_FIXED}, at 300",
    "tracker.samples_max_mb": f"{_FIXED}, at 2 GiB",
    **{f"launcher.{option}": f'Use launcher.sbatch=["--{option}=..."]' for option in ("account", "qos", "constraint")},
    "bus.storage_units": f"{_FIXED}, at 1",
    "data.row_group_mb": f"{_FIXED}, at 32 MB; the error of a larger row group shows how to write smaller groups",
    "engine.host": "Engines listen on loopback, or on the address of their node of a Ray cluster",
    **{f"env.code_{name}": f"{_FIXED}, at {value}" for name, value in _CODE_LIMITS.items()},
    "env.heartbeat_s": f"{_FIXED}, at 20 s",
    **dict.fromkeys(("parallel.name", "placement.name", "tracker.name"), "Choose an option, such as parallel=dp2"),
    "tracker.jsonl": "metrics.jsonl is always written",
    "optimizer.beta1": f"{_FIXED}, at 0.9",
    "launcher.ray_logical_cpus": f"{_FIXED}, at 16",
    "launcher.array_parallelism": f"{_FIXED}, at 16",
    "engine.autoscaler.min_count": "It is engine.count",
    "engine.elastic.drain_timeout_s": f"{_FIXED}, at 30 s; an order may set another time",
    "rollout.max_aborts": f"{_FIXED}, at 3",
    "modality.worker_timeout_s": f"{_FIXED}, at 120 s",
    "modality.worker_mb": f"{_FIXED}, at 4 GiB",
    **dict.fromkeys(("parallel.forward.cp", "parallel.forward.etp"), "Use parallel.forward.tp and ep"),
    "env.worker_memory_gib": f"{_FIXED}, at 2 GiB, unless the environment's own settings class has another value",
    "env.prefix_tools": "If several servers have a tool of the same name, its name is SERVER_TOOL",
    "reward.require_think": "A response without </think> is wrong",
    **dict.fromkeys(("algo.skip_without_advantage", "algo.std_epsilon"), "It is fixed now"),
    "launcher.manifest": "Use launcher.dry_run=true",
    "launcher.working_dir": "Install Relax on the cluster",
    "launcher.gpus_per_node": "It is placement.gpus_per_node, with placement=gpu",
    "launcher.volume_path": f"{_FIXED}, at /data",
    "launcher.namespace": "Use kubectl apply --namespace",
    "parallel.logprob_chunk_tokens": f"{_FIXED}, at 1024",
    "parallel.threads_per_rank": "It is engine.threads",
    "run.stop_timeout_s": "It is a tenth of run.stall_timeout_s, at least 60 s",
    "launcher.partition": 'Use launcher.sbatch=["--partition=..."]',
    "modality.cache_mb": f"{_FIXED}, at 1 GB",
    "run.async_save": "Checkpoints are always written in parallel to the steps",
    "run.show_samples": "The page shows the samples: relax dashboard",
    "rollout.quorum_grace_s": f"{_FIXED}, at 0 s",
    "rollout.reward_concurrency": f"{_FIXED}, at 64; the total is this times rollout.workers",
    "rollout.max_failed_groups": "It is 4 * rollout.prompts_per_step; reward.max_failed=1 never ends the run",
}


@cache
def section_types() -> dict[str, type]:
    """Maps each root key with a dataclass to the dataclass."""
    hints = typing.get_type_hints(RelaxConfig)
    return {key: hint for key, hint in hints.items() if dataclasses.is_dataclass(hint) and isinstance(hint, type)}


@cache
def known_keys() -> tuple[str, ...]:
    """Returns all dotted keys of the schema, without the settings of plug-ins."""
    keys: list[str] = []
    for root in dataclasses.fields(RelaxConfig):
        keys += section_keys(root.name) if root.name in section_types() else [root.name]
    return tuple(keys)


def section_keys(section: str) -> list[str]:
    """Returns the dotted keys of one section and of its subsections."""
    return list(_keys_below(section, section_types()[section]))


def _keys_below(key: str, section: type) -> Iterator[str]:
    for name, kind in typing.get_type_hints(section).items():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _keys_below(f"{key}.{name}", kind)
        else:
            yield f"{key}.{name}"


@cache
def launcher_keys() -> dict[str, tuple[str, ...]]:
    """Maps each dotted key of `launcher` to the launchers that have the key."""
    found: dict[str, tuple[str, ...]] = {}
    for name, launcher in LAUNCHERS.items():
        for field in dataclasses.fields(launcher):
            found[f"launcher.{field.name}"] = (*found.get(f"launcher.{field.name}", ()), name)
    return found


def unknown_key(key: str) -> str:
    """Returns the message for a key that the schema does not have."""
    leaf = key.rsplit(".", 1)[-1]
    if (
        removed := next((old_key for old_key in REMOVED if key == old_key or key.startswith(f"{old_key}.")), None)
    ) is not None:
        return f"{key} is not a key any more. {REMOVED[removed]}."
    if key.startswith("launcher."):
        return _unknown_launcher_key(key)
    parent = key.rpartition(".")[0]
    if "." in parent and parent in known_keys():  # a dict, such as placement.roles
        return f"{key} is not set yet. Add it with a plus: +{key}=..."
    if (here := synonym(key)) is not None:
        return f"{key} is not a key. {here}"
    same_leaf = [candidate for candidate in known_keys() if candidate.rsplit(".", 1)[-1] == leaf and leaf != "name"]
    near = same_leaf or nearest(key, known_keys()) or _by_leaf(leaf)
    if near:
        return f"{key} is not a key. Nearest: {', '.join(near)}."
    section = key.split(".", 1)[0]
    if section in section_types():
        return f"{key} is not a key. Keys of {section}: {', '.join(section_keys(section))}."
    roots = ", ".join(field.name for field in dataclasses.fields(RelaxConfig))
    return f"{key} is not a key. Root keys: {roots}."


def _unknown_launcher_key(key: str) -> str:
    keys = launcher_keys()
    if key in keys:
        having = " and ".join(f"launcher={name}" for name in keys[key])
        return f"{key} is a key of {having} only. Choose this launcher, or drop the key."
    if (here := synonym(key)) is not None:
        return f"{key} is not a key. {here}"
    if near := nearest(key, keys):
        return f"{key} is not a key. Nearest: {', '.join(near)}."
    return f"{key} is not a key. Keys of launcher: {', '.join(keys)}."


def _by_leaf(leaf: str) -> list[str]:
    leaves = {candidate.rsplit(".", 1)[-1] for candidate in known_keys()}
    near = nearest(leaf, leaves)
    return [candidate for candidate in known_keys() if candidate.rsplit(".", 1)[-1] in near][:3]


def types_of(key: str) -> list[Any]:
    """Returns the types of a dotted key in the schema; a launcher key may have several, an unknown key has no type.

    Settings of plug-ins are not in the schema.
    """
    section, _, rest = key.partition(".")
    roots = list(LAUNCHERS.values()) if section == "launcher" else [typing.get_type_hints(RelaxConfig).get(section)]
    return [found for root in roots if (found := type_below(root, rest)) is not None]


def type_below(root: Any, key: str) -> Any:
    """Returns the type of a dotted key below a type, or None.

    A part of the key is a field of a dataclass, a key of a mapping, or, for a list item, any text.
    """
    for name in key.split(".") if key else ():
        root = without_null(root)
        if isinstance(root, type) and dataclasses.is_dataclass(root):
            root = typing.get_type_hints(root).get(name)
        else:
            of = {dict: 1, list: 0}.get(typing.get_origin(root), -1)  # the value of a mapping or the item of a list
            root = typing.get_args(root)[of] if of >= 0 else None
    return root


def without_null(kind: Any) -> Any:
    """Returns T for the type T | None; returns other types unchanged."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        left = [arg for arg in typing.get_args(kind) if arg is not types.NoneType]
        return left[0] if len(left) == 1 else kind
    return kind
