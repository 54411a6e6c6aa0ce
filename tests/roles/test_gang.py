"""The lead and its peers: who gets which groups, whose answer counts, and what the loss of a peer looks like."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

from relax_core.config.compose import load_config
from relax_core.contracts.train import TrainGroup
from relax_core.roles.gang import Gang, RankLost, Ranks, TrainerGang
from relax_core.train.layout_arithmetic import replica_ranks, world_size

OVERRIDES = ("parallel.dp=2", "parallel.tp=2")


class Backend:
    """A rank that answers with its own number, and can be told to fail."""

    def __init__(self, rank: int, *, fails: str = "") -> None:
        self.rank, self.fails = rank, fails
        self.groups: list[str] = []

    def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        self.groups += [group.group_uid for group in groups]
        if self.fails == "dies":
            os._exit(1)
        if self.fails:
            raise RuntimeError(self.fails)

    def logprobs(self, groups: Sequence[TrainGroup]) -> list[np.ndarray]:
        return [np.array([self.rank, int(group.group_uid)]) for group in groups]


class Peer(Backend):
    """`relax_core.roles.rank_peer.RankPeer`, as far as the gang knows it."""

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)

    def follow(self, method: str, *arguments: Any) -> None:
        self.call(method, *arguments)

    def seen(self) -> list[str]:
        return self.groups


@pytest.fixture
def peers(ray_session: str) -> Iterator[list[Any]]:
    import ray

    started: list[Any] = []
    yield started
    for peer in started:
        ray.kill(peer)


def group(number: int, *, tokens: int) -> TrainGroup:
    arrays: dict[str, Any] = dict.fromkeys(("prompt_ids", "response_ids", "loss_mask", "rollout_logprobs"), None)
    arrays |= {"prompt_ids": np.zeros(3, np.int32), "lengths": np.array([tokens])}
    return TrainGroup(group_uid=str(number), **arrays)


def start(peers: list[Any], count: int, **fails: str) -> list[tuple[str, Any]]:
    import ray

    remote: Any = ray.remote(num_cpus=0)(Peer)
    peers += [remote.remote(rank, fails=fails.get(f"rank_{rank}", "")) for rank in range(1, count + 1)]
    ray.get([peer.seen.remote() for peer in peers])  # all are there
    return [(f"actor-{rank}", peer) for rank, peer in enumerate(peers, start=1)]


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
        lead=lead,
        peers=start(peers, world_size(parallel) - 1),
        replicas=replicas,  # type: ignore[arg-type]
    )
    groups = [group(number, tokens=tokens) for number, tokens in enumerate((9, 2, 4, 7, 1))]
    TrainerGang(ranks, timeout_s=30.0, waiting=waiting).accumulate(groups)
    seen = [lead.groups, *ray.get([peer.seen.remote() for peer in peers])]
    for replica in replicas:
        assert all(seen[rank] == seen[replica[0]] for rank in replica)
    assert sorted(seen[0] + seen[2]) == [one.group_uid for one in groups] and seen[0] and seen[2]
    answers = Gang(ranks, timeout_s=30.0, waiting=waiting).logprobs(groups)
    assert [int(answer[1]) for answer in answers] == list(range(5))
    assert {(int(answer[0]), str(int(answer[1])) in seen[0]) for answer in answers} == {(0, True), (2, False)}


def test_a_rank_that_dies_is_named_also_where_the_lead_breaks_of_it(peers: list[Any]) -> None:
    names: list[tuple[str, str]] = []

    @contextmanager
    def noted(what: str, *, on: str) -> Iterator[None]:
        names.append((what, on))
        yield

    lead = Backend(0, fails="a collective broke")
    members = start(peers, 3, rank_2="dies", rank_3="a collective broke")
    ranks = Ranks(name="actor-0", lead=lead, peers=members, replicas=[[0, 1, 2, 3]])  # type: ignore[arg-type]
    with pytest.raises(RankLost, match=r"actor-2 was lost in accumulate"):
        TrainerGang(ranks, timeout_s=30.0, waiting=noted).accumulate([group(0, tokens=3)])
    assert names == [("accumulate of all ranks", f"actor-{rank}") for rank in range(4)]


def test_what_a_rank_raises_by_itself_is_no_loss(peers: list[Any]) -> None:
    ranks = Ranks(
        name="actor-0",
        lead=Backend(0, fails="out of memory"),  # type: ignore[arg-type]
        peers=start(peers, 1, rank_1="out of memory"),
        replicas=[[0, 1]],
    )
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        TrainerGang(ranks, timeout_s=30.0, waiting=waiting).accumulate([group(0, tokens=3)])
    assert not isinstance(raised.value, RankLost)
