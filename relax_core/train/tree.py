"""Tree packing: a group becomes one stream, its prompt once and its responses as branches, without pads.

A response's last token is predicted but predicts nothing, so it is not in the stream. Rows of the stream come group
by group: the prompt's tokens, then response after response. numpy only; this is on the step path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relax_core.contracts.train import TrainGroup

MASKLESS_SAVES_PAIRS = 2**17  # of token rows: what attention without a mask must save, on a CPU, to be taken


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLayout:
    """Where everything of some groups lies in their common stream of ``rows`` token rows.

    Rows stand in depth-first order, and ``end`` is all that attention reads of a layout: row k is seen by row q iff
    k <= q < end[k].
    """

    token_ids: np.ndarray  # int64 [rows]
    end: np.ndarray  # int64 [rows], the row behind the subtree of each row
    positions: np.ndarray  # int64 [rows], place of the token in its own sequence
    predicting_rows: np.ndarray  # int64 [tokens], the row whose output predicts each response token
    targets: np.ndarray  # int64 [tokens], the response tokens
    sample_ids: np.ndarray  # int64 [tokens]
    num_samples: int


def tree_starts(end: np.ndarray) -> np.ndarray:
    """The row that each tree of a stream begins with, ascending, int64 ``[trees]``; ``end`` int64 ``[rows]``."""
    reach = np.maximum.accumulate(end)
    return np.append(0, np.flatnonzero(reach[:-1] == np.arange(1, len(end))) + 1)


def pack_tree(groups: Sequence[TrainGroup]) -> TreeLayout:
    """Lays out groups as one stream; needs at least one group, prompts and responses of one token or more."""
    prompt_lengths = np.array([len(group.prompt_ids) for group in groups])
    samples_of = np.array([len(group.lengths) for group in groups])
    lengths = np.concatenate([group.lengths for group in groups]).astype(np.int64, copy=False)
    _check_lengths(groups, prompt_lengths, lengths)
    num_samples, tokens, prompt_tokens = len(lengths), int(lengths.sum()), int(prompt_lengths.sum())
    targets = np.concatenate([group.response_ids for group in groups]).astype(np.int64)

    # Rows of a group: its prompt, then its responses less one token each.
    group_of_sample = np.repeat(np.arange(len(groups)), samples_of)
    first_token = np.cumsum(lengths) - lengths
    branch_rows = np.bincount(group_of_sample, weights=lengths - 1, minlength=len(groups)).astype(np.int64)
    group_rows = prompt_lengths + branch_rows
    group_start = np.cumsum(group_rows) - group_rows
    rows = int(group_rows.sum())

    # The row of response token t, if it had one, is t + what lies before: prompts up to here, less one a finished
    # sample. So the row that predicts it is the one before, and for a first token the prompt's last.
    sample_ids = np.repeat(np.arange(num_samples), lengths)
    prompts_before = np.cumsum(prompt_lengths)[group_of_sample]
    offset = np.arange(tokens) - first_token[sample_ids]
    own_row = np.arange(tokens) + (prompts_before - np.arange(num_samples))[sample_ids]
    prompt_end = (group_start + prompt_lengths)[group_of_sample]
    predicting_rows = np.where(offset == 0, prompt_end[sample_ids] - 1, own_row - 1)
    in_stream = offset < (lengths - 1)[sample_ids]

    prompt_place = np.arange(prompt_tokens) - np.repeat(np.cumsum(prompt_lengths) - prompt_lengths, prompt_lengths)
    prompt_rows = np.repeat(group_start, prompt_lengths) + prompt_place
    response_rows = own_row[in_stream]
    token_ids = np.empty(rows, dtype=np.int64)
    token_ids[prompt_rows] = np.concatenate([group.prompt_ids for group in groups])
    token_ids[response_rows] = targets[in_stream]
    positions = np.empty(rows, dtype=np.int64)
    positions[prompt_rows] = prompt_place
    positions[response_rows] = (offset + prompt_lengths[group_of_sample][sample_ids])[in_stream]

    end = np.empty(rows, dtype=np.int64)
    end[prompt_rows] = np.repeat(group_start + group_rows, prompt_lengths)
    end[response_rows] = (own_row - offset + lengths[sample_ids] - 1)[in_stream]
    return TreeLayout(
        token_ids=token_ids,
        end=end,
        positions=positions,
        predicting_rows=predicting_rows,
        targets=targets,
        sample_ids=sample_ids,
        num_samples=num_samples,
    )


def _check_lengths(groups: Sequence[TrainGroup], prompt_lengths: np.ndarray, lengths: np.ndarray) -> None:
    if prompt_lengths.min() > 0 and lengths.min() > 0:
        return
    empty = [group.group_uid for group in groups if not len(group.prompt_ids) or not group.lengths.all()]
    raise ValueError(f"groups {', '.join(empty)}: a prompt or a response without tokens cannot be trained.")
