"""Tests how groups are built from responses and rewards: kept samples, dropped samples and the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from algorithms.grpo import SPEC as GRPO
from algorithms.grpo import GrpoConfig
from relax_core.bus.replay_buffer import ReplayBuffer
from relax_core.contracts import columns as c
from relax_core.contracts.bus import Group, LeaseRequest
from relax_core.contracts.engine import Generated
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.reward import RewardOutput
from relax_core.contracts.tree import TokenTree
from relax_core.rollout.dynamic_sampling import GroupFilter
from relax_core.rollout.episodes.episode_records import EpisodeRecord, PlayedTurn
from relax_core.rollout.episodes.group_assembly import DroppedGroup, complete_group
from relax_core.rollout.group_advantages import advantage_extras
from relax_core.train.megatron_rank import micro_batch_totals
from relax_core.train.micro_batches import decode_train_tree
from tests.bus.make_rows import make_core
from tests.responses import response as make_response
from tests.responses import scored
from tests.trees import of_tokens, rewards_of, tree_of


def response(
    sample: int,
    finish_reason: Literal["stop", "length"] = "stop",
    *,
    version: int = 4,
    newest: int = 5,
    kept: KeptTokens | None = None,
) -> Generated:
    tokens = sample + 2
    return make_response(
        list(range(tokens)),
        versions=[version] + [newest] * (tokens - 1),
        sample=sample,
        finish_reason=finish_reason,
        engine="engine-1",
        kept=kept,
    )


def completed(*pairs: tuple[Generated, float | None]) -> object:
    outputs = [
        RewardOutput(reward=reward, exact=reward == 1.0, parts={"format": 0.5}, why=f"{reward}") for _, reward in pairs
    ]
    return complete_group(index=12, episodes=scored([record for record, _ in pairs], outputs, index=12))


def test_a_whole_group_is_in_the_order_of_its_samples() -> None:
    """Responses arrive in any order. Uids, rewards and columns have the order of the samples."""
    row = completed((response(2), 0.2), (response(0), 1.0), (response(1, "length", version=5), 0.1))
    assert not isinstance(row, DroppedGroup)
    assert (row.group_uid, row.index, row.dropped) == ("g00000012", 12, {})
    assert row.uids == ["g00000012.0", "g00000012.1", "g00000012.2"]
    assert row.versions == [4, 5, 4]
    assert rewards_of(tree_of(row)) == pytest.approx([1.0, 0.1, 0.2])
    assert tree_of(row).lengths.tolist() == [2, 3, 4]
    assert of_tokens(tree_of(row), tree_of(row).loss_mask).tolist() == [1] * 9
    info = tree_of(row).episodes
    assert [metrics.ended for metrics in info] == ["stop", "length", "stop"]
    assert [metrics.why for metrics in info] == ["1.0", "0.1", "0.2"]
    assert [metrics.parts for metrics in info] == [{"exact": float(place == 0), "format": 0.5} for place in range(3)]


def test_a_reward_of_none_is_dropped_alone_and_never_becomes_0() -> None:
    row = completed((response(0), None), (response(1), 0.0), (response(2), 0.7))
    assert not isinstance(row, DroppedGroup)
    assert row.uids == ["g00000012.1", "g00000012.2"]
    assert row.dropped == {"g00000012.0": "reward_failed"}
    assert rewards_of(tree_of(row)) == pytest.approx([0.0, 0.7])
    assert [episode.uid for episode in tree_of(row).episodes] == row.uids


def sets_of(sample: int) -> KeptTokens:
    """Returns one kept set per token t: t and some other tokens. The set of token 0 is the complete vocabulary."""
    sets = [[token, 20 + sample, *range(30, 30 + sample)] for token in range(sample + 2)]
    return KeptTokens.of_lists([list(range(40)), *sets[1:]], vocab_size=40)


def test_kept_sets_reach_the_trainer_in_the_order_of_its_tokens() -> None:
    pairs = [(response(sample, kept=sets_of(sample)), reward) for sample, reward in ((2, 0.2), (0, 1.0), (1, None))]
    row = completed(*pairs)
    assert not isinstance(row, DroppedGroup)
    advantages = c.encode_column(c.ADVANTAGES, np.zeros(6))
    columns = row.columns | {c.ADVANTAGES: advantages}
    leased = Group(group_uid=row.group_uid, index=12, uids=row.uids, versions=row.versions, columns=columns)
    expected = sets_of(0).lists() + sets_of(2).lists()
    group, _ = decode_train_tree(leased, step=5, oldest_version=4)
    assert group.kept is not None and group.kept.tokens == group.rows
    assert group.kept.take(group.tokens[1]).lists() == expected
    assert group.kept.take(np.arange(3)).lists() == [list(range(40))] * 3, "prompt tokens keep all"
    without = completed((response(0), 1.0), (response(1), 0.0))
    assert not isinstance(without, DroppedGroup) and c.KEPT_TOKENS not in without.columns


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([[0, 5], [0, 5]], "its token 1, id 1, is not in the set that it was sampled from"),
        ([[0, 5]], "1 kept sets came for 2 tokens"),
    ],
)
def test_a_kept_set_without_its_token_names_engine_and_sample(sets: list[list[int]], message: str) -> None:
    wrong = KeptTokens.of_lists(sets, vocab_size=100)
    with pytest.raises(ValueError, match=rf"engine-1, sample g00000012\.0: {message}"):
        completed((response(0, kept=wrong), 1.0), (response(1, kept=sets_of(1)), 0.0))


@pytest.mark.parametrize("rewards", [[1.0, None], [None, None], [None, None, 1.0], [None]])
def test_fewer_than_two_left_drop_the_group(rewards: list[float | None]) -> None:
    pairs = [(response(sample), reward) for sample, reward in enumerate(rewards)]
    assert completed(*pairs) == DroppedGroup(group_uid="g00000012", reason="reward_failed")


def test_a_group_of_one_is_complete_with_one() -> None:
    row = completed((response(0), 1.0))
    assert not isinstance(row, DroppedGroup) and row.uids == ["g00000012.0"]


def test_a_complete_group_may_be_refused_and_the_refusals_are_counted() -> None:
    seen: list[tuple[list[float], int]] = []

    def drop_group(rewards: Sequence[float], dropped_in_a_row: int) -> str | None:
        seen.append((list(rewards), dropped_in_a_row))
        return "all_equal" if len(set(rewards)) == 1 else None

    refuse = GroupFilter(drop_group)
    results = []
    for rewards in ([0.5, 0.5], [0.5, 0.5], [0.5, 1.0], [1.0, 1.0], [None, 1.0]):
        results.append(
            complete_group(index=12, episodes=scored([response(0), response(1)], rewards, index=12), refuse=refuse)
        )
    reasons = [result.reason if isinstance(result, DroppedGroup) else None for result in results]
    assert reasons == ["all_equal", "all_equal", None, "all_equal", "reward_failed"]
    # The last group was incomplete, so the filter did not process it.
    assert seen == [([0.5, 0.5], 0), ([0.5, 0.5], 1), ([0.5, 1.0], 2), ([1.0, 1.0], 0)]


def test_the_filter_of_a_sum_compares_its_first_part() -> None:
    """For DAPO, which keeps groups with 0 < right < all, wrong answers with different form are all wrong."""

    def drop_group(rewards: Sequence[float], dropped_in_a_row: int) -> str | None:
        return "all_equal" if len(set(rewards)) == 1 else None

    def refused(*parts: dict[str, float]) -> bool:
        outputs = [RewardOutput(reward=sum(part.values()), parts=part) for part in parts]
        group = complete_group(
            index=12,
            episodes=scored([response(0), response(1)], outputs, index=12),
            refuse=GroupFilter(drop_group, parts=["right", "form"]),
        )
        return isinstance(group, DroppedGroup)

    assert refused({"right": 0.0, "form": 0.1}, {"right": 0.0, "form": 0.2})
    assert not refused({"right": 0.0, "form": 1.0}, {"right": 1.0, "form": 0.0})  # the sums are equal
    assert not refused({"form": 0.1}, {"form": 0.2}) and not refused({"right": 1.0, "form": 0.0}, {"form": 0.2})


@pytest.mark.parametrize(("mask", "masks", "versions"), [(False, [1] * 5, [4, 5]), (True, [0, 1, 1, 1, 1], [5, 5])])
def test_tokens_of_older_weights_are_masked_on_request(mask: bool, masks: list[int], versions: list[int]) -> None:
    """The version of a sample is then its newest version. A sample with a single version is not masked."""
    row = complete_group(
        index=12,
        episodes=scored([response(0), response(1, version=5)], [1.0, 0.0], index=12),
        mask_off_policy=mask,
    )
    assert not isinstance(row, DroppedGroup)
    assert of_tokens(tree_of(row), tree_of(row).loss_mask).tolist() == masks
    assert row.versions == versions
    assert tree_of(row).episodes[0].turns[0].versions == [(4, 1), (5, 1)], "the versions of all tokens are recorded"


def truncated(*pairs: tuple[Generated, float | None]) -> Group | DroppedGroup:
    return complete_group(
        index=0,
        episodes=scored([record for record, _ in pairs], [reward for _, reward in pairs]),
        refuse=GroupFilter(lambda rewards, dropped: "all_equal" if len(set(rewards)) == 1 else None),
        mask_truncated=True,
    )


def test_nothing_is_trained_of_a_truncated_response_and_its_age_does_not_count() -> None:
    row = truncated((response(0, "length", version=1), 0.0), (response(1, version=5), 1.0), (response(2), 1.0))
    assert not isinstance(row, DroppedGroup)
    assert of_tokens(tree_of(row), tree_of(row).loss_mask).tolist() == [0] * 2 + [1] * 7
    assert rewards_of(tree_of(row)) == [0.0, 1.0, 1.0] and row.dropped == {}
    # The sample's tokens have versions 1 and 5. The group's version is 4, the version of its oldest trained token.
    assert row.versions == [5, 5, 4]
    early = msgspec.structs.replace(response(0, "length"), versions=np.array([3, 3], dtype=np.int32))
    row = truncated((early, 0.0), (response(1, version=5), 1.0), (response(2, version=5), 1.0))
    assert not isinstance(row, DroppedGroup) and row.versions == [5, 5, 5]


def test_a_group_of_truncated_responses_is_dropped_before_it_is_asked_about() -> None:
    cut = [(response(place, "length"), reward) for place, reward in enumerate((0.0, 0.0, None))]
    assert truncated(*cut) == DroppedGroup(group_uid="g00000000", reason="truncated")
    assert truncated(*cut[1:]) == DroppedGroup(group_uid="g00000000", reason="reward_failed")


@pytest.mark.parametrize(
    ("aggregation", "denominator"),
    [("token_mean", 7.0), ("seq_mean_token_mean", 2.0), ("seq_mean_token_sum_norm", 2 * 8.0)],
)
def test_the_way_of_a_truncated_sample_from_the_engine_to_the_ledger(aggregation: str, denominator: float) -> None:
    """The baseline includes the sample's reward, no denominator includes its tokens, and the ledger has the reason."""
    core: ReplayBuffer = make_core(groups_per_step=1, group_size=3, max_staleness=1)
    core.admit(1)
    row = truncated(
        (response(0, "length", version=0, newest=0), -2.0),
        (response(1, version=0, newest=0), 1.0),
        (response(2, version=0, newest=0), 1.0),
    )
    assert not isinstance(row, DroppedGroup)
    core.put([row])
    request = LeaseRequest(task="advantages", columns=(*c.FORWARD_COLUMNS, c.LOSS_MASK), max_groups=1, lease_s=60.0)
    lease = core.lease(request)
    assert lease is not None
    config = GrpoConfig(normalize_std="none", aggregation=aggregation, norm_length=8.0)
    (made,) = advantage_extras([tree_of(lease.rows[0])], GRPO, config)
    payload = c.encode_column(c.ADVANTAGES, made[c.ADVANTAGES])
    core.write(lease.lease_id, {row.group_uid: {c.ADVANTAGES: payload}})
    columns = (*c.ROLLOUT_COLUMNS, c.ADVANTAGES)
    lease = core.lease(LeaseRequest(task="actor", columns=columns, max_groups=1, step=0, lease_s=60.0))
    assert lease is not None
    group, masked = decode_train_tree(lease.rows[0], step=0, oldest_version=0)
    trained = of_tokens(group, group.loss_mask)
    assert group.extras["advantages"][trained].tolist() == [1.0] * 7  # the mean is 0
    assert GRPO.denominator(micro_batch_totals([group]), config) == denominator
    core.ack([lease.lease_id], step=0, dropped=masked)
    counts = core.progress().ledger
    assert (counts.issued, counts.trained, counts.dropped, counts.lost) == (3, 2, {"truncated": 1}, 0)
    assert core.progress().staleness_histogram == {0: 2}


