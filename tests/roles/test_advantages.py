"""The advantages role's work on rows, and the wait for a whole train step's groups, on the bus's own state machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.grpo import SPEC as GRPO
from algorithms.grpo import GrpoKnobs
from algorithms.ppo import SPEC as PPO
from algorithms.ppo import PpoKnobs
from algorithms.reinforce_pp import SPEC as REINFORCE_PP
from algorithms.reinforce_pp import ReinforcePpKnobs
from relax_core.bus.core import BusCore
from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import Needs, TeacherNeeds
from relax_core.contracts.bus import BusProgress, BusTimeout, Lease, LeasedRow, LeaseRequest
from relax_core.roles.actor import train_columns
from relax_core.roles.advantages import advantage_columns, advantage_inputs, input_columns
from relax_core.roles.whole_step import lease_whole_step
from tests.bus.make_rows import for_actor, for_worker, make_core, make_row
from tests.trees import answers_tree, random_tree, with_tokens


def leased(uid: str, rewards: Sequence[float], lengths: Sequence[int], **by_token: Sequence[float]) -> LeasedRow:
    """With these columns of one number a token, and without the engine's log-probs unless they are among them."""
    tree = answers_tree(uid, [7], lengths, np.zeros(sum(lengths)), rewards=rewards)
    values = {name: np.array(numbers, dtype=np.float32) for name, numbers in by_token.items()}
    columns = c.encode_tree(with_tokens(tree, **values))
    names = {*c.FORWARD_COLUMNS, c.LOSS_MASK, *by_token}
    return LeasedRow(
        group_uid=uid,
        index=0,
        uids=[one.uid for one in tree.episodes],
        versions=[0] * len(lengths),
        columns={name: payload for name, payload in columns.items() if name in names},
    )


def flat(columns: Mapping[str, Mapping[str, bytes]], uid: str, name: str = c.ADVANTAGES) -> list[float]:
    """One number a token, episode after episode."""
    values: list[float] = np.frombuffer(columns[uid][name], dtype="<f4").tolist()
    return values


def test_each_group_is_on_its_own_without_normalize() -> None:
    rows = [leased("a", [1.0, 0.0], [1, 2]), leased("b", [5.0, 5.0], [1, 1])]
    columns = advantage_columns(rows, GRPO, GrpoKnobs(normalize_std="none"))
    assert flat(columns, "a") == [0.5, -0.5, -0.5]
    assert flat(columns, "b") == [0.0, 0.0]


def test_normalize_sees_all_groups() -> None:
    rows = [leased("a", [1.0, 0.0], [1, 1]), leased("b", [3.0, 0.0], [1, 1])]
    columns = advantage_columns(rows, REINFORCE_PP, ReinforcePpKnobs())
    # ±0.5 and ±1.5 around a mean of 0: population std sqrt(1.25)
    root = 1.25**0.5
    assert flat(columns, "a") == pytest.approx([0.5 / root, -0.5 / root])
    assert flat(columns, "b") == pytest.approx([1.5 / root, -1.5 / root])


def test_the_deviation_of_a_step_is_that_of_all_groups_and_needs_them_together() -> None:
    knobs = GrpoKnobs(normalize_std="batch", std_epsilon=1e-6)
    assert GRPO.needs(knobs).whole_step and not GRPO.needs(GrpoKnobs()).whole_step
    assert REINFORCE_PP.needs(ReinforcePpKnobs()).whole_step and PPO.needs(PpoKnobs()).whole_step
    rows = [leased("a", [1.0, 0.0], [1, 2]), leased("b", [3.0, 0.0], [1, 1])]
    columns = advantage_columns(rows, GRPO, knobs)
    std = 2.0**0.5  # of 1, 0, 3, 0 around their mean of 1, unbiased: sqrt((0 + 1 + 4 + 1) / 3)
    assert flat(columns, "a") == pytest.approx([0.5 / std, -0.5 / std, -0.5 / std], rel=1e-5)
    assert flat(columns, "b") == pytest.approx([1.5 / std, -1.5 / std], rel=1e-5)


