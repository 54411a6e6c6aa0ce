"""Defines the valid and the usual range of each number in the schema, and checks numbers against both ranges."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from relax_core.config.errors import nearest
from relax_core.config.schema import FORWARD_SIZES, RelaxConfig
from relax_core.contracts.engine import MAX_TEMPERATURE, MAX_TOP_K, MIN_TEMPERATURE


@dataclass(frozen=True)
class Range:
    """Holds the interval from ``low`` to ``high``.

    With ``above`` it excludes ``low``, with ``below`` it excludes ``high``.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    why: str = ""

    def holds(self, value: float) -> bool:
        """Returns whether the value is finite and inside the range."""
        over = value > self.low if self.above else value >= self.low
        under = value < self.high if self.below else value <= self.high
        return math.isfinite(value) and over and under

    def describe(self) -> str:
        """Returns the range as text for an error message."""
        parts = []
        if self.low > -math.inf:
            parts.append(f"more than {self.low:.10g}" if self.above else f"at least {self.low:.10g}")
        if self.high < math.inf:
            parts.append(f"less than {self.high:.10g}" if self.below else f"at most {self.high:.10g}")
        return " and ".join(parts)


_POSITIVE = Range(0, above=True)
_COUNT = Range(1)
_FROM_ZERO = Range(0)

RANGES: dict[str, Range] = {
    "seed": Range(0, 2**31 - 1),
    "parallel.dp": _COUNT,
    "parallel.tp": _COUNT,
    "parallel.pp": _COUNT,
    "parallel.vpp": _COUNT,
    "parallel.cp": _COUNT,
    "parallel.ep": _COUNT,
    "parallel.etp": _COUNT,
    **{f"parallel.forward.{size}": _COUNT for size in FORWARD_SIZES},
    "parallel.micro_batch_tokens": _COUNT,
    "parallel.micro_batch_patches": _COUNT,
    "model.moe_aux_loss_coef": Range(0, why="0: no balancing loss"),
    "model.lora.rank": Range(0, why="0: no LoRA; 32 is usual"),
    "model.lora.alpha": Range(0, above=True, why="32 is usual"),
    "modality.video_fps": _POSITIVE,
    "modality.frame_tokens": _COUNT,
    "modality.workers": _COUNT,
    "placement.nodes": _COUNT,
    "placement.gpus_per_node": Range(0, why="0: CPU cores"),
    "mode.max_staleness": _FROM_ZERO,
    "engine.count": _COUNT,
    "engine.tp": _COUNT,
    "engine.port": Range(0, 65535, why="0 takes any free port"),
    "engine.max_running_samples": _COUNT,
    "engine.max_total_tokens": _COUNT,
    "engine.context_length": _COUNT,
    "engine.threads": Range(0, why="0 means all cores for a large model in colocate, otherwise 1"),
    "engine.start_timeout_s": _POSITIVE,
    "engine.elastic.max_count": _COUNT,
    "engine.autoscaler.cooldown_s": _FROM_ZERO,
    "gateway.port": Range(0, 65535, why="0 takes any free port"),
    "data.size": _FROM_ZERO,
    "data.eval_size": _FROM_ZERO,
    "data.max_bad_rows": Range(0, 1, below=True, why="a share of all rows; 0 ends the run with the first bad row"),
    "launcher.nodes": _COUNT,
    "launcher.object_store_mb": Range(80, why="Ray needs at least this much"),
    "optimizer.lr": _POSITIVE,
    "optimizer.min_lr_ratio": Range(0, 1),
    "optimizer.beta2": Range(0, 1, below=True),
    "optimizer.eps": _POSITIVE,
    "optimizer.weight_decay": _FROM_ZERO,
    "optimizer.clip_grad": Range(0, why="0 turns clipping off"),
    "rollout.workers": Range(1, 64),
    "rollout.prompts_per_step": _COUNT,
    "rollout.max_new_tokens": _COUNT,
    "rollout.temperature": Range(
        MIN_TEMPERATURE, MAX_TEMPERATURE, why="at temperature 0 all samples of a group are equal"
    ),
    "rollout.top_p": Range(0, 1, above=True),
    "rollout.top_k": Range(-1, MAX_TOP_K, why="-1 keeps all tokens"),
    "rollout.min_p": Range(0, 1, below=True, why="0 keeps all tokens"),
    "rollout.reward_workers": _COUNT,
    "rollout.over_sampling": Range(1, 16, why="1 admits only the groups that a step needs"),
    "rollout.quorum": Range(0, 1, above=True),
    "agent.workers": Range(0, why="0: one process per episode"),
    "agent.timeout_s": _POSITIVE,
    "endpoint.port": Range(0, 65535, why="0 takes any free port"),
    "run.steps": Range(1, why="relax eval evaluates without training"),
    "run.save_every": Range(0, why="0 saves only at the end"),
    "run.keep_last": _COUNT,
    "run.patience": Range(0, why="0 disables early stopping"),
    "run.start_timeout_s": _POSITIVE,
    "run.stall_timeout_s": _POSITIVE,
    "run.max_restarts": _FROM_ZERO,
    "run.max_recoveries": _FROM_ZERO,
    "run.heartbeat_timeout_s": _POSITIVE,
    "eval.every": Range(0, why="0 never evaluates"),
    "eval.rows": _COUNT,
    "eval.samples": Range(1, 256, why="the number of answers per prompt"),
    "eval.temperature": Range(0, why="0 is greedy"),
}

