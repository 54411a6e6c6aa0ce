"""The data cursor: chooses the next group and its prompt, also with data.mix (shares of modalities)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from relax_core.bus.ledger import LedgerState
from relax_core.bus.settings import BusSettings
from relax_core.bus.staleness import (
    admissible_versions,
    choose,
    fill,
    keeps_order,
    oldest_version,
    oldest_window_first,
    window_steps,
)
from relax_core.config.modality import MixOrder
from relax_core.contracts.bus import LeaseRequest

if TYPE_CHECKING:
    from relax_core.bus.replay_buffer import OpenGroup, ReplayBuffer


@dataclass(frozen=True, slots=True)
class PromptDraw:
    """Describes the next group to issue.

    With data.mix, ``drawn`` is the index of the group's prompt in the mixed order, and ``modality`` is the prompt's
    modality. Without data.mix, ``drawn`` is None and ``modality`` is empty.
    """

    index: int
    attempt: int
    min_version: int
    drawn: int | None = None
    modality: str = ""


class DataCursor:
    """Numbers the groups of a run without data.mix in order of issue. Group i gets prompt i."""

    def __init__(self) -> None:
        self.next_index = 0
        self._reissue: deque[tuple[int, int]] = deque()  # (index, attempt) of a snapshot's open groups

    def admit(self, core: ReplayBuffer, max_groups: int) -> list[PromptDraw]:
        """Returns the groups to admit now, at most ``max_groups``. The caller must issue all of them."""
        return [self._draw(min_version) for min_version in admissible_versions(core, max_groups)]

    def _draw(self, min_version: int) -> PromptDraw:
        if self._reissue:
            index, last_attempt = self._reissue.popleft()
            return PromptDraw(index, last_attempt + 1, min_version)
        self.next_index += 1
        return PromptDraw(self.next_index - 1, 0, min_version)

    def waiting(self) -> list[int]:
        """Returns the indices of a snapshot's open groups that have not been issued again yet."""
        return [index for index, _ in self._reissue]

    def state(self, core: ReplayBuffer) -> Snapshot:
        """Returns the snapshot of a bus."""
        groups = core.groups.values()
        return Snapshot(
            version=core.version,
            next_index=self.next_index,
            open_groups=[(group.admission.index, group.admission.attempt) for group in groups] + list(self._reissue),
            staleness_histogram=dict(core.staleness),
            ledger=core.ledger.state(),
        )

    def restore(self, state: Snapshot) -> None:
        """Restores a snapshot."""
        self._reissue = deque(state.open_groups)
        self.next_index = state.next_index