def test_a_group_of_one_has_the_step_as_its_baseline() -> None:
    """Plain REINFORCE++: each prompt's single reward against the others'."""
    knobs = ReinforcePpKnobs(group_size=1, group_baseline=False)
    REINFORCE_PP.check(knobs)
    columns = advantage_columns([leased("a", [1.0], [2]), leased("b", [0.0], [2])], REINFORCE_PP, knobs)
    assert flat(columns, "a") == pytest.approx([1.0, 1.0]) and flat(columns, "b") == pytest.approx([-1.0, -1.0])


def test_weights_are_divided_by_their_mean_over_the_step() -> None:
    knobs = GrpoKnobs(normalize_std="none", old_logprobs="actor_fwd", correction="tis_normalized")
    needs = GRPO.needs(knobs)
    assert needs.whole_step and {c.OLD_LOGPROBS, c.LOGPROBS} <= set(input_columns(needs))
    assert c.LOGPROBS not in input_columns(GRPO.needs(GrpoKnobs(old_logprobs="actor_fwd")))

    def rows(*ratios: float) -> list[LeasedRow]:
        return [
            leased(f"{place}", [1.0, 0.0], [1, 1], old_logprobs=[math.log(ratio)] * 2, logprobs=[0.0, 0.0])
            for place, ratio in enumerate(ratios)
        ]

    columns = advantage_columns(rows(0.25, 0.75), GRPO, knobs)  # weights of mean 1/2
    assert flat(columns, "0") == pytest.approx([1.0, -1.0]) and flat(columns, "1") == pytest.approx([1.0, -1.0])


def test_the_engines_logprobs_stand_for_the_old_ones() -> None:
    assert input_columns(Needs(old_logprobs="rollout")) == (*c.FORWARD_COLUMNS, c.LOSS_MASK)
    assert c.LOGPROBS in input_columns(Needs(old_logprobs="rollout", reference=True))
    assert c.LOGPROBS not in input_columns(Needs(old_logprobs="actor_fwd", reference=True))
    two = [-1.0, -2.0]
    inputs = advantage_inputs(leased("a", [1.0, 0.0], [1, 1], logprobs=two, reference_logprobs=two))
    assert inputs.old_logprobs is not None and torch.equal(inputs.old_logprobs, torch.tensor([-1.0, -2.0]))
    assert advantage_inputs(leased("a", [1.0, 0.0], [1, 1])).old_logprobs is None


def test_a_critics_returns_are_advantages_before_whitening_plus_values() -> None:
    assert c.VALUES in input_columns(PPO.needs(PpoKnobs()))
    rows = [leased("a", [1.0, 0.0], [1, 2], values=[0.25, 0.5, 0.75])]
    columns = advantage_columns(rows, PPO, PpoKnobs(gae_lambda=1.0))
    # lambda 1: advantages 0.75, -0.5, -0.75, and the return of each token is its sample's reward
    assert flat(columns, "a", c.RETURNS) == [1.0, 0.0, 0.0]
    # VAPO: the advantages' own λ, here 0 as 0.4 times two tokens is below 1, leaves the returns as they are.
    adaptive = advantage_columns(rows, PPO, PpoKnobs(gae_lambda=1.0, gae_alpha=0.4))
    assert adaptive["a"][c.RETURNS] == columns["a"][c.RETURNS] and flat(adaptive, "a") != flat(columns, "a")
    raw = np.array([0.75, -0.5, -0.75])
    assert flat(columns, "a") == pytest.approx(((raw - raw.mean()) / raw.std()).tolist())
    plain = advantage_columns([leased("a", [1.0, 0.0], [1, 2])], GRPO, GrpoKnobs())
    assert set(plain["a"]) == {c.ADVANTAGES}


def test_a_row_of_two_episodes_has_an_advantage_in_each() -> None:
    """GRPO's is the reward minus the group's mean on each token of the episode, wherever its rows lie."""
    tree = random_tree(np.random.default_rng(3), uid="a")
    assert len(tree.tokens[1]) > len(tree.sampled), "some rows are in two episodes"
    assert max(len(one.leaves) for one in tree.episodes) > 1
    columns = c.encode_tree(dataclasses.replace(tree, extras={}))
    row = LeasedRow(group_uid="a", index=0, uids=[], versions=[], columns=columns)
    inputs = advantage_inputs(row)
    assert inputs.lengths.tolist() == tree.lengths.tolist() and inputs.loss_mask.tolist() == [
        bool(tree.loss_mask[token]) for token in tree.tokens[1]
    ]
    rewards = np.array([one.reward for one in tree.episodes], dtype=np.float32)
    expected = np.repeat(rewards - rewards.mean(), tree.lengths)
    made = advantage_columns([row], GRPO, GrpoKnobs(normalize_std="none"))
    assert flat(made, "a") == pytest.approx(expected.tolist(), abs=1e-6)