# These keys may be null; ``why`` explains null.
OPTIONAL: dict[str, Range] = {
    "parallel.first_stage_layers": Range(1, why="null gives all stages the same number of layers"),
    "placement.gpu_memory_gib": Range(0, above=True, why="null takes the memory of placement.gpu"),
    "optimizer.critic_lr": Range(0, above=True, why="null takes optimizer.lr"),
    "optimizer.tower_lr": Range(0, above=True, why="null takes optimizer.lr; model.freeze=[vision] freezes the tower"),
    "optimizer.warmup_steps": Range(0, why="null takes 10, or run.steps if this is less"),
    "engine.prefix_cache_tokens": Range(0, why="null means 4 groups of the longest episodes; 0 keeps no prefixes"),
    "run.epochs": Range(0, above=True, why="null does not change run.steps"),
}

# No published run uses values outside these ranges, so such a value is probably a mistake, e.g. a wrong unit or a lost
# decimal point. If a user intends the value, its key in run.confirm confirms it. ``why`` is the reason for the bound.
USUAL: dict[str, Range] = {
    "optimizer.lr": Range(high=1e-2, why="Adam moves each weight by about this much in a step"),
    "optimizer.critic_lr": Range(high=1e-2, why="Adam moves each weight by about this much in a step"),
    "optimizer.tower_lr": Range(high=1e-2, why="Adam moves each weight by about this much in a step"),
    "optimizer.weight_decay": Range(high=1, why="0 to 0.1 are usual"),
    "optimizer.eps": Range(high=1e-3, why="above it Adam no longer scales its steps; 1e-8 is usual"),
    "optimizer.clip_grad": Range(high=1000, why="1 is usual; 0 turns clipping off"),
    "algo.clip_low": Range(high=1, why="from 1 on no ratio is clipped from below"),
    "algo.clip_high": Range(high=10, why="0.2 and 0.28 are usual, 4 for CISPO"),
    "algo.kl_coef": Range(high=10, why="0.001 to 0.1 are usual"),
    "algo.entropy_coef": Range(high=1, why="0.001 to 0.05 are usual"),
    "algo.group_size": Range(high=1024, why="samples a prompt; 8 to 64 are usual"),
    "algo.epochs": Range(high=100, why="passes over the prompts of one train step; run.epochs is for the data"),
    "mode.max_staleness": Range(high=64, why="weight versions; 0 to 8 are usual"),
    "rollout.temperature": Range(0.1, 5, why="1 is usual"),
    "eval.temperature": Range(high=5, why="0 to 1 are usual"),
    "rollout.top_p": Range(0.1, 1, why="below this, sampling keeps about one token"),
    "rollout.min_p": Range(high=0.5, why="above this, sampling keeps about one token"),
    "rollout.prompts_per_step": Range(high=65536, why="prompts, each with algo.group_size samples"),
    "rollout.max_new_tokens": Range(high=1 << 20, why="no model writes longer responses"),
    "run.steps": Range(high=10_000_000, why="train steps"),
    "run.epochs": Range(high=10_000, why="passes over all training rows"),
}
REAL_LR = Range(high=1e-4, why="full training of a published model uses 1e-7 to 1e-5; the demo uses 8e-4")
REAL_BYTES = 20_000_000  # size of weights; Relax's tiny models and the models of tests are smaller

