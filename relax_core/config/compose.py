"""From the command line to a typed, validated `RelaxConfig`; Hydra stays in here."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from relax_core.config.checks.model_folder import set_banned_tokens
from relax_core.config.checks.validate import PLANS, Check, problems_of
from relax_core.config.command_line.error_messages import explain
from relax_core.config.command_line.override_words import PATHS, CommandLine, hydra_words
from relax_core.config.errors import ConfigError
from relax_core.config.options import conf_folder, plugin_options, shipped
from relax_core.config.plugin_types import typed_plugin
from relax_core.config.schema import LAUNCHERS, FolderByTime, RelaxConfig
from relax_core.config.schema_keys import section_types, unknown_key
from relax_core.registry import KINDS

_VERSION_BASE = "1.3"
SHOWN_PATH = 120  # characters
Settle = Callable[[RelaxConfig], tuple[RelaxConfig, list[str]]]  # fills in derived values, and says what is wrong


class SweepRuns(Protocol):
    """What takes the runs of a sweep. ``overrides``: of this run, as its user would type them; ``swept``: those of
    them in which the runs differ. ``folder``: the sweep's."""

    def take(self, config: RelaxConfig, overrides: Sequence[str], folder: Path, *, swept: Sequence[str]) -> object: ...

    def refuse(self, overrides: Sequence[str], folder: Path, *, swept: Sequence[str], error: ConfigError) -> None: ...

    def finish(self) -> int: ...


class SweepFailed(RuntimeError):
    """A run failed whose value the sweeper wants."""


def register_schema() -> None:
    """Puts the types, and the plug-ins that have no YAML, into Hydra's ConfigStore."""
    from hydra.core.config_store import ConfigStore

    if not OmegaConf.has_resolver("examples"):
        OmegaConf.register_new_resolver("examples", lambda name: str(shipped("examples") / name))
    store = ConfigStore.instance()
    root = OmegaConf.structured(RelaxConfig)
    for kind in KINDS:
        # Open until the plug-in's own settings type it: a file's settings are not known to any YAML.
        root[kind] = DictConfig({}, flags={"struct": False})
        for name in plugin_options(kind):
            store.store(group=kind, name=name, node={"name": name})
    store.store(group="schema", name="root", node=root, package="_global_")
    for name, launcher in LAUNCHERS.items():
        store.store(group="schema/launcher", name=name, node=launcher)


def compose(overrides: Sequence[str]) -> DictConfig:
    """The merged configuration, not yet typed. Raises `ConfigError`."""
    return _compose(overrides, with_hydra=False)


def choices_of(overrides: Sequence[str]) -> dict[str, str]:
    """Group → the option that is chosen, with these overrides. Raises `ConfigError`."""
    choices = _compose(overrides, with_hydra=True).hydra.runtime.choices
    return {str(group): str(choice) for group, choice in choices.items() if choice is not None}


def _compose(overrides: Sequence[str], *, with_hydra: bool) -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    register_schema()
    try:
        with initialize_config_dir(str(conf_folder()), version_base=_VERSION_BASE):
            return hydra_compose("config", overrides=hydra_words(overrides), return_hydra_config=with_hydra)
    except (HydraException, OmegaConfBaseException, MarkedYAMLError) as error:
        raise explain(error) from error


def load_config(
    overrides: Sequence[str] = (), *, checks: Iterable[Check] = (), settle: Settle | None = None
) -> RelaxConfig:
    """The typed and validated configuration of one run. Raises `ConfigError` with every problem found."""
    return to_run_config(compose(overrides), checks=checks, settle=settle)


def config_from_yaml(text: str, *, checks: Iterable[Check] = ()) -> RelaxConfig:
    """What `relax_core.config.saved.to_whole_yaml` wrote, validated again. Raises `ConfigError`."""
    values = OmegaConf.create(text)
    root = OmegaConf.structured(RelaxConfig)
    for kind in KINDS:
        root[kind] = DictConfig({}, flags={"struct": False})
    try:
        assert isinstance(values, DictConfig)
        root.launcher = OmegaConf.structured(LAUNCHERS[values.launcher.name])
        merged = OmegaConf.merge(root, values)
    except (OmegaConfBaseException, MarkedYAMLError) as error:
        raise explain(error) from error
    assert isinstance(merged, DictConfig)
    return to_run_config(merged, checks=checks)


