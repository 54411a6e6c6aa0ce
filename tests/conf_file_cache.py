"""Caches Hydra's reads of `conf/` and its merges of the same files for a test session."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any


def remember_conf_files() -> None:
    """Wraps the methods of Hydra that read and merge files. Each caller gets a copy.

    A new entry in Hydra's ConfigStore may replace files, so it clears the cache.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_repository import ConfigRepository, IConfigRepository
    from hydra.core.config_store import ConfigStore

    known: dict[Hashable, Any] = {}
    read, merge = ConfigRepository.load_config, ConfigLoaderImpl._compose_config_from_defaults_list
    store = ConfigStore.store

    def copy_of(made: Callable[[], Any], repository: IConfigRepository, of: Hashable) -> Any:
        key = of, *(f"{source.scheme()}{source.path}" for source in repository.get_sources())
        if key not in known:
            known[key] = made()
        return copy.deepcopy(known[key])

    def conf_file_cache(repository: ConfigRepository, config_path: str) -> Any:
        return copy_of(lambda: read(repository, config_path), repository, config_path)

    def merge_once(loader: ConfigLoaderImpl, defaults: Any, repo: IConfigRepository) -> Any:
        return copy_of(lambda: merge(loader, defaults, repo), repo, repr(defaults))

    def store_anew(*arguments: Any, **named: Any) -> None:
        known.clear()
        store(*arguments, **named)

    ConfigRepository.load_config = conf_file_cache
    ConfigLoaderImpl._compose_config_from_defaults_list = merge_once
    ConfigStore.store = store_anew
