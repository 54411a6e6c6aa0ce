"""The parts of groups that one rank trains, which the trainer's lead names and the rank reads from the bus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from relax_core.config.schema import RelaxConfig
from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import Requirements
from relax_core.contracts.bus import Bus
from relax_core.contracts.tree import TokenTree
from relax_core.registry import find_algorithm
from relax_core.roles.process.role_context import RunContext
from relax_core.train.micro_batches import decode_train_tree, piece_of

CRITIC_COLUMNS = (*c.FORWARD_COLUMNS, c.LOSS_MASK, c.VALUES, c.RETURNS)


class TreePart(msgspec.Struct, frozen=True, array_like=True):
    """Holds adjacent episodes of one group.

    ``lease_id`` is the lease by which the group is read. If a group is split into several parts, ``counts_group`` is
    True for one of them, so that the group counts once.
    """

    lease_id: int
    group_uid: str
    uids: list[str]
    counts_group: bool


def parts_of(trees: Iterable[TokenTree], lease_ids: Mapping[str, int]) -> list[TreePart]:
    """Returns the parts for ``trees``, which are groups or parts of groups; ``lease_ids`` maps group uids to leases."""
    return [
        TreePart(lease_ids[tree.group_uid], tree.group_uid, [one.uid for one in tree.episodes], tree.counts_group)
        for tree in trees
    ]


class RankGroups:
    """Reads the groups of a step from the bus, each once per step, even if several updates train on them.

    ``columns`` are those that this rank needs. ``max_staleness`` is mode.max_staleness, and ``timeout_s`` the limit of
    one read in seconds.
    """

    def __init__(self, bus: Bus, *, columns: Sequence[str], max_staleness: int, timeout_s: float) -> None:
        self._bus, self._columns = bus, tuple(columns)
        self._max_staleness, self._timeout_s = max_staleness, timeout_s
        self._step = -1
        self._groups: dict[str, TokenTree] = {}

    def trees(self, step: int, parts: Sequence[TreePart]) -> list[TokenTree]:
        """Returns the parts as train step ``step`` sees them, in their order.

        Raises BusTimeout if the bus does not answer within ``timeout_s``, LeaseLost if a part's lease has ended, and
        BusLost if the bus has exited.
        """
        if step != self._step:
            self._step, self._groups = step, {}
        unread: dict[int, dict[str, None]] = {}  # lease → its groups, each once, in order
        for part in parts:
            if part.group_uid not in self._groups:
                unread.setdefault(part.lease_id, {})[part.group_uid] = None
        for lease_id, group_uids in unread.items():
            self._read(lease_id, list(group_uids))
        return [_part_of(self._groups[part.group_uid], part) for part in parts]

    def _read(self, lease_id: int, group_uids: list[str]) -> None:
        oldest = self._step - self._max_staleness
        rows = self._bus.read(lease_id, group_uids, columns=self._columns, timeout_s=self._timeout_s)
        for row in rows:
            self._groups[row.group_uid], _ = decode_train_tree(row, step=self._step, oldest_version=oldest)


def _part_of(tree: TokenTree, part: TreePart) -> TokenTree:
    first = [one.uid for one in tree.episodes].index(part.uids[0])
    piece = piece_of(tree, first, first + len(part.uids))
    assert [one.uid for one in piece.episodes] == part.uids, "a part holds adjacent episodes"
    return piece if piece.counts_group == part.counts_group else replace(piece, counts_group=part.counts_group)


def policy_groups(context: RunContext, bus: Bus) -> RankGroups:
    """Returns the reader of a policy rank."""
    return _rank_groups(context, bus, policy_columns(context.config))


def critic_groups(context: RunContext, bus: Bus) -> RankGroups:
    """Returns the reader of the critic."""
    return _rank_groups(context, bus, CRITIC_COLUMNS)


def _rank_groups(context: RunContext, bus: Bus, columns: Sequence[str]) -> RankGroups:
    config = context.config
    return RankGroups(
        bus, columns=columns, max_staleness=config.mode.max_staleness, timeout_s=config.run.stall_timeout_s
    )


def policy_columns(config: RelaxConfig) -> tuple[str, ...]:
    """Returns the columns that the policy trains on in this run."""
    requirements = find_algorithm(config.algo.name).requirements(config.algo)
    return train_columns(requirements, routing_replay=config.algo.routing_replay, truncates=config.rollout.truncates)


def train_columns(requirements: Requirements, *, routing_replay: bool, truncates: bool) -> tuple[str, ...]:
    """Returns the policy's columns: those of the rollout, the advantages, and what the algorithm requires.

    ``truncates`` is True if top_k, top_p or min_p restricts sampling.
    """
    extra = [c.ADVANTAGES]
    if routing_replay:
        extra.append(c.ROUTED_EXPERTS)
    if truncates:
        extra.append(c.KEPT_TOKENS)
    if requirements.old_logprobs == "actor_fwd":
        extra.append(c.OLD_LOGPROBS)
    if requirements.reference:
        extra.append(c.REFERENCE_LOGPROBS)
    if requirements.teacher is not None:
        extra.append(c.TEACHER_LOGPROBS)
        if requirements.teacher.top_k:
            extra += [c.TEACHER_TOP_IDS, c.TEACHER_TOP_LOGPROBS]
    if requirements.critic:
        extra += [c.VALUES, c.RETURNS]
    return (*c.ROLLOUT_COLUMNS, *extra)
