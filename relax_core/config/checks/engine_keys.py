"""What a kind of engine cannot be, beside the other keys: its own checks, and keys that it does not read."""

from __future__ import annotations

from collections.abc import Iterator

from relax_core.config.command_line.error_messages import missing_name
from relax_core.config.redaction import is_secret_name, redacted
from relax_core.config.schema import RelaxConfig
from relax_core.registry import PluginError, find_engine, is_builtin, is_file_plugin, names

_UNSET: dict[str, object] = {
    "python": None,
    "urls": [],
    "token_file": None,
    "mem_fraction": None,
    "deterministic": None,
    "flags": {},
    "prefix_cache_tokens": None,
}


def engine_name_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a sentence where there is no such kind of engine, or its file cannot be loaded."""
    name = config.engine.name
    if not is_file_plugin(name) and name not in names("engine"):
        yield missing_name("engine.name", name, names("engine"))
        return
    try:
        find_engine(name)
    except PluginError as error:
        yield str(error)


def engine_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a sentence for each problem that needs no look at a file."""
    engine = config.engine
    spec = find_engine(engine.name)
    for key, unset in _UNSET.items():
        if key not in spec.keys and (value := getattr(engine, key)) != unset:
            kinds = " or ".join(f"engine={name}" for name in _with_key(key))
            shown = redacted(value, ("engine", key))
            yield f"engine.{key}={shown} is a key of {kinds} only. Drop it, or choose {kinds}."
    for name in filter(is_secret_name, engine.flags):
        yield (
            f"engine.flags.{name}: `ps` shows an engine's command line to every user of the machine. Drop it: the run "
            "gives a key of its own to engines that it starts, and engine.token_file names the key of others."
        )
    if not spec.on_gpus and engine.tp != 1:
        yield (
            f"engine.tp={engine.tp}: engine={spec.name} is one process on CPU cores. Use engine.tp=1, engine.count=N."
        )
    yield from spec.problems(config)


def engine_file_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a sentence for each file that the engine needs and that is not as it should be."""
    yield from find_engine(config.engine.name).file_problems(config)


def _with_key(key: str) -> list[str]:
    """Returns the names of Relax's own kinds of engine that read the key."""
    return [name for name in names("engine") if is_builtin("engine", name) and key in find_engine(name).keys]
