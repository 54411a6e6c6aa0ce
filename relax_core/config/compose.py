"""From the command line to a typed, validated `RelaxConfig`; Hydra stays in here."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from relax_core.config.errors import ConfigError
from relax_core.config.explain import explain
from relax_core.config.options import conf_folder, plugin_options
from relax_core.config.plugins import typed_knobs
from relax_core.config.schema import RelaxConfig
from relax_core.config.schema_keys import section_types, unknown_key
from relax_core.config.validate import Check, problems_of
from relax_core.registry import KINDS

_VERSION_BASE = "1.3"
_PATHS = (("model", "path"), ("data", "path"), ("data", "eval_path"), ("run", "dir"))


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


def to_run_config(cfg: DictConfig, *, checks: Iterable[Check] = ()) -> RelaxConfig:
    """Typed objects from a composed configuration: knobs as instances, paths absolute, everything validated.

    Raises:
        ConfigError: unknown keys, missing values, wrong knobs; or, when all types fit, what `validate` finds.
    """
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
    config = _absolute(dataclasses.replace(config, **knobs))
    if found := problems_of(config, checks):
        raise ConfigError(found)
    return config


def run(arguments: Sequence[str], job: Callable[[RelaxConfig], int], *, checks: Sequence[Check] = ()) -> int:
    """Runs ``job`` for the configuration on the command line, or for each one of a sweep (-m), one after another.

    Returns the exit code: the job's own (of a sweep: the first that is not 0), or 2 for a user's mistake, which is
    reported on stderr without a traceback.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode

    codes: list[int] = []

    def one(cfg: DictConfig) -> None:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            print(f"relax: run {len(codes) + 1} of the sweep: {' '.join(HydraConfig.get().overrides.task)}", flush=True)
        try:
            config = to_run_config(cfg, checks=checks)
        except ConfigError as error:
            print(error.report(), file=sys.stderr)
            codes.append(2)
        else:
            codes.append(job(config))

    register_schema()
    decorated = hydra.main(version_base=_VERSION_BASE, config_path=str(conf_folder()), config_name="config")(one)
    try:
        with _hydra_raises(), _command_line(_with_plugin_groups(arguments)):
            decorated()
    except (HydraException, OmegaConfBaseException, MarkedYAMLError) as error:
        print(explain(error).report(), file=sys.stderr)
        return 2
    return next((code for code in codes if code != 0), 0)


def _with_plugin_groups(overrides: Sequence[str]) -> list[str]:
    """``algo.name=x`` alone means ``algo=plugin algo.name=x``: another plug-in must not inherit grpo.yaml's values."""
    keys = {override.split("=", 1)[0] for override in overrides}
    return [*overrides, *(f"{kind}=plugin" for kind in KINDS if f"{kind}.name" in keys and kind not in keys)]


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
    for section, section_type in section_types().items():
        fields = {field.name for field in dataclasses.fields(section_type)}
        problems += [unknown_key(f"{section}.{key}") for key in cfg[section] if key not in fields]
    return problems


def _missing_values(cfg: DictConfig) -> list[str]:
    """Keys still at ???; the plug-ins' are found when they are typed."""
    missing = sorted(key for key in OmegaConf.missing_keys(cfg) if key.split(".", 1)[0] not in KINDS)
    return [f"{key} has no value: add {key}=..." for key in missing]


def _absolute(config: RelaxConfig) -> RelaxConfig:
    """Services have working folders of their own, so every path is made absolute here."""
    for section, key in _PATHS:
        holder: Any = getattr(config, section)
        if (path := getattr(holder, key)) is not None:
            setattr(holder, key, str(Path(path).expanduser().absolute()))
    if config.resume is not None and config.resume != "auto":
        config.resume = str(Path(config.resume).expanduser().absolute())
    return config
