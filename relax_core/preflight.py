"""Checks a configuration before a run starts: parallel layout, model, data, plug-ins, teachers, engine ports and GPUs.

These checks need packages that config/ must not import, so the entry point passes the checks to config/.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from relax_core.config.choices import LauncherKind
from relax_core.config.engine_checks import engine_count, offline_rows
from relax_core.config.errors import NotYet
from relax_core.config.modality import mix_problem
from relax_core.config.model_checks import media_token_ids, settle_dtype
from relax_core.config.redaction import packed_text
from relax_core.config.reward_choice import RewardChoice
from relax_core.config.schema import FORWARD_SIZES, RelaxConfig
from relax_core.contracts.algorithm import AlgorithmSpec
from relax_core.contracts.engine import MAX_BANNED
from relax_core.contracts.reward import RewardSpec
from relax_core.control.model_folders import judge_problems, teacher_model_problems
from relax_core.data.eval_sets import name_problems
from relax_core.data.generated import example, task_names
from relax_core.data.plugin_source import is_configured, names_plugin, source_config
from relax_core.data.sources import GENERATED_KEYS, file_rows
from relax_core.families.folder import folder_architecture
from relax_core.families.hf_config import has_hf_config, language_values, read_hf_config
from relax_core.families.tiny_configs import MAX_POSITIONS, MODEL_NAMES, tiny_config
from relax_core.observe.alarms import read_receivers
from relax_core.observe.event_log import EVAL
from relax_core.plan.context_length import settle_context, settle_evaluation_context
from relax_core.plan.data_check import settle_steps, summarize_data
from relax_core.plan.memory_terms import adapted_matrices
from relax_core.plan.model_dimensions import ModelDimensions, find_dimensions, layout_shape, shape_dimensions
from relax_core.plan.placement import device_files, gpu_problems
from relax_core.registry import Kind, find, find_algorithm, find_engine, find_family, find_reward, is_builtin
from relax_core.roles.process_placement import layout_key, worker_group_layouts
from relax_core.rollout.eval_metrics import MAX_SAMPLES
from relax_core.rollout.evaluator import metric_names
from relax_core.rollout.trial.plugin_trial import Request, try_plugins
from relax_core.tools.make_tiny import check_tiny_model
from relax_core.train.hf.stored_weights import weight_problems
from relax_core.train.parallel_layout import (
    combination_faults,
    model_faults,
    switch_faults,
    trainer_faults,
)

ADDRESS_S = 5.0  # time limit of a connection to a Ray head

SHOWN = 3  # maximum number of reported problems with a folder's weights; a wrong folder has thousands


def layout_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields an error for each parallel layout with sizes that contradict each other or do not divide the model."""
    layouts = {layout_key(role): layout for role, layout in worker_group_layouts(config).items()}
    sizes = [getattr(layout, size) for layout in layouts.values() for size in FORWARD_SIZES]
    if min(*sizes, config.parallel.vpp) < 1:
        return  # config/ has reported it
    yield from switch_faults(config.parallel)
    for key, layout in layouts.items():
        yield from combination_faults(layout, key=key)
    model = _known_model(config)
    if model is None:
        return
    shape = layout_shape(model)
    yield from trainer_faults(config.parallel, shape)
    gpus = config.placement.nodes * config.placement.gpus_per_node
    for key, layout in layouts.items():
        yield from model_faults(layout, shape, key=key, most=gpus or None)


def _known_model(config: RelaxConfig) -> ModelDimensions | None:
    """Returns the model's dimensions, or None if there is no model yet or another check refuses the model."""
    if config.model.builtin is not None and config.model.builtin not in MODEL_NAMES:
        return None
    try:
        return find_dimensions(config)
    except (ValueError, OSError):
        return None


