"""Derives the number of train steps from run.epochs, the number of passes over the training rows."""

from __future__ import annotations

import dataclasses
import math

from relax_core.config.choices import LauncherKind
from relax_core.config.schema import RelaxConfig
from relax_core.data.sources import are_rows_named, file_rows


def settle_steps(config: RelaxConfig) -> RelaxConfig:
    """Returns the configuration with ``run.steps`` derived from ``run.epochs`` if that is set.

    The check of the data reports problems of the data. For a job on another cluster this happens there, where its files
    are.
    """
    epochs, prompts = config.run.epochs, config.rollout.prompts_per_step
    if epochs is None or not 0 < epochs < math.inf or prompts < 1 or config.launcher.name is LauncherKind.ray_job:
        return config
    rows = _training_rows(config)
    if rows is None:
        return config
    steps = max(1, math.ceil(round(epochs * rows / prompts, 6)))
    return dataclasses.replace(config, run=dataclasses.replace(config.run, steps=steps))


def epoch_words(config: RelaxConfig) -> list[str]:
    """Returns where the number of train steps comes from, for a settled configuration with ``run.epochs``."""
    if config.run.epochs is None:
        return []
    rows, prompts = _training_rows(config), config.rollout.prompts_per_step
    return [f"run.epochs={config.run.epochs:g} over {rows} rows, {prompts} a step, is run.steps={config.run.steps}."]


def _training_rows(config: RelaxConfig) -> int | None:
    """Returns the number of training rows, or None if the data cannot be read."""
    data = config.data
    if data.task is not None:
        return data.size
    if not are_rows_named(data):
        return None
    try:
        return file_rows(data)[1]
    except (ValueError, OSError):
        return None
