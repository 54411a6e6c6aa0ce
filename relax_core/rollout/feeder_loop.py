"""Runs the loop of a feeder: admissions → data rows → groups on the bus, for algorithms that train without engines.

The feeder takes the place of the rollout. Admissions, the order of data rows, bad rows and the ledger are the same, so
a restarted or resumed run trains each row once per pass over the data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from relax_core.contracts.bus import Admission, Group
from relax_core.contracts.columns import decode_tree
from relax_core.contracts.data import BadRow, PromptSource
from relax_core.observe.sample_log import SampleLog
from relax_core.rollout.offline_rows import OfflineRows, partner_rows
from relax_core.rollout.partial_rollout import GroupsInFlight
from relax_core.rollout.prompt_tokens import AdmittedPrompt, PromptMaker
from relax_core.rollout.rollout_loop import BadRows, PromptAdmissions, Record, RolloutBus, RolloutLoopSettings


class FeederLoop:
    """Puts the groups of admitted data rows into the bus; `RolloutLoop` explains the parameters.

    ``rows`` makes the groups. ``prompts`` encodes images, videos and sounds.
    """

    def __init__(
        self,
        *,
        bus: RolloutBus,
        source: PromptSource,
        rows: OfflineRows,
        prompts: PromptMaker,
        settings: RolloutLoopSettings,
        record: Record,
        bad_rows: BadRows,
        samples: SampleLog | None = None,
    ) -> None:
        self._bus, self._source, self._rows, self._prompts = bus, source, rows, prompts
        self._settings, self._record, self._samples = settings, record, samples
        self._flight = GroupsInFlight()
        self._admissions = PromptAdmissions(
            bus=bus,
            source=source,
            prompts=prompts,
            settings=settings,
            bad_rows=bad_rows,
            teacher_of=None,
            check_row=lambda row, where: None,
            flight=self._flight,
            makes_prompts=True,
        )

    async def run(self, reclaimed: Sequence[Admission]) -> None:
        """Runs until the bus closes (raises BusClosed) or too many data rows are bad (raises ValueError)."""
        size = self._settings.batch_prompts
        for start in range(0, len(reclaimed), size):
            await self._feed(reclaimed[start : start + size])
        while True:
            await self._feed(await self._admissions.next())

    async def _feed(self, admissions: Sequence[Admission]) -> None:
        admitted = await self._admissions.prompts(admissions)
        made = await asyncio.gather(*map(self._group_or_error, admitted))
        groups = []
        for row, group in zip(admitted, made, strict=True):
            if isinstance(group, BadRow):
                await self._admissions.leave_out(row.index, row.number, group)
                continue
            self._admissions.used()
            self._flight.end(row.index)
            groups.append(group)
            if self._samples is not None:
                self._samples.put(group)
        if groups:
            await self._bus.put(groups, timeout_s=self._settings.call_timeout_s)
            for group in groups:  # the bus now holds their images, videos and sounds
                self._prompts.release(group.group_uid)
            self._record("rollout", max(max(group.versions) for group in groups), _values(groups))

    async def _group_or_error(self, row: AdmittedPrompt) -> Group | BadRow:
        try:
            items = await self._prompts.encoded(self._rows.sources(row.row), owner=row.uid)
            return self._rows.group(
                row.row,
                where=row.where,
                index=row.index,
                version=row.request.min_version,
                items=items,
                partners=partner_rows(row.number, count=len(self._source), read=self._source.numbered),
            )
        except BadRow as error:
            return error


def _values(groups: Sequence[Group]) -> dict[str, float]:
    trees = [decode_tree(group) for group in groups]
    return {
        "samples": float(sum(len(tree.episodes) for tree in trees)),
        "tokens": float(sum(int(tree.loss_mask.sum()) for tree in trees)),
    }