_NULL = ("launcher.memory_gb", "engine.context_length")  # keys that may be null

OF_LAUNCHER: dict[str, dict[str, Range]] = {
    "local": {},
    "slurm": {
        "launcher.cpus_per_node": _COUNT,
        "launcher.memory_gb": _POSITIVE,
        "launcher.time_limit_min": _COUNT,
        "launcher.checkpoint_s": _COUNT,
        "launcher.max_requeues": _FROM_ZERO,
    },
    "ray_job": {
        "launcher.cpus_per_node": _COUNT,
        "launcher.memory_gb": _POSITIVE,
    },
}


def value_of(config: RelaxConfig, key: str) -> object:
    """Returns the value at a dotted key."""
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def usual_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a problem for each unusual value that the user has not confirmed, and for unnecessary confirmations."""
    confirmed = config.run.confirm
    for key in confirmed:
        if key not in USUAL:
            near = nearest(key, USUAL)
            hint = f"Nearest: {', '.join(near)}." if near else "Drop it."
            yield f"run.confirm has {key}, which needs no confirmation. {hint}"
    is_real = _weight_bytes(config) > REAL_BYTES
    for key, usual in USUAL.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name, None)
        if is_real and key.startswith("optimizer.") and key.endswith("lr"):
            usual = REAL_LR
        if key in confirmed or not isinstance(value, int | float) or usual.holds(value):
            continue
        # Another problem reports a value outside the valid range.
        if math.isfinite(value) and (key not in RANGES or RANGES[key].holds(value)):
            yield (
                f"{key}={value}: runs use {usual.describe()} ({usual.why}). Give another value, or confirm this value: "
                f"run.confirm=[{','.join([*confirmed, key])}]."
            )


def _weight_bytes(config: RelaxConfig) -> int:
    """Returns the bytes of weights in the model's folder.

    For a plan with a shape, returns a size that marks a real model.
    """
    if config.model.path is None:
        return 0 if config.model.shape is None else REAL_BYTES + 1
    return sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors") if file.is_file())


def finite_problems(value: object, key: str = "") -> Iterator[str]:
    """Yields a problem for each number in a configuration that is not finite.

    In a list or a mapping .inf may be a bound, so only NaN is refused there.
    """
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from finite_problems(getattr(value, field.name), f"{key}.{field.name}" if key else field.name)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from finite_problems([inner], f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for element in value:
            if isinstance(element, float) and math.isnan(element):
                yield f"{key}={element}: expected a number."
            elif not isinstance(element, float):
                yield from finite_problems(element, key)
    elif isinstance(value, float) and not math.isfinite(value) and key not in RANGES and key not in OPTIONAL:
        yield f"{key}={value}: expected a finite number."


def range_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a problem for each number that is not finite or out of range."""
    yield from finite_problems(config)
    for key, allowed in (RANGES | OF_LAUNCHER[config.launcher.name.value]).items():
        value = value_of(config, key)
        if value is None and key in _NULL:
            continue
        assert isinstance(value, int | float)
        if not math.isfinite(value):
            yield f"{key}={value}: must be finite, and {allowed.describe()}."
        elif not allowed.holds(value):
            why = f" ({allowed.why})" if allowed.why else ""
            yield f"{key}={value}: must be {allowed.describe()}{why}."
    for key, allowed in OPTIONAL.items():
        value = value_of(config, key)
        assert value is None or isinstance(value, int | float)
        if value is not None and not allowed.holds(value):
            yield f"{key}={value}: must be {allowed.describe()}. {allowed.why}."
    if config.rollout.top_k == 0:
        yield "rollout.top_k=0 keeps no token. Use -1 to keep all."
    if config.rollout.top_k == 1:
        yield (
            "rollout.top_k=1 keeps one token, with log-prob 0 for any weights, so nothing is learnt. "
            "Use 2 or more, or -1 to keep all."
        )
