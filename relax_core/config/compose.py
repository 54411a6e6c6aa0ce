"""From the command line to a typed, validated `RelaxConfig`; Hydra stays in here."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from relax_core.config.errors import ConfigError
from relax_core.config.explain import explain
from relax_core.config.options import conf_folder, plugin_options, yaml_options
from relax_core.config.plugins import typed_knobs
from relax_core.config.schema import LAUNCHERS, RelaxConfig
from relax_core.config.schema_keys import section_types, unknown_key
from relax_core.config.validate import PLANS, Check, problems_of
from relax_core.registry import KINDS

_VERSION_BASE = "1.3"
_PATHS = (
    ("model", "path"),
    ("data", "path"),
    ("data", "eval_path"),
    ("run", "dir"),
    ("launcher", "token_file"),
    ("engine", "python"),
    ("engine", "token_file"),
)


class SweepRuns(Protocol):
    """What takes the runs of a sweep."""

    def take(self, config: RelaxConfig, overrides: Sequence[str], folder: Path) -> object: ...

    def finish(self) -> int: ...


class SweepFailed(RuntimeError):
    """A run failed whose value the sweeper wants."""


def register_schema() -> None:
    """Puts the types, and the plug-ins that have no YAML, into Hydra's ConfigStore."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    root = OmegaConf.structured(RelaxConfig)
    for kind in KINDS:
        # Open until the plug-in's own knobs type it: a file's knobs are not known to any YAML.
        root[kind] = DictConfig({}, flags={"struct": False})
        for name in plugin_options(kind):
            store.store(group=kind, name=name, node={"name": name})
    store.store(group="schema", name="root", node=root, package="_global_")
    for name, launcher in LAUNCHERS.items():
        store.store(group="schema/launcher", name=name, node=launcher)


def compose(overrides: Sequence[str]) -> DictConfig:
    """The merged configuration, not yet typed. Raises `ConfigError`."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    register_schema()
    try:
        with initialize_config_dir(str(conf_folder()), version_base=_VERSION_BASE):
            return hydra_compose("config", overrides=_with_plugin_groups(overrides))
    except (HydraException, OmegaConfBaseException, MarkedYAMLError) as error:
        raise explain(error) from error


def load_config(overrides: Sequence[str] = (), *, checks: Iterable[Check] = ()) -> RelaxConfig:
    """The typed and validated configuration of one run. Raises `ConfigError` with every problem found."""
    return to_run_config(compose(overrides), checks=checks)


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


def to_run_config(cfg: DictConfig, *, checks: Iterable[Check] = ()) -> RelaxConfig:
    """Typed objects from a composed configuration: knobs as instances, paths absolute, everything validated.

    Raises:
        ConfigError: unknown keys, missing values, wrong knobs; or, when all types fit, what `validate` finds.
    """
    config = typed_config(cfg)
    if found := problems_of(config, checks):
        raise ConfigError(found)
    return config


def typed_config(cfg: DictConfig) -> RelaxConfig:
    """`to_run_config` before anything is validated."""
    problems = _unknown_keys(cfg)
    try:
        problems += _missing_values(cfg)
        OmegaConf.resolve(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError([*problems, *explain(error).problems]) from error
    knobs = {}
    for kind in KINDS:
        try:
            knobs[kind] = typed_knobs(kind, cfg[kind])
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    config = cast(RelaxConfig, OmegaConf.to_object(cfg))
    return _absolute(dataclasses.replace(config, **knobs))


def run(
    arguments: Sequence[str],
    job: Callable[[RelaxConfig], int],
    *,
    checks: Sequence[Check] = (),
    show_plan: Callable[[RelaxConfig, Sequence[str]], int] | None = None,
    sweep: SweepRuns | None = None,
) -> int:
    """Runs ``job`` for the configuration on the command line, or for each one of a sweep (-m), one after another.
    ``show_plan`` is run in its place with plan=true, and told what the checks have found. ``sweep`` takes the runs of a
    sweep in ``job``'s place.

    Returns the exit code: the job's own (of a sweep: the first that is not 0), or 2 for a user's mistake, which is
    reported on stderr without a traceback.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode

    codes: list[int] = []

    def one(cfg: DictConfig) -> object:
        several = HydraConfig.get().mode == RunMode.MULTIRUN
        if several:
            print(f"relax: run {len(codes) + 1} of the sweep: {' '.join(HydraConfig.get().overrides.task)}", flush=True)
        try:
            config = typed_config(cfg)
            problems = problems_of(config, checks)
            if config.plan in PLANS[1:] and show_plan is not None:
                codes.append(show_plan(config, problems))
                return None
            if problems:
                raise ConfigError(problems)
        except ConfigError as error:
            print(error.report(), file=sys.stderr)
            codes.append(2)
            return None
        if several and sweep is not None:
            codes.append(0)  # the sweep keeps its own
            folder = Path(HydraConfig.get().sweep.dir).absolute()
            return sweep.take(config, HydraConfig.get().overrides.task, folder)
        codes.append(job(config))
        return None

    one.sweep = sweep  # type: ignore[attr-defined]  # for the launcher in hydra_plugins, which is given this function
    register_schema()
    decorated = hydra.main(version_base=_VERSION_BASE, config_path=str(conf_folder()), config_name="config")(one)
    try:
        with _hydra_raises(), _command_line(_with_plugin_groups(arguments)):
            decorated()
    except (HydraException, OmegaConfBaseException, MarkedYAMLError) as error:
        print(explain(error).report(), file=sys.stderr)
        return 2
    except SweepFailed as error:
        print(f"relax: the sweep ends: {error}", file=sys.stderr)
        return 1
    if sweep is not None:
        codes.append(sweep.finish())
    return next((code for code in codes if code != 0), 0)


def _with_plugin_groups(overrides: Sequence[str]) -> list[str]:
    """``algo.name=x`` alone means ``algo=x`` where there is such an option, whose values may follow other keys.
    Elsewhere it means ``algo=plugin algo.name=x``: another plug-in must not inherit grpo.yaml's values."""
    given = dict(override.split("=", 1) for override in overrides if "=" in override)
    named = [(kind, given[f"{kind}.name"]) for kind in KINDS if f"{kind}.name" in given and kind not in given]
    return [*overrides, *(f"{kind}={name if name in yaml_options(kind) else 'plugin'}" for kind, name in named)]


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
def _command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Hydra reads sys.argv."""
    before = sys.argv
    sys.argv = ["relax", *arguments]
    try:
        yield
    finally:
        sys.argv = before


def _unknown_keys(cfg: DictConfig) -> list[str]:
    """Keys that were forced in with +key=value. The rest was refused while composing."""
    roots = {field.name for field in dataclasses.fields(RelaxConfig)}
    problems = [unknown_key(str(key)) for key in cfg if key not in roots]
    for section in section_types():
        problems += _unknown_below(section, cfg[section])
    return problems


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
    for section, key in _PATHS:
        holder: Any = getattr(config, section)
        if (path := getattr(holder, key, None)) is not None:  # token_file is of one launcher only
            if not path:  # `run.dir=$UNSET` would be this very folder
                raise ConfigError([f"{section}.{key} is empty. Give a path, or leave it out."])
            setattr(holder, key, str(Path(path).expanduser().absolute()))
    if config.resume is not None and config.resume != "auto":
        config.resume = str(Path(config.resume).expanduser().absolute())
    return config
