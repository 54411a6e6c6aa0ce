"""Tests that ranks read the same trees that the lead rank would send, and read each group once per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from relax_core.bus.replay_buffer import ReplayBuffer
from relax_core.contracts import columns as c
from relax_core.contracts.bus import Group, Lease, LeaseLost, LeaseRequest
from relax_core.contracts.tree import TokenTree
from relax_core.roles.trainer.rank_worker import RankGroups, parts_of
from relax_core.train.micro_batches import REPEATED, MicroBatcher, decode_train_tree, split_over_ranks
from tests.bus.make_rows import make_core, make_row, make_settings
from tests.trees import random_tree

GROUPS = 6
COLUMNS = (*c.ROLLOUT_COLUMNS, c.ADVANTAGES, c.RETURNS, c.VALUES)
STEP, MAX_STALENESS = 2, 1  # the trees' tokens have versions 0, 1 and 2


class ReplayBufferBus:
    """Runs `Bus.read` on the bus core. ``reads`` holds the groups of each call."""

    def __init__(self, core: ReplayBuffer) -> None:
        self._core = core
        self.reads: list[list[str]] = []

    async def read(
        self, lease_id: int, group_uids: Sequence[str], *, columns: Sequence[str], timeout_s: float
    ) -> list[Group]:
        self.reads.append(list(group_uids))
        return self._core.read(lease_id, group_uids, columns).rows


def random_groups(core: ReplayBuffer) -> list[TokenTree]:
    """Puts one group per admission. Some groups have old tokens, episodes that share sampled rows, or several roots."""
    random = np.random.default_rng(5)
    trees = []
    for admission in core.admit(GROUPS):
        tree = random_tree(random, uid=admission.group_uid, roots=2, fan_out=2)
        tree = replace(tree, extras={name: tree.extras[name] for name in tree.extras if name != "on_policy"})
        columns = c.encode_tree(tree)
        missing = {f"{admission.group_uid}.{place}": "too long" for place in range(len(tree.episodes), 64)}
        core.put([make_row(admission, version=0, group_size=64, dropped=missing, columns=columns)])
        trees.append(tree)
    return trees


def leased(core: ReplayBuffer, payloads: tuple[str, ...] | None, *, groups: int) -> Lease:
    request = LeaseRequest(task="trains", columns=COLUMNS, payloads=payloads, min_groups=groups, max_groups=groups)
    lease = core.lease(request)
    assert lease is not None
    return lease


def decoded(rows: Sequence[Group]) -> list[TokenTree]:
    return [decode_train_tree(row, step=STEP, oldest_version=STEP - MAX_STALENESS)[0] for row in rows]


def rank_rows(bus: Any) -> RankGroups:
    return RankGroups(bus, columns=COLUMNS, window=make_settings(max_staleness=MAX_STALENESS), timeout_s=60.0)


def shares_of(trees: Sequence[TokenTree], *, budget_rows: int) -> list[list[list[TokenTree]]]:
    """Returns for each micro-batch the shares of the two ranks."""
    batcher = MicroBatcher(budget_rows, ranks=2)
    batches = [*batcher.add(trees), batcher.flush()]
    return [split_over_ranks(batch, 2) for batch in batches]


def assert_same_tree(tree: TokenTree, expected: TokenTree) -> None:
    assert (tree.group_uid, list(tree.episodes), tree.counts_group) == (
        expected.group_uid,
        list(expected.episodes),
        expected.counts_group,
    )
    for name in ("token_ids", "end", "loss_mask", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(tree, name), getattr(expected, name), err_msg=name)
    assert tree.extras.keys() == expected.extras.keys()
    for name, array in tree.extras.items():
        np.testing.assert_array_equal(array, expected.extras[name], err_msg=name)


@pytest.mark.parametrize("budget_rows", [40, 100, 100_000])
def test_ranks_read_the_same_batches_as_the_lead(budget_rows: int) -> None:
    """The lead rank splits trees without tokens. Each rank's parts equal the parts of complete trees."""
    core = make_core(groups_per_step=GROUPS, group_size=64)
    random_groups(core)
    first, second = (leased(core, c.STRUCTURE_COLUMNS, groups=GROUPS // 2) for _ in range(2))
    assert all(row.columns.keys() == set(c.STRUCTURE_COLUMNS) for lease in (first, second) for row in lease.rows)
    structures = decoded([*first.rows, *second.rows])
    assert all((tree.token_ids == -1).all() for tree in structures)
    lease_ids = {row.group_uid: lease.lease_id for lease in (first, second) for row in lease.rows}
    whole = decoded(
        [
            *core.read(first.lease_id, [row.group_uid for row in first.rows], COLUMNS).rows,
            *core.read(second.lease_id, [row.group_uid for row in second.rows], COLUMNS).rows,
        ]
    )
    ranks = [rank_rows(ReplayBufferBus(core)) for _ in range(2)]
    cut = False
    for told, expected in zip(
        shares_of(structures, budget_rows=budget_rows), shares_of(whole, budget_rows=budget_rows), strict=True
    ):
        for rank, share, wanted in zip(ranks, told, expected, strict=True):
            found = rank.trees(STEP, parts_of(share, lease_ids))
            cut |= any(tree.extras.get(REPEATED, np.zeros(0)).any() for tree in found)
            for tree, expected in zip(found, wanted, strict=True):
                assert_same_tree(tree, expected)
    assert cut, "no group was divided into parts with shared rows"
    assert any((tree.versions[~tree.loss_mask] == 0).any() for tree in whole), "no token was too old"


def test_a_row_is_read_once_a_step_and_with_its_neighbours() -> None:
    core = make_core(groups_per_step=GROUPS, group_size=64)
    random_groups(core)
    lease = leased(core, c.STRUCTURE_COLUMNS, groups=GROUPS)
    lease_ids = {row.group_uid: lease.lease_id for row in lease.rows}
    uids = list(lease_ids)
    structures = decoded(lease.rows)
    bus = ReplayBufferBus(core)
    rank = rank_rows(bus)
    halves = [structures[0].take([0]), structures[0].take(range(1, len(structures[0].episodes)))]
    rank.trees(STEP, parts_of([*halves, structures[1]], lease_ids))
    rank.trees(STEP, parts_of(structures[1:3], lease_ids))
    rank.trees(STEP, parts_of(structures[::-1][-3:], lease_ids))  # a later epoch
    assert bus.reads == [uids[:2], uids[2:3]]
    rank.trees(STEP + 1, parts_of(structures[:1], lease_ids))  # read again: more tokens may be too old
    assert bus.reads[2:] == [uids[:1]]


def test_computed_columns_belong_to_the_groups_of_one_step() -> None:
    core = make_core(groups_per_step=GROUPS, group_size=64)
    random_groups(core)
    lease = leased(core, c.STRUCTURE_COLUMNS, groups=GROUPS)
    structures = decoded(lease.rows)
    parts = parts_of(structures, {row.group_uid: lease.lease_id for row in lease.rows})
    read = [column for column in COLUMNS if column not in (c.VALUES, c.RETURNS)]
    window = make_settings(max_staleness=MAX_STALENESS)
    rank = RankGroups(ReplayBufferBus(core), columns=read, window=window, timeout_s=60.0)  # type: ignore[arg-type]
    values = {tree.group_uid: np.arange(tree.rows, dtype=np.float32) for tree in structures}
    rank.add(STEP, {uid: {c.VALUES: c.encode_column(c.VALUES, array)} for uid, array in values.items()})
    for tree in rank.trees(STEP, parts):
        np.testing.assert_array_equal(tree.extras[c.VALUES], values[tree.group_uid])
        assert c.RETURNS not in tree.extras
    assert all(c.VALUES not in tree.extras for tree in rank.trees(STEP + 1, parts))


def test_a_lease_that_ended_is_not_read_and_names_itself() -> None:
    core = make_core(groups_per_step=GROUPS, group_size=64)
    random_groups(core)
    lease = leased(core, c.STRUCTURE_COLUMNS, groups=1)
    parts = parts_of(decoded(lease.rows), {lease.rows[0].group_uid: lease.lease_id})
    core.revoke("trains")
    with pytest.raises(LeaseLost, match=f"lease {lease.lease_id} is not held"):
        rank_rows(ReplayBufferBus(core)).trees(STEP, parts)
