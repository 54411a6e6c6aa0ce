"""Tests that the trainer receives the routed experts of engine responses in the order of its packed rows."""

from __future__ import annotations

import numpy as np

from relax_core.contracts import columns as c
from relax_core.contracts.bus import Group
from relax_core.contracts.engine import Generated
from relax_core.rollout.episodes.group_assembly import DroppedGroup, complete_group
from relax_core.train.micro_batches import decode_train_tree
from tests.responses import response as make_response
from tests.responses import scored

LAYERS, TOP_K = 2, 3
PROMPT = np.arange(4 * LAYERS * TOP_K, dtype=np.uint8).reshape(4, LAYERS, TOP_K)


def experts_of(sample: int, tokens: int) -> np.ndarray:
    """Returns the experts of all tokens of a response except the last. One sample has expert numbers of two bytes."""
    experts = np.full((tokens - 1, LAYERS, TOP_K), 100 * sample) + np.arange(TOP_K)
    return experts.astype(np.uint8 if experts.max(initial=0) < 256 else np.uint16)


def response(sample: int, tokens: int, *, replayed: bool) -> Generated:
    return make_response(
        list(range(tokens)),
        versions=3,
        sample=sample,
        prompt_experts=PROMPT if replayed else None,
        response_experts=experts_of(sample, tokens) if replayed else None,
    )


def leased(*, replayed: bool) -> Group:
    row = complete_group(
        index=0,
        episodes=scored(
            [
                response(3, 5, replayed=replayed),
                response(0, 3, replayed=replayed),
                response(1, 2, replayed=replayed),
                response(2, 1, replayed=replayed),
            ],
            [1.0, 1.0, None, 1.0],
            prompt_ids=[1, 2, 3, 4],
        ),
    )
    assert not isinstance(row, DroppedGroup)
    columns = row.columns | {c.ADVANTAGES: c.encode_column(c.ADVANTAGES, np.zeros(9))}
    return Group(group_uid=row.group_uid, index=0, uids=row.uids, versions=row.versions, columns=columns)


def test_experts_of_a_group_arrive_as_its_rows_are_packed() -> None:
    row = leased(replayed=True)
    group, _ = decode_train_tree(row, step=3, oldest_version=3)
    experts = group.extras["routed_experts"].reshape(group.rows, LAYERS, TOP_K)
    assert experts.dtype == np.uint16
    computed = group.end > np.arange(group.rows) + 1
    assert np.count_nonzero(computed) == group.computed_rows == 4 + 2 + 0 + 4
    expected = np.concatenate([PROMPT, experts_of(0, 3), experts_of(3, 5)])
    assert np.array_equal(experts[computed], expected)


def test_the_column_is_missing_if_the_run_does_not_need_it() -> None:
    row = leased(replayed=False)
    assert c.ROUTED_EXPERTS not in row.columns
    group, _ = decode_train_tree(row, step=3, oldest_version=3)
    assert "routed_experts" not in group.extras
