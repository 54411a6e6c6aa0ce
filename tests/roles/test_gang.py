"""The lead and its peers: who gets which groups, whose answer counts, and what the loss of a peer looks like."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

from relax_core.config.compose import load_config
from relax_core.contracts.tree import TokenTree
from relax_core.control.heartbeats import Beat
from relax_core.control.watch import verdict
from relax_core.roles.gang import Gang, RankLost, Ranks, TrainerGang, take_answers
from relax_core.roles.rank_peer import STATUS_GROUPS, RankPeer
from relax_core.roles.ranks import tell_loss
from relax_core.roles.worker import WorkerStatus
from relax_core.train.layout_arithmetic import replica_ranks, world_size
from tests.trees import answers_tree

OVERRIDES = ("parallel.dp=2", "parallel.tp=2")
BROKE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer"


class Backend:
    """A rank that can be told to fail, and whose log-prob of each row is its token plus 1,000 times its own number."""

    def __init__(self, rank: int, *, fails: str = "") -> None:
        self.rank, self.fails = rank, fails
        self.groups: list[str] = []

    def accumulate(self, groups: Sequence[TokenTree]) -> None:
        self.groups += [group.group_uid for group in groups]
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
    """A lead whose own part lasts until a peer has done its part."""

    def __init__(self, peer: Any) -> None:
        super().__init__(0)
        self._peer = peer

    def accumulate(self, groups: Sequence[TokenTree]) -> None:
        import ray

        super().accumulate(groups)
        ray.get(self._peer.seen.remote(), timeout=120)  # a peer's calls come one after the other


class Peer(RankPeer):
    """With a back end that needs no other ranks."""

    role = "reference"  # whose process runs no plug-in, so that its output has no log of its own

    def warm_up(self) -> None:
        """Nothing: Megatron is not needed."""

    def build(self, fails: str) -> None:
        with self._busy("build"):
            if fails == "no file":
                raise FileNotFoundError(fails)
            if fails == "hangs in build":
                threading.Event().wait()
            self._built = Backend(self._rank, fails=fails)  # type: ignore[assignment]

    def seen(self) -> list[str]:
        return self._backend.groups  # type: ignore[attr-defined]


class RestartedPeer(Peer):
    """Of a role that Ray starts anew."""

    ends_with_others = True


@pytest.fixture
def peers(ray_session: str) -> Iterator[list[Any]]:
    import ray

    started: list[Any] = []
    yield started
    for peer in started:
        ray.kill(peer)


def group(number: int, *, tokens: int, answers: int = 1) -> TokenTree:
    """Its tokens count its rows from 100 times its number."""
    first = 100 * number
    ids = np.arange(first, first + 3 + tokens * answers)
    return answers_tree(str(number), ids[:3], [tokens] * answers, ids[3:])


def start(peers: list[Any], count: int, *, of: type[RankPeer] = Peer, **fails: str) -> list[tuple[str, Any]]:
    """All of them built."""
    import ray

    members = begin(peers, count, of=of)
    ray.get([peer.build.remote(fails.get(f"rank_{rank}", "")) for rank, (_, peer) in enumerate(members, start=1)])
    return members


def begin(peers: list[Any], count: int, *, of: type[RankPeer] = Peer) -> list[tuple[str, Any]]:
    import ray

    options: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": STATUS_GROUPS, "max_restarts": 1}
    remote: Any = ray.remote(**options)(of)
    peers += [remote.remote(f"actor-{rank}", None, rank) for rank in range(1, count + 1)]
    return [(f"actor-{rank}", peer) for rank, peer in enumerate(peers, start=1)]


def pid_of(peer: Any) -> int | None:
    """None while Ray starts another process."""
    import ray
    from ray.exceptions import ActorUnavailableError

    try:
        return int(ray.get(peer.status.remote()).pid)
    except ActorUnavailableError:
        return None


def one_replica(lead: Backend, members: list[tuple[str, Any]], *, timeout_s: float = 120.0) -> TrainerGang:
    replica = list(range(len(members) + 1))
    ranks = Ranks(
        name="actor-0",
        lead=lead,  # type: ignore[arg-type]
        peers=members,
        replicas=[replica],
    )
    return TrainerGang(ranks, timeout_s=timeout_s, waiting=waiting)


def waiting(what: str, *, on: str) -> Any:
    return nullcontext()


def test_the_ranks_of_a_replica_get_the_same_groups_and_its_first_one_answers(peers: list[Any]) -> None:
    import ray

    parallel = load_config(OVERRIDES).parallel
    replicas = replica_ranks(parallel)
    assert replicas == [[0, 1], [2, 3]]
    lead = Backend(0)
    ranks = Ranks(
        name="actor-0",
        lead=lead,  # type: ignore[arg-type]
        peers=start(peers, world_size(parallel) - 1),
        replicas=replicas,
    )
    # 33 rows in groups of one answer, then a prompt of 3 rows with 14 more an answer: cut behind the first of these.
    groups = [group(number, tokens=tokens) for number, tokens in enumerate((9, 2, 4, 7, 1))]
    groups.append(group(5, tokens=15, answers=4))
    TrainerGang(ranks, timeout_s=120.0, waiting=waiting).accumulate(groups)
    seen = [lead.groups, *ray.get([peer.seen.remote() for peer in peers])]
    for replica in replicas:
        assert all(seen[rank] == seen[replica[0]] for rank in replica)
    assert seen[0] == [one.group_uid for one in groups] and seen[2] == ["5"]
    answers = Gang(ranks, timeout_s=120.0, waiting=waiting).logprobs(groups)
    for one, answer in zip(groups, answers, strict=True):
        of_second = 2000.0 * (one.group_uid == "5") * np.isin(np.arange(one.rows), range(3, 18), invert=True)
        assert answer.tolist() == (one.token_ids + of_second).tolist()  # the second one's of the shared prompt


def test_a_rank_that_dies_is_named_also_where_the_lead_breaks_of_it(peers: list[Any]) -> None:
    names: list[tuple[str, str]] = []

    @contextmanager
    def noted(what: str, *, on: str) -> Iterator[None]:
        names.append((what, on))
        yield

    lead = Backend(0, fails=BROKE)
    members = start(peers, 3, rank_2="dies", rank_3=BROKE)
    ranks = Ranks(name="actor-0", lead=lead, peers=members, replicas=[[0, 1, 2, 3]])  # type: ignore[arg-type]
    with pytest.raises(RankLost, match=r"actor-2 was lost in accumulate"):
        TrainerGang(ranks, timeout_s=120.0, waiting=noted).accumulate([group(0, tokens=3)])
    assert names == [("accumulate of all ranks", f"actor-{rank}") for rank in range(4)]


def test_what_a_rank_raises_by_itself_is_no_loss(peers: list[Any]) -> None:
    lead = Backend(0, fails="out of memory")
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        one_replica(lead, start(peers, 1, rank_1="out of memory")).accumulate([group(0, tokens=3)])
    assert not isinstance(raised.value, RankLost)


def test_a_process_that_was_started_anew_is_a_lost_rank(peers: list[Any], wait_until: Callable[..., None]) -> None:
    members = start(peers, 1)
    pid = pid_of(peers[0])
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid_of(peers[0]) not in (None, pid), what="its new process")
    for lead_fails in ("", BROKE):
        with pytest.raises(RankLost, match=r"^actor-1 was lost in accumulate: actor-1 was started anew$"):
            one_replica(Backend(0, fails=lead_fails), members).accumulate([group(0, tokens=3)])
    assert status_of(peers[0]).state != "failed"


def test_what_one_rank_alone_raises_is_told_by_it_and_by_the_lead(peers: list[Any]) -> None:
    members = start(peers, 2, rank_1=BROKE, rank_2="a bad loss")
    for lead_fails in ("", BROKE):
        with pytest.raises(ValueError, match="a bad loss"):
            one_replica(Backend(0, fails=lead_fails), members).accumulate([group(0, tokens=3)])
    broke, failed = status_of(peers[0]), status_of(peers[1])
    assert (broke.state, broke.error) == ("starting", None)
    assert (failed.state, failed.detail, failed.lost) == ("failed", "ValueError: a bad loss", None)
    assert failed.error is not None and "in accumulate" in failed.error
    beats = {"actor-2": Beat(name="actor-2", life="alive", status=failed)}
    assert str(verdict(beats, bus=None, killed={}, sure=True)) == "actor-2 failed: ValueError: a bad loss"


def test_a_rank_that_ray_starts_anew_ends_where_a_collective_breaks(peers: list[Any]) -> None:
    members = start(peers, 1, of=RestartedPeer, rank_1=BROKE)
    with pytest.raises(RankLost, match=r"actor-1 was lost in accumulate"):
        one_replica(Backend(0), members).accumulate([group(0, tokens=3)])


def test_who_does_not_answer_in_time_is_named(peers: list[Any]) -> None:
    members = start(peers, 2, rank_2="hangs")
    with pytest.raises(RankLost, match=r"actor-2 was lost in accumulate: no answer within 1 s"):
        one_replica(Patient(peers[0]), members, timeout_s=1.0).accumulate([group(0, tokens=3)])


def test_a_loss_while_ranks_build_is_told_at_once(peers: list[Any]) -> None:
    import ray

    members = begin(peers, 2)
    pid = pid_of(peers[1])
    assert pid is not None
    sent = [
        (who, peer.build.remote(fails))
        for (who, peer), fails in zip(members, ("no file", "hangs in build"), strict=True)
    ]
    losses: list[str] = []
    ray.wait([sent[0][1]])
    tell_loss(sent, 0.5, lambda lost: losses.append(str(lost)))
    assert losses == ["actor-2 was lost in build: no answer within 0 s"]
    assert status_of(peers[0]).detail == "FileNotFoundError: no file"
    os.kill(pid, signal.SIGKILL)
    tell_loss(sent, 120.0, lambda lost: losses.append(str(lost)))
    assert len(losses) == 2 and losses[1].startswith("actor-2 was lost in build: The actor")
    with pytest.raises(FileNotFoundError):
        take_answers("build", sent, timeout_s=120.0, waiting=waiting)


def status_of(peer: Any) -> WorkerStatus:
    import ray

    status: WorkerStatus = ray.get(peer.status.remote())
    return status