def adapter_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields an error for LoRA targets that the model does not have, and for a rank above a size of a layer."""
    model, lora = _known_model(config), config.model.lora
    if model is None or lora.rank < 1:
        return
    sizes = [min(matrix.out, matrix.into) for matrix in adapted_matrices(config, model)]
    if not sizes:
        yield (
            f"model.lora.targets=[{','.join(lora.targets)}]: the model has none of these layers; experts and linear "
            "attention have no factors. Add q_proj."
        )
    elif lora.rank > min(sizes):
        yield (
            f"model.lora.rank={lora.rank}: the smallest of the layers has {min(sizes)} rows or columns. Use "
            f"{min(sizes)} or less."
        )


def family_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields an error for a model family that is not implemented, and for a model folder of a different family."""
    try:
        planned = shape_dimensions(config.model.shape).family if config.model.shape is not None else None
    except ValueError as error:
        yield str(error)
        return
    try:
        if config.model.family is not None:
            find_family(config.model.family)
    except ValueError as error:
        yield NotYet(error) if config.model.family == planned else str(error)
        return
    folder = Path(config.model.path) if config.model.path is not None else None
    if folder is None or not has_hf_config(folder):
        return
    try:
        read_hf_config(folder)
    except ValueError:
        return  # config/ has reported it
    try:
        architecture = folder_architecture(folder, family=config.model.family)
    except ValueError as error:
        yield str(error)
        return
    if any(folder.glob("*.safetensors")):
        wrong = weight_problems(folder, architecture)
        yield from wrong[:SHOWN]
        if len(wrong) > SHOWN:
            yield f"{len(wrong) - SHOWN} more: relax check-model {folder}"


def experts_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields an error for each mixture-of-experts setting if the model has no experts."""
    asked = {}
    if config.algo.routing_replay:
        asked["algo.routing_replay"] = "true"
    if config.model.moe_aux_loss_coef:
        asked["model.moe_aux_loss_coef"] = f"{config.model.moe_aux_loss_coef:g}"
    if not asked:
        return
    if config.model.path is not None:
        try:
            values = language_values(read_hf_config(Path(config.model.path)))
        except (ValueError, OSError):
            return  # config/ has reported it
    elif config.model.builtin in MODEL_NAMES:
        values = language_values(tiny_config(config.model.builtin))
    else:
        return  # there is no model yet
    if not (values.get("num_local_experts") or values.get("num_experts")):
        for key, value in asked.items():
            yield f"{key}={value}: model={config.model.name} has no experts. Drop it, or choose a mixture of experts."


def builtin_model_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields an error for an unknown built-in model or warm-start task, or for a context that is too long."""
    model = config.model
    if model.builtin is None or model.path is not None:
        return
    if model.builtin not in MODEL_NAMES:
        yield f"model.builtin={model.builtin}: no such built-in model. Models: {', '.join(MODEL_NAMES)}."
    elif model.task is not None:
        try:
            check_tiny_model(model.builtin, task=model.task)
        except ValueError as error:
            yield str(error)
    context = config.engine.context_length
    if context is not None and context > MAX_POSITIONS:
        yield (
            f"engine.context_length={context} is more than the model's {MAX_POSITIONS} positions. "
            f"Use engine.context_length={MAX_POSITIONS} or less."
        )


