"""Validates a typed configuration: ranges, combinations, plug-in settings and paths.

Each problem is one sentence with the key, the value and the fix. All problems are reported together. Values appear in
batch scripts, logs and tables, so they must not contain line breaks or direction characters. Only texts that a model, a
plug-in or a user's program gets unchanged may contain these characters.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import stat
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from relax_core.config.choices import (
    ForwardRanks,
    LauncherKind,
    ModeName,
    OnStale,
    Overlong,
    Surplus,
    WeightTransportName,
)
from relax_core.config.engine_checks import (
    engine_count,
    engine_file_problems,
    engine_name_problems,
    engine_problems,
    offline_rows,
)
from relax_core.config.error_messages import missing_name
from relax_core.config.errors import NotYet, either
from relax_core.config.launcher_checks import launcher_problems
from relax_core.config.modality import modality_problems
from relax_core.config.model_checks import freeze_problems, lora_problems, model_problems
from relax_core.config.notify_rules import number_problem, read_rules
from relax_core.config.plugin_types import plugin_config, plugins_of
from relax_core.config.ranges import range_problems, usual_problems
from relax_core.config.redaction import secret_leaves
from relax_core.config.rollout_checks import agent_file_problems, agent_problems, reward_problems, turn_problems
from relax_core.config.saved_config import plain
from relax_core.config.schema import EVENTS, RelaxConfig, kept_groups
from relax_core.registry import (
    FILE_SINKS,
    find_algorithm,
    find_data_source,
    find_engine,
    find_env,
    find_reward,
    find_sink,
    is_file_plugin,
    names,
    short_name,
)

_TEXTS = (
    *("rollout.stop", "data.chat_template_kwargs", "data.config", "agent.env", "agent.command", "launcher.env"),
    "tracker.sinks",
)
_PLUGINS = ("algo", "reward", "env")  # files and tables show only the name of these plug-ins, no other settings
_BEGINS_LINE = ("Cc", "Zl", "Zp", "Cs")
_TURNS_TEXT = "\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def line_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields problems for values and names with control characters, for redacted secrets, and for agent.env."""
    values = plain(config, redact=False)
    yield from _below(values, "")
    for key in secret_leaves(values):
        yield f"{key} is a secret, and a saved configuration does not contain secrets. Add {key}=..."
    for name, value in config.agent.env.items():
        if not isinstance(value, str):  # OmegaConf accepts a mapping, too
            yield f"agent.env.{name}: expected text."
        elif not re.fullmatch(r"[^=\0\n\r]+", name) or "\0" in value:
            yield f"agent.env has the variable {name!r}: it cannot be set. Drop '=' and control characters."


def _below(values: Any, key: str) -> Iterator[str]:
    if isinstance(values, Mapping):
        for name, value in values.items():
            below = f"{key}.{name}" if key else str(name)
            if below in _TEXTS or (key in _PLUGINS and name != "name"):
                continue
            if odd := _odd(str(name)):
                yield f"{key or 'the configuration'} has the name {str(name)!r} with the character {odd}. Drop it."
            yield from _below(value, below)
    elif isinstance(values, list):
        for value in values:
            yield from _below(value, key)
    elif isinstance(values, str) and (odd := _odd(values)):
        yield f"{key}={values!r} has the character {odd}, which would break a line or reverse a text. Drop it."


def _odd(text: str) -> str:
    """Returns the code of the first control or direction character in a text, or ""."""
    if text.isascii() and text.isprintable():
        return ""
    found = next((char for char in text if unicodedata.category(char) in _BEGINS_LINE or char in _TURNS_TEXT), "")
    return f"U+{ord(found):04X}" if found else ""


