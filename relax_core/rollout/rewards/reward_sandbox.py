"""Defines the sandbox of isolated rewards' worker processes: the files that the processes may read."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from relax_core.config.reward_choice import ChosenReward, RewardChoice
from relax_core.registry import is_file_plugin
from relax_core.sandbox.worker_sandbox import WorkerSandbox, worker_refusal

_GROUP = "relax.rewards"
log = logging.getLogger(__name__)


def reward_sandbox(
    choice: RewardChoice, rewards: Sequence[ChosenReward], *, media_folder: str = ""
) -> WorkerSandbox | None:
    """Returns the sandbox for the workers of a run's rewards, or None for plain processes.

    The workers may read the files of ``rewards``, other Python files in the folders of these files, the paths in
    ``reads`` of the rewards, ``media_folder``, and installed packages with rewards.
    """
    if choice.own.config.sandbox == "none":
        return None
    if refusal := worker_refusal():
        log.warning("isolated rewards run without a sandbox, with the rights of this run: %s", refusal)
        return None
    shown = [Path(media_folder)] if media_folder else []
    for reward in rewards:
        shown += [Path(path).expanduser().absolute() for path in reward.spec.reads(reward.config)]
        if is_file_plugin(reward.config.name):
            file = Path(reward.config.name).expanduser().absolute()
            shown += [file, *file.parent.glob("*.py")]
    return WorkerSandbox(read_only=tuple(shown), imports=tuple(_installed()))


def _installed() -> Iterator[Path]:
    """Yields the packages that offer rewards, also packages outside the usual package folders."""
    for point in importlib.metadata.entry_points(group=_GROUP):
        package = importlib.util.find_spec(point.module.partition(".")[0])
        if package is not None and package.submodule_search_locations:
            yield Path(package.submodule_search_locations[0])
        elif package is not None and package.origin is not None:
            yield Path(package.origin)
