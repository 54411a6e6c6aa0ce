"""Checks engine.urls, the servers that the run attaches to and does not start, against the other keys."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from relax_core.config.checks.modality_keys import media_kinds
from relax_core.config.media_schema import MEDIA_TASKS
from relax_core.config.schema import EngineConfig, RelaxConfig
from relax_core.contracts.media import MediaKind
from relax_core.registry import find_algorithm, find_engine

# Key of servers that the run starts → its default.
_OF_OUR_SERVERS: dict[str, object] = {"python": None, "mem_fraction": None, "flags": {}}


def attached_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a sentence for each problem of engine.urls and engine.token_file that needs no look at a file."""
    engine = config.engine
    if not engine.urls:
        if engine.token_file is not None and config.gateway.name == "none":
            yield (
                f"engine.token_file={engine.token_file} with gateway=none: it is the key of servers that engine.urls "
                "names, or that join through the gateway. Drop it, or use gateway=local."
            )
        return
    if len(engine.urls) != engine.count:
        yield f"engine.urls names {len(engine.urls)} servers. Use engine.count={len(engine.urls)}."
    for url in engine.urls:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.port is None or parts.path not in ("", "/"):
            yield f"engine.urls: {url} is no address of a server. Write http://host:port."
    for key, unset in _OF_OUR_SERVERS.items():
        if (value := getattr(engine, key)) != unset:
            yield f"engine.{key}={value} with engine.urls: those servers were started by somebody else. Drop it."
    teacher = find_algorithm(config.algo.name).requirements(config.algo).teacher
    if teacher is not None and teacher.served_by == "engine":
        yield "engine.urls with algo.served_by=engine: teachers' engines have no addresses. Use algo.served_by=forward."


def unseen_media(config: RelaxConfig) -> list[MediaKind]:
    """Returns the kinds of media that prompts may have and that servers which somebody else started do not get."""
    kinds, gets = media_kinds(config), find_engine(config.engine.name).attached_media
    if not gets:
        return list(kinds)
    task = MEDIA_TASKS.get(config.data.task or "")
    asked = {*config.data.media_keys.columns, *(task.kinds if task is not None else ())}
    return [kind for kind in kinds if kind in asked and kind not in gets]


def no_media_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a sentence if prompts have media and the servers of engine.urls see no folder of the run's items."""
    if config.engine.urls and (unseen_media(config) or config.data.task in MEDIA_TASKS):
        yield (
            f"engine.urls with media in prompts: a server of engine={config.engine.name} that the run did not start "
            "does not see them. Drop engine.urls, or use engine=sglang, whose servers get images."
        )


def token_file_problems(engine: EngineConfig) -> Iterator[str]:
    """Yields what is wrong with the file of the servers' key."""
    if engine.token_file is not None:
        file = Path(engine.token_file)
        if not file.is_file():
            yield f"engine.token_file={file}: no such file."
        elif stat.S_IMODE(file.stat().st_mode) & 0o077:
            yield f"engine.token_file={file}: others may read it. Run chmod 600 {file}."
