"""Tests advantages of groups from their columns, and the list of algorithms that need only complete groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.grpo import SPEC as GRPO
from algorithms.grpo import GrpoConfig
from algorithms.ppo import SPEC as PPO
from algorithms.ppo import PpoConfig
from algorithms.reinforce_pp import SPEC as REINFORCE_PP
from algorithms.reinforce_pp import ReinforcePpConfig
from relax_core.config.compose import load_config
from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import Requirements
from relax_core.contracts.bus import Group
from relax_core.contracts.columns import decode_tree, encode_tree
from relax_core.contracts.reward import RewardOutput
from relax_core.contracts.tree import TokenTree, reward_array
from relax_core.registry import find_algorithm
from relax_core.roles.process_placement import roles_of
from relax_core.rollout.episodes.episode_records import EpisodeRecord, PlayedTurn
from relax_core.rollout.episodes.group_assembly import build_tree
from relax_core.rollout.group_advantages import (
    advantage_extras,
    advantage_inputs,
    computes_advantages_per_group,
    input_columns,
)
from tests.responses import response
from tests.trees import answers_tree, random_tree


def row(rewards: Sequence[float], lengths: Sequence[int], **extras: Any) -> TokenTree:
    """Returns a group of answers with these rewards. ``logprobs`` and extras have one entry per answer token."""
    return answers_tree("g", [1, 2], lengths, np.zeros(sum(lengths)), rewards=rewards, **extras)


def flat(extras: Mapping[str, np.ndarray], name: str = c.ADVANTAGES) -> list[float]:
    values: list[float] = extras[name].tolist()
    return values


def test_each_group_is_on_its_own_without_normalize() -> None:
    rows = [row([1.0, 0.0], [1, 2]), row([5.0, 5.0], [1, 1])]
    a, b = advantage_extras(rows, GRPO, GrpoConfig(normalize_std="none"))
    assert flat(a) == [0.5, -0.5, -0.5]
    assert flat(b) == [0.0, 0.0]


def test_a_row_of_two_episodes_has_an_advantage_in_each() -> None:
    """Each token of an episode has GRPO's advantage: the reward minus the group's mean."""
    tree = random_tree(np.random.default_rng(3))
    assert len(tree.tokens[1]) > len(tree.sampled), "some rows are in two episodes"
    assert max(len(episode.leaves) for episode in tree.episodes) > 1
    rewards = np.array([episode.reward for episode in tree.episodes], dtype=np.float32)
    (made,) = advantage_extras([tree], GRPO, GrpoConfig(normalize_std="none"))
    expected = np.repeat(rewards - rewards.mean(), tree.lengths)
    assert flat(made) == pytest.approx(expected.tolist(), abs=1e-6)


def test_normalize_sees_all_groups() -> None:
    rows = [row([1.0, 0.0], [1, 1]), row([3.0, 0.0], [1, 1])]
    a, b = advantage_extras(rows, REINFORCE_PP, ReinforcePpConfig())
    # ±0.5 and ±1.5 around a mean of 0: population std sqrt(1.25)
    root = 1.25**0.5
    assert flat(a) == pytest.approx([0.5 / root, -0.5 / root])
    assert flat(b) == pytest.approx([1.5 / root, -1.5 / root])


def test_the_deviation_of_a_step_is_that_of_all_groups_and_needs_them_together() -> None:
    config = GrpoConfig(normalize_std="batch")
    assert GRPO.requirements(config).whole_step and not GRPO.requirements(GrpoConfig()).whole_step
    assert REINFORCE_PP.requirements(ReinforcePpConfig()).whole_step and PPO.requirements(PpoConfig()).whole_step
    rows = [row([1.0, 0.0], [1, 2]), row([3.0, 0.0], [1, 1])]
    a, b = advantage_extras(rows, GRPO, config)
    std = 2.0**0.5  # std of 1, 0, 3, 0 around their mean of 1, unbiased: sqrt((0 + 1 + 4 + 1) / 3)
    assert flat(a) == pytest.approx([0.5 / std, -0.5 / std, -0.5 / std], rel=1e-5)
    assert flat(b) == pytest.approx([1.5 / std, -1.5 / std], rel=1e-5)


def test_a_group_of_one_has_the_step_as_its_baseline() -> None:
    """Plain REINFORCE++ compares the single reward of a prompt with the rewards of the other prompts."""
    config = ReinforcePpConfig(group_size=1, group_baseline=False)
    REINFORCE_PP.check(config)
    a, b = advantage_extras([row([1.0], [2]), row([0.0], [2])], REINFORCE_PP, config)
    assert flat(a) == pytest.approx([1.0, 1.0]) and flat(b) == pytest.approx([-1.0, -1.0])


def test_weights_are_divided_by_their_mean_over_the_step() -> None:
    config = GrpoConfig(normalize_std="none", old_logprobs="actor_fwd", correction="tis_normalized")
    requirements = GRPO.requirements(config)
    assert requirements.whole_step and {c.OLD_LOGPROBS, c.LOGPROBS} <= set(input_columns(requirements))
    assert c.LOGPROBS not in input_columns(GRPO.requirements(GrpoConfig(old_logprobs="actor_fwd")))

    def rows(*ratios: float) -> list[TokenTree]:
        old = [np.log(np.array([ratio, ratio], dtype=np.float32)) for ratio in ratios]
        return [row([1.0, 0.0], [1, 1], logprobs=np.zeros(2), old_logprobs=logprobs) for logprobs in old]

    a, b = advantage_extras(rows(0.25, 0.75), GRPO, config)  # the mean of the weights is 1/2
    assert flat(a) == pytest.approx([1.0, -1.0]) and flat(b) == pytest.approx([1.0, -1.0])


def test_the_engines_logprobs_stand_for_the_old_ones() -> None:
    assert input_columns(Requirements(old_logprobs="rollout")) == (*c.FORWARD_COLUMNS, c.LOSS_MASK)
    assert c.LOGPROBS in input_columns(Requirements(old_logprobs="rollout", reference=True))
    assert c.LOGPROBS not in input_columns(Requirements(old_logprobs="actor_fwd", reference=True))
    logprobs = np.array([-1.0, -2.0], dtype=np.float32)
    scored_row = row([1.0, 0.0], [1, 1], logprobs=logprobs, reference_logprobs=logprobs)
    inputs = advantage_inputs(scored_row, Requirements(old_logprobs="rollout", reference=True))
    assert inputs.old_logprobs is not None and torch.equal(inputs.old_logprobs, torch.tensor([-1.0, -2.0]))
    asked_for_nothing = advantage_inputs(scored_row, Requirements(old_logprobs="rollout"))
    assert asked_for_nothing.old_logprobs is None is asked_for_nothing.reference_logprobs


def test_a_critics_returns_are_advantages_before_whitening_plus_values() -> None:
    assert c.VALUES in input_columns(PPO.requirements(PpoConfig()))
    values = np.array([0.25, 0.5, 0.75], dtype=np.float32)
    rows = [row([1.0, 0.0], [1, 2], values=values)]
    (a,) = advantage_extras(rows, PPO, PpoConfig(gae_lambda=1.0))
    # lambda 1: advantages 0.75, -0.5, -0.75; the return of each token is its sample's reward
    assert flat(a, c.RETURNS) == [1.0, 0.0, 0.0]
    # VAPO's λ for advantages does not change the returns. Here it is 0, because 0.4 times two tokens is below 1.
    (adaptive,) = advantage_extras(rows, PPO, PpoConfig(gae_lambda=1.0, gae_alpha=0.4))
    assert flat(adaptive, c.RETURNS) == flat(a, c.RETURNS) and flat(adaptive) != flat(a)
    raw = np.array([0.75, -0.5, -0.75])
    assert flat(a) == pytest.approx(((raw - raw.mean()) / raw.std()).tolist())
    (plain,) = advantage_extras([row([1.0, 0.0], [1, 2])], GRPO, GrpoConfig())
    assert set(plain) == {c.ADVANTAGES}


def played(uid: str, *turns: tuple[list[int], list[int], float | None], reward: float) -> EpisodeRecord:
    """Returns an episode of turns (prompt, response, reward). The state key of a turn is the text of its prompt."""
    made = [
        PlayedTurn(prompt_ids=prompt, response=response(ids, versions=0), reward=own, state_key=str(prompt) * 20)
        for prompt, ids, own in turns
    ]
    return EpisodeRecord(uid=uid, turns=made, output=RewardOutput(reward=reward), ended="env_done")


def test_the_turns_of_a_group_come_from_the_bus_in_the_order_in_which_they_were_played() -> None:
    """The third turn continues the first history, so its rows precede the second turn's rows."""
    back = played(
        "g.0", ([1, 2, 3], [4, 4], 0.5), ([1, 2, 9, 9], [5], None), ([1, 2, 3, 7], [6, 6, 6], 0.25), reward=2.0
    )
    other_episode = played("g.1", ([1, 2, 3], [8], 1.0), reward=1.0)
    tree = build_tree("g", [back, other_episode])
    assert tree.token_ids[tree.tokens[1]].tolist() == [4, 4, 6, 6, 6, 5, 8]
    requirements = Requirements(old_logprobs="rollout", critic=True, turns=True)
    tree = tree.with_extras(values=np.arange(tree.rows, dtype=np.float32))
    inputs = advantage_inputs(leased(encode_tree(tree), input_columns(requirements)), requirements)
    turns = inputs.turns
    assert turns is not None and inputs.values is not None
    assert turns.of_tokens.tolist() == [0, 0, 1, 2, 2, 2, 3]
    assert turns.samples.tolist() == [0, 0, 0, 1] == inputs.sample_ids[[0, 2, 3, 6]].tolist()
    assert turns.rewards.tolist() == [0.5, 0.0, 1.5, 1.0], "the last turn gets the rest of the episode's reward"
    assert turns.state_keys[0] == turns.state_keys[3] != turns.state_keys[1]
    assert all(key is not None and len(key) == 32 for key in turns.state_keys), "long keys are sent as digests"
    rows = tree.tokens[1][[0, 1, 5, 2, 3, 4, 6]]
    assert inputs.values.tolist() == rows.tolist(), "the columns also have the order of the turns"
    zeros = tree.with_extras(values=np.zeros(tree.rows, dtype=np.float32))
    spec = dataclasses.replace(PPO, normalize=None)
    (made,) = advantage_extras([zeros], spec, PpoConfig(gae_lambda=1.0))
    assert flat(made) == flat(made, c.RETURNS) == [2.0, 2.0, 1.5, 1.5, 1.5, 1.5, 1.0], "in the order of rows"
    assert advantage_inputs(tree, Requirements(old_logprobs="rollout")).turns is None


