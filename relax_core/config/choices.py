"""Defines the enums for configuration keys with a few named values."""

from __future__ import annotations

from enum import Enum

SEEDS = "seeds"  # data.task: rows for envs that need no data; a row has only its number, in order
NUMBER_GUESS, CALCULATOR = "number_guess", "calculator"  # envs with games that a builtin model's warm start teaches


class ModeName(Enum):
    """Names the schedules of rollout and trainer: they alternate, or run at the same time."""

    colocate = "colocate"
    asynchronous = "async"


class OnStale(Enum):
    """Lists the actions for groups outside the staleness window."""

    drop = "drop"
    mask = "mask"


class Surplus(Enum):
    """Lists the actions for over-sampled groups that a step does not need."""

    drop = "drop"
    keep = "keep"


class Partial(Enum):
    """Lists the actions for unfinished samples at a weight update."""

    in_place = "in_place"
    abort = "abort"


TEXT = "text"  # the option of `modality` that reads no images, videos or audio

# The parts of a model for `model.freeze`. The projector maps the towers' outputs to the language model.
VISION, AUDIO, PROJECTOR, LANGUAGE, ROUTER = MODEL_PARTS = ("vision", "audio", "projector", "language", "router")


class Schedule(Enum):
    """Names the learning-rate schedules."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"


# Handling of a prompt that ends with an assistant message; None rejects the prompt.
LastAssistant = Enum("LastAssistant", ["drop", "continue"])


class StatesPlace(Enum):
    """Lists the places of master weights and Adam's moments between updates."""

    device = "device"
    host = "host"


class Overlong(Enum):
    """Lists the actions for prompts that are too long."""

    drop = "drop"
    truncate_left = "truncate_left"
    truncate_middle = "truncate_middle"
    error = "error"


class MediaPlace(Enum):
    """Lists the positions to insert media in prompts without a placeholder."""

    first = "first"


class Recompute(Enum):
    """Lists how many activations the backward pass recomputes."""

    none = "none"
    selective = "selective"
    full = "full"


class GpuName(Enum):
    """Names the GPU models of `relax_core.plan.gpu_models`."""

    h100 = "h100"
    h200 = "h200"
    b200 = "b200"
    gb200 = "gb200"
    h20 = "h20"
    a100 = "a100"
    l40s = "l40s"
    a6000 = "a6000"
    l4 = "l4"
    a10 = "a10"
    rtx_4090 = "rtx_4090"


class ForwardRanks(Enum):
    """Names the processes that compute the log-probs of actor_fwd and reference."""

    actor = "actor"
    separate = "separate"


class WeightTransportName(Enum):
    """Names the transports for weights from the trainer to an engine."""

    auto = "auto"
    shared_memory = "shared_memory"
    gloo = "gloo"
    nccl = "nccl"
    cuda_ipc = "cuda_ipc"
    disk = "disk"


class LauncherKind(Enum):
    """Names the launchers."""

    local = "local"
    slurm = "slurm"
    ray_job = "ray_job"