def banned_token_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields an error for banned tokens outside the vocabulary, and for a folder if its media tokens cannot be read."""
    model = config.model
    try:
        if model.path is not None:
            vocab_size = language_values(read_hf_config(Path(model.path))).get("vocab_size")
        elif model.builtin in MODEL_NAMES:
            vocab_size = language_values(tiny_config(model.builtin))["vocab_size"]
        else:
            return  # there is no model yet
    except (ValueError, OSError):
        return  # config/ has reported it
    if config.rollout.banned_token_ids is None:
        try:
            media_token_ids(Path(str(model.path)))
        except (ValueError, OSError) as error:
            yield f"model.path={model.path}: its media tokens are not known ({error}). Write tokenizer.json again."
        return
    for token in config.rollout.banned_token_ids:
        if isinstance(vocab_size, int) and not 0 <= token < vocab_size:
            yield (
                f"rollout.banned_token_ids names {token}, and the model has the tokens 0 to {vocab_size - 1}. "
                "Remove it, or use null for the tokenizer's media placeholders and ids without a text."
            )
    if len(config.rollout.banned_token_ids) > MAX_BANNED:
        yield (
            f"rollout.banned_token_ids has {len(config.rollout.banned_token_ids)} tokens, more than {MAX_BANNED}. With "
            "null these are ids for which the tokenizer has no text: give the tokenizer that belongs to the weights."
        )


def data_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields an error if the task or the files cannot be used or have too many unusable rows (`summarize_data`)."""
    data, new_tokens = config.data, config.rollout.max_new_tokens
    given = sum(setting is not None for setting in (data.task, data.path, data.paths)) + names_plugin(data)
    if given != 1 or min(data.size, data.eval_size, config.eval.rows, new_tokens, data.max_bad_rows) < 0:
        return  # config/ has reported it
    if data.mix is not None and mix_problem(data.mix):
        return
    samples = offline_rows(config) is None
    if samples and config.engine.context_length is not None and config.engine.context_length <= new_tokens:
        return
    if names_plugin(data) and not is_configured(data):
        return
    if plugin_problems(config):
        return  # `settle` has reported these errors, and an environment that hangs would hang this process
    try:
        refused = summarize_data(config).refused
    except (ValueError, OSError) as error:
        refused = str(error)
    if refused is not None:
        yield refused


def evaluation_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields an error for invalid names of evaluation sets, and if no evaluation reports the metric run.keep_best."""
    yield from name_problems(config)
    best, samples = config.run.keep_best, config.eval.samples
    if best is None or not 1 <= samples <= MAX_SAMPLES:
        return
    known = [f"{EVAL}/{name}" for name in metric_names(samples=samples, sets=list(config.eval.sets))]
    if best not in known:
        yield f"run.keep_best={best}: no evaluation of this run reports it. What exists: {', '.join(known)}."


def port_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields an error for each configured engine port that another process uses."""
    if engine_count(config) == 0 or not 0 < config.engine.port <= 65536 - config.engine.count:
        return  # 0 means any free port, and config/ has refused all other values
    for port in range(config.engine.port, config.engine.port + config.engine.count):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                yield f"engine.port={port} cannot be used ({error.strerror}). Use engine.port=0 for any free port."


def receiver_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields an error if notify.urls_file, the file of notification receivers, cannot be used."""
    if config.notify.urls_file is not None:
        try:
            read_receivers(Path(config.notify.urls_file))
        except ValueError as error:
            yield str(error)


def ray_address_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields an error for a Ray address without a listener; Ray itself would retry for minutes and end the process."""
    address = config.launcher.ray_address
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition(":")
    fix = "Start one with `ray start --head`, name its host:port, or leave the key null: the run then starts Ray."
    if not host or not port.isdecimal() or int(port) > 65535 or "/" in host:
        yield f"launcher.ray_address={address} is not a host:port of a Ray head. {fix}"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ADDRESS_S).close()
    except OSError as error:
        yield f"launcher.ray_address={address}: no server listens there ({error.strerror or error}). {fix}"


def engine_start_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the reasons why the configured kind of engine cannot start on this machine.

    If this machine has no GPU, a run on GPUs starts on another machine, so the engine is not checked.
    """
    if engine_count(config) == 0:
        return
    engine = find_engine(config.engine.name)
    if engine.on_gpus and config.placement.gpus_per_node and config.engine.python is None and not device_files():
        return
    yield from engine.start_problems(config)


def teacher_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields an error for teachers that are missing or do not fit the model, and if the data has no teacher column."""
    teachers = find_algorithm(config.algo.name).requirements(config.algo).teacher
    if teachers is None:
        return
    for name, model in teachers.models.items():
        yield from teacher_model_problems(config, name, model, top_k=teachers.top_k)
    if teachers.key and config.data.task is not None and teachers.key not in GENERATED_KEYS:
        has = ", ".join(GENERATED_KEYS)
        yield f"algo.teacher_key={teachers.key}: data={config.data.name} has only {has}. Use data=file."