def episodes_row(*episodes: tuple[float | None, str, list[list[int]]], **given: Any) -> Group | DroppedGroup:
    """Returns a group. ``episodes`` holds per episode the reward, the end, and the token versions of each turn."""
    played = list[EpisodeRecord]()
    for place, (reward, ended, turns) in enumerate(episodes):
        prompt, made = [1, 2], list[PlayedTurn]()
        for versions in turns:
            answer = make_response([7] * len(versions), versions=versions)
            made.append(PlayedTurn(prompt_ids=prompt, response=answer))
            prompt = [*prompt, *answer.output_ids.tolist(), 5]
        uid = f"g00000012.{place}"
        output = RewardOutput(reward=reward)
        played.append(EpisodeRecord(uid=uid, turns=made, output=output, ended=ended))  # type: ignore[arg-type]
    return complete_group(index=12, episodes=played, **given)


def test_an_episode_without_a_reward_is_dropped_alone() -> None:
    row = episodes_row((1.0, "env_done", [[3]]), (None, "env_failed", []), (0.0, "max_turns", [[3], [3, 4]]))
    assert isinstance(row, Group)
    assert (row.uids, row.versions) == (["g00000012.0", "g00000012.2"], [3, 3])
    assert row.dropped == {"g00000012.1": "reward_failed"}
    dropped = episodes_row((1.0, "env_done", [[3]]), (None, "step_timeout", [[3]]))
    assert isinstance(dropped, DroppedGroup) and dropped.reason == "reward_failed"