@pytest.mark.parametrize(
    "settings", [{"gamma": 0.5}, {"kl_coef": 0.25, "kl_placement": "reward", "kl_estimator": "k1"}]
)
def test_returns_follow_the_order_of_sampling_if_an_episode_goes_back(settings: dict[str, Any]) -> None:
    """The third turn continues the first history, so its rows precede the second turn's rows."""
    order = [4, 4, 5, 6, 6, 6]  # the episode's sampled tokens in the order of sampling
    back = played(
        "g.0", ([1, 2, 3], [4, 4], None), ([1, 2, 9, 9], [5], None), ([1, 2, 3, 7], [6, 6, 6], None), reward=2.0
    )
    tree = build_tree("g", [back, played("g.1", ([1, 2, 3], [8], None), reward=0.0)])
    at = tree.token_ids[tree.tokens[1]].tolist()
    assert at == [4, 4, 6, 6, 6, 5, 8]
    config = ReinforcePpConfig(group_baseline=False, **settings)
    logprobs = np.zeros(tree.rows, dtype=np.float32)
    logprobs[tree.sampled] = -tree.token_ids[tree.sampled].astype(np.float32) / 8  # k1 KL of a token = 1 - id / 8
    tree = dataclasses.replace(tree, logprobs=logprobs).with_extras(
        reference_logprobs=np.full(tree.rows, -1.0, dtype=np.float32)
    )
    spec = dataclasses.replace(REINFORCE_PP, normalize=None)
    (made,) = advantage_extras([tree], spec, config)
    left, wanted = Fraction(0), {}
    for place in reversed(range(len(order))):
        charge = Fraction(config.kl_coef) * (1 - Fraction(order[place], 8))
        left = left * Fraction(config.gamma) - charge + (2 if place == len(order) - 1 else 0)
        wanted[place] = float(left)
    assert flat(made)[:6] == pytest.approx([wanted[place] for place in (0, 1, 3, 4, 5, 2)])
    assert flat(made)[5] != flat(made)[4], "the second turn's token was sampled before the third turn"


