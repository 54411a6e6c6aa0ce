"""Computes the memory of images and videos outside the trainer: features in engines, items, encode workers."""

from __future__ import annotations

from relax_core.config.schema import RelaxConfig
from relax_core.data.generated import MEDIA_FILES
from relax_core.plan.memory.memory_terms import MIB, engine_bytes
from relax_core.plan.model.dimensions import ModelDimensions
from relax_core.plan.workload import Workload
from relax_core.registry import find_engine
from relax_core.rollout.media_encoding import MEGABYTE

ENCODE_WORKER = 51  # MiB of a worker process that encodes, after its imports
STAMP_TOKENIZER = 17  # MiB more with the tokenizer, which writes the time stamps of videos
SOUNDS = 40  # MiB more at most for the decoding of a sound of 30 s, and for its features
ENCODE_BYTES_A_PIXEL = 14  # of a source while it is decoded and resized (docs/media.md)


def engine_media_terms(config: RelaxConfig, model: ModelDimensions, work: Workload) -> dict[str, int]:
    """Returns what an engine keeps of the tower's features, and what the pass of its largest item takes.

    Features stay for one weight version, so that no more prompts have some than are asked within it.
    """
    if model.patches is None or work.media is None:
        return {}
    cost, media, size = model.patches, work.media, engine_bytes(config)
    prompts = (config.mode.max_staleness + 1) * work.groups + (config.eval.rows if config.eval.every else 0)
    features = round(prompts * media.patches) // cost.a_row * cost.features * size
    return {
        "tower features": min(features, find_engine(config.engine.name).feature_mib * MIB),
        "one tower block": media.item_patches * (cost.block + cost.inputs) * size,
    }


def shared_item_bytes(config: RelaxConfig, work: Workload, *, rollout_workers: int, data_rows: int | None) -> int:
    """Returns the bytes of encoded items in shared memory: what the caches may keep, or all items that are asked.

    Items of prompts in flight stay beyond `modality.cache_mb`. An item is one file, named by its digest, however many
    workers and prompts have it.
    """
    media = work.media
    if media is None:
        return 0
    staleness, rollout = config.mode.max_staleness, config.rollout
    in_flight = round((staleness + 1) * (work.groups + rollout.spare_prompts) * media.nbytes)
    kept = max(rollout_workers * config.modality.cache_mb * MEGABYTE, in_flight)
    if data_rows is None or media.prompts == 0 or not media.items:
        return kept
    trained = (config.run.steps + staleness) * (work.groups + rollout.spare_prompts)
    asked = {"train": min(data_rows, trained), "eval": config.eval.rows if config.eval.every else 0}
    drawn = {split: prompts * media.items for split, prompts in asked.items()}
    files = MEDIA_FILES.get(config.data.task or "", {})
    items = sum(_distinct(count, files.get(split)) for split, count in drawn.items())
    return min(kept, round(items * media.nbytes / media.items))


def _distinct(drawn: float, files: int | None) -> float:
    """Returns the expected number of different items when ``drawn`` are drawn from ``files``; None: all differ."""
    return drawn if files is None else files * (1 - (1 - 1 / files) ** drawn)


def encode_worker_bytes(work: Workload) -> int:
    """Returns the memory of one worker process that encodes."""
    assert work.media is not None, "only a run with images or videos has such processes"
    own = ENCODE_WORKER + (STAMP_TOKENIZER if work.media.videos else 0) + (SOUNDS if work.media.sounds else 0)
    return own * MIB + ENCODE_BYTES_A_PIXEL * work.media.source_pixels
