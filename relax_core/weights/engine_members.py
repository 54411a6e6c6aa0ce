"""Stores the list of the run's current engines. The controller writes the list, and all other processes read it.

The file of the list is in the folder of the published weights and is replaced atomically. This module has no heavy
imports.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from relax_core.weights.version_folder import PublishedUnreadable, read_digested, replace_digested

ENGINES = "engines.json"

# start: an engine of the configuration. added: the run started the engine during training. external: an external server
# that joined during training.
Origin = Literal["start", "added", "external"]
# joining: loads its first weights, gets no prompts. serving: gets prompts. leaving: only finishes its open samples.
# moving: its open samples are aborted and continue in other engines.
MemberState = Literal["joining", "serving", "leaving", "moving"]
STARTED: tuple[MemberState, ...] = ("serving", "leaving", "moving")  # states of an engine that has served prompts
log = logging.getLogger(__name__)


class EngineMember(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one engine of the run; its ``number`` is not reused in the run, even after the engine has left.

    ``url`` is the address of an external engine, and "" for an engine that the run started.
    """

    number: int
    origin: Origin = "start"
    state: MemberState = "serving"
    url: str = ""


class EngineMembers(msgspec.Struct, frozen=True, kw_only=True):
    """Lists the engines of the run in the order of their numbers."""

    members: tuple[EngineMember, ...]

    @property
    def numbers(self) -> list[int]:
        """Returns the numbers of all engines."""
        return [member.number for member in self.members]

    def url_of(self, number: int) -> str:
        """Returns the address of an external engine; "" if the engine is not external or the number is unknown."""
        return next((member.url for member in self.members if member.number == number), "")

    def in_state(self, *states: MemberState) -> list[int]:
        """Returns the numbers of the engines in these states."""
        return [member.number for member in self.members if member.state in states]

    @property
    def started(self) -> list[int]:
        """Returns the numbers of the engines that have served prompts; the trainer pushes weights to these engines."""
        return self.in_state(*STARTED)


def start_members(count: int) -> EngineMembers:
    """Returns the engines of the configuration, numbered from 0; they serve from the start."""
    return EngineMembers(members=tuple(EngineMember(number=number) for number in range(count)))


def write_members(folder: Path, members: Iterable[EngineMember]) -> None:
    """Replaces the list of engines in the folder of the published weights; creates a missing folder."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_digested(folder / ENGINES, EngineMembers(members=tuple(sorted(members, key=lambda member: member.number))))


class MemberList:
    """Reads the list of the engines in ``folder``.

    If the file does not exist, as in a run without a controller, the list has the ``count`` engines of the
    configuration.
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