@pytest.mark.parametrize(
    ("rewards", "wanted"),
    [
        ([1e9 + 0.1, 1e9 + 0.2, 1e9 + 0.3, 1e9 + 0.4], np.float64),
        ([16_777_217.0, 16_777_216.0], np.float64),
        ([0.1 + 0.2, 0.3], np.float32),  # equal except for float64 rounding
        ([0.7 + 1e-9, 0.7, 0.7 + 2e-9], np.float64),
        ([1.0, 0.0, 0.3, -2.5], np.float32),
        ([100.0 * (0.1 + 0.2), 30.0], np.float32),
        ([1e15, 0.0, 1.5], np.float32),
        ([5.5], np.float32),
        ([1e12 + 0.1] * 3, np.float32),
    ],
)
def test_rewards_are_rounded_where_that_changes_no_difference(rewards: list[float], wanted: type) -> None:
    got = reward_array(rewards)
    assert got.dtype == wanted
    if wanted is np.float32:
        assert got.tolist() == np.array(rewards, dtype=np.float32).tolist()


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "sapo", "cispo", "dapo"])
def test_an_offset_of_all_rewards_changes_no_advantage(algorithm: str) -> None:
    config, spec = load_config([f"algo={algorithm}", "algo.group_size=4"]).algo, find_algorithm(algorithm)
    eighths, offset = [1 / 8, 2 / 8, 3 / 8, 6 / 8], 2.0**30
    near, far = (
        advantage_extras([row([eighth + more for eighth in eighths], [2, 1, 1, 3])], spec, config)[0]
        for more in (0.0, offset)
    )
    assert far[c.ADVANTAGES].dtype == np.float32
    assert flat(far) == pytest.approx(flat(near), rel=1e-5) and len(set(flat(far))) > 1


