"""From leased bus rows to the trainer's groups."""

from __future__ import annotations

import numpy as np

from relax_core.contracts import columns as c
from relax_core.contracts.bus import LeasedRow
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.sample import TRUNCATED, VersionSpan
from relax_core.contracts.train import TrainGroup


def token_versions(spans: list[list[VersionSpan]], lengths: np.ndarray) -> np.ndarray:
    """Weight version of every response token, int64 ``[tokens]``; ``spans``: one list a sample."""
    if all(len(sample) == 1 for sample in spans):
        return np.repeat([sample[0].version for sample in spans], lengths)
    parts = [np.repeat([s.version for s in sample], [s.end - s.start for s in sample]) for sample in spans]
    return np.concatenate(parts)


def decode_prompt_and_responses(row: LeasedRow) -> TrainGroup:
    """What a log-prob pass needs of a row: token ids, and where they are leased the experts to replay and the kept
    sets."""
    responses = c.decode_ragged(row.columns[c.RESPONSE_IDS])
    tokens = responses.flat()
    return TrainGroup(
        group_uid=row.group_uid,
        prompt_ids=c.decode_array(row.columns[c.PROMPT_IDS]),
        lengths=np.asarray(responses.lengths, dtype=np.int64),
        response_ids=tokens,
        loss_mask=np.ones(len(tokens), dtype=bool),
        rollout_logprobs=np.zeros(len(tokens), dtype=np.float32),
        routed_experts=_routed_experts(row),
        kept=_kept(row),
    )


def _routed_experts(row: LeasedRow) -> np.ndarray | None:
    payload = row.columns.get(c.ROUTED_EXPERTS)
    return None if payload is None else c.decode_routed_experts(payload)


def _kept(row: LeasedRow) -> KeptTokens | None:
    payload = row.columns.get(c.KEPT_TOKENS)
    return None if payload is None else c.decode_kept_tokens(payload)


def _oldest_of_all_tokens(row: LeasedRow) -> list[int]:
    """One version a sample; `LeasedRow.versions` looks at its trained tokens alone."""
    spans = c.decode_weight_versions(row.columns[c.WEIGHT_VERSIONS])
    return [min(span.version for span in sample) for sample in spans]


def decode_train_group(row: LeasedRow, *, step: int, oldest_version: int) -> tuple[TrainGroup, dict[str, str]]:
    """A row as the trainer sees it at ``step``, and the uids of which no token is trained, with the ledger's reason.

    Tokens older than ``oldest_version`` are masked (mode.on_stale=mask; with drop the bus never hands such a row out).
    A sample that comes without a trained token was truncated (rollout.mask_truncated).
    """
    responses = c.decode_ragged(row.columns[c.RESPONSE_IDS])
    lengths = np.asarray(responses.lengths, dtype=np.int64)
    loss_mask = c.decode_ragged(row.columns[c.LOSS_MASK]).flat().astype(bool)
    masked: dict[str, str] = {}
    if not loss_mask.all():
        masked = dict.fromkeys(_untrained(row, loss_mask, lengths), TRUNCATED)
    # A token counts as fresh only with its whole sample: later ones attend to what older weights left in the cache.
    oldest = row.versions if loss_mask.all() else _oldest_of_all_tokens(row)
    fresh = np.repeat([version == step for version in oldest], lengths)
    if min(row.versions) < oldest_version:
        versions = token_versions(c.decode_weight_versions(row.columns[c.WEIGHT_VERSIONS]), lengths)
        loss_mask &= versions >= oldest_version
        masked = dict.fromkeys(_untrained(row, loss_mask, lengths), "stale") | masked

    def column(name: str) -> np.ndarray | None:
        payload = row.columns.get(name)
        return None if payload is None else c.decode_ragged(payload).flat()

    def top_column(name: str) -> np.ndarray | None:
        """top_k numbers a response token → ``[tokens, top_k]``."""
        flat = column(name)
        return None if flat is None else flat.reshape(int(lengths.sum()), -1)

    group = TrainGroup(
        group_uid=row.group_uid,
        prompt_ids=c.decode_array(row.columns[c.PROMPT_IDS]),
        lengths=lengths,
        response_ids=responses.flat(),
        loss_mask=loss_mask,
        rollout_logprobs=c.decode_ragged(row.columns[c.ROLLOUT_LOGPROBS]).flat(),
        fresh=fresh,
        advantages=c.decode_ragged(row.columns[c.ADVANTAGES]).flat(),
        old_logprobs=column(c.OLD_LOGPROBS),
        reference_logprobs=column(c.REFERENCE_LOGPROBS),
        teacher_logprobs=column(c.TEACHER_LOGPROBS),
        teacher_top_ids=top_column(c.TEACHER_TOP_IDS),
        teacher_top_logprobs=top_column(c.TEACHER_TOP_LOGPROBS),
        values=column(c.VALUES),
        returns=column(c.RETURNS),
        routed_experts=_routed_experts(row),
        kept=_kept(row),
    )
    return group, masked


def _untrained(row: LeasedRow, loss_mask: np.ndarray, lengths: np.ndarray) -> list[str]:
    """The uids of samples without a trained token."""
    trained = np.logical_or.reduceat(loss_mask, np.cumsum(lengths) - lengths)
    return [uid for uid, one in zip(row.uids, trained, strict=True) if not one]
