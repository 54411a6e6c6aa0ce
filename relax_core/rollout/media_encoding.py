"""Builds the encoders of a run's media: limits, the root folder of media files, and worker processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from relax_core.config.schema import MEDIA_TASKS, ModalityConfig, RelaxConfig
from relax_core.contracts.media import MediaItem
from relax_core.data.media_tasks import cache_folder
from relax_core.data.paths import data_files, data_parts
from relax_core.data.plugin_source import names_plugin
from relax_core.registry import is_file_plugin

if TYPE_CHECKING:
    from relax_core.data.media.encode_pool import EncodePool
    from relax_core.data.media.media_limits import MediaLimits

ENCODE_LOG = "encode.log"  # file for the output of the worker processes


def open_encoders(config: RelaxConfig, *, model_folder: Path, media_folder: Path, log_dir: Path) -> EncodePool:
    """Returns the worker processes that encode media into ``media_folder``; the caller must close them.

    Raises ValueError if the model's folder lacks a processor file.
    """
    from relax_core.data.media.encode_pool import EncodePool, EncodeSettings
    from relax_core.families.folder import folder_architecture

    model = folder_architecture(model_folder, also=config.model.family)
    assert model.vision is not None, "only a vision family has kinds of media"
    settings = EncodeSettings(
        model_folder=str(model_folder),
        tower=model.vision,
        limits=media_limits(config.modality),
        root=str(media_root(config)),
        folder=str(media_folder),
        audio=model.audio,
        audio_in_video=config.modality.audio_in_video,
    )
    return EncodePool(settings, workers=config.modality.workers, log_file=log_dir / ENCODE_LOG)


def item_work_of(config: RelaxConfig, *, model_folder: Path) -> Callable[[MediaItem], float]:
    """Returns a function that estimates the towers' work for a media item, to distribute prompts over engines."""
    from relax_core.families.folder import folder_architecture
    from relax_core.families.towers import item_work

    return partial(item_work, folder_architecture(model_folder, also=config.model.family))


def media_limits(modality: ModalityConfig) -> MediaLimits:
    """Returns the limits of media from the configuration."""
    from relax_core.data.media.media_limits import MediaLimits

    return MediaLimits(
        image_rows_min=modality.image_tokens[0],
        image_rows_max=modality.image_tokens[1],
        video_fps=modality.video_fps,
        video_frames_min=modality.video_frames[0],
        video_frames_max=modality.video_frames[1],
        frame_rows=modality.frame_tokens,
        audio_seconds_min=modality.audio_seconds[0],
        audio_seconds_max=modality.audio_seconds[1],
    )


def media_root(config: RelaxConfig) -> Path:
    """Returns the root folder of all media files: data.media_root, or else the folder of the data file.

    Without a data file, it is the folder of the first evaluation set that is a file. For a data source plug-in it is
    the plug-in's folder, and for a built-in task with media it is the cache folder.
    """
    data = config.data
    if data.media_root is not None:
        return Path(data.media_root).absolute()
    if data.task in MEDIA_TASKS:
        return cache_folder()
    if names_plugin(data):
        return Path(data.name).parent.absolute() if is_file_plugin(data.name) else Path.cwd()
    if data.path is not None or data.paths is not None:
        return data_parts(data)[0].files[0].parent.absolute()
    sets = [file for file in config.eval.sets.values() if file is not None]
    return data_files(sets[0], key="eval.sets")[0].parent.absolute() if sets else Path.cwd()