def transport_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of engine.weight_transport."""
    wanted, taken = config.engine.weight_transport, find_engine(config.engine.name).transports
    message = f"engine.weight_transport={wanted.value}"
    if wanted is WeightTransportName.cuda_ipc:
        yield NotYet(f"{message} is not built yet. Use engine.weight_transport=auto.")
    elif config.engine.urls and wanted not in (WeightTransportName.auto, WeightTransportName.disk):
        yield f"{message} with engine.urls: servers that the run did not start load from its folder. Use disk, or auto."
    elif wanted is WeightTransportName.nccl and ("nccl" not in taken or config.placement.gpus_per_node == 0):
        yield f"{message}: NCCL needs trainer and engines on GPUs. Use engine.weight_transport=auto."
    elif wanted is WeightTransportName.nccl and config.mode.name is ModeName.colocate:
        yield (
            f"{message} with mode=colocate: trainer and engines share GPUs, and NCCL wants one rank a GPU. Use disk, "
            "or auto."
        )
    elif wanted is not WeightTransportName.auto and wanted.value not in taken:
        yield f"{message}: engine.name={config.engine.name} takes {', '.join(sorted(taken))} only. Use one of these."
    elif wanted is WeightTransportName.auto and config.launcher.ray_address is not None and "disk" not in taken:
        yield (
            f"launcher.ray_address with engine.name={config.engine.name}: engines may be on other nodes, and this kind "
            f"of engine takes new weights by {', '.join(sorted(taken))} only. Leave launcher.ray_address null."
        )


_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


def gateway_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of `gateway`, `engine.autoscaler` and `engine.elastic`."""
    gateway, engine = config.gateway, config.engine
    if engine.autoscaler.enabled and (why := _no_autoscaler(config)):
        yield f"engine.autoscaler.enabled=true {why}"
    yield from _host_problems("engine.elastic.allowed_hosts", engine.elastic.allowed_hosts)
    if gateway.name == "none":
        return
    if not _is_address(gateway.host):
        yield f"gateway.host={gateway.host} is no IPv4 address. Use 127.0.0.1, or an address of this machine."
    yield from _host_problems("gateway.allowed_hosts", gateway.allowed_hosts)


