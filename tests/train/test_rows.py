"""Bus rows as the trainer's groups: which tokens are fresh, which too old, and who is left with none."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest

from relax_core.contracts import columns as c
from relax_core.contracts.bus import LeasedRow
from relax_core.contracts.sample import Group, Sample, VersionSpan
from relax_core.train.rows import decode_prompt_and_responses, decode_train_group, token_versions

Spans = list[tuple[int, int]]  # (tokens, version)


def sample(place: int, spans: Spans, *, mask: list[int] | None = None) -> Sample:
    length = sum(tokens for tokens, _ in spans)
    ends = np.cumsum([0, *(tokens for tokens, _ in spans)]).tolist()
    return Sample(
        uid=f"g.{place}",
        response_ids=[100 * place + token for token in range(length)],
        rollout_logprobs=[-0.5 - place - token for token in range(length)],
        loss_mask=mask or [1] * length,
        weight_versions=[
            VersionSpan(start, end, version) for (start, end), (_, version) in zip(pairwise(ends), spans, strict=True)
        ],
        finish_reason="stop",
        reward=float(place),
    )


def row(*samples: Sample, extra: tuple[str, ...] = ()) -> LeasedRow:
    columns = c.encode_group(Group(group_uid="g", index=0, prompt_ids=[7, 8, 9], samples=list(samples)))
    lengths = [len(one.response_ids) for one in samples]
    for number, name in enumerate((c.ADVANTAGES, *extra)):
        columns[name] = c.encode_flat(np.arange(sum(lengths), dtype=np.float32) + number, lengths)
    uids, versions = [one.uid for one in samples], [one.version for one in samples]
    return LeasedRow(group_uid="g", index=0, uids=uids, versions=versions, columns=columns)


def test_everything_arrives_flat_and_in_order() -> None:
    group, masked = decode_train_group(row(sample(0, [(2, 5)]), sample(1, [(3, 5)])), step=5, oldest_version=5)
    assert masked == {}
    assert group.prompt_ids.tolist() == [7, 8, 9]
    assert group.lengths.tolist() == [2, 3]
    assert group.response_ids.tolist() == [0, 1, 100, 101, 102]
    assert group.rollout_logprobs.tolist() == [-0.5, -1.5, -1.5, -2.5, -3.5]
    assert group.advantages is not None and group.advantages.tolist() == [0, 1, 2, 3, 4]
    assert group.loss_mask.all() and group.loss_mask.dtype == bool
    assert group.old_logprobs is None and group.reference_logprobs is None
    assert group.packed_tokens == 3 + 1 + 2


def test_columns_of_other_roles_are_kept_apart() -> None:
    leased = row(sample(0, [(2, 0)]), sample(1, [(1, 0)]), extra=(c.OLD_LOGPROBS, c.REFERENCE_LOGPROBS))
    group, _ = decode_train_group(leased, step=0, oldest_version=0)
    assert group.old_logprobs is not None and group.old_logprobs.tolist() == [1, 2, 3]
    assert group.reference_logprobs is not None and group.reference_logprobs.tolist() == [2, 3, 4]


def test_teachers_and_critics_columns_arrive() -> None:
    leased = row(sample(0, [(2, 0)]), sample(1, [(1, 0)]), extra=(c.TEACHER_LOGPROBS, c.VALUES, c.RETURNS))
    ids = c.encode_flat(np.arange(6, dtype=np.int32), [4, 2])  # two numbers a token
    top = {c.TEACHER_TOP_IDS: ids, c.TEACHER_TOP_LOGPROBS: c.encode_flat(-np.arange(6, dtype=np.float32), [4, 2])}
    leased = msgspec.structs.replace(leased, columns=leased.columns | top)
    group, _ = decode_train_group(leased, step=0, oldest_version=0)
    assert group.teacher_logprobs is not None and group.teacher_logprobs.tolist() == [1, 2, 3]
    assert group.values is not None and group.values.tolist() == [2, 3, 4]
    assert group.returns is not None and group.returns.tolist() == [3, 4, 5]
    assert group.teacher_top_ids is not None and group.teacher_top_ids.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert group.teacher_top_logprobs is not None
    assert group.teacher_top_logprobs.tolist() == [[0, -1], [-2, -3], [-4, -5]]


def test_a_sample_is_fresh_only_as_a_whole() -> None:
    """The second sample ended with the step's weights, but began with older ones."""
    leased = row(sample(0, [(2, 5)]), sample(1, [(1, 4), (2, 5)]), sample(2, [(1, 4)]))
    group, _ = decode_train_group(leased, step=5, oldest_version=0)
    assert group.fresh is not None
    assert group.fresh.tolist() == [True, True, False, False, False, False]