def to_run_config(cfg: DictConfig, *, checks: Iterable[Check] = (), settle: Settle | None = None) -> RelaxConfig:
    """Typed objects from a composed configuration: settings as instances, paths absolute, everything validated.

    Raises:
        ConfigError: unknown keys, missing values, wrong settings; or, when all types fit, what `validate` finds.
    """
    config, found = settled(typed_config(cfg), checks=checks, settle=settle)
    if found:
        raise ConfigError(found)
    return config


def settled(
    config: RelaxConfig, *, checks: Iterable[Check] = (), settle: Settle | None = None
) -> tuple[RelaxConfig, list[str]]:
    """The configuration with its derived values, and every problem of it."""
    found: list[str] = []
    if settle is not None:
        config, found = settle(config)
    return config, [*problems_of(config, checks), *found]


def typed_config(cfg: DictConfig) -> RelaxConfig:
    """`to_run_config` before anything is validated."""
    problems = _unknown_keys(cfg)
    by_time = "${now:" in str(cfg.run._get_node("dir"))
    try:
        problems += _missing_values(cfg)
        OmegaConf.resolve(cfg)
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
    config = _absolute(dataclasses.replace(cast(RelaxConfig, OmegaConf.to_object(cfg)), **plugin_config))
    if by_time:
        config.run.dir = FolderByTime(config.run.dir)
    set_banned_tokens(config)
    return config


def run(
    line: CommandLine | Sequence[str],
    job: Callable[[RelaxConfig], int],
    *,
    checks: Sequence[Check] = (),
    settle: Settle | None = None,
    show_plan: Callable[[RelaxConfig, Sequence[str]], int] | None = None,
    sweep: SweepRuns | None = None,
) -> int:
    """Runs ``job`` for the configuration on the command line. ``show_plan`` is run in its place with plan=true, and is
    told what the checks have found. ``sweep`` is given the runs of a sweep (-m), and starts them once all are known.

    Returns the exit code: the job's own (of a sweep: the first that is not 0), or 2 for a user's mistake, which is
    reported on stderr without a traceback.
    """
    import hydra
    from hydra.errors import HydraException

    try:
        line = line if isinstance(line, CommandLine) else CommandLine.of(line)
        jobs = _Jobs(line, job, checks=checks, settle=settle, show_plan=show_plan, sweep=sweep)

        def one(cfg: DictConfig) -> object:
            return jobs.take(cfg)

        one.sweep = sweep  # type: ignore[attr-defined]  # for the launcher in hydra_plugins, which is given this function
        register_schema()
        decorated = hydra.main(version_base=_VERSION_BASE, config_path=str(conf_folder()), config_name="config")(one)
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
    """Takes each composed configuration of one command line. ``codes``: exit codes of what has ended."""

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
        """Gives a run of a sweep to the sweep. Keeps what is planned, and a single run, for `end`: what is raised in
        here Hydra would tell in words of its own."""
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        if HydraConfig.get().mode != RunMode.MULTIRUN or self._sweep is None:
            self._kept.append(partial(self._start, cfg))
            return None
        overrides, folder = self._line.as_typed(HydraConfig.get().overrides.task), Path(HydraConfig.get().sweep.dir)
        swept = self._line.swept(overrides)
        try:
            config, problems = settled(typed_config(cfg), checks=self._checks, settle=self._settle)
            if self._is_plan(config):
                self._kept.append(partial(self._plan, config, problems, swept))
                return None
            if problems:
                raise ConfigError(problems)
        except ConfigError as error:
            self._sweep.refuse(overrides, folder.absolute(), swept=swept, error=error)
            return None
        return self._sweep.take(config, overrides, folder.absolute(), swept=swept)

    def end(self) -> None:
        """Does what was kept, and starts the sweep's runs."""
        for one in self._kept:
            self.codes.append(one())
        if self._sweep is not None:
            self.codes.append(self._sweep.finish())

    def _start(self, cfg: DictConfig) -> int:
        """Raises `ConfigError`."""
        config, problems = settled(typed_config(cfg), checks=self._checks, settle=self._settle)
        if self._is_plan(config):
            return self._plan(config, problems)
        if problems:
            raise ConfigError(problems)
        with _argv(self._line.typed):
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
    """Hydra prints its errors itself, unless this variable tells it to raise them."""
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
    """Hydra reads its words in sys.argv; a run tells in its summary what its user has typed."""
    before = sys.argv
    sys.argv = ["relax", *arguments]
    try:
        yield
    finally:
        sys.argv = before


