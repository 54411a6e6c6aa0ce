"""Stores the list of the run's current engines: the controller writes it, all other processes read it.

The file is in the folder of the published weights and is replaced atomically. This module has no heavy imports.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from relax_core.weights.version_folder import PublishedUnreadable, read_digested, replace_digested

ENGINES = "engines.json"

# start: an engine of the configuration. added: an engine that the run started during training. external: an external
# server that joined during training.
Origin = Literal["start", "added", "external"]
# joining: it gets its first weights and no prompts. serving: it gets prompts. leaving: it finishes its open samples.
# moving: its open samples are aborted and continue in other engines.
MemberState = Literal["joining", "serving", "leaving", "moving"]
STARTED: tuple[MemberState, ...] = ("serving", "leaving", "moving")  # it has served prompts
log = logging.getLogger(__name__)


class EngineMember(msgspec.Struct, frozen=True, kw_only=True):
    """Holds one engine of the run; ``number`` is never reused in the run, also after the engine has left.

    ``url`` is the address of an external engine, "" for all others.
    """

    number: int
    origin: Origin = "start"
    state: MemberState = "serving"
    url: str = ""


class EngineMembers(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the engines of the run in the order of their numbers."""

    members: tuple[EngineMember, ...]

    @property
    def numbers(self) -> list[int]:
        """Returns the numbers of all engines."""
        return [member.number for member in self.members]

    def url_of(self, number: int) -> str:
        """Returns the address of an external engine, "" for any other number."""
        return next((member.url for member in self.members if member.number == number), "")

    def in_state(self, *states: MemberState) -> list[int]:
        """Returns the numbers of the engines in these states."""
        return [member.number for member in self.members if member.state in states]

    @property
    def started(self) -> list[int]:
        """Returns the numbers of the engines that have served prompts, to which the trainer pushes its weights."""
        return self.in_state(*STARTED)


def start_members(count: int) -> EngineMembers:
    """Returns the engines of the configuration, which are numbered from 0 and serve from the start."""
    return EngineMembers(members=tuple(EngineMember(number=number) for number in range(count)))


def write_members(folder: Path, members: Iterable[EngineMember]) -> None:
    """Replaces the list in the folder of the published weights; creates the folder if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_digested(folder / ENGINES, EngineMembers(members=tuple(sorted(members, key=lambda member: member.number))))


class MemberList:
    """Reads the list of the engines in ``folder``.

    Without a file, as in a run without a controller, the list has the ``count`` engines of the configuration.
    """

    def __init__(self, folder: Path, *, count: int) -> None:
        self._folder = folder
        self.at_start = self._newest = start_members(count)

    def read(self) -> EngineMembers:
        """Returns the newest list. If the file is damaged, logs a warning and returns the previous list."""
        try:
            self._newest = read_digested(self._folder / ENGINES, type=EngineMembers) or self._newest
        except PublishedUnreadable as error:
            log.warning("the list of engines cannot be read, the previous list stays in use: %s", error)
        return self._newest