def _host_problems(key: str, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if not _HOST_NAME.fullmatch(name):
            yield f"{key} has {name!r}, which is no host name. Give it without scheme, port and path."


def _no_autoscaler(config: RelaxConfig) -> str:
    """Returns the reason why the autoscaler cannot work in this run, or ""."""
    if config.gateway.name == "none":
        return "with gateway=none: it orders engines through the gateway's order book. Use gateway=local."
    if config.mode.name is ModeName.colocate:
        return "with mode=colocate, because its engines are fixed. Use mode=async."
    if config.engine.urls:
        return "with engine.urls: the run starts no engines. Drop one of the two."
    if config.placement.gpus_per_node:
        return "with engines on GPUs, because their placement is fixed at the start. Leave it off."
    return ""


def _is_address(host: str) -> bool:
    try:
        return host == "localhost" or bool(ipaddress.IPv4Address(host))
    except ValueError:
        return False


Check = Callable[[RelaxConfig], Iterable[str]]

_BUILT = {
    "bus": ("ray", "transfer_queue"),
    "modality": ("auto", "text"),
    "gateway": ("none", "local"),
}
PLANS = (False, True, "json", "rehearse", "rehearse_json")
MAX_STOP_STRINGS, MAX_STOP_BYTES = 16, 1024  # limits of the engines
EVAL_SOURCE = "eval"  # the source name of evaluation records
_MAX_DIVISOR = 1024  # largest divisor that a message names


def problems_of(config: RelaxConfig, checks: Iterable[Check] = ()) -> list[str]:
    """Returns all problems of the configuration; empty if it can run. ``checks`` are further checks."""
    if problems := list(line_problems(config)):
        return problems
    if problems := [*launcher_problems(config), *engine_name_problems(config)]:
        return problems
    # The files of a Ray job are on the cluster, so this machine cannot check them.
    here = (*_FILE_CHECKS, *checks) if config.launcher.name is not LauncherKind.ray_job else ()
    return [problem for check in (range_problems, usual_problems, *_CHECKS, *here) for problem in check(config)]


def _check_plan(config: RelaxConfig) -> Iterator[str]:
    if not config.name.strip():
        yield f"name={config.name}: it is empty, but the run's folder needs a name. Give a name, or leave it out."
    if config.plan not in PLANS:
        yield f"plan={config.plan}: expected true, json, rehearse, rehearse_json or false."


def _check_names(config: RelaxConfig) -> Iterator[str]:
    for section, built in _BUILT.items():
        name = getattr(config, section).name
        if name not in built:
            yield missing_name(f"{section}.name", name, built)


def _check_mode(config: RelaxConfig) -> Iterator[str]:
    mode = config.mode
    if mode.name is ModeName.colocate and mode.max_staleness != 0:
        yield (
            f"mode.max_staleness={mode.max_staleness} with mode=colocate: this mode is strictly on-policy. "
            "Drop mode.max_staleness, or choose mode=async."
        )
    if mode.name is ModeName.colocate and config.rollout.workers > 1:
        yield (
            f"rollout.workers={config.rollout.workers} with mode=colocate: the engine gives its memory up when a "
            "step's groups are complete. With several workers, an evaluation may not have ended by then. Use "
            "rollout.workers=1, or mode=async."
        )
    if mode.name is ModeName.colocate and config.placement.gpus_per_node:
        yield from _shared_gpu_problems(config)


def _shared_gpu_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of a trainer and engines that share GPUs."""
    engine, needs = find_engine(config.engine.name), find_algorithm(config.algo.name).requirements(config.algo)
    if engine.on_gpus and not engine.releases_weights and not config.engine.urls:
        yield (
            f"engine.name={config.engine.name} with mode=colocate on GPUs: it cannot release the GPU memory of its "
            "weights while the trainer works. Use engine=sglang, or mode=async."
        )
    if config.placement.nodes > 1 or config.launcher.ray_address is not None:
        key = f"placement.nodes={config.placement.nodes}" if config.placement.nodes > 1 else "launcher.ray_address"
        yield NotYet(f"{key} with mode=colocate on GPUs is not built yet. Use one machine, or mode=async.")
    models = {"critic": needs.critic, "teacher": needs.teacher is not None}
    if wanted := [role for role, needed in models.items() if needed]:
        yield NotYet(
            f"mode=colocate on GPUs with algo.name={config.algo.name}: {', '.join(wanted)} cannot share GPUs with "
            "engines yet. Use mode=async, or an algorithm without these roles, such as algo=grpo."
        )
    forward = {"reference": needs.reference, "actor_fwd": needs.old_logprobs == "actor_fwd"}
    wanted = [role for role, needed in forward.items() if needed]
    if wanted and config.placement.forward is ForwardRanks.separate and not config.model.lora.rank:
        yield (
            f"placement.forward=separate with mode=colocate on GPUs: processes of {' and '.join(wanted)} cannot share "
            "GPUs with engines. Use placement.forward=actor, or mode=async."
        )


def _check_plugins(config: RelaxConfig) -> Iterator[str]:
    for check in (
        lambda: find_algorithm(config.algo.name).check(config.algo),
        lambda: find_reward(config.reward.name).check(config.reward),
        lambda: find_env(config.env.name).check(config.env),
    ):
        try:
            check()
        except ValueError as error:
            yield from str(error).splitlines()
    for key, what in (
        ("group_size", "sample a prompt"),
        ("mini_batches", "update a train step"),
        ("epochs", "time that a prompt is trained on"),
    ):
        if getattr(config.algo, key) < 1:
            yield f"algo.{key}={getattr(config.algo, key)}: at least one {what}."


def _check_sinks(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of the tracker; sinks are imported but not opened, because opening may use the network."""
    key = "tracker.sinks"
    try:
        kept_groups(config.tracker, groups_per_step=config.rollout.prompts_per_step)
        for name, values in plugins_of(config.tracker.sinks, key=key):
            if name in FILE_SINKS:
                yield f"{key}: {name} has a separate key. Use tracker.{name}=true."
            else:
                find_sink(name).check(plugin_config("sink", name, values, section=f"{key}.{short_name(name)}"))
    except ValueError as error:
        yield from str(error).splitlines()


def _check_critic(config: RelaxConfig) -> Iterator[str]:
    spec = find_algorithm(config.algo.name)
    has_critic = spec.requirements(config.algo).critic
    if has_critic and spec.value_loss is None:
        yield f"algo.name={config.algo.name}: it needs a critic, but its SPEC has no value_loss. Give it one."
    if not has_critic and config.optimizer.critic_lr is not None:
        yield (
            f"optimizer.critic_lr={config.optimizer.critic_lr} with algo={config.algo.name}, which has no critic. "
            "Drop it, or choose algo=ppo."
        )


def _check_batch(config: RelaxConfig) -> Iterator[str]:
    prompts, ranks = config.rollout.prompts_per_step, config.parallel.dp
    if ranks >= 1 and prompts % ranks != 0:
        yield (
            f"rollout.prompts_per_step={prompts} does not divide among parallel.dp={ranks} ranks. "
            f"Use a multiple of {ranks}."
        )
    mini_batches = config.algo.mini_batches
    if mini_batches >= 1 and prompts % mini_batches != 0:
        yield (
            f"rollout.prompts_per_step={prompts} does not divide into algo.mini_batches={mini_batches}. Lower "
            f"algo.mini_batches to {_divisors(prompts, most=mini_batches)}, or use a multiple of {mini_batches} as "
            "rollout.prompts_per_step."
        )


def _divisors(number: int, *, most: int) -> str:
    return either([divisor for divisor in range(1, min(number, most, _MAX_DIVISOR) + 1) if number % divisor == 0])


def _check_engine(config: RelaxConfig) -> Iterator[str]:
    engine, group_size = config.engine, config.algo.group_size
    new_tokens = config.rollout.max_new_tokens
    if engine_count(config) == 0:
        return
    if engine.port and engine.port + engine.count - 1 > 65535:
        yield f"engine.port={engine.port} with engine.count={engine.count} passes port 65535. Use engine.port=0."
    if engine.max_running_samples < group_size:
        yield (
            f"engine.max_running_samples={engine.max_running_samples} cannot hold one group of "
            f"algo.group_size={group_size}. Use engine.max_running_samples={group_size} or more."
        )
    if engine.context_length is not None and engine.context_length <= new_tokens:
        yield (
            f"engine.context_length={engine.context_length} leaves no room for a prompt beside "
            f"rollout.max_new_tokens={new_tokens}. Lower rollout.max_new_tokens, or use a longer context "
            "(engine.context_length=null derives a length within the positions of the model)."
        )
    if engine.max_total_tokens < group_size * new_tokens:
        yield (
            f"engine.max_total_tokens={engine.max_total_tokens} cannot hold one group: algo.group_size={group_size} x "
            f"rollout.max_new_tokens={new_tokens} = {group_size * new_tokens}. Raise it."
        )


def _check_offline(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of settings that an algorithm on data rows cannot have."""
    kind = offline_rows(config)
    if kind is None:
        return
    rollout, what = config.rollout, f"algo={config.algo.name}, which trains on data rows without engines"
    if rollout.temperature != 1.0:
        yield f"rollout.temperature={rollout.temperature} with {what}: log-probs need the temperature 1. Use 1.0."
    if rollout.truncates:
        yield f"rollout.top_p, top_k or min_p with {what}: nothing is sampled. Drop them."
    if rollout.over_sampling > 1.0:
        yield f"rollout.over_sampling={rollout.over_sampling} with {what}: every row is trained. Use 1.0."
    if config.data.overlong is not Overlong.drop:
        yield f"data.overlong={config.data.overlong.value} with {what}: a row is never cut. Use drop."
    if config.run.keep_best is not None:
        yield NotYet(f"run.keep_best={config.run.keep_best} with {what} is not built yet. Drop it.")
    if kind == "labels" and config.eval.every and config.eval.rows < 2:
        yield f"eval.rows={config.eval.rows} with {what}: a held-out row needs another row for the KL estimate. Use 2."
    if config.engine.urls:
        yield f"engine.urls with {what}. Drop engine.urls."
    if config.engine.autoscaler.enabled:
        yield f"engine.autoscaler.enabled=true with {what}. Leave it off."
    if find_env(config.env.name).has_turns or find_env(config.env.name).agent is not None:
        yield f"env={config.env.name} with {what}. Use env=single_turn."


def _check_rollout(config: RelaxConfig) -> Iterator[str]:
    rollout, mode = config.rollout, config.mode
    if rollout.workers > rollout.prompts_per_step >= 1:
        yield (
            f"rollout.workers={rollout.workers} is more than rollout.prompts_per_step={rollout.prompts_per_step}: a "
            f"step has no prompt for some of them. Use rollout.workers={rollout.prompts_per_step} or less."
        )
    kept = rollout.over_sampling > 1.0 and rollout.surplus is Surplus.keep
    if kept and mode.max_staleness == 0 and mode.on_stale is OnStale.drop:
        yield (
            "rollout.surplus=keep with mode.max_staleness=0 and mode.on_stale=drop: every group that is kept is stale "
            "at the next step. Use mode.on_stale=mask, a larger mode.max_staleness, or rollout.surplus=drop."
        )


def _check_data(config: RelaxConfig) -> Iterator[str]:
    data = config.data
    if data.template_date is not None and not _is_day(data.template_date):
        yield f"data.template_date={data.template_date}: expected a day, such as 2026-11-28."
    if is_file_plugin(data.name) or data.name in names("data"):
        yield from _check_source(config)
    elif data.config:
        message = f"data.config={data.config} with data={data.name}, which is no plug-in."
        yield f"{message} Drop it, or name a plug-in in data.name."
    elif data.task is None and data.path is None and data.paths is None:
        yield NotYet("data.path is not set: data=file needs data.path=train.jsonl, or a .json list, .csv, .parquet.")
    elif data.task is not None and data.path is not None:
        yield f"data.path={data.path} with data={data.name}, which is generated. Choose data=file."
    elif data.task is not None and data.paths is not None:
        yield f"data.paths={data.paths} with data={data.name}, which is generated. Choose data=file."
    elif data.path is not None and data.paths is not None:
        yield f"data.path={data.path} with data.paths={data.paths}. Name all files in data.paths alone."
    elif data.task is not None and (unread := _file_keys(config)):
        message = f"{', '.join(unread)} with data={data.name}, which is generated and has no columns or files."
        yield f"{message} Drop {'it' if len(unread) == 1 else 'them'}, or choose data=file data.path=FILE."
    elif data.task is None and data.size:
        yield f"data.size={data.size} with data={data.name}: a file has a fixed number of rows. Drop data.size."
    elif config.rollout.max_new_tokens == 1 and offline_rows(config) is None:
        yield "rollout.max_new_tokens=1 holds only the stop token. Use 8 or more."


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _file_keys(config: RelaxConfig) -> list[str]:
    """Returns KEY=VALUE for each file key that the user set but that a generated task ignores."""
    data = config.data
    if any(config.eval.sets.values()):  # the files in eval.sets are read with the column keys
        return [] if data.eval_path is None else [f"data.eval_path={data.eval_path}"]
    unset = {"prompt_key": "prompt", "answer_key": "answer", "eval_path": None}
    keys = [f"data.{key}={value}" for key, usual in unset.items() if (value := getattr(data, key)) != usual]
    media = dataclasses.asdict(data.media_keys)
    keys += [] if data.last_assistant is None else [f"data.last_assistant={data.last_assistant.name}"]
    return keys + [f"data.media_keys.{kind}={column}" for kind, column in media.items() if column is not None]


def _check_source(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of a data source plug-in."""
    data = config.data
    for key in ("task", "path", "paths"):
        if (value := getattr(data, key)) is not None:
            yield f"data.{key}={value} with data.name={data.name}: the plug-in supplies the rows. Drop data.{key}."
    try:
        source_config = plugin_config("data", data.name, data.config, section="data.config")
        find_data_source(data.name).check(source_config)
    except ValueError as error:
        yield from str(error).splitlines()


def _check_schedule(config: RelaxConfig) -> Iterator[str]:
    warmup, steps = config.optimizer.warmup_steps, config.run.steps
    if warmup is not None and warmup > steps >= 1:
        yield (
            f"optimizer.warmup_steps={warmup} is more than run.steps={steps}: optimizer.lr would never be reached. Use "
            f"optimizer.warmup_steps={steps} or less, or null."
        )


def _check_stop_strings(config: RelaxConfig) -> Iterator[str]:
    stop = config.rollout.stop
    if len(stop) > MAX_STOP_STRINGS:
        yield f"rollout.stop has {len(stop)} strings. Give {MAX_STOP_STRINGS} at most."
    for string in stop:
        if not isinstance(string, str):  # OmegaConf accepts a nested list
            yield f"rollout.stop has {string!r}, which is not text. Put each text in quotes."
        elif not string:
            yield "rollout.stop has an empty string, which would end every response at once. Leave it out."
        elif len(string.encode()) > MAX_STOP_BYTES:
            yield f"rollout.stop has a string of {len(string.encode())} bytes. Give {MAX_STOP_BYTES} at most."


def _check_evaluation(config: RelaxConfig) -> Iterator[str]:
    evaluation, run = config.eval, config.run
    if evaluation.samples > 1 and evaluation.temperature == 0.0:
        yield (
            f"eval.samples={evaluation.samples} with eval.temperature=0: greedy answers to a prompt are all equal. Set "
            "eval.temperature, e.g. eval.temperature=1."
        )
    if evaluation.samples > config.engine.max_running_samples:
        yield (
            f"eval.samples={evaluation.samples} is more than engine.max_running_samples="
            f"{config.engine.max_running_samples}. Raise engine.max_running_samples."
        )
    if run.keep_best is not None and not evaluation.every:
        yield f"run.keep_best={run.keep_best} with eval.every=0: nothing is evaluated. Set eval.every."
    if run.patience and run.keep_best is None:
        yield f"run.patience={run.patience}: name the metric that must improve, e.g. run.keep_best=eval/exact."


def _check_notify(config: RelaxConfig) -> Iterator[str]:
    for event in config.notify.events:
        if event not in EVENTS:
            yield f"notify.events has {event!r}, which is not an event. Choose from {', '.join(EVENTS)}."
    for rule in config.notify.rules:
        try:
            read = read_rules([rule])
        except ValueError as error:
            yield f"notify.rules: {error}."
            continue
        for notify_rule in read:
            if (why := number_problem(notify_rule.number)) is not None:
                yield f"notify.rules: {notify_rule.words!r} can never be true: {why}."
            elif notify_rule.source == EVAL_SOURCE and not config.eval.every:
                yield f"notify.rules: {notify_rule.words!r} with eval.every=0: nothing is evaluated. Set eval.every."


def _check_run_folder(config: RelaxConfig) -> Iterator[str]:
    if config.resume is not None and config.resume != "auto" and not Path(config.resume).is_dir():
        yield f"resume={config.resume}: no such folder. Use resume=auto for the newest checkpoint."
    elif config.resume not in (None, "auto") and not (Path(config.resume) / "meta.json").is_file():
        yield (
            f"resume={config.resume}: no meta.json there. Give a folder of a run's checkpoints/, such as "
            "step_00000100; or run.dir=RUN resume=auto for its newest checkpoint."
        )
    folder = Path(config.run.dir)
    for existing in (folder, *folder.parents):
        # All checks use one file descriptor, because another run may create or remove the file in the meantime.
        try:
            descriptor = os.open(existing, os.O_PATH)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                yield f"run.dir={folder}: {existing} is a file. Choose another folder."
            elif not os.access(f"/proc/self/fd/{descriptor}", os.W_OK):
                yield f"run.dir={folder}: {existing} cannot be written to. Choose another folder."
        finally:
            os.close(descriptor)
        return


_CHECKS: tuple[Check, ...] = (
    _check_plan,
    _check_names,
    _check_mode,
    _check_plugins,
    _check_sinks,
    _check_critic,
    reward_problems,
    _check_batch,
    lora_problems,
    _check_offline,
    _check_engine,
    _check_rollout,
    transport_problems,
    engine_problems,
    gateway_problems,
    _check_notify,
    _check_data,
    _check_schedule,
    _check_stop_strings,
    _check_evaluation,
    turn_problems,
    agent_problems,
)
_FILE_CHECKS: tuple[Check, ...] = (
    model_problems,
    modality_problems,
    freeze_problems,
    engine_file_problems,
    agent_file_problems,
    _check_run_folder,
)