def test_every_token_of_a_tree_is_in_a_turn_of_its_episode() -> None:
    requirements = Requirements(old_logprobs="rollout", turns=True)
    for seed in range(20):
        tree = random_tree(np.random.default_rng(seed), roots=2)
        inputs = advantage_inputs(tree, requirements)
        assert inputs.turns is not None
        of_tokens = inputs.turns.of_tokens.tolist()
        assert of_tokens == sorted(of_tokens)
        assert inputs.turns.samples[of_tokens].tolist() == inputs.sample_ids.tolist()
        sums = np.bincount(inputs.turns.samples, weights=inputs.turns.rewards)
        assert sums.tolist() == pytest.approx([episode.reward for episode in tree.episodes])
        lengths = [turn.end - turn.start for episode in tree.episodes for turn in episode.turns]
        assert np.bincount(of_tokens).tolist() == lengths


def test_a_step_is_normalised_only_where_the_algorithm_sees_one() -> None:
    """The groups of one lease are not always a complete train step."""
    rows = [row([1.0, 0.0], [1, 1]), row([5.0, 1.0], [1, 1])]
    config = GrpoConfig(normalize_std="none")
    mixing = dataclasses.replace(GRPO, normalize=lambda values, inputs, config: [torch.cat(list(values))[:2]] * 2)
    mixed, plain = advantage_extras(rows, mixing, config), advantage_extras(rows, GRPO, config)
    assert [flat(values) for values in mixed] == [flat(values) for values in plain]


