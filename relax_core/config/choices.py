"""Defines the keys of the configuration that have a few named values."""

from __future__ import annotations

from enum import Enum

SEEDS = "seeds"  # data.task: rows for envs that need no data; each has a number of its own, in the order of the rows
NUMBER_GUESS, CALCULATOR = "number_guess", "calculator"  # envs whose games are a builtin model's warm start


class ModeName(Enum):
    """Names the ways in which rollout and trainer share time."""

    colocate = "colocate"
    asynchronous = "async"


class OnStale(Enum):
    """Says what happens to a group outside of the staleness window."""

    drop = "drop"
    mask = "mask"


class Surplus(Enum):
    """Says what happens to over-sampled groups that a step does not need."""

    drop = "drop"
    keep = "keep"


class Partial(Enum):
    """Says what happens to unfinished samples when the weights change."""

    in_place = "in_place"
    abort = "abort"


TEXT = "text"  # the option of `modality` that reads no images, videos or sounds

# The parts of a model that `model.freeze` names. The projector maps what the towers give to the language model.
VISION, AUDIO, PROJECTOR, LANGUAGE, ROUTER = MODEL_PARTS = ("vision", "audio", "projector", "language", "router")


class Schedule(Enum):
    """Names the learning-rate schedules."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"


# Says what happens to the assistant's message with which a prompt ends; None refuses the prompt.
LastAssistant = Enum("LastAssistant", ["drop", "continue"])


class Overlong(Enum):
    """Says what happens to a prompt that is too long."""

    drop = "drop"
    truncate_left = "truncate_left"
    truncate_middle = "truncate_middle"
    error = "error"


class MediaPlace(Enum):
    """Says where the media of a row stand whose prompt has no place for them."""

    first = "first"


class Recompute(Enum):
    """Says which activations the backward pass computes again."""

    none = "none"
    selective = "selective"
    full = "full"


class WeightTransportName(Enum):
    """Names the ways in which a weight version reaches an engine."""

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
