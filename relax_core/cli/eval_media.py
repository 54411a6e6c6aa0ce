"""Encodes the images and videos of an evaluation without training, as a run does, without Ray and the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from relax_core.config.checks.modality_keys import media_kinds
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.media import MediaItem
from relax_core.control.host.run_paths import run_paths
from relax_core.rollout.held_items import HeldItems
from relax_core.rollout.item_cache import ItemCache
from relax_core.rollout.media_encoding import MEGABYTE, item_work_of, open_encoders


@dataclass(frozen=True, kw_only=True)
class EvalMedia:
    """Holds what gives an evaluation its media, the folder of their files in shared memory, and the towers' work."""

    items: ItemCache
    folder: Path
    work: Callable[[MediaItem], float]


@contextmanager
def eval_media(config: RelaxConfig, model_folder: Path, *, log_dir: Path) -> Iterator[EvalMedia | None]:
    """Starts the worker processes that encode, and yields None for an evaluation of text.

    The workers end and the files are removed after the block. Raises ValueError if the model's folder lacks a processor
    file.
    """
    if not media_kinds(config):
        yield None
        return
    log_dir.mkdir(parents=True, exist_ok=True)
    with run_paths(run_dir=Path(config.run.dir)) as paths:
        folder = paths.weights_folder
        with open_encoders(config, model_folder=model_folder, media_folder=folder, log_dir=log_dir) as encoders:
            held = HeldItems(encoders, ItemFiles(folder), worker=0, timeout_s=config.bus.call_timeout_s)
            items = ItemCache(held, most_bytes=config.modality.cache_mb * MEGABYTE, let_go=held.let_go)
            yield EvalMedia(items=items, folder=folder, work=item_work_of(config, model_folder=model_folder))


class ItemFiles:
    """Takes the place of the bus: the cache alone says how long the files of its items exist."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def hold_async(self, items: Mapping[str, int], *, worker: int = 0, timeout_s: float) -> list[str]:
        """Returns the digests of the items that have no file."""
        return [digest for digest in items if not (self._folder / digest).exists()]

    async def let_go_async(self, digests: Sequence[str], *, worker: int = 0, timeout_s: float) -> None:
        """Removes the files of items."""
        for digest in digests:
            await asyncio.to_thread((self._folder / digest).unlink, missing_ok=True)