def _unknown_keys(cfg: DictConfig) -> list[str]:
    """Keys that were forced in with +key=value. The rest was refused while composing."""
    roots = {field.name for field in dataclasses.fields(RelaxConfig)}
    unknown = (dotted for key in map(str, cfg) if key not in roots for dotted in _dotted(key, cfg._get_node(key)))
    problems = [unknown_key(key) for key in unknown]
    for section in section_types():
        problems += _unknown_below(section, cfg[section])
    return problems


def _dotted(key: str, node: Any) -> Iterator[str]:
    """The keys at the ends of what was forced in as one."""
    if not isinstance(node, DictConfig):
        yield key
        return
    for part in map(str, node):
        yield from _dotted(f"{key}.{part}", node._get_node(part))


def _unknown_below(section: str, values: DictConfig) -> list[str]:
    section_type: Any = OmegaConf.get_type(values)  # of `launcher` the chosen one's
    kinds = {field.name: field.type for field in dataclasses.fields(section_type)}
    problems = [unknown_key(f"{section}.{key}") for key in map(str, values) if key not in kinds]
    for name in kinds:
        if isinstance(one := values._get_node(name), DictConfig) and dataclasses.is_dataclass(OmegaConf.get_type(one)):
            problems += _unknown_below(f"{section}.{name}", one)
    return problems


def _missing_values(cfg: DictConfig) -> list[str]:
    """Keys still at ???; the plug-ins' are found when they are typed."""
    missing = sorted(key for key in OmegaConf.missing_keys(cfg) if key.split(".", 1)[0] not in KINDS)
    return [f"{key} has no value: add {key}=..." for key in missing]


def _absolute(config: RelaxConfig) -> RelaxConfig:
    """Services have working folders of their own, so every path is made absolute here."""
    for section, key in (dotted.split(".") for dotted in PATHS):
        holder: Any = getattr(config, section)
        if (path := getattr(holder, key, None)) is not None:  # token_file is of one launcher only
            if not path:  # `run.dir=$UNSET` would be this very folder
                raise ConfigError([f"{section}.{key} is empty. Give a path, or leave it out."])
            setattr(holder, key, _path(f"{section}.{key}", path))
    config.data.paths = _absolute_each(config.data.paths, key="data.paths")
    config.eval.sets = _absolute_each(config.eval.sets, key="eval.sets")
    if config.resume is not None and config.resume != "auto":
        config.resume = _path("resume", config.resume)
    return config


def _path(key: str, text: str) -> str:
    """Raises `ConfigError` for what no file can be called, and for what this user may not look at."""
    shown = text if len(text) <= SHOWN_PATH else f"{text[: SHOWN_PATH - 20]}…{text[-20:]}"
    try:
        path = Path(text).expanduser().absolute()
        with suppress(FileNotFoundError, NotADirectoryError):  # where it must be there, another check tells
            path.stat()
    except OSError as error:
        raise ConfigError([f"{key}={shown}: {error.strerror}. Give another path."]) from error
    except RuntimeError as error:  # ~nobody/x
        raise ConfigError([f"{key}={shown}: {error} Give another path."]) from error
    return str(path)


def _absolute_each(paths: Any, *, key: str) -> Any:
    """The same list or mapping of paths; what is no text is left to whoever checks it. `data.paths` has its paths as
    keys, `eval.sets` as values."""
    if isinstance(paths, dict) and key == "data.paths":
        return {_absolute_path(path, key=key): weight for path, weight in paths.items()}
    if isinstance(paths, dict):
        return {name: _absolute_path(path, key=f"{key}.{name}") for name, path in paths.items()}
    return [_absolute_path(path, key=key) for path in paths] if isinstance(paths, list) else paths


def _absolute_path(path: Any, *, key: str) -> Any:
    if not isinstance(path, str):
        return path
    if not path:
        raise ConfigError([f"{key} has an empty path. Give a path, or leave it out."])
    return _path(key, path)