def test_the_trainer_leases_what_the_algorithm_needs() -> None:
    plain = {*c.ROLLOUT_COLUMNS, c.ADVANTAGES}
    teacher = TeacherNeeds(models={"default": "x"})
    top = TeacherNeeds(models={"default": "x"}, top_k=4)
    for needs, more in (
        (Needs(old_logprobs="rollout"), set()),
        (Needs(old_logprobs="rollout", critic=True), {c.VALUES, c.RETURNS}),
        (Needs(old_logprobs="actor_fwd", reference=True), {c.OLD_LOGPROBS, c.REFERENCE_LOGPROBS}),
        (Needs(old_logprobs="rollout", teacher=teacher), {c.TEACHER_LOGPROBS}),
        (
            Needs(old_logprobs="rollout", teacher=top),
            {c.TEACHER_LOGPROBS, c.TEACHER_TOP_IDS, c.TEACHER_TOP_LOGPROBS},
        ),
    ):
        columns = train_columns(needs, routing_replay=False, truncates=False)
        assert len(columns) == len(set(columns)) and set(columns) == plain | more
        columns = train_columns(needs, routing_replay=True, truncates=True)
        assert set(columns) == plain | more | {c.ROUTED_EXPERTS, c.KEPT_TOKENS}


class CoreBus:
    """The bus's state machine behind the calls that the role makes; what cannot come now counts as timed out."""

    def __init__(self, core: BusCore) -> None:
        self._core = core

    def lease(self, request: LeaseRequest, *, timeout_s: float) -> Lease:
        lease = self._core.lease(request)
        if lease is None:
            raise BusTimeout(f"nothing for {timeout_s} s")
        return lease

    def release(self, lease_ids: Sequence[int], *, timeout_s: float) -> None:
        self._core.release(lease_ids)

    def progress(self, *, timeout_s: float) -> BusProgress:
        return self._core.progress()


def whole_step(core: BusCore) -> list[str]:
    bus: Any = CoreBus(core)
    lease = lease_whole_step(bus, for_worker(groups=2), timeout_s=0.05, slice_s=0.01)
    core.write(lease.lease_id, {row.group_uid: {"advantages": b"x"} for row in lease.rows})
    return [row.group_uid for row in lease.rows]


def test_a_whole_step_is_waited_for() -> None:
    core = make_core(max_staleness=0)
    first, second = core.admit(2)
    core.put([make_row(first)])
    with pytest.raises(BusTimeout):
        whole_step(core)
    assert not core.leases  # what it looked at went back
    core.put([make_row(second)])
    assert whole_step(core) == [first.group_uid, second.group_uid]


def test_a_lost_groups_replacement_need_not_wait_for_company() -> None:
    """One of a step's groups ages out after it had its advantages; what replaces it comes alone until the step ends."""
    core = make_core(max_staleness=1)
    old, fresh, *later = core.admit(4)
    core.put([make_row(old), make_row(fresh)])
    whole_step(core)
    core.put([make_row(one) for one in later])
    whole_step(core)
    lease = core.lease(for_actor(0))
    assert lease is not None
    core.ack([lease.lease_id], step=0, dropped={})
    # Of step 1's two groups the trainer holds one; the other is lost with its advantages.
    held = core.lease(for_actor(1, groups=1))
    assert held is not None
    lost = next(uid for uid, group in core.groups.items() if group.actor_step is None)
    core._end_as_dropped(core.groups[lost], dict.fromkeys(core.groups[lost].uids, "lost"))
    replacement = core.admit(1)[0]
    core.put([make_row(replacement, version=1)])
    assert whole_step(core) == [replacement.group_uid]
    rest = core.lease(for_actor(1, groups=1))
    assert rest is not None and [row.group_uid for row in rest.rows] == [replacement.group_uid]
