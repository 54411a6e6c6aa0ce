"""Checks that belong to other rooms, run before anything starts: layout, model, data, free port.

config/ may not look upward, so the entry point hands these to it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

from relax_core.config.errors import NotYet
from relax_core.config.model_folder import read_model_config
from relax_core.config.schema import DataConfig, RelaxConfig
from relax_core.contracts.algorithm import TeacherNeeds
from relax_core.control.teachers import teacher_model_problems
from relax_core.data import generated
from relax_core.data.sources import GENERATED_KEYS, file_rows, make_source
from relax_core.plan.models import shape_dimensions
from relax_core.registry import find_algorithm
from relax_core.rollout.teachers import named_teacher
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
        yield NotYet(error)


def family_problems(config: RelaxConfig) -> Iterator[str]:
    """A model family that is not built, or a model folder that is not of it."""
    try:
        planned = shape_dimensions(config.model.shape).family if config.model.shape is not None else None
    except ValueError as error:
        yield str(error)
        return
    try:
        find_family(config.model.family)
    except ValueError as error:
        yield NotYet(error) if config.model.family == planned else str(error)
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


def teacher_problems(config: RelaxConfig) -> Iterator[str]:
    """Teachers that are not there or do not fit the model, and data that does not say which is whose."""
    needs = find_algorithm(config.algo.name).needs(config.algo)
    teachers = needs.teacher
    if teachers is None:
        return
    truncated = config.rollout.top_p < 1.0 or config.rollout.top_k > 0
    if truncated and needs.old_logprobs == "rollout" and not teachers.top_k:
        yield (
            f"rollout.top_p={config.rollout.top_p}, rollout.top_k={config.rollout.top_k} with algo.name="
            f"{config.algo.name}: the engine's log-probs are those of the tokens that were left, the teacher's those "
            "of all. Use algo.old_logprobs=actor_fwd, or leave the two alone."
        )
    for name, model in teachers.models.items():
        yield from teacher_model_problems(config, name, model, top_k=teachers.top_k)
    if teachers.key and config.data.path is not None:
        yield from _teacher_column_problems(config.data, teachers)
    elif teachers.key and teachers.key not in GENERATED_KEYS:
        has = ", ".join(GENERATED_KEYS)
        yield f"algo.teacher_key={teachers.key}: data={config.data.name} has only {has}. Use data=file."


def _teacher_column_problems(data: DataConfig, teachers: TeacherNeeds) -> Iterator[str]:
    """The first row that is trained on and names no teacher."""
    try:
        rows, count = file_rows(data)
        for number in range(count):
            named_teacher(rows[number], teachers.key, known=teachers.models, what=rows.where(number))
    except ValueError as error:
        yield str(error)


CHECKS = (layout_problems, family_problems, builtin_model_problems, data_problems, teacher_problems, port_problems)
