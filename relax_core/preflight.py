"""Checks that belong to other rooms, run before anything starts: layout, model, data, free port.

config/ may not look upward, so the entry point hands these to it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

from relax_core.config.model_folder import read_model_config
from relax_core.config.schema import RelaxConfig
from relax_core.data import generated
from relax_core.data.sources import make_source
from relax_core.tools.make_tiny import MAX_POSITIONS, MODEL_NAMES
from relax_core.train.layout import check_layout
from relax_core.train.models.registry import find_family, read_model


def layout_problems(config: RelaxConfig) -> Iterator[str]:
    """A parallel layout that the trainer cannot run."""
    if config.parallel.dp < 1:
        return  # config/ has said so
    try:
        check_layout(config.parallel, config.parallel.dp)
    except ValueError as error:
        yield str(error)


def family_problems(config: RelaxConfig) -> Iterator[str]:
    """A model family that is not built, or a model folder that is not of it."""
    try:
        find_family(config.model.family)
    except ValueError as error:
        yield str(error)
        return
    folder = Path(config.model.path) if config.model.path is not None else None
    if folder is None or not (folder / "config.json").is_file():
        return
    try:
        read_model_config(folder)
    except ValueError:
        return  # config/ has said so
    try:
        read_model(folder, config.model.family)
    except ValueError as error:
        yield str(error)


def builtin_model_problems(config: RelaxConfig) -> Iterator[str]:
    """A built-in model, or a task for its warm start, that does not exist; a context longer than its positions."""
    model = config.model
    if model.builtin is None or model.path is not None:
        return
    if model.builtin not in MODEL_NAMES:
        yield f"model.builtin={model.builtin}: no such built-in model. What exists: {', '.join(MODEL_NAMES)}."
    if config.engine.context_length > MAX_POSITIONS:
        yield (
            f"engine.context_length={config.engine.context_length} is more than the model's {MAX_POSITIONS} positions. "
            f"Use engine.context_length={MAX_POSITIONS} or less."
        )
    if model.task is not None and model.task not in generated.task_names():
        tasks = ", ".join(generated.task_names())
        yield f"model.task={model.task}: no such generated task. What exists: {tasks}."


def data_problems(config: RelaxConfig) -> Iterator[str]:
    """A task or a file that cannot serve: every line of the file is read once."""
    data = config.data
    if (data.task is None) == (data.path is None) or min(data.size, data.eval_size, config.eval.rows) < 0:
        return  # config/ has said so
    try:
        make_source(data, seed=config.seed, eval_rows=config.eval.rows if config.eval.every else 0)
    except ValueError as error:
        yield str(error)


def port_problems(config: RelaxConfig) -> Iterator[str]:
    """A fixed engine port that another process holds."""
    if not 0 < config.engine.port <= 65536 - config.engine.count:
        return  # any port, or one that config/ has refused
    family = socket.AF_INET6 if ":" in config.engine.host else socket.AF_INET
    for port in range(config.engine.port, config.engine.port + config.engine.count):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.engine.host, port))
            except OSError as error:
                yield f"engine.port={port} cannot be used ({error.strerror}). Use engine.port=0 for any free port."


CHECKS = (layout_problems, family_problems, builtin_model_problems, data_problems, port_problems)