class MixedCursor(DataCursor):
    """Draws the prompts of a run with data.mix, and assigns to each modality its slots in every train step.

    A `MixOrder` assigns a modality to every slot of all steps and to every prompt. Admission and selection handle each
    modality separately: if a group is dropped, the next prompt of the same modality fills its slot. The cursor's
    position is the number of drawn prompts of each modality.
    """

    def __init__(self, settings: BusSettings) -> None:
        super().__init__()
        self._settings = settings
        self._order = MixOrder(settings.mix)
        self._given = dict.fromkeys(self._order.names, 0)
        self._drawn: dict[int, int] = {}  # group index → prompt index, for groups that must be issued again

    def admit(self, core: ReplayBuffer, max_groups: int) -> list[PromptDraw]:
        """Returns the groups to admit now, at most ``max_groups``. The caller must issue all of them."""
        found: list[tuple[int, int, PromptDraw]] = []  # (two sort keys, draw); a snapshot's groups keep their old order
        for modality in self._order.names:
            again = [entry for entry in self._reissue if self._order.at(self._drawn[entry[0]])[0] == modality]
            versions = self._admissible_versions(core, modality, max_groups)
            for (index, attempt), version in zip(again, versions, strict=False):
                found.append((0, index, PromptDraw(index, attempt + 1, version, self._drawn[index], modality)))
            for number, version in enumerate(versions[len(again) :], start=self._given[modality]):
                drawn = self._order.index(modality, number)
                found.append((1, drawn, PromptDraw(-1, 0, version, drawn, modality)))
        found.sort(key=lambda entry: (entry[2].min_version, entry[0], entry[1]))
        return [self._take(draw) for _, _, draw in found[:max_groups]]

    def _take(self, draw: PromptDraw) -> PromptDraw:
        if draw.attempt:
            del self._drawn[draw.index]
            self._reissue = deque(entry for entry in self._reissue if entry[0] != draw.index)
            return draw
        self._given[draw.modality] += 1
        self.next_index += 1
        return replace(draw, index=self.next_index - 1)

    def _admissible_versions(self, core: ReplayBuffer, modality: str, max_groups: int) -> list[int]:
        settings, version = self._settings, core.version
        steps = window_steps(version, settings)
        open_groups = [group for group in core.groups.values() if group.modality == modality]
        supply = [group.ready_from(version) for group in open_groups if group.actor_step != version]
        return fill(
            [self._wanted(modality, open_groups, version=version, ahead=ahead) for ahead in range(steps)],
            supply,
            settings,
            version=version,
            max_groups=max_groups,
        )

    def _wanted(self, modality: str, open_groups: list[OpenGroup], *, version: int, ahead: int) -> int:
        """Returns how many groups of a modality may enter for step ``version`` and the next ``ahead`` steps."""
        settings = self._settings
        leased = sum(group.actor_step == version for group in open_groups)
        slots = self._slots(modality, version, version + ahead + 1, each=settings.groups_per_step) - leased
        if settings.surplus == "keep":
            return slots + self._slots(modality, 0, 1, each=settings.spare_groups)
        return slots + self._slots(modality, version, version + ahead + 1, each=settings.spare_groups)

    def _slots(self, modality: str, first: int, end: int, *, each: int) -> int:
        """Returns a modality's number of slots in steps ``first`` to ``end`` - 1, with ``each`` slots per step."""
        return self._order.count(modality, end * each) - self._order.count(modality, first * each)

    def choose(self, core: ReplayBuffer, request: LeaseRequest) -> list[OpenGroup]:
        """Returns the groups for a lease. The actor gets one group for each slot of each modality.

        Slots are reserved for groups that leave the window after this step, even if these groups are not ready.
        Over-sampling therefore drops the slowest groups of each modality, in proportion to the modality's share. At
        staleness 0 without over-sampling, exactly the step's groups were admitted, and they keep their order.
        """
        settings = self._settings
        if request.step is None or keeps_order(settings):
            return choose(core, request)
        chosen: list[OpenGroup] = []
        for modality in self._order.names:
            mine = [group for group in core.groups.values() if group.modality == modality]
            leased = sum(group.actor_step == core.version for group in mine)
            chosen += oldest_window_first(
                [group for group in mine if group.actor_step is None],
                columns=request.columns,
                last_chance=oldest_version(core.version, settings),
                max_groups=request.max_groups,
                slots=self._slots(modality, core.version, core.version + 1, each=settings.groups_per_step) - leased,
            )
        return sorted(chosen, key=lambda group: group.admission.index)[: request.max_groups]

    def state(self, core: ReplayBuffer) -> Snapshot:
        """Returns the snapshot of a bus."""
        drawn = {group.admission.index: group.admission.data_index for group in core.groups.values()} | self._drawn
        state = super().state(core)
        return msgspec.structs.replace(
            state, open_groups=sorted(state.open_groups), drawn=drawn, given=dict(self._given)
        )

    def restore(self, state: Snapshot) -> None:
        """Restores a snapshot. Raises ValueError if the snapshot's run had no data.mix."""
        if state.next_index and not state.given:
            raise ValueError(
                f"data.mix={self._settings.mix}: the checkpoint was made without it. Resume with data.mix=null, or "
                "start a new run."
            )
        super().restore(state)
        self._drawn = dict(state.drawn)
        self._given = dict(state.given)


class Snapshot(msgspec.Struct, frozen=True):
    """Holds the state of a bus, without payloads.

    ``version`` is the number of finished train steps. ``next_index`` is the index of the next new group.
    ``open_groups`` lists (index, attempt) of every unfinished group, in order of issue; after a restore these groups
    are admitted again. With data.mix, ``given`` maps each modality to the number of its drawn prompts, and ``drawn``
    maps each open group's index to its prompt's index in the mixed order.
    """

    version: int
    next_index: int
    open_groups: list[tuple[int, int]]
    staleness_histogram: dict[int, int]
    ledger: LedgerState
    given: dict[str, int] = {}
    drawn: dict[int, int] = {}