def leased(columns: Mapping[str, bytes], names: Sequence[str]) -> TokenTree:
    """Returns the tree with only the columns that a bus task leases."""
    asked_for = {name: columns[name] for name in names}
    return decode_tree(Group(group_uid="g", index=0, uids=[], versions=[], columns=asked_for))


COMPLETE = ("grpo", "dapo", "dr_grpo", "rloo", "gspo", "sapo", "cispo")


@pytest.mark.parametrize("algorithm", COMPLETE)
def test_a_group_alone_has_the_bits_that_it_has_among_others(algorithm: str) -> None:
    """The rollout processes one group with all columns. The role processes several groups with requested columns."""
    config = load_config([f"algo={algorithm}"])
    spec = find_algorithm(algorithm)
    random = np.random.default_rng(0)
    groups = []
    for _ in range(4):
        lengths = random.integers(1, 9, size=16).tolist()
        logprobs = random.standard_normal(sum(lengths)).astype(np.float32)
        groups.append(row(random.standard_normal(16).tolist(), lengths, logprobs=logprobs))
    names = input_columns(spec.requirements(config.algo))
    asked_for = [leased(encode_tree(group), names) for group in groups]
    together = [columns[c.ADVANTAGES].tobytes() for columns in advantage_extras(asked_for, spec, config.algo)]
    assert together == [advantage_extras([group], spec, config.algo)[0][c.ADVANTAGES].tobytes() for group in groups]
    assert len(set(together)) == len(groups)


@pytest.mark.parametrize(
    ("overrides", "in_rollout"),
    [
        *(([f"algo={name}"], True) for name in COMPLETE),
        (["algo.normalize_std=batch"], False),
        (["algo.old_logprobs=actor_fwd"], False),
        (["algo.kl_coef=0.1"], False),
        (["algo=reinforce_pp"], False),
        (["algo=ppo"], False),
        (["algo=distill"], False),
    ],
)
def test_a_role_makes_them_where_they_need_more_than_the_group(overrides: list[str], in_rollout: bool) -> None:
    config = load_config(overrides)
    assert computes_advantages_per_group(config) is in_rollout
    assert ("advantages" in roles_of(config)) is not in_rollout


@pytest.mark.parametrize(
    ("rewards", "wanted"),
    [
        ([1e9 + 0.1 * n for n in range(4)], [-0.15, -0.05, 0.05, 0.15]),
        ([-1e12, 1.0 - 1e12], [-0.5, 0.5]),
        ([0.0, -1e15], [5e14, -5e14]),
        ([1e9, 1e9], [0.0, 0.0]),
    ],
)
def test_differences_of_a_group_are_taken_before_rewards_are_rounded(rewards: list[float], wanted: list[float]) -> None:
    (made,) = advantage_extras([row(rewards, [1] * len(rewards))], GRPO, GrpoConfig(normalize_std="none"))
    assert flat(made) == pytest.approx(wanted, rel=1e-3)


def test_usual_rewards_are_float32_as_before() -> None:
    inputs = advantage_inputs(row([0.1, 0.7, -3.0], [1, 1, 1]), Requirements(old_logprobs="rollout"))
    assert inputs.rewards.dtype == torch.float32