def eval_engine_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields an error for each setting that an evaluation without training does not support."""
    if find_reward(config.reward.name).judges is not None:
        yield (
            f"reward={config.reward.name}: relax eval starts no engines for judges. Choose another reward, or evaluate "
            "in a run (eval.every)."
        )
    if config.engine.urls:
        yield "engine.urls: relax eval starts its own engines with the weights that it evaluates. Drop engine.urls."
    context, new_tokens = config.engine.context_length, config.rollout.max_new_tokens
    if context is not None and config.eval.samples * min(context, new_tokens + 1) > config.engine.max_total_tokens:
        yield (
            f"engine.max_total_tokens={config.engine.max_total_tokens} cannot hold eval.samples={config.eval.samples} "
            f"answers of rollout.max_new_tokens={new_tokens} to one prompt. Raise it."
        )


def settle(config: RelaxConfig) -> tuple[RelaxConfig, list[str]]:
    """Returns the configuration with derived values, and problems of plug-ins, context length and tokenizer.

    The entry point calls this function before the checks. It first tries the plug-ins in a process that can be killed,
    because later steps call the environment in this process.
    """
    config = settle_dtype(config)
    if problems := source_problems(config):
        return config, problems
    config = settle_steps(config)
    if problems := plugin_problems(config):
        return config, problems
    return settle_context(config)


def settle_evaluation(config: RelaxConfig) -> tuple[RelaxConfig, list[str]]:
    """Works like `settle` for an evaluation without training."""
    config = settle_dtype(config)
    config.model.dtype = str(config.model.dtype)  # no run has determined the dtype
    return settle_evaluation_context(config)


EVAL_CHECKS = (
    family_problems,
    builtin_model_problems,
    banned_token_problems,
    evaluation_problems,
    eval_engine_problems,
    port_problems,
    engine_start_problems,
)
CHECKS = (
    layout_problems,
    adapter_problems,
    family_problems,
    experts_problems,
    builtin_model_problems,
    banned_token_problems,
    data_problems,
    evaluation_problems,
    teacher_problems,
    judge_problems,
    port_problems,
    receiver_problems,
    engine_start_problems,
    ray_address_problems,
    gpu_problems,
)


CALL_S = 10.0  # a first call may import libraries
OPEN_S = 120.0  # a data source may load all its rows
TRIED_ROWS = 3  # the first row, the last row and one row between them


def plugin_problems(config: RelaxConfig) -> list[str]:
    """Tries the environment, the reward and the algorithm on rows of the data; returns their errors.

    Relax's own environments and rewards are tried only on the user's data, and its own algorithms are not tried. Errors
    that other checks report are not repeated. A Ray job is checked on its cluster, which has the files.
    """
    if config.launcher.name is LauncherKind.ray_job:
        return []
    if problems := source_problems(config):
        return problems
    own_data = config.data.task is None and offline_rows(config) is None
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
    """Tries a data source that is a plug-in; returns its errors.

    It is tried in a process that can be killed, because this process then reads the rows.
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
    """Tries plug-ins only once for each request, because runs of a sweep usually have the same plug-ins and data."""
    return tuple(try_plugins(msgspec.msgpack.decode(request, type=Request)))


def _packed(config: RelaxConfig, kind: Kind) -> tuple[str, bytes] | None:
    """Returns a plug-in's name and encoded settings, or None if another check refuses the settings."""
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
    """Yields (location, data row) of `TRIED_ROWS` training rows, or no row if the data cannot be read."""
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
        except (ValueError, TypeError, OverflowError):  # the row cannot be read or cannot be sent to another process
            continue
        yield rows.where(number), row
