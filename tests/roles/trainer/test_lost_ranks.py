"""The loss of a rank, and a rank's own failure, as the lead, the rank and the controller report them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from relax_core.contracts.bus import Lease
from relax_core.contracts.tree import TokenTree
from relax_core.control.worker_health import Beat, verdict
from relax_core.roles.role_context import RunContext
from relax_core.roles.trainer.worker_group import RankLost, take_answers, watch_build
from tests.roles.trainer.worker_group_harness import (
    BROKE,
    Backend,
    Patient,
    RestartedRank,
    begin,
    one_replica,
    pid_of,
    start,
    status_of,
    waiting,
)


def test_a_rank_that_dies_is_named_also_where_the_lead_breaks_of_it(
    other_ranks: list[Any], context: RunContext, lease: Lease, groups: list[TokenTree]
) -> None:
    names: list[tuple[str, str]] = []

    @contextmanager
    def traced(what: str, *, on: str) -> Iterator[None]:
        names.append((what, on))
        yield

    lead = Backend(0, fails=BROKE)
    members = start(other_ranks, 3, context, rank_2="dies", rank_3=BROKE)
    worker_group = one_replica(lead, members, lease, waiting=traced)
    names.clear()
    with pytest.raises(RankLost, match=r"actor-2 was lost in accumulate"):
        worker_group.accumulate(groups[:1])
    assert names == [("accumulate of all ranks", f"actor-{rank}") for rank in range(4)]


def test_what_a_rank_raises_by_itself_is_no_loss(
    other_ranks: list[Any], context: RunContext, lease: Lease, groups: list[TokenTree]
) -> None:
    lead = Backend(0, fails="out of memory")
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        one_replica(lead, start(other_ranks, 1, context, rank_1="out of memory"), lease).accumulate(groups[:1])
    assert not isinstance(raised.value, RankLost)


def test_a_process_that_was_started_anew_is_a_lost_rank(
    other_ranks: list[Any], context: RunContext, lease: Lease, groups: list[TokenTree], wait_until: Callable[..., None]
) -> None:
    lead = Backend(0)
    worker_group = one_replica(lead, start(other_ranks, 1, context), lease)
    pid = pid_of(other_ranks[0])
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid_of(other_ranks[0]) not in (None, pid), what="its new process")
    for lead.fails in ("", BROKE):
        with pytest.raises(RankLost, match=r"^actor-1 was lost in accumulate: actor-1 was restarted$"):
            worker_group.accumulate(groups[:1])
    assert status_of(other_ranks[0]).state != "failed"


def test_what_one_rank_alone_raises_is_told_by_it_and_by_the_lead(
    other_ranks: list[Any], context: RunContext, lease: Lease, groups: list[TokenTree]
) -> None:
    members = start(other_ranks, 2, context, rank_1=BROKE, rank_2="a bad loss")
    for lead_fails in ("", BROKE):
        with pytest.raises(ValueError, match="a bad loss"):
            one_replica(Backend(0, fails=lead_fails), members, lease).accumulate(groups[:1])
    broke, failed = status_of(other_ranks[0]), status_of(other_ranks[1])
    assert (broke.state, broke.error) == ("starting", None)
    assert (failed.state, failed.detail, failed.lost) == ("failed", "ValueError: a bad loss", None)
    assert failed.error is not None and "in accumulate" in failed.error
    beats = {"actor-2": Beat(name="actor-2", life="alive", status=failed)}
    assert str(verdict(beats, bus=None, killed={}, sure=True)) == "actor-2 failed: ValueError: a bad loss"


def test_a_rank_that_ray_starts_anew_ends_where_a_collective_breaks(
    other_ranks: list[Any], context: RunContext, lease: Lease, groups: list[TokenTree]
) -> None:
    members = start(other_ranks, 1, context, of=RestartedRank, rank_1=BROKE)
    with pytest.raises(RankLost, match=r"actor-1 was lost in accumulate"):
        one_replica(Backend(0), members, lease).accumulate(groups[:1])


def test_who_does_not_answer_in_time_is_named(
    other_ranks: list[Any], context: RunContext, lease: Lease, groups: list[TokenTree]
) -> None:
    members = start(other_ranks, 2, context, rank_2="hangs")
    with pytest.raises(RankLost, match=r"actor-2 was lost in accumulate: no answer within 1 s"):
        one_replica(Patient(other_ranks[0]), members, lease, timeout_s=1.0).accumulate(groups[:1])


def test_a_loss_while_ranks_build_is_told_at_once(other_ranks: list[Any], context: RunContext) -> None:
    import ray

    members = begin(other_ranks, 2, context)
    pid = pid_of(other_ranks[1])
    assert pid is not None
    sent = [
        (who, other_rank.build.remote(fails))
        for (who, other_rank), fails in zip(members, ("no file", "hangs in build"), strict=True)
    ]
    losses: list[str] = []
    ray.wait([sent[0][1]])
    watch_build(sent, 0.5, lambda lost: losses.append(str(lost)))
    assert losses == ["actor-2 was lost in build: no answer within 0 s"]
    assert status_of(other_ranks[0]).detail == "FileNotFoundError: no file"
    os.kill(pid, signal.SIGKILL)
    watch_build(sent, 120.0, lambda lost: losses.append(str(lost)))
    assert len(losses) == 2 and losses[1].startswith("actor-2 was lost in build: The actor")
    with pytest.raises(FileNotFoundError):
        take_answers("build", sent, timeout_s=120.0, waiting=waiting)
