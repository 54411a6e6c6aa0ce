"""Composes the configuration: converts the words of a command line to a typed, validated `RelaxConfig` with Hydra."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from relax_core.config.error_messages import explain
from relax_core.config.errors import ConfigError
from relax_core.config.hydra_overrides import PATHS, CommandLine, hydra_arguments, without_secrets
from relax_core.config.model_checks import set_banned_tokens
from relax_core.config.options import conf_folder, plugin_options, shipped
from relax_core.config.plugin_types import give_task_to_source, typed_plugin, with_absolute_paths
from relax_core.config.redaction import as_text, escaped, references, shown, with_variable
from relax_core.config.schema import LAUNCHERS, FolderByTime, RelaxConfig
from relax_core.config.schema_keys import section_types, unknown_key
from relax_core.config.validate import PLANS, Check, problems_of
from relax_core.families.pretrained import pretrained_folder
from relax_core.registry import GROUP_KINDS, KINDS, is_file_plugin, short_name

_VERSION_BASE = "1.3"
SHOWN_PATH = 120  # characters
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
Settle = Callable[[RelaxConfig], tuple[RelaxConfig, list[str]]]  # fills in derived values and returns problems


@cache  # the set of plug-ins does not change during a process
def register_schema() -> None:
    """Registers the schema's types and the plug-ins without a YAML file in Hydra's ConfigStore."""
    from hydra.core.config_store import ConfigStore

    if not OmegaConf.has_resolver("examples"):
        OmegaConf.register_new_resolver("examples", lambda name: str(shipped("examples") / name))
        OmegaConf.register_new_resolver("short_name", short_name)
        OmegaConf.register_new_resolver("pretrained", lambda name: str(pretrained_folder(name)))
    store = ConfigStore.instance()
    root = OmegaConf.structured(RelaxConfig)
    for kind in KINDS:
        # The mapping accepts any key, because the plug-in's settings are unknown here. Later `typed_plugin` checks the
        # keys with the plug-in's type.
        root[kind] = DictConfig({}, flags={"struct": False})
    for kind in GROUP_KINDS:
        for name in plugin_options(kind):
            values: Any = {} if kind in KINDS else OmegaConf.load(conf_folder() / kind / "plugin.yaml")
            store.store(group=kind, name=name, node={**_plain(values), "name": name})
    store.store(group="schema", name="root", node=root, package="_global_")
    for name, launcher in LAUNCHERS.items():
        store.store(group="schema/launcher", name=name, node=launcher)


def _plain(values: Any) -> dict[str, Any]:
    """Returns the values as a dict, with ??? for missing values."""
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(values)))


def compose(overrides: Sequence[str]) -> DictConfig:
    """Returns the merged, untyped configuration; raises `ConfigError`."""
    return _compose(overrides, with_hydra=False)


def choices_of(overrides: Sequence[str]) -> dict[str, str]:
    """Maps each group to the option that these overrides choose; raises `ConfigError`."""
    choices = _compose(overrides, with_hydra=True).hydra.runtime.choices
    return {str(group): str(choice) for group, choice in choices.items() if choice is not None}


def _compose(overrides: Sequence[str], *, with_hydra: bool) -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    register_schema()
    try:
        args = hydra_arguments(without_secrets(overrides))
        with initialize_config_dir(str(conf_folder()), version_base=_VERSION_BASE):
            composed = hydra_compose("config", overrides=args, return_hydra_config=with_hydra)
        _refuse_both_lengths(composed, args)
        return composed
    except (HydraException, OmegaConfBaseException, MarkedYAMLError) as error:
        raise explain(error) from error


def _refuse_both_lengths(cfg: DictConfig, args: Sequence[str]) -> None:
    """Raises `ConfigError` if the words set run.steps while run.epochs is set in any place."""
    epochs = cfg.run.get("epochs")
    typed = [word for word in args if word.lstrip("+").startswith("run.steps=")]
    if epochs is not None and typed:
        message = f"{typed[-1].lstrip('+')} with run.epochs={epochs}, which sets the number of train steps itself."
        raise ConfigError([f"{message} Drop one of them, or add run.epochs=null."])


def load_config(
    overrides: Sequence[str] = (), *, checks: Iterable[Check] = (), settle: Settle | None = None
) -> RelaxConfig:
    """Returns the typed and validated configuration of one run; raises `ConfigError` with all problems."""
    return to_run_config(compose(overrides), checks=checks, settle=settle)


def config_from_yaml(text: str, *, checks: Iterable[Check] = ()) -> RelaxConfig:
    """Reads the YAML that `relax_core.config.saved_config.to_yaml_with_secrets` wrote, and validates it again.

    Raises `ConfigError`.
    """
    return to_run_config(_of_yaml(text), checks=checks)


def planned_config_from_yaml(text: str) -> RelaxConfig:
    """Reads the YAML of a configuration that can be planned, but not started. It is not validated again.

    Raises `ConfigError`.
    """
    return typed_config(_of_yaml(text))


def _of_yaml(text: str) -> DictConfig:
    root = OmegaConf.structured(RelaxConfig)
    for kind in KINDS:
        root[kind] = DictConfig({}, flags={"struct": False})
    try:
        values = OmegaConf.create(as_text(yaml.safe_load(text)))
        assert isinstance(values, DictConfig)
        root.launcher = OmegaConf.structured(LAUNCHERS[values.launcher.name])
        merged = OmegaConf.merge(root, values)
    except (OmegaConfBaseException, MarkedYAMLError) as error:
        raise explain(error) from error
    assert isinstance(merged, DictConfig)
    return merged


def to_run_config(cfg: DictConfig, *, checks: Iterable[Check] = (), settle: Settle | None = None) -> RelaxConfig:
    """Converts a composed configuration to typed objects with absolute paths, and validates it.

    Raises:
        ConfigError: for unknown keys, missing values and wrong types. If all types are right, for the problems that
            `validate` finds.
    """
    config, found = settled(typed_config(cfg), checks=checks, settle=settle)
    if found:
        raise ConfigError(found)
    return config


def settled(
    config: RelaxConfig, *, checks: Iterable[Check] = (), settle: Settle | None = None
) -> tuple[RelaxConfig, list[str]]:
    """Returns the configuration with derived values, and all problems of the configuration."""
    found: list[str] = []
    if settle is not None:
        config, found = settle(config)
    return config, [*problems_of(config, checks), *found]


def typed_config(cfg: DictConfig) -> RelaxConfig:
    """Returns the typed configuration with absolute paths, without validation; raises `ConfigError`."""
    problems = _unknown_keys(cfg)
    by_time = "${now:" in str(cfg.run._get_node("dir"))
    by_variable = references(OmegaConf.to_container(cfg))
    try:
        problems += _missing_values(cfg)
        _resolve(cfg, OmegaConf.to_container(cfg, resolve=True))
    except OmegaConfBaseException as error:
        raise ConfigError([*problems, *explain(error).problems]) from error
    plugin_config = {}
    for kind in KINDS:
        try:
            plugin_config[kind] = typed_plugin(kind, cfg[kind])
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    config = dataclasses.replace(cast(RelaxConfig, OmegaConf.to_object(cfg)), **plugin_config)
    for path, variable in by_variable.items():
        config = with_variable(config, path, variable)
    config = _absolute(config)
    give_task_to_source(config)
    if by_time:
        config.run.dir = FolderByTime(config.run.dir)
    set_banned_tokens(config)
    # A resume compares this list, and the order of the list has no meaning.
    config.model.freeze = sorted(set(config.model.freeze))
    return config


def _resolve(node: Any, values: Any) -> None:
    """Replaces each interpolation in a configuration by its value in ``values``, the resolved configuration.

    Values of environment variables are not resolved again.
    """
    for key in range(len(values)) if isinstance(values, list) else list(values):
        child = node._get_node(key)
        if child._is_interpolation():
            if isinstance(values[key], dict | list):
                node[key] = escaped(values[key])
            else:
                child._set_value(escaped(values[key]))
        elif isinstance(values[key], dict | list):
            _resolve(child, values[key])


def run(
    line: CommandLine | Sequence[str],
    job: Callable[[RelaxConfig], int],
    *,
    checks: Sequence[Check] = (),
    settle: Settle | None = None,
    show_plan: Callable[[RelaxConfig, Sequence[str]], int] | None = None,
    sweep: SweepRuns | None = None,
) -> int:
    """Runs ``job`` for the configuration of the command line, and returns the exit code.

    With plan=true, calls ``show_plan`` with the problems that the checks found, and does not call ``job``. ``sweep``
    receives the runs of a sweep (-m) and starts them after the last one.

    The exit code is the job's exit code; for a sweep it is the first nonzero exit code of a job. It is 2 for a user's
    mistake, which stderr shows without a traceback, and 1 if a sweep ends with `SweepFailed`.
    """
    import hydra
    from hydra.errors import HydraException

    try:
        line = line if isinstance(line, CommandLine) else CommandLine.of(line)
        jobs = _Jobs(line, job, checks=checks, settle=settle, show_plan=show_plan, sweep=sweep)

        def take_job(cfg: DictConfig) -> object:
            return jobs.take(cfg)

        take_job.sweep = sweep  # type: ignore[attr-defined]  # the launcher in hydra_plugins receives this function
        register_schema()
        decorated = hydra.main(version_base=_VERSION_BASE, config_path=str(conf_folder()), config_name="config")(
            take_job
        )
        with _hydra_raises(), _argv(line.hydra):
            decorated()
        jobs.end()
    except ConfigError as error:
        print(error.report(), file=sys.stderr)
        return 2
    except (HydraException, OmegaConfBaseException, MarkedYAMLError) as error:
        print(explain(error).report(), file=sys.stderr)
        return 2
    except SweepFailed as error:
        print(f"relax: the sweep ends: {error}", file=sys.stderr)
        return 1
    return next((code for code in jobs.codes if code != 0), 0)


class _Jobs:
    """Receives the composed configurations of one command line; ``codes`` are the exit codes of finished jobs."""

    def __init__(
        self,
        line: CommandLine,
        job: Callable[[RelaxConfig], int],
        *,
        checks: Sequence[Check],
        settle: Settle | None,
        show_plan: Callable[[RelaxConfig, Sequence[str]], int] | None,
        sweep: SweepRuns | None,
    ) -> None:
        self.codes: list[int] = []
        self._line, self._job, self._checks, self._settle = line, job, checks, settle
        self._show_plan, self._sweep = show_plan, sweep
        self._kept: list[Callable[[], int]] = []

    def take(self, cfg: DictConfig) -> object:
        """Passes a run of a sweep to ``sweep``, and stores a plan or a single run for `end`.

        This method starts no job, because Hydra would report an exception in its own format.
        """
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        if HydraConfig.get().mode != RunMode.MULTIRUN or self._sweep is None:
            self._kept.append(partial(self._start, cfg))
            return None
        overrides, folder = self._line.as_typed(HydraConfig.get().overrides.task), Path(HydraConfig.get().sweep.dir)
        swept = self._line.swept(overrides)
        overrides = [shown(word) for word in overrides]
        try:
            config, problems = settled(self._typed(cfg), checks=self._checks, settle=self._settle)
            if self._is_plan(config):
                self._kept.append(partial(self._plan, config, problems, swept))
                return None
            if problems:
                raise ConfigError(problems)
        except ConfigError as error:
            self._sweep.refuse(overrides, folder.absolute(), swept=swept, error=error)
            return None
        return self._sweep.take(config, overrides, folder.absolute(), swept=swept)

    def _typed(self, cfg: DictConfig) -> RelaxConfig:
        _refuse_both_lengths(cfg, self._line.hydra)
        return typed_config(cfg)

    def end(self) -> None:
        """Executes the stored plans and the stored run, and starts the runs of the sweep."""
        for job in self._kept:
            self.codes.append(job())
        if self._sweep is not None:
            self.codes.append(self._sweep.finish())

    def _start(self, cfg: DictConfig) -> int:
        """Derives the missing values, then shows the plan or runs the job; raises `ConfigError`."""
        config, problems = settled(self._typed(cfg), checks=self._checks, settle=self._settle)
        if self._is_plan(config):
            return self._plan(config, problems)
        if problems:
            raise ConfigError(problems)
        with _argv([shown(word) for word in self._line.typed]):
            return self._job(config)

    def _is_plan(self, config: RelaxConfig) -> bool:
        return config.plan in PLANS[1:] and self._show_plan is not None

    def _plan(self, config: RelaxConfig, problems: Sequence[str], swept: Sequence[str] = ()) -> int:
        assert self._show_plan is not None
        if swept:
            print(f"relax: run {' '.join(swept)} of the sweep", file=sys.stderr, flush=True)
        return self._show_plan(config, problems)


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Makes Hydra raise errors; by default Hydra prints them."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


@contextmanager
def _argv(arguments: Sequence[str]) -> Iterator[None]:
    """Sets sys.argv to ``arguments`` during the block, for Hydra or for the job, and restores it afterwards."""
    before = sys.argv
    sys.argv = ["relax", *arguments]
    try:
        yield
    finally:
        sys.argv = before


def _unknown_keys(cfg: DictConfig) -> list[str]:
    """Returns messages for unknown keys that were added with +key=value.

    Hydra itself refuses all other unknown keys.
    """
    roots = {field.name for field in dataclasses.fields(RelaxConfig)}
    unknown = (dotted for key in map(str, cfg) if key not in roots for dotted in _dotted(key, cfg._get_node(key)))
    problems = [unknown_key(key) for key in unknown]
    for section in section_types():
        problems += _unknown_below(section, cfg[section])
    return problems


def _dotted(key: str, node: Any) -> Iterator[str]:
    """Yields the dotted leaf keys of a mapping that the user added as one value."""
    if not isinstance(node, DictConfig):
        yield key
        return
    for part in map(str, node):
        yield from _dotted(f"{key}.{part}", node._get_node(part))


def _unknown_below(section: str, values: DictConfig) -> list[str]:
    section_type: Any = OmegaConf.get_type(values)  # the chosen launcher has other keys than the other launchers
    kinds = {field.name: field.type for field in dataclasses.fields(section_type)}
    problems = [unknown_key(f"{section}.{key}") for key in map(str, values) if key not in kinds]
    for name in kinds:
        if isinstance(node := values._get_node(name), DictConfig) and dataclasses.is_dataclass(
            OmegaConf.get_type(node)
        ):
            problems += _unknown_below(f"{section}.{name}", node)
    return problems


def _missing_values(cfg: DictConfig) -> list[str]:
    """Returns messages for keys with the value ???.

    `typed_plugin` checks the keys of plug-ins.
    """
    missing = sorted(key for key in OmegaConf.missing_keys(cfg) if key.split(".", 1)[0] not in KINDS)
    return [f"{key} has no value: add {key}=..." for key in missing]


def _absolute(config: RelaxConfig) -> RelaxConfig:
    """Makes every path absolute, because services have different working folders."""
    for section, key in (dotted.split(".") for dotted in PATHS):
        holder: Any = getattr(config, section)
        if (path := getattr(holder, key, None)) is not None:  # only one launcher has token_file
            setattr(holder, key, _path(f"{section}.{key}", path))
    for section, key in (("engine", "name"), ("model", "family")):
        if (path := getattr(getattr(config, section), key)) is not None and is_file_plugin(path):
            setattr(getattr(config, section), key, _path(f"{section}.{key}", path))
    if config.agent.command is not None and config.agent.cwd is None:
        config.agent.cwd = os.getcwd()
    config.data.paths = _absolute_each(config.data.paths, key="data.paths")
    config.eval.sets = _absolute_each(config.eval.sets, key="eval.sets")
    if is_file_plugin(config.data.name):
        config.data.name = _path("data.name", config.data.name)
    config.tracker.sinks = with_absolute_paths(config.tracker.sinks)
    if config.resume is not None and config.resume != "auto":
        config.resume = _path("resume", config.resume)
    return config


def _path(key: str, text: Any) -> Any:
    """Returns the absolute path.

    A value that is not text is returned unchanged; the checks report it.

    Raises `ConfigError` for an empty or invalid path, an address, or a path that this user cannot access.
    """
    if not isinstance(text, str):
        return text
    if not text:  # `run.dir=$UNSET` would become the current folder
        raise ConfigError([f"{key} is empty. Give a path, or leave it out."])
    shown = text if len(text) <= SHOWN_PATH else f"{text[: SHOWN_PATH - 20]}…{text[-20:]}"
    if _ADDRESS.match(text):
        raise ConfigError([f"{key}={shown}: this is an address, not a local path. {_copy_hint(text)}"])
    try:
        path = Path(text).expanduser().absolute()
        with suppress(FileNotFoundError, NotADirectoryError):  # another check reports a missing file
            path.stat()
    except OSError as error:
        raise ConfigError([f"{key}={shown}: {error.strerror}. Give another path."]) from error
    except RuntimeError as error:  # ~nobody/x
        raise ConfigError([f"{key}={shown}: {error} Give another path."]) from error
    return str(path)


def _copy_hint(address: str) -> str:
    """Returns a hint on how to copy the content of an address to this machine."""
    if address.startswith("hf://"):
        return "Download it with hf download, and give the path of the copy."
    if address.startswith(("http://", "https://")):
        name = address.partition("?")[0].rstrip("/").rpartition("/")[2]
        return f"Download it: curl -L -o {shlex.quote(name)} {shlex.quote(address)}; then give {name}."
    return "Copy it to this machine, and give the path of the copy."


def _absolute_each(paths: Any, *, key: str) -> Any:
    """Makes the paths in a list or a mapping absolute: the keys of `data.paths`, or the values of `eval.sets`.

    Raises `ConfigError` for a value of `eval.sets` that is neither text nor null.
    """
    if isinstance(paths, dict) and key == "data.paths":
        return {_path(key, path): weight for path, weight in paths.items()}
    if isinstance(paths, dict):
        if wrong := [name for name, path in paths.items() if not isinstance(path, str | None)]:
            expected = "expected one file, folder or pattern, or null for the held-out rows"
            raise ConfigError([f"{key}.{name}={paths[name]}: {expected}: {key}.{name}=FILE." for name in wrong])
        return {name: _path(f"{key}.{name}", path) for name, path in paths.items()}
    return [_path(key, path) for path in paths] if isinstance(paths, list) else paths


class SweepRuns(Protocol):
    """Receives the runs of a sweep one by one.

    ``overrides`` are the overrides of one run, as a user would type them. ``swept`` are the overrides that differ
    between the runs. ``folder`` is the folder of the sweep.
    """

    def take(self, config: RelaxConfig, overrides: Sequence[str], folder: Path, *, swept: Sequence[str]) -> object:
        """Accepts a valid run."""

    def refuse(self, overrides: Sequence[str], folder: Path, *, swept: Sequence[str], error: ConfigError) -> None:
        """Records a run with an invalid configuration."""

    def finish(self) -> int:
        """Starts the runs after the last call of `take`, and returns the exit code."""


class SweepFailed(RuntimeError):
    """Ends a sweep because the sweeper needs the result of a run that failed or did not start."""
