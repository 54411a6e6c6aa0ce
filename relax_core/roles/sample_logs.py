"""Opens the log of samples of a process that generates or trains samples."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from relax_core.config.schema import kept_groups
from relax_core.contracts.media import MediaItem, MediaSource
from relax_core.data.media.played_files import PlayedFiles
from relax_core.observe.sample_log import (
    PICTURES_FOLDER,
    PLAYED_FOLDER,
    SAMPLES_FOLDER,
    TOKENIZER_FOLDER,
    SampleLog,
)
from relax_core.roles.role_context import RunContext
from relax_core.rollout.media_encoding import media_limits, media_root
from relax_core.rollout.thumbnails import MOST, THUMBNAILS, Thumbnails

MAX_BYTES = 2 << 30  # maximum bytes of tokens in a run's sample logs; the oldest are removed first
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def open_sample_log(context: RunContext, name: str, *, tokenizer: bool = False) -> SampleLog | None:
    """Returns the log of the worker ``name``, or None if the run keeps no samples.

    With ``tokenizer`` the model's tokenizer is copied next to the samples, so the samples can be decoded in any copy of
    the run's folder. `MAX_BYTES` is divided among the processes that generate or train samples.
    """
    config = context.config
    groups = config.rollout.prompts_per_step
    first = kept_groups(config.tracker, groups_per_step=groups)
    if not first:
        return None
    folder = context.run_dir / SAMPLES_FOLDER
    if tokenizer:
        target = folder / TOKENIZER_FOLDER
        target.mkdir(parents=True, exist_ok=True)
        for file in TOKENIZER_FILES:
            if (context.model_folder / file).is_file():
                shutil.copyfile(context.model_folder / file, target / file)
    writers = config.rollout.workers + config.parallel.dp
    return SampleLog(
        context.run_dir,
        worker=name,
        attempt=context.attempt,
        first=first,
        every=groups,
        max_bytes=MAX_BYTES // writers,
    )


def keep_media(context: RunContext, *, first: bool) -> Callable[[MediaItem, MediaSource], None]:
    """Returns a callback for new media items, which stores pictures and playable files of the items.

    For kept samples the callback writes small pictures, and files of sounds and videos. With ``first`` it also writes
    pictures of the run's first items.
    """
    assert context.media_folder is not None, "a run on text has no items"
    kept = kept_groups(context.config.tracker, groups_per_step=context.config.rollout.prompts_per_step)
    samples = context.run_dir / SAMPLES_FOLDER
    thumbnails = Thumbnails(
        context.run_dir / THUMBNAILS,
        context.media_folder,
        first=MOST if first else 0,
        pictures=samples / PICTURES_FOLDER if kept else None,
    )
    config = context.config
    played = PlayedFiles(samples / PLAYED_FOLDER, root=media_root(config), limits=media_limits(config.modality))

    def keep(item: MediaItem, source: MediaSource) -> None:
        thumbnails.add(item)
        if kept:
            played.add(item, source)

    return keep
