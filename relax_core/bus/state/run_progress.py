"""Counts the groups, samples and media items of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from relax_core.contracts.bus import BusProgress, LedgerCounts

if TYPE_CHECKING:
    from relax_core.bus.state.bus_state import BusCore


def run_progress(core: BusCore, *, admitted: int, staleness: Mapping[int, int], ledger: LedgerCounts) -> BusProgress:
    """Returns the state of the run; ``staleness`` counts the trained samples by staleness."""
    in_flight = sum(group.in_flight for group in core.groups.values())
    leased = sum(group.actor_step is not None for group in core.groups.values())
    return BusProgress(
        version=core.version,
        admitted=admitted,
        in_flight=in_flight,
        waiting=len(core.groups) - in_flight - leased,
        leased=leased,
        credits=core.credits(),
        staleness_histogram=dict(sorted(staleness.items())),
        ledger=ledger,
        media_items=len(core.media),
        media_bytes=core.media.nbytes,
    )
