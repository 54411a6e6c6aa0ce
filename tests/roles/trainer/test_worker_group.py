"""The lead and its other ranks: who trains which groups, what each reads of them, whose answer counts, and what the
loss of a other rank looks like.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from relax_core.bus.factory import create_bus
from relax_core.bus.ray.ray_bus import RayBus
from relax_core.config.compose import load_config
from relax_core.config.schema import BusConfig
from relax_core.contracts import columns as c
from relax_core.contracts.bus import GroupRow, Lease, LeasedRow, LeaseRequest
from relax_core.contracts.tree import TokenTree
from relax_core.control.health.heartbeats import Beat
from relax_core.control.health.worker_states import verdict
from relax_core.roles.process.discovery import discover_bus
from relax_core.roles.process.role_context import BUS, RunContext
from relax_core.roles.process.worker import WorkerStatus
from relax_core.roles.trainer.rank_batches import parts_of, policy_columns, policy_rows
from relax_core.roles.trainer.rank_discovery import watch_build
from relax_core.roles.trainer.rank_worker import STATUS_GROUPS, ActorRank
from relax_core.roles.trainer.worker_group import RankLost, Ranks, TrainerWorkerGroup, WorkerGroup, take_answers
from relax_core.train.parallel.layout_arithmetic import replica_ranks, world_size
from tests.roles.run_context import context_in
from tests.trees import answers_tree, with_tokens

Seen = tuple[list[str], list[int], list[float]]  # of a tree that was trained: episodes, tokens, advantages
STEP = 0
ANSWERS = ((9,), (2,), (4,), (7,), (1,), (15, 15, 15, 15))  # tokens of each answer of the groups on the bus
OVERRIDES = ("parallel.dp=2", "parallel.tp=2")
BROKE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by other rank"


class Backend:
    """A rank that fails on request, and whose log-prob of each row is its token plus 1,000 times its own number."""

    def __init__(self, rank: int, *, fails: str = "") -> None:
        self.rank, self.fails = rank, fails
        self.seen: list[Seen] = []

    def begin_step(self, step: int) -> None:
        self.step = step

    def accumulate(self, groups: Sequence[TokenTree]) -> None:
        self.seen += [seen(group) for group in groups]
        if self.fails == "dies":
            os._exit(1)
        if self.fails == "a bad loss":
            raise ValueError(self.fails)
        if self.fails == "hangs":
            threading.Event().wait()
        if self.fails:
            raise RuntimeError(self.fails)

    def logprobs(self, groups: Sequence[TokenTree]) -> list[np.ndarray]:
        return [1000.0 * self.rank + group.token_ids for group in groups]


class Patient(Backend):
    """A lead whose own part lasts until another rank has done its part."""

    def __init__(self, other_rank: Any) -> None:
        super().__init__(0)
        self._other_rank = other_rank

    def accumulate(self, groups: Sequence[TokenTree]) -> None:
        import ray

        super().accumulate(groups)
        ray.get(self._other_rank.seen.remote(), timeout=120)  # another rank's calls run one after the other


class OtherRank(ActorRank):
    """A rank whose back end needs no other ranks."""

    role = "reference"  # whose process runs no plug-in, so that its output has no log of its own

    def warm_up(self) -> None:
        """Does nothing, because the test needs no Megatron."""

    def build(self, fails: str) -> None:
        with self._busy("build"):
            if fails == "no file":
                raise FileNotFoundError(fails)
            if fails == "hangs in build":
                threading.Event().wait()
            self._built = Backend(self._rank, fails=fails)  # type: ignore[assignment]
            self._rows = policy_rows(self._context, discover_bus(self._context, self.waiting))

    def seen(self) -> list[Seen]:
        return self._backend.seen  # type: ignore[attr-defined]


class RestartedRank(OtherRank):
    """A rank of a role that Ray restarts."""

    ends_with_others = True


@pytest.fixture
def other_ranks(ray_session: str) -> Iterator[list[Any]]:
    import ray

    started: list[Any] = []
    yield started
    for other_rank in started:
        ray.kill(other_rank)


@pytest.fixture(scope="module")
def context(ray_session: str, tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    folder = tmp_path_factory.mktemp("worker_group")
    return replace(context_in(folder), namespace="test-worker group")


@pytest.fixture(scope="module")
def bus(context: RunContext) -> Iterator[RayBus]:
    """Returns a bus with a group for each of `ANSWERS`; the answers of a group share one prompt of 3 rows."""
    bus = create_bus(
        BusConfig(name="ray", lease_s=600.0, call_timeout_s=30.0, inline_bytes=64, max_row_bytes=1 << 20),
        groups_per_step=len(ANSWERS),
        group_size=4,
        max_staleness=1,
        on_stale="drop",
        total_steps=10,
        ledger_path=context.run_dir / "ledger.sqlite",
        name=BUS,
        namespace=context.namespace,
    )
    for admission, lengths in zip(bus.admit(len(ANSWERS), timeout_s=60.0), ANSWERS, strict=True):
        first = 100 * admission.index
        ids = np.arange(first, first + 3 + sum(lengths))
        tree = answers_tree(admission.group_uid, ids[:3], lengths, ids[3:])
        tree = with_tokens(tree, advantages=ids[3:] / 8)
        uids = [f"{admission.group_uid}.{place}" for place in range(4)]
        kept, dropped = uids[: len(lengths)], dict.fromkeys(uids[len(lengths) :], "failed")
        row = GroupRow(
            group_uid=admission.group_uid,
            index=admission.index,
            uids=kept,
            versions=[0] * len(kept),
            columns=c.encode_tree(tree),
            dropped=dropped,
        )
        bus.put([row], timeout_s=60.0)
    yield bus
    bus.close(reason="the test is over", timeout_s=60.0)
    bus.terminate()


@pytest.fixture(scope="module")
def lease(bus: RayBus, context: RunContext) -> Lease:
    """Returns a lease of all groups without tokens, as the lead of several data-parallel ranks has; no test ends it."""
    return bus.lease(
        LeaseRequest(
            task="actor",
            columns=policy_columns(context.config),
            payloads=c.STRUCTURE_COLUMNS,
            min_groups=len(ANSWERS),
            max_groups=len(ANSWERS),
            step=STEP,
        ),
        timeout_s=60.0,
    )


@pytest.fixture
def groups(bus: RayBus, lease: Lease, context: RunContext) -> list[TokenTree]:
    """Returns the whole groups, as the lead of one data-parallel rank has them."""
    uids = [row.group_uid for row in lease.rows]
    columns = policy_columns(context.config)
    return [c.decode_tree(row) for row in bus.read(lease.lease_id, uids, columns=columns, timeout_s=60.0)]


def seen(tree: TokenTree) -> Seen:
    return [one.uid for one in tree.episodes], tree.token_ids.tolist(), tree.extras["advantages"].tolist()


def start(
    other_ranks: list[Any], count: int, context: RunContext, *, of: type[ActorRank] = OtherRank, **fails: str
) -> list[tuple[str, Any]]:
    """Starts other ranks and builds all of them."""
    import ray

    members = begin(other_ranks, count, context, of=of)
    ray.get(
        [
            other_rank.build.remote(fails.get(f"rank_{rank}", ""))
            for rank, (_, other_rank) in enumerate(members, start=1)
        ]
    )
    return members


def begin(
    other_ranks: list[Any], count: int, context: RunContext, *, of: type[ActorRank] = OtherRank
) -> list[tuple[str, Any]]:
    import ray

    options: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": STATUS_GROUPS, "max_restarts": 1}
    remote: Any = ray.remote(**options)(of)
    other_ranks += [remote.remote(f"actor-{rank}", context, rank) for rank in range(1, count + 1)]
    return [(f"actor-{rank}", other_rank) for rank, other_rank in enumerate(other_ranks, start=1)]


def pid_of(other_rank: Any) -> int | None:
    """Returns the rank's pid, or None while Ray starts another process."""
    import ray
    from ray.exceptions import ActorUnavailableError

    try:
        return int(ray.get(other_rank.status.remote()).pid)
    except ActorUnavailableError:
        return None


