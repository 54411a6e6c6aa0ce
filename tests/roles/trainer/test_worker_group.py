"""Tests the lead rank and the other ranks: the division of groups, the ranks' reads, and the use of their results."""

from __future__ import annotations

import errno
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_core.config.compose import load_config
from relax_core.contracts import columns as c
from relax_core.contracts.bus import Group, Lease
from relax_core.contracts.tree import TokenTree
from relax_core.control.worker_health import WorkerHeartbeat, verdict
from relax_core.roles.role_context import BUS, RunContext
from relax_core.roles.trainer.rank_worker import parts_of, policy_groups
from relax_core.roles.trainer.worker_group import (
    RankLost,
    Ranks,
    TrainerWorkerGroup,
    WorkerGroup,
    take_answers,
    watch_build,
)
from relax_core.train.parallel_layout import replica_ranks, world_size
from tests.bus.blocking import BlockingBus
from tests.outages import filled
from tests.roles.trainer.worker_group_harness import (
    BROKE,
    OVERRIDES,
    STEP,
    Backend,
    Patient,
    RestartedRank,
    begin,
    one_replica,
    pid_of,
    seen,
    start,
    status_of,
    waiting,
)
from tests.trees import answers_tree, with_tokens


def test_the_ranks_of_a_replica_read_the_same_groups_and_its_first_one_answers(
    other_ranks: list[Any], context: RunContext, bus: BlockingBus, lease: Lease, groups: list[TokenTree]
) -> None:
    import ray

    parallel = load_config(OVERRIDES).parallel
    replicas = replica_ranks(parallel)
    assert replicas == [[0, 1], [2, 3]]
    lead = Backend(0)
    ranks = Ranks(
        name="actor-0",
        lead=lead,  # type: ignore[arg-type]
        other_ranks=start(other_ranks, world_size(parallel) - 1, context),
        replicas=replicas,
    )
    # 33 rows in groups of one answer, then a prompt of 3 rows with 14 rows per answer. This group is split after the
    # first answer.
    worker_group = TrainerWorkerGroup(
        ranks, timeout_s=120.0, waiting=waiting, rank_groups=policy_groups(context, bus.bus)
    )
    worker_group.begin_step(STEP)
    worker_group.add_lease(lease)
    worker_group.accumulate([c.decode_tree(row) for row in lease.rows])
    times = worker_group.finish_step().ranks
    assert [time.wall_ms for time in times] == [{"forward": 10.0 * rank} for rank in range(4)], "each reports its times"
    trained = [lead.seen, *ray.get([other_rank.seen.remote() for other_rank in other_ranks])]
    for replica in replicas:
        assert all(trained[rank] == trained[replica[0]] for rank in replica)
    first, second = trained[0], trained[2]
    assert first[:-1] == [seen(tree) for tree in groups[:-1]]  # trees with tokens, although the lead rank has no tokens
    assert first[-1:] == [seen(groups[-1].take([0]))] and second == [seen(groups[-1].take([1, 2, 3]))]
    answers = WorkerGroup(ranks, timeout_s=120.0, waiting=waiting).logprobs(groups)
    for group, answer in zip(groups, answers, strict=True):
        of_second = 2000.0 * (group is groups[-1]) * np.isin(np.arange(group.rows), range(3, 18), invert=True)
        assert answer.tolist() == (group.token_ids + of_second).tolist()  # the second rank returns the shared prompt


def test_all_ranks_train_the_columns_that_they_have_computed(
    other_ranks: list[Any], context: RunContext, bus: BlockingBus, lease: Lease, groups: list[TokenTree]
) -> None:
    import ray

    lead = Backend(0)
    ranks = Ranks(
        name="actor-0",
        lead=lead,  # type: ignore[arg-type]
        other_ranks=start(other_ranks, 1, context),
        replicas=[[0], [1]],
    )
    worker_group = TrainerWorkerGroup(
        ranks, timeout_s=120.0, waiting=waiting, rank_groups=policy_groups(context, bus.bus)
    )
    worker_group.begin_step(STEP)
    worker_group.add_lease(lease)
    advantages = {group.group_uid: -np.arange(1, 1 + group.lengths.sum()) for group in groups}
    columns = {uid: {c.ADVANTAGES: c.encode_column(c.ADVANTAGES, values)} for uid, values in advantages.items()}
    worker_group.add_columns(STEP, columns)
    worker_group.accumulate([c.decode_tree(row) for row in lease.rows])
    trained = [*lead.seen, *ray.get(other_ranks[0].seen.remote(), timeout=120)]
    found = sorted(value for _, _, values in trained for value in values)
    assert found == sorted(float(value) for values in advantages.values() for value in values)