def test_dropped_samples_are_reported_with_their_tokens() -> None:
    told: list[tuple[list[str], int]] = []

    def lost(tree: TokenTree) -> None:
        told.append(([episode.uid for episode in tree.episodes], tree.rows))

    episodes_row((1.0, "env_done", [[3]]), (None, "env_failed", []), (0.0, "max_turns", [[3]]), lost=lost)
    episodes_row((None, "env_failed", []), (None, "env_failed", []), lost=lost)
    assert told == [], "an episode without a sampled token has no tokens to record"
    episodes_row((1.0, "env_done", [[3]]), (None, "env_failed", []), (None, "step_timeout", [[3, 3]]), lost=lost)
    uids = ["g00000012.0", "g00000012.2"]
    assert told == [(uids, 5)], "the group is dropped whole, because only one episode has a reward"


def test_masks_go_by_episode() -> None:
    """With both masks, only tokens of the newest version are trained, and truncated episodes have no trained token."""
    given = ((1.0, "env_done", [[3, 4], [4]]), (0.0, "turn_cut", [[5], [5]]), (0.0, "max_turns", [[3]]))
    row = episodes_row(*given, mask_off_policy=True, mask_truncated=True)
    assert isinstance(row, Group)
    tree = tree_of(row)
    episodes, rows = tree.tokens
    trained = [tree.loss_mask[rows[episodes == place]].tolist() for place in range(3)]
    assert trained == [[False, True, True], [False, False], [True]]
    assert row.versions == [4, 5, 3]
    cut = episodes_row((1.0, "turn_cut", [[3]]), (0.0, "context_full", [[3]]), mask_truncated=True)
    assert isinstance(cut, DroppedGroup) and cut.reason == "truncated"