def test_old_tokens_are_masked_one_by_one_and_what_is_left_with_none_is_told() -> None:
    leased = row(
        sample(0, [(2, 1), (1, 2), (2, 3)]),
        sample(1, [(3, 1)]),
        sample(2, [(1, 3)]),
        sample(3, [(1, 2), (1, 3)], mask=[1, 0]),  # its young token is not trained, so nothing is left
    )
    group, masked = decode_train_group(leased, step=4, oldest_version=3)
    assert group.loss_mask.tolist() == [False, False, False, True, True, False, False, False, True, False, False]
    assert masked == {"g.1": "stale", "g.3": "stale"}


def test_a_row_within_the_window_is_left_as_it_is() -> None:
    leased = row(sample(0, [(2, 3)], mask=[0, 1]), sample(1, [(1, 4)]))
    group, masked = decode_train_group(leased, step=4, oldest_version=3)
    assert group.loss_mask.tolist() == [False, True, True]
    assert masked == {}


@pytest.mark.parametrize(
    "spans", [[[(2, 1)], [(1, 4)]], [[(1, 1), (1, 2)], [(1, 4)]], [[(1, 1), (3, 2), (1, 7)], [(2, 0), (2, 9)]]]
)
def test_token_versions_are_the_spans_written_out(spans: list[Spans]) -> None:
    samples = [sample(place, one) for place, one in enumerate(spans)]
    expected = [version for one in spans for tokens, version in one for _ in range(tokens)]
    lengths = np.asarray([len(one.response_ids) for one in samples])
    assert token_versions([one.weight_versions for one in samples], lengths).tolist() == expected


def test_a_forward_pass_needs_token_ids_only() -> None:
    leased = row(sample(0, [(2, 5)]), sample(1, [(3, 4)]))
    ids = {name: leased.columns[name] for name in (c.PROMPT_IDS, c.RESPONSE_IDS)}
    group = decode_prompt_and_responses(LeasedRow(group_uid="g", index=0, uids=[], versions=[], columns=ids))
    assert group.response_ids.tolist() == [0, 1, 100, 101, 102]
    assert group.lengths.tolist() == [2, 3] and len(group.rollout_logprobs) == len(group.loss_mask) == 5


def test_masked_tokens_of_older_weights_make_a_sample_old_for_the_gap() -> None:
    """rollout.mask_off_policy: it is trained as of its newest version, but its cache was begun by an older one."""
    one, other = sample(0, [(2, 4), (1, 5)], mask=[0, 0, 1]), sample(1, [(2, 5)])
    assert (one.version, other.version) == (5, 5)
    group, masked = decode_train_group(row(one, other), step=5, oldest_version=5)
    assert masked == {} and group.loss_mask.tolist() == [False, False, True, True, True]
    assert group.fresh is not None and group.fresh.tolist() == [False] * 3 + [True] * 2


def test_a_sample_without_a_trained_token_was_truncated_whatever_its_age() -> None:
    """rollout.mask_truncated: it stays in the row for its group's baseline, and is neither trained nor stale."""
    leased = row(
        sample(0, [(2, 3)]),
        sample(1, [(2, 1), (1, 3)], mask=[0, 0, 0]),
        sample(2, [(3, 1)]),
    )
    group, masked = decode_train_group(leased, step=4, oldest_version=3)
    assert masked == {"g.1": "truncated", "g.2": "stale"}
    assert group.loss_mask.tolist() == [True, True] + [False] * 6
    young, masked = decode_train_group(leased, step=1, oldest_version=0)
    assert masked == {"g.1": "truncated"} and young.loss_mask.tolist() == [True] * 2 + [False] * 3 + [True] * 3