def test_a_rank_that_reads_tells_that_it_waits_for_the_bus(
    other_ranks: list[Any],
    context: RunContext,
    bus: BlockingBus,
    lease: Lease,
    groups: list[TokenTree],
    wait_until: Any,
) -> None:
    import ray

    start(other_ranks, 1, context)
    parts = parts_of(groups, {row.group_uid: lease.lease_id for row in lease.rows})
    bus_pid = bus.process_id(timeout_s=60.0)
    os.kill(bus_pid, signal.SIGSTOP)
    try:
        reference = other_ranks[0].accumulate.remote(STEP, parts)
        wait_until(lambda: [wait.on for wait in status_of(other_ranks[0]).waits] == [BUS], what="its wait")
        assert [wait.what for wait in status_of(other_ranks[0]).waits] == ["read"]
    finally:
        os.kill(bus_pid, signal.SIGCONT)
    ray.get(reference, timeout=120)
    assert ray.get(other_ranks[0].seen.remote(), timeout=120) == [seen(group) for group in groups]
    (idle,) = status_of(other_ranks[0]).waits
    assert (idle.what, idle.on) == ("its next call", "reference-0")


class Recorder:
    """A fake worker handle that records calls."""

    def __init__(self) -> None:
        self.called: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, method: str) -> Any:
        class Method:
            @staticmethod
            def remote(*arguments: Any) -> Any:
                import ray

                self.called.append((method, arguments))
                return ray.put(None)

        return Method


def test_no_array_travels_in_the_leads_calls(ray_session: str) -> None:
    """The group has 102,400 tokens. One rank is in the lead's replica, one in another. There is a critic."""
    tree = answers_tree("g00000000", np.arange(1024), np.full(16, 6400), np.zeros(102_400))
    tree = with_tokens(tree, advantages=np.ones(102_400, dtype=np.float32))
    lead, same, second_replica, critic = Backend(0), Recorder(), Recorder(), Recorder()
    ranks = Ranks(
        name="actor-0",
        lead=lead,  # type: ignore[arg-type]
        other_ranks=[("actor-1", same), ("actor-2", second_replica)],
        replicas=[[0, 1], [2]],
    )
    worker_group = TrainerWorkerGroup(ranks, timeout_s=120.0, waiting=waiting, critic=critic)
    worker_group.begin_step(STEP)
    row = Group(group_uid=tree.group_uid, index=0, uids=[], versions=[], columns={})
    worker_group.add_lease(Lease(lease_id=7, task="actor", rows=[row]))
    worker_group.accumulate([tree])
    uids: dict[str, list[str]] = {}
    for who, handle in (("same", same), ("other", second_replica), ("critic", critic)):
        _, (method, arguments) = handle.called  # after `begin_step`
        (step, (part,)) = arguments
        assert (method, step, part.lease_id, part.group_uid) == ("accumulate", STEP, 7, tree.group_uid)
        uids[who] = part.uids
        assert len(pickle.dumps(arguments)) < 2000
    assert lead.seen[0][0] == uids["same"] and len(uids["same"]) == 8
    assert uids["same"] + uids["other"] == uids["critic"] == [episode.uid for episode in tree.episodes]


def test_groups_without_advantage_are_counted_by_the_lead_alone(ray_session: str) -> None:
    lead, other_rank = Backend(0), Recorder()
    ranks = Ranks(name="actor-0", lead=lead, other_ranks=[("actor-1", other_rank)], replicas=[[0], [1]])  # type: ignore[arg-type]
    worker_group = TrainerWorkerGroup(ranks, timeout_s=120.0, waiting=waiting)
    worker_group.begin_step(STEP)
    tree = answers_tree("g00000000", np.arange(4), [2, 2], np.zeros(4))
    worker_group.count([])
    worker_group.count([tree])
    assert lead.counted == [tree.group_uid] and [method for method, _ in other_rank.called] == ["follow"]


# -- The loss of a rank, and a rank's own failure, as the lead, the rank and the controller report them ---------------


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


def test_an_error_of_a_rank_is_not_a_lost_process(
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


def test_an_error_of_one_rank_is_reported_by_this_rank_and_the_lead(
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
    beats = {"actor-2": WorkerHeartbeat(name="actor-2", life="alive", status=failed)}
    assert str(verdict(beats, bus=None, killed={}, sure=True)) == "actor-2 failed: ValueError: a bad loss"


def test_a_rank_that_ray_starts_anew_ends_where_a_collective_breaks(
    other_ranks: list[Any], context: RunContext, lease: Lease, groups: list[TokenTree]
) -> None:
    members = start(other_ranks, 1, context, of=RestartedRank, rank_1=BROKE)
    with pytest.raises(RankLost, match=r"actor-1 was lost in accumulate"):
        one_replica(Backend(0), members, lease).accumulate(groups[:1])


def test_a_rank_without_an_answer_in_time_is_named(
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


def test_a_rank_whose_disk_is_full_has_not_failed_and_writes_again(
    other_ranks: list[Any], context: RunContext, lease: Lease, small_disk: Callable[[str], Path]
) -> None:
    """The lead rank has a separate disk and receives the errno of the other rank."""
    disk = small_disk("1m")
    (disk / "train").mkdir()

    class OtherDisk(Backend):
        def write_copy(self, folder: Path) -> None:
            """Writes the copy to another folder."""

    members = start(other_ranks, 1, context)
    group = one_replica(OtherDisk(0), members, lease)
    with filled(disk), pytest.raises(OSError, match="No space left on device") as raised:
        group.write_copy(disk)
    assert type(raised.value) is OSError and raised.value.errno == errno.ENOSPC
    assert status_of(members[0][1]).state != "failed"
    group.write_copy(disk)
    assert (disk / "train" / "rank-1").read_text() == "a copy"
