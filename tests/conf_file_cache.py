"""Caches Hydra's reads of `conf/`, its defaults lists and its merges of the same files for a test session."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable
from typing import Any


def remember_conf_files() -> None:
    """Wraps the functions of Hydra that read files, choose them and merge them. Each caller gets a copy.

    A new entry in Hydra's ConfigStore may replace files, so it clears the cache.
    """
    from hydra._internal import config_loader_impl
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_repository import ConfigRepository, IConfigRepository
    from hydra.core.config_store import ConfigStore

    known: dict[Hashable, bytes] = {}
    read, merge = ConfigRepository.load_config, ConfigLoaderImpl._compose_config_from_defaults_list
    choose = config_loader_impl.create_defaults_list
    store = ConfigStore.store

    def copy_of(made: Callable[[], Any], repository: IConfigRepository, of: Hashable) -> Any:
        key = of, *(f"{source.scheme()}{source.path}" for source in repository.get_sources())
        if key not in known:
            known[key] = pickle.dumps(made())
        return pickle.loads(known[key])  # a fifth of the time of a deep copy

    def conf_file_cache(repository: ConfigRepository, config_path: str) -> Any:
        return copy_of(lambda: read(repository, config_path), repository, config_path)

    def choose_once(repo: IConfigRepository, config_name: Any, overrides_list: Any, **flags: Any) -> Any:
        """Overrides of values do not reach the defaults list, so all command lines with the same groups share it."""
        values = [
            word
            for word in overrides_list
            if not word.is_sweep_override()
            and (isinstance(word.value(), dict) or not repo.group_exists(word.key_or_group))
        ]
        groups = [word for word in overrides_list if word not in values]
        key = "defaults", config_name, *sorted(flags.items()), *(word.input_line for word in groups)
        chosen = copy_of(lambda: choose(repo, config_name, groups, **flags), repo, key)
        chosen.config_overrides = chosen.overrides.config_overrides = values
        return chosen

    def merge_once(loader: ConfigLoaderImpl, defaults: Any, repo: IConfigRepository) -> Any:
        return copy_of(lambda: merge(loader, defaults, repo), repo, repr(defaults))

    def store_anew(*arguments: Any, **named: Any) -> None:
        known.clear()
        store(*arguments, **named)

    config_loader_impl.create_defaults_list = choose_once
    ConfigRepository.load_config = conf_file_cache
    ConfigLoaderImpl._compose_config_from_defaults_list = merge_once
    ConfigStore.store = store_anew
    ConfigStore.__deepcopy__ = lambda store, memo: store  # Hydra copies all of it with each repository
