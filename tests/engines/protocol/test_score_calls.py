"""Tests how an engine's response to a scoring request is parsed."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from relax_core.contracts.kept_tokens import OUTSIDE
from relax_core.engines.protocol.engine_client import TokensToScore, read_scores

ROW = TokensToScore(input_ids=[5, 6, 7, 8], first=2)  # scores the tokens 7 and 8
GIVEN = [[None, 6, None], [-0.5, 7, None], [-0.25, 8, None]]


def reply(given: list[Any], tops: list[Any] | None = None) -> bytes:
    return msgspec.json.encode([{"meta_info": {"input_token_logprobs": given, "input_top_logprobs": tops}}])


def test_scores_are_arrays_with_pads_where_fewer_tokens_were_left() -> None:
    tops = [None, [[-0.5, 7, None], [-1.5, 9, None]], [[-0.25, 8, None]]]
    (scores,) = read_scores(reply(GIVEN, tops), [ROW], top_k=2, fewer=True)
    assert (scores.logprobs.dtype, scores.top_ids.dtype, scores.top_logprobs.dtype) == (
        np.float32,
        np.int32,
        np.float32,
    )
    assert scores.logprobs.tolist() == [-0.5, -0.25]
    assert scores.top_ids.tolist() == [[7, 9], [8, -1]]
    assert scores.top_logprobs.tolist() == [[-0.5, -1.5], [-0.25, float(np.float32(OUTSIDE))]]
    (bare,) = read_scores(reply(GIVEN), [ROW], top_k=0)
    assert bare.logprobs.tolist() == [-0.5, -0.25] and bare.top_ids.shape == bare.top_logprobs.shape == (2, 0)


@pytest.mark.parametrize("fewer", [True, False])
@pytest.mark.parametrize(
    ("given", "tops"),
    [
        (GIVEN[:2], [None, [[-0.5, 7, None]] * 2]),
        ([*GIVEN[:2], [None, 8, None]], [None, [[-0.5, 7, None]] * 2, [[-0.5, 7, None]] * 2]),
        (GIVEN, [None, [[-0.5, 7, None]] * 2]),
        (GIVEN, [None, [[-0.5, 7, None]] * 2, []]),
        (GIVEN, [None, [[-0.5, 7, None]] * 2, [[-0.5, 7, None]] * 3]),
        (GIVEN, None),
    ],
)
def test_a_reply_without_a_number_for_every_token_is_refused(given: list[Any], tops: list[Any], fewer: bool) -> None:
    with pytest.raises(ValueError, match="lists of top-k tokens for 2 tokens"):
        read_scores(reply(given, tops), [ROW], top_k=2, fewer=fewer)