def one_replica(lead: Backend, members: list[tuple[str, Any]], lease: Lease, **options: Any) -> TrainerWorkerGroup:
    """Returns a worker group with one replica in the step of the lease; ``options`` are the worker group's."""
    ranks = Ranks(
        name="actor-0",
        lead=lead,  # type: ignore[arg-type]
        other_ranks=members,
        replicas=[list(range(len(members) + 1))],
    )
    worker_group = TrainerWorkerGroup(ranks, **{"timeout_s": 120.0, "waiting": waiting, **options})
    worker_group.begin_step(STEP)
    worker_group.add_lease(lease)
    return worker_group


def waiting(what: str, *, on: str) -> Any:
    return nullcontext()


def test_the_ranks_of_a_replica_read_the_same_groups_and_its_first_one_answers(
    other_ranks: list[Any], context: RunContext, bus: RayBus, lease: Lease, groups: list[TokenTree]
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
    # 33 rows in groups of one answer, then a prompt of 3 rows with 14 more an answer: cut behind the first of these.
    worker_group = TrainerWorkerGroup(ranks, timeout_s=120.0, waiting=waiting, rows=policy_rows(context, bus))
    worker_group.begin_step(STEP)
    worker_group.add_lease(lease)
    worker_group.accumulate([c.decode_tree(row) for row in lease.rows])
    trained = [lead.seen, *ray.get([other_rank.seen.remote() for other_rank in other_ranks])]
    for replica in replicas:
        assert all(trained[rank] == trained[replica[0]] for rank in replica)
    first, second = trained[0], trained[2]
    assert first[:-1] == [seen(tree) for tree in groups[:-1]]  # tokens and all, though the lead has none of its own
    assert first[-1:] == [seen(groups[-1].take([0]))] and second == [seen(groups[-1].take([1, 2, 3]))]
    answers = WorkerGroup(ranks, timeout_s=120.0, waiting=waiting).logprobs(groups)
    for one, answer in zip(groups, answers, strict=True):
        of_second = 2000.0 * (one is groups[-1]) * np.isin(np.arange(one.rows), range(3, 18), invert=True)
        assert answer.tolist() == (one.token_ids + of_second).tolist()  # the second one's of the shared prompt


def test_a_rank_that_reads_tells_that_it_waits_for_the_bus(
    other_ranks: list[Any], context: RunContext, bus: RayBus, lease: Lease, groups: list[TokenTree], wait_until: Any
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
    """A worker's handle that records its calls."""

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
    """The group has 102,400 tokens; one rank is in the lead's replica, one in another, and there is a critic."""
    tree = answers_tree("g00000000", np.arange(1024), np.full(16, 6400), np.zeros(102_400))
    tree = with_tokens(tree, advantages=np.ones(102_400, dtype=np.float32))
    lead, same, other, critic = Backend(0), Recorder(), Recorder(), Recorder()
    ranks = Ranks(
        name="actor-0",
        lead=lead,  # type: ignore[arg-type]
        other_ranks=[("actor-1", same), ("actor-2", other)],
        replicas=[[0, 1], [2]],
    )
    worker_group = TrainerWorkerGroup(ranks, timeout_s=120.0, waiting=waiting, critic=critic)
    worker_group.begin_step(STEP)
    row = LeasedRow(group_uid=tree.group_uid, index=0, uids=[], versions=[], columns={})
    worker_group.add_lease(Lease(lease_id=7, task="actor", rows=[row]))
    worker_group.accumulate([tree])
    uids: dict[str, list[str]] = {}
    for who, handle in (("same", same), ("other", other), ("critic", critic)):
        _, (method, arguments) = handle.called  # behind `begin_step`
        (step, (part,)) = arguments
        assert (method, step, part.lease_id, part.group_uid) == ("accumulate", STEP, 7, tree.group_uid)
        uids[who] = part.uids
        assert len(pickle.dumps(arguments)) < 2000
    assert lead.seen[0][0] == uids["same"] and len(uids["same"]) == 8
    assert uids["same"] + uids["other"] == uids["critic"] == [one.uid for one in tree.episodes]


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


def status_of(other_rank: Any) -> WorkerStatus:
    import ray

    status: WorkerStatus = ray.get(other_rank.status.remote())
    return status
